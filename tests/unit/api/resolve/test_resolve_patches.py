"""What do patches come to, prompt by prompt, and which of them is refused, by which field?"""

import functools
from typing import Any

import msgspec
import numpy as np
import pytest
from model_kit import HIDDEN, LAYERS, model, module
from refusal_kit import refuses

from midstream.api.resolve.edits import patches
from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.patches import MAX_PATCH_ROWS, MAX_RUNS
from midstream.api.resolve.edits.steering import MAX_ENTRIES, resolve_edits
from midstream.api.resolve.positions.captures import Bounds, PromptFacts, resolve_captures
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy, to_numpy
from midstream.schemas.prompts.selectors import HOOKS, PositionWindow, SelectorError, Span
from midstream.schemas.requests.source_runs import ZEROS, RunPrompt, RunView
from midstream.schemas.requests.specs import (
    CaptureSpec,
    PatchSource,
    PatchSpec,
    SteeringSpec,
    StoredSteering,
)

SERVED = [hook for hook in HOOKS if hook != "mlp_in"]
VECTOR = from_numpy(np.arange(1, HIDDEN + 1, dtype=np.float32))
OTHER = from_numpy(np.ones(HIDDEN, np.float32))
RANK2 = from_numpy(np.ones((2, HIDDEN), np.float32))
#: Five tokens, of which all but the last were captured, at two hooks.
CLEAN = RunPrompt(
    request=0,
    tokens=5,
    sites={"pre_attn": [0, 1, 2, 3], "post_block": [0, 2]},
    positions=[0, 1, 2, 3],
    token_ids=[1, 2, 3, 4],
    dtype="float32",
    hidden_size=HIDDEN,
    bytes=0,
)


def changed(**changes: Any) -> RunPrompt:
    return msgspec.structs.replace(CLEAN, **changes)


def run(*prompts: RunPrompt, **changes: Any) -> RunView:
    facts: dict[str, Any] = {
        "name": "clean",
        "model": "m",
        "job": "job_1",
        "tag": "t",
        "created": 0.0,
        "state": "ready",
    }
    return RunView(**(facts | {"prompts": list(prompts) or [CLEAN]} | changes))


STANDING = ModelState(runs={"clean": run()}, run_names=["clean", "corrupt"])


def patch(source: Any = None, positions: Any = (0,), **fields: Any) -> PatchSpec:
    given = {"run": "clean"} if source is None else source
    wish = list(positions) if isinstance(positions, tuple) else positions
    return PatchSpec(
        **(
            {"layers": 0, "hook": "pre_attn", "positions": wish, "source": PatchSource(**given)}
            | fields
        )
    )


def resolved(
    specs: list[PatchSpec],
    steering: Any = (),
    lengths: tuple[int, ...] = (6,),
    max_tokens: int = 4,
    model_state: ModelState = STANDING,
    **changes: Any,
) -> tuple[list[list[StoredSteering]], dict[str, bytes]]:
    bounds = Bounds(
        model(hooks=SERVED, **changes),
        [PromptFacts(length, _find) for length in lengths],
        max_tokens,
    )
    return resolve_edits(specs, list(steering), bounds, model_state)


def entries(*specs: PatchSpec, **more: Any) -> list[StoredSteering]:
    """Of one prompt of six tokens."""
    ((*found,),), _ = resolved(list(specs), **more)
    return found


def rows(*specs: PatchSpec, **more: Any) -> list[tuple[Any, str]]:
    """(Where, what) of each entry, without what names the run."""
    return [
        (entry.positions, entry.tensors[0].removeprefix("run:job_1.0.t:"))
        for entry in entries(*specs, **more)
    ]


def _find(span: Span) -> list[int]:
    if span.text != "here":
        raise SelectorError(f"{span.text!r} is not there")
    return [2, 3]


# --- Which rows
# --------------------------------------------------------------------------------------------------


def test_a_row_of_a_run_is_put_in_place_by_its_name_in_each_layer() -> None:
    assert entries(
        patch({"run": "clean", "position": 3}, layers="1,-1", hook="resid_pre", alpha=0.5)
    ) == [
        StoredSteering(
            layers=[layer],
            hook="pre_attn",
            positions=[0],
            family="replace",
            tensors=[f"run:job_1.0.t:pre_attn:{layer}:3"],
            numbers=[0.5],
        )
        for layer in (1, 3)
    ]


@pytest.mark.parametrize(
    ("positions", "position", "expected"),
    [
        ([0, 3], None, [([0], "0"), ([3], "3")]),  # each its own
        ([3, -6], None, [([0], "0"), ([3], "3")]),
        ([0, -1], 2, [([0, 5], "2")]),  # one for all, and so one entry
        ("last_prompt", -2, [([5], "3")]),  # from the end of the run's prompt, not of this one
        # in ascending order of what is patched
        ([4, 0, 2], [3, 1, -5], [([0], "3"), ([2], "1"), ([4], "0")]),
        ([1, 2, 3], [0, 1, 0], [([1, 3], "0"), ([2], "1")]),  # those that share a row are one entry
        ([Span(text="here")], None, [([2], "2"), ([3], "3")]),
        (Span(text="here"), [0, 1], [([2], "0"), ([3], "1")]),
        (Span(start=1, stop=3), None, [([1], "1"), ([2], "2")]),
        # the second is the first generated token
        (Span(start=5, stop=7), [0, 1], [([5], "0"), ([6], "1")]),
        (Span(start=5, stop=7), 0, [([5, 6], "0")]),
        ("all_generated", 0, [("all_generated", "0")]),
        ("all", 0, [("all", "0")]),
        (Span(start=4), 0, [(PositionWindow(start=4), "0")]),
    ],
)
def test_source_positions_meet_those_that_are_patched(
    positions: Any, position: Any, expected: Any
) -> None:
    # field case 34
    found = rows(patch({"run": "clean", "position": position}, positions))
    assert found == [(where, f"pre_attn:0:{what}") for where, what in expected]


def test_places_and_rows_are_those_of_each_prompt() -> None:
    per_prompt, _ = resolved([patch({"run": "clean", "position": -2}, [-1])], lengths=(6, 3))
    assert [
        [(entry.positions, entry.tensors[0][-1]) for entry in found] for found in per_prompt
    ] == [[([5], "3")], [([2], "3")]]
    model_state = ModelState(
        runs={"clean": run(CLEAN, changed(request=7)), "job_9": run(name="job_9", job="job_9")}
    )
    wished = [patch({"run": "clean", "prompt": 7}), patch({"run": "job_9"}, (1,))]
    assert [entry.tensors for entry in entries(*wished, model_state=model_state)] == [
        ["run:job_1.7.t:pre_attn:0:0"],
        ["run:job_9.0.t:pre_attn:0:1"],
    ]


@pytest.mark.parametrize(
    ("over", "name"),
    [
        ({}, "mean"),
        ({"positions": "all"}, "mean"),
        ({"positions": [0, 1, 2, 3]}, "mean"),
        ({"positions": [-4, 3]}, "mean 1, 3"),
        ({"positions": Span(start=1)}, "mean 1-3"),
        ({"positions": Span(start=1, stop=3)}, "mean 1-2"),
        ({"positions": [Span(start=0, stop=2), 3]}, "mean 0-1, 3"),
    ],
)
def test_a_mean_is_one_row_for_all_that_is_patched(over: Any, name: str) -> None:
    found = rows(patch({"run": "clean", "mean": True} | over, "all_generated", layers=[0, 2]))
    assert found == [("all_generated", f"pre_attn:{layer}:{name}") for layer in (0, 2)]


def test_where_one_token_is_generated_the_request_ends_with_its_prompt() -> None:
    for wish in ("all", "all_prompt", Span(start=0)):
        assert rows(patch({"zeros": True}, wish), max_tokens=1) == [([0, 1, 2, 3, 4, 5], ZEROS)]
    with refuses("nothing would be patched", field="patch[0].positions"):
        entries(patch({"zeros": True}, "all_generated"), max_tokens=1)


# --- Other sources
# --------------------------------------------------------------------------------------------------


def test_vectors_and_zeros_bring_what_the_rank_lacks() -> None:
    ((entry,),), blobs = resolved(
        [patch({"vector": VECTOR}, "last_prompt", layers="all", hook="mlp_out")]
    )
    assert entry.layers == [0, 1, 2, 3]
    assert entry.positions == [5]
    assert entry.tensors == [content_hash(VECTOR)]
    assert entry.numbers == [1.0]
    assert from_msgpack(blobs[content_hash(VECTOR)], Tensor) == VECTOR
    ((entry,),), blobs = resolved([patch({"zeros": True}, alpha=0.25)])
    assert entry.tensors == [ZEROS]
    assert entry.numbers == [0.25]
    assert blobs == {}


@pytest.mark.parametrize("op", ["add", "replace"])
def test_a_module_of_one_vector_is_that_vector_times_its_scale(op: Any) -> None:
    joy = module(SteeringSpec(layers=3, op=op, vector=VECTOR, scale=2.0, positions="all_generated"))
    ((entry,),), blobs = resolved([patch({"module": "joy"})], model_state=ModelState({"joy": joy}))
    assert entry.layers == [0]
    assert entry.positions == [0]
    assert entry.tensors == [content_hash(VECTOR)]
    assert entry.scale == 2.0
    assert blobs == {}


# --- Masks and order
# --------------------------------------------------------------------------------------------------


def test_masks_that_differ_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "MAX_MASKS", 2)
    two = [patch(mask=0), patch(mask=[1]), patch(mask="0"), patch()]
    assert len(entries(*two)) == 4
    with refuses(field="patch[4].mask", allowed="at most 2 different masks"):
        entries(*two, patch(mask=2))


def test_a_mask_is_a_tensor_of_ones_where_it_writes() -> None:
    ((entry,),), blobs = resolved([patch(mask="0-1,-1")])
    assert entry.family == "replace_masked"
    assert entry.tensors[0] == "run:job_1.0.t:pre_attn:0:0"
    assert entry.numbers == [1.0]
    mask = from_msgpack(blobs[entry.tensors[1]], Tensor)
    assert mask.dtype == "float32"
    assert to_numpy(mask).tolist() == [1, 1, 0, 0, 0, 0, 0, 1]
    assert content_hash(mask) == entry.tensors[1]
    assert [entry.family for entry in entries(patch(mask="all"))] == ["replace"], (
        "all dimensions are no mask"
    )


def test_patches_stand_in_front_of_the_requests_steering() -> None:
    steering = [
        SteeringSpec(layers=0, vector=OTHER),
        SteeringSpec(layers=0, hook="pre_attn", vector=OTHER, op="replace"),
    ]
    per_prompt, blobs = resolved([patch()], steering, lengths=(6, 3))
    assert [[entry.family for entry in found] for found in per_prompt] == [
        ["replace", "add", "replace"]
    ] * 2
    assert list(blobs) == [content_hash(OTHER)]


# --- Refusals
# --------------------------------------------------------------------------------------------------


# field cases 21, 27, 34
@pytest.mark.parametrize(
    ("wish", "field", "words"),
    [
        ({"layers": 9}, "layers", "layer 9 is out of range"),
        ({"layers": []}, "layers", "no layer given"),
        ({"hook": "mlp_in"}, "hook", "unknown hook 'mlp_in': the model has"),
        (
            {"positions": [0, 6]},
            "positions[1]",
            "position 6 is out of range: the prompt has positions 0 to 5",
        ),
        ({"positions": [-7]}, "positions[0]", "position -7 is out of range: the prompt has"),
        ({"positions": []}, "positions", "no position given"),
        ({"positions": [Span(text="gone")]}, "positions[0]", "'gone' is not there"),
        (
            {"positions": Span(start=9)},
            "positions.start",
            "position 9 is never patched: the model computes positions 0 to 8 at most",
        ),
        ({"positions": Span(start=7, stop=10)}, "positions.stop", "the range stops at 10"),
        (
            {"positions": Span(start=20)},
            "positions.start",
            "position 20 is out of range: the prompt and the generated tokens",
        ),
        ({"mask": []}, "mask", "no dimension given"),
        ({"mask": ""}, "mask", "not a dimension selector"),
        ({"mask": "0-8"}, "mask", "dimension 8 is out of range: the model has dimensions 0 to 7"),
        ({"mask": [-9]}, "mask", "dimension -9 is out of range"),
        ({"source": {"run": "cleaner"}}, "source.run", "unknown source run 'cleaner' of model 'm'"),
        ({"source": {"run": ""}}, "source.run", "unknown source run ''"),
        ({"source": {"run": "clean", "prompt": 1}}, "source.prompt", "has no rows of prompt 1"),
        ({"hook": "post_attn"}, "hook", "post_attn was not captured in run 'clean'"),
        (
            {"hook": "post_block", "layers": "0-2"},
            "layers",
            "layer 1 was not captured at post_block in run 'clean', which has 0, 2",
        ),
        (
            {"positions": [4]},
            "source.position",
            "position 4 was not captured: the run has positions 0-3",
        ),
        (
            {"source": {"run": "clean", "position": 7}},
            "source.position",
            "position 7 was not captured: the run has positions 0-3",
        ),
        (
            {"source": {"run": "clean", "position": -1}},
            "source.position",
            "position 4 was not captured: the run has positions 0-3",
        ),
        (
            {"source": {"run": "clean", "position": -6}},
            "source.position",
            "the run's prompt has positions 0 to 4",
        ),
        (
            {"source": {"run": "clean", "position": [0, 1]}},
            "source.position",
            "has length 2, but the number of patched positions is 1",
        ),
        (
            {"source": {"run": "clean", "position": [8]}},
            "source.position[0]",
            "position 8 was not captured",
        ),
        (
            {"positions": "all_generated"},
            "source.position",
            "is required, because the patched positions are open-ended",
        ),
        (
            {"positions": Span(start=2), "source": {"run": "clean", "position": [1]}},
            "source.position",
            "is required, because the patched positions are open-ended",
        ),
        (
            {"source": {"run": "clean", "mean": True, "positions": [0, 4]}},
            "source.positions",
            "position 4 was not captured: the run has positions 0-3",
        ),
        (
            {"source": {"run": "clean", "mean": True, "positions": [5]}},
            "source.positions[0]",
            "position 5 is out of range: the prompt has",
        ),
        (
            {"source": {"run": "clean", "mean": True, "positions": Span(start=1, stop=1 << 30)}},
            "source.positions",
            "was not captured",
        ),
        (
            {"source": {"run": "clean", "mean": True, "positions": "all_generated"}},
            "source.positions",
            "the run has no rows there",
        ),
        (
            {"source": {"run": "clean", "mean": True, "positions": [Span(text="x")]}},
            "source.positions[0].text",
            "positions but no text",
        ),
        (
            {"source": {"vector": from_numpy(np.ones(4, np.float32))}},
            "source.vector.shape",
            "has shape [4]: it must be [8]",
        ),
        (
            {"source": {"vector": from_numpy(np.full(HIDDEN, np.nan))}},
            "source.vector.data",
            "element 0 is not finite (non-finite elements: 8 of 8",
        ),
        (
            {"source": {"vector": from_numpy(np.full(HIDDEN, 1e6))}},
            "source.vector.data",
            "float16 allows at most",
        ),
        ({"source": {"module": "sad"}}, "source.module", "unknown module 'sad'"),
    ],
)
def test_invalid_patches_name_the_field(wish: dict[str, Any], field: str, words: str) -> None:
    wish = dict(wish)
    with refuses(words, field=f"patch[0].{field}", status=400):
        entries(patch(wish.pop("source", None), wish.pop("positions", (0,)), **wish))


def refused_with(*specs: PatchSpec, **more: Any) -> Any:
    """What is called to refuse these patches."""
    return functools.partial(resolved, list(specs), **more)


def from_run(source: RunView) -> Any:
    return refused_with(patch(), model_state=ModelState(runs={"clean": source}))


def from_module(*specs: SteeringSpec) -> Any:
    return refused_with(patch({"module": "joy"}), model_state=ModelState({"joy": module(*specs)}))


OWN = SteeringSpec(layers=0, vector=VECTOR)


EVERYWHERE = patch({"run": "clean"}, [0, 1, 2, 3], layers="all")


#: Five patches that meet at the last token of a prompt of six.
CROWD = [patch({"zeros": True}, list(range(first, 6))) for first in range(5)]


#: These meet at one token, with `FIFTH` and a patch at 4, in a prompt of five tokens only.
MEETING = [patch({"zeros": True}, [0, -place], layers=place % LAYERS) for place in range(1, 5)]


FIFTH = SteeringSpec(layers=0, vector=VECTOR, positions=[-5])


LOW_RANK = SteeringSpec(
    layers=0,
    op="lowrank",
    rotation=RANK2,
    weight=RANK2,
    bias=from_numpy(np.zeros(2, np.float32)),
)


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        # field case 34: in several prompts, the one at fault is named
        (
            refused_with(patch(positions=[2]), patch({"zeros": True}, [4]), lengths=(6, 3)),
            "[1].positions[0]",
            "prompt 1: position 4 is out of range: the prompt has positions 0 to 2",
        ),
        (
            refused_with(patch(positions=[-1]), lengths=(4, 6)),
            "[0].source.position",
            "prompt 1: position 5 was not captured: the run has positions 0-3",
        ),
        (
            refused_with(
                patch({"run": "clean", "position": [0, 1]}, Span(start=4, stop=-1)), lengths=(7, 6)
            ),
            "[0].source.position",
            "prompt 1: has length 2, but",
        ),
        # runs
        (
            from_run(run(state="pending", detail="its job is running")),
            "[0].source.run",
            "run 'clean' of job job_1 is pending: its job is running",
        ),
        (from_run(run(state="pending")), "[0].source.run", "/v1/jobs/job_1?wait"),
        (
            from_run(run(state="failed", detail="a rank died")),
            "[0].source.run",
            "of job job_1 is failed: a rank died",
        ),
        (from_run(run(state="deleted")), "[0].source.run", "of job job_1 is deleted"),
        (from_run(run(model="other")), "[0].source.run", "is a run of model 'other'"),
        (from_run(run(changed(hidden_size=16))), "[0].source.run", "rows of hidden size 16"),
        (
            refused_with(patch({"run": "cleen"})),
            "[0].source.run",
            "did you mean 'clean'? (allowed: clean, corrupt",
        ),
        # modules of other things than one vector
        (
            from_module(OWN, SteeringSpec(layers=1, vector=VECTOR)),
            "[0].source.module",
            "it has 2 entries",
        ),
        (
            from_module(SteeringSpec(layers=0, op="ablate", vector=VECTOR)),
            "[0].source.module",
            "it has op 'ablate'",
        ),
        (
            from_module(SteeringSpec(layers=0, norm_match=True, vector=VECTOR)),
            "[0].source.module",
            "norm_match",
        ),
        (from_module(LOW_RANK), "[0].source.module", "it has op 'lowrank'"),
        # how much
        (
            refused_with(*CROWD, lengths=(20, 6)),
            "",
            "needs 5 rows of the steering table for one token for prompt 0",
        ),
        (refused_with(*CROWD[:4], steering=[OWN]), "", "needs 5 rows"),
        (
            refused_with(*MEETING, patch({"zeros": True}, [4]), steering=[FIFTH], lengths=(12, 5)),
            "",
            "for prompt 1",
        ),
        (refused_with(EVERYWHERE, steering_rows=3), "", "steering_rows"),
        (refused_with(EVERYWHERE, steering_entries=15), "", "steering_entries"),
        (
            refused_with(EVERYWHERE, EVERYWHERE, lengths=(6,) * (MAX_PATCH_ROWS // 32 + 1)),
            "",
            f"(allowed: at most {MAX_PATCH_ROWS})",
        ),
        (
            refused_with(*[patch({"run": f"r{number}"}) for number in range(MAX_RUNS + 1)]),
            "",
            "source runs",
        ),
    ],
)
def test_what_does_not_fit_prompt_run_or_worker_is_refused(
    call: Any, field: str, words: str
) -> None:
    with refuses(words, field=f"patch{field}", status=400):
        call()


@pytest.mark.parametrize(
    ("patches", "facts", "count"),
    [
        # many positions, but no token more than four times
        ([patch({"zeros": True}, [place]) for place in range(6)] * 2, {}, 12),
        (
            [
                *(patch({"zeros": True}, [-place]) for place in range(1, 4)),
                *(patch({"zeros": True}, [place, 9]) for place in (0, 1)),
            ],
            {"lengths": (12,)},
            5,
        ),
        ([EVERYWHERE], {"steering_rows": 4, "steering_entries": 16}, 16),
    ],
)
def test_what_just_fits_prompt_and_worker_is_taken(
    patches: list[PatchSpec], facts: dict[str, Any], count: int
) -> None:
    assert len(entries(*patches, **facts)) == count


def test_patches_that_meet_in_one_prompt_alone_are_taken() -> None:
    assert len(resolved([*MEETING, patch({"zeros": True}, [4])], [FIFTH], lengths=(12, 11))[0]) == 2


# --- How much
# --------------------------------------------------------------------------------------------------


def test_steering_over_its_limit_alone_names_steering() -> None:
    crowd = [SteeringSpec(layers=0, vector=VECTOR, positions=[0, place]) for place in range(1, 6)]
    with refuses(field="steering", status=400):
        entries(patch(), steering=crowd)


def test_entries_per_prompt_are_bounded() -> None:
    tokens = MAX_ENTRIES // LAYERS
    long = run(changed(tokens=tokens, positions=list(range(tokens)), token_ids=[1] * tokens))
    wished = patch({"run": "clean"}, "all_prompt", layers="all")
    more: dict[str, Any] = {"lengths": (tokens,), "model_state": ModelState(runs={"clean": long})}
    assert len(entries(wished, **more)) == MAX_ENTRIES
    with refuses(f"needs {MAX_ENTRIES + 1} entries for prompt 0", field="patch"):
        resolved([wished], [OWN], **more)


# --- A capture that becomes a run
# --------------------------------------------------------------------------------------------


def test_a_named_run_needs_files() -> None:
    bounds = Bounds(model(consumers=["filesystem", "memory"], memory_limit_kib=1), [PromptFacts(6)])
    assert resolve_captures(CaptureSpec(run="clean", consumers=["memory", "filesystem"]), bounds)
    with refuses("requires the consumer 'filesystem'", field="capture.run"):
        resolve_captures(CaptureSpec(run="clean", consumers=["memory"]), bounds)
