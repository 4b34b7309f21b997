"""Rows inside attention and MLP are transformers', in its shapes.

Real vLLM, tiny models in fp32.
"""

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fidelity_inside import beyond, engine, measure, read_table
from fidelity_page import PAGE
from host import Host, prompt_of, relative_error
from inside_reference import InsideReference
from nursery import Nursery
from reference import Edit
from tiny import CHECKPOINTS, LAYERS, checkpoint
from tolerances import FP32_ATTENTION, FP32_HOOKS, FP32_ROWS

from midstream.api.resolve.positions.captures import Bounds, PromptFacts, resolve_captures
from midstream.client.captures.reader import CaptureReader
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.prompts.selectors import INSIDE
from midstream.schemas.requests.specs import CaptureSpec, SteeringSpec, StoredSteering


@pytest.fixture(scope="module")
def inside(llama: Path) -> InsideReference:
    return InsideReference(llama)


def captured(host: Host, job: Job, **spec) -> Job:
    """The job with a capture as a user writes it."""
    bounds = Bounds(
        msgspec.convert(host.info, ModelInfo),
        [PromptFacts(len(prompt.token_ids)) for prompt in job.prompts],
        job.sampling.max_tokens,
    )
    return msgspec.structs.replace(
        job, captures=resolve_captures(msgspec.convert(spec, CaptureSpec), bounds)
    )


def served(host: Host) -> list[str]:
    return [hook for hook in INSIDE if hook in host.info["hooks"]]


def compare(reader: CaptureReader, rows: dict, hooks: list[str], request: int = 0) -> int:
    """Every captured row with the reference's; how many sites were compared."""
    positions = reader.positions(request)
    for hook in hooks:
        assert reader.layers(request, hook) == list(range(LAYERS))
        for layer in range(LAYERS):
            assert (
                relative_error(reader.array(layer, hook, request), rows[hook, layer][positions])
                <= FP32_ROWS
            ), (hook, layer)
    return len(hooks) * LAYERS


def test_rows_inside_are_those_of_transformers(v1: Host, inside: InsideReference) -> None:
    """In one capture with the residual stream; the prompt is prefilled in chunks, and another
    request runs beside it.
    """
    hooks = served(v1)
    assert hooks == [hook for hook in INSIDE if hook != "router"]
    spec = {"hooks": dict.fromkeys([*hooks, "post_block"], "all"), "positions": "all"}
    job = captured(v1, v1.job(prompt_of(90), max_tokens=4), **spec)
    beside = captured(
        v1,
        v1.job(prompt_of(9, seed=3), max_tokens=6),
        hooks={"hook_z": "all", "mlp.hook_post": [1]},
        positions="all",
    )
    outputs = v1.run(job, beside)
    reader = v1.capture(job)
    tokens = [*prompt_of(90), *outputs[job.id][0].token_ids][:-1]
    assert compare(reader, inside.rows(tokens), [*hooks, "post_block"]) == 8 * LAYERS
    other = v1.capture(beside)
    assert other.hooks() == ["z", "mlp_act"]
    rows = inside.rows([*prompt_of(9, seed=3), *outputs[beside.id][0].token_ids][:-1])
    assert relative_error(other.array(1, "mlp.hook_post"), rows["mlp_act", 1]) <= FP32_ROWS
    assert relative_error(other.array(2, "z"), rows["z", 2]) <= FP32_ROWS


RNG = np.random.default_rng(5)
#: Of the edits below: of some prompt tokens and of all that is generated.
POSITIONS = [2, 5, 9]


def edits(host: Host) -> dict[str, Edit]:
    """Every op that is possible at every hook, at a layer of its own."""
    found = {}
    for number, hook in enumerate(served(host)):
        shape = host.info["inside"][hook]
        size = shape["heads"] * shape["width"]
        vector = RNG.normal(size=size).astype(np.float32)
        ops = {
            "add": {"scale": 0.5},
            "replace": {"alpha": 0.75},
            "ablate": {},
            "clamp": {"low": -0.1, "high": 0.1},
            "lowrank": {
                "rotation": np.linalg.qr(RNG.normal(size=(size, 2)))[0].T.astype(np.float32),
                "weight": 0.1 * RNG.normal(size=(2, size)).astype(np.float32),
                "bias": RNG.normal(size=2).astype(np.float32),
            },
        }
        for op, options in ops.items():
            given = {} if op == "lowrank" else {"vector": vector}
            found[f"{op} {hook}"] = Edit(
                number % (LAYERS - 1), hook=hook, op=op, positions=POSITIONS, **given, **options
            )
    return found


def check_edits(host: Host, reference: InsideReference, wanted: dict[str, Edit]) -> None:
    """Each in a request of its own, all in one batch with one that nothing edits: rows behind the
    edit, and what they become.
    """
    jobs = {}
    for name, edit in wanted.items():
        job = host.job(
            prompt_of(12, seed=len(jobs)), max_tokens=3, steering=host.steering(edit), logprobs=0
        )
        jobs[name] = captured(
            host,
            job,
            hooks={edit.hook: edit.layer, "z": "all", "post_block": "all"},
            positions="all",
            at="after",
        )
    jobs["plain"] = captured(
        host,
        host.job(prompt_of(12), max_tokens=3),
        hooks={"z": "all", "post_block": "all"},
        positions="all",
    )
    answers = host.run(*jobs.values())
    wrong = {}
    for number, (name, job) in enumerate(jobs.items()):
        edit = [wanted[name]] if name in wanted else []
        tokens = [*prompt_of(12, seed=number if edit else 0), *answers[job.id][0].token_ids][:-1]
        rows = reference.rows(tokens, *edit)
        reader = host.capture(job)
        last = relative_error(
            reader.array(LAYERS - 1, "post_block"), rows["post_block", LAYERS - 1]
        )
        attended = relative_error(reader.array(LAYERS - 1, "z"), rows["z", LAYERS - 1])
        if max(last, attended) > FP32_ROWS:
            wrong[name] = (last, attended)
        if (
            edit
            and relative_error(
                reference.rows(tokens)["post_block", LAYERS - 1][-4:],
                rows["post_block", LAYERS - 1][-4:],
            )
            < 1e-3
        ):
            wrong[name] = ("the edit", "changes nothing in the reference")
        applied = sum(receipt.applied for receipt in host.receipts(job))
        if edit and applied != len(POSITIONS) * host.settings.vllm.tensor_parallel_size:
            wrong[name] = ("applied", applied)
    assert wrong == {}


@pytest.mark.slow("a request for each op at each hook")
def test_every_op_at_every_hook_inside_reaches_what_follows(
    v1: Host, inside: InsideReference
) -> None:
    check_edits(v1, inside, edits(v1))


def test_heads_are_captured_and_edited_alone(v1: Host, inside: InsideReference) -> None:
    """A vector of one head for two heads, zeros for another; one is ablated.

    The rows of other heads are the reference's.
    """
    vector = RNG.normal(size=32).astype(np.float32)
    tensor = from_numpy(vector)
    steering = v1.steering(
        SteeringSpec(layers=1, hook="z", op="replace", vector=tensor, heads="0,2", positions=[4]),
        SteeringSpec(layers=2, hook="v", op="ablate", vector=tensor, heads=1),
        SteeringSpec(layers=0, hook="hook_rot_q", op="add", vector=tensor, heads=[-1], scale=2.0),
    )
    jobs = [v1.job(prompt_of(12), max_tokens=2, steering=steering) for _ in range(2)]
    wanted = {"hooks": {"z": [1], "post_block": [3]}, "positions": "all", "at": "after"}
    whole = captured(v1, jobs[0], **wanted)
    two = captured(v1, jobs[1], **wanted | {"hooks": {"z": [1]}, "heads": "0,3"})
    outputs = v1.run(whole, two)
    row = np.zeros((2, 4, 32), np.float32)
    other = np.zeros((2, 32), np.float32)
    row[0, [0, 2]] = vector
    row[1, 3] = vector
    other[1] = vector
    mask = np.repeat([True, False, True, False], 32)
    same = [
        Edit(1, row[0].reshape(-1), hook="z", op="replace", positions=[4], mask=mask),
        Edit(2, other.reshape(-1), hook="v", op="ablate"),
        Edit(0, row[1].reshape(-1), hook="q", op="add", scale=2.0),
    ]
    rows = inside.rows([*prompt_of(12), *outputs[whole.id][0].token_ids][:-1], *same)
    reader = v1.capture(whole)
    heads = v1.capture(two)
    assert relative_error(reader.array(3, "post_block"), rows["post_block", 3]) <= FP32_ROWS
    edited = reader.array(1, "z").reshape(-1, 4, 32)
    assert np.array_equal(edited[4, [0, 2]], [vector, vector])
    assert heads.manifest().heads == [0, 3]
    assert heads.array(1, "z").shape == (13, 64)
    assert np.array_equal(heads.array(1, "z").reshape(-1, 2, 32), edited[:, [0, 3]])


# --- The same from every way to run ---------------------------------------------------------------


@pytest.fixture(scope="module")
def inside_qwen3(qwen3: Path) -> InsideReference:
    return InsideReference(qwen3)


def some(wanted: dict[str, Edit], *ops: str) -> dict[str, Edit]:
    return {name: edit for name, edit in wanted.items() if edit.op in ops}


def check_captures(host: Host, reference: InsideReference, length: int = 90) -> Job:
    """One request with everything, prefilled in chunks where steps are shorter."""
    spec = {"hooks": dict.fromkeys([*served(host), "post_block"], "all"), "positions": "all"}
    job = captured(host, host.job(prompt_of(length), max_tokens=3), **spec)
    output = host.run(job)[job.id][0]
    compare(
        host.capture(job),
        reference.rows([*prompt_of(length), *output.token_ids][:-1]),
        [*served(host), "post_block"],
    )
    return job


@pytest.mark.parametrize(
    ("way", "ops"), [("compiled", ("add", "replace")), ("v2", ("add",)), ("pp2", ("add",))]
)
def test_every_way_to_run_has_the_same_rows_and_edits(
    way: str, ops: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    host: Host = request.getfixturevalue(way)
    reference = request.getfixturevalue("inside_qwen3" if way == "pp2" else "inside")
    check_captures(host, reference)
    check_edits(host, reference, some(edits(host), *ops))


def test_tensor_parallel_ranks_record_and_edit_their_own_columns(
    tp2: Host, inside_qwen3: InsideReference
) -> None:
    """Rows of all ranks are joined, one rank stores the residual stream, and receipts of both
    agree.
    """
    job = check_captures(tp2, inside_qwen3)
    first, second = tp2.receipts(job)
    assert {hook for file in second.files for hook in file.sites} == set(served(tp2))
    assert {hook for file in first.files for hook in file.sites} == {*served(tp2), "post_block"}
    assert all(check.ok for check in tp2.capture(job).verify())
    check_edits(tp2, inside_qwen3, some(edits(tp2), "add", "replace"))
    assert len(set(tp2.call("midstream_fingerprint"))) == 1
    vector = RNG.normal(size=32).astype(np.float32)
    whole = np.zeros((4, 32), np.float32)
    whole[3] = vector
    same = Edit(1, whole.reshape(-1), hook="z", op="ablate")
    ablated = SteeringSpec(layers=1, hook="z", op="ablate", vector=from_numpy(vector), heads=3)
    job = tp2.job(prompt_of(12), max_tokens=1, steering=tp2.steering(ablated))
    job = captured(tp2, job, hooks={"post_block": [3]}, positions="all", at="after")
    tp2.run(job)
    reader = tp2.capture(job)
    rows = inside_qwen3.rows(prompt_of(12), same)
    assert relative_error(reader.array(3, "post_block"), rows["post_block", 3]) <= FP32_ROWS
    assert len({receipt.checksum for receipt in tp2.receipts(job)}) == 1


def test_rows_that_one_rank_kept_do_not_stand_for_those_of_another(
    tp2: Host, inside_qwen3: InsideReference
) -> None:
    """Of heads that the first rank holds: who asks for a head of the other, or for all, has the
    prompt computed.
    """
    prompt = prompt_of(200, seed=83)
    found = []
    rows = inside_qwen3.rows(prompt)["z", 1].reshape(-1, 4, 32)
    for heads in ("0-1", "0-1", "1-2", None, "2-3", "0-1", None):
        job = captured(
            tp2,
            tp2.job(prompt, max_tokens=1),
            hook="z",
            layers=1,
            positions="all_prompt",
            heads=heads,
        )
        found.append(tp2.run(job)[job.id][0].cached_tokens)
        first, last = (0, 3) if heads is None else map(int, heads.split("-"))
        assert (
            relative_error(
                tp2.capture(job).array(1, "z"), rows[:, first : last + 1].reshape(len(prompt), -1)
            )
            <= FP32_ROWS
        ), heads
    assert found == [0, 128, 0, 0, 0, 128, 128]


def test_a_sum_over_columns_of_several_ranks_is_refused(tp2: Host) -> None:
    with pytest.raises(MidstreamError, match="spans 2 tensor-parallel ranks"):
        tp2.steering(
            SteeringSpec(
                layers=1, hook="z", op="ablate", vector=from_numpy(np.ones(128, np.float32))
            )
        )
    straddling = StoredSteering(
        layers=[1],
        hook="z",
        positions="all",
        family="ablate",
        tensors=[tp2.vector(np.ones(128))],
        numbers=[1.0],
    )
    job = tp2.job(prompt_of(8), max_tokens=1, steering=[straddling])
    tp2.run_any(job)
    receipts = tp2.receipts(job)
    assert [receipt.status for receipt in receipts] == ["error", "error"]
    assert all(
        "adds up columns of 2 tensor-parallel ranks" in receipt.message for receipt in receipts
    )


# --- Cached prompts -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["cached", "v2", "compiled", "tp2", "pp2"])
def test_cached_prompts_have_the_rows_that_others_captured_and_no_others(
    engine: str,
    inside: InsideReference,
    inside_qwen3: InsideReference,
    request: pytest.FixtureRequest,
) -> None:
    """A block that others filled without reading `z` is computed again for `z`; rows of it that
    were read are kept on each rank.
    """
    host: Host = request.getfixturevalue(engine)
    prompt = prompt_of(200, seed=80)
    layers = (1, 3)
    ranks = host.settings.vllm.tensor_parallel_size
    rows = (inside_qwen3 if engine in ("tp2", "pp2") else inside).rows(prompt)
    reused = []
    for hooks in (
        [],
        ["z", "k"],
        ["z"],
        ["q"],
        ["q", "z"],
        ["k", "q"],
        ["mlp_act", "z"],
        ["post_block"],
        ["z", "post_block"],
    ):
        job = host.job(prompt, max_tokens=1)
        if hooks:
            job = captured(host, job, hooks=dict.fromkeys(hooks, "1,3"), positions="all_prompt")
        output = host.run(job)[job.id][0]
        for hook in hooks:
            for layer in layers:
                assert (
                    relative_error(host.capture(job).array(layer, hook), rows[hook, layer])
                    <= FP32_ROWS
                ), (hooks, hook, layer)
        kept = (
            sum(file.reused for receipt in host.receipts(job) for file in receipt.files)
            if hooks
            else 0
        )
        reused.append((output.cached_tokens, kept // 128))
    held = len(layers) * ranks
    assert reused == [
        (0, 0),
        (0, 0),
        (128, held),
        (0, 0),
        (0, 0),
        (128, 2 * held),
        (0, 0),
        (0, 0),
        (128, held + len(layers)),
    ]


def test_blocks_under_an_edited_key_never_serve_a_plain_request(
    cached: Host, inside: InsideReference
) -> None:
    prompt = prompt_of(280, seed=81)
    vector = RNG.normal(size=64).astype(np.float32)
    edit = Edit(1, vector, list(range(140, 200)), hook="k", scale=3.0)
    for edited, served_tokens in (([edit], 0), ([], 128), ([edit], 256), ([], 256)):
        job = captured(
            cached,
            cached.job(prompt, max_tokens=1, steering=cached.steering(*edited)),
            hook="z",
            layers=3,
        )
        assert cached.run(job)[job.id][0].cached_tokens == served_tokens
        wanted = inside.rows(prompt, *edited)["z", 3][-1:]
        assert relative_error(cached.capture(job).array(3, "z"), wanted) <= FP32_ROWS, edited


# --- Preempted requests, and drafts ---------------------------------------------------------------


def check_together(
    host: Host, reference: InsideReference, prompts: list[list[int]], max_tokens: int
) -> None:
    """One request with each prompt, all but the first with an edit inside of a layer: rows and
    patterns are those of it alone.
    """
    jobs = []
    wanted = []
    for number, prompt in enumerate(prompts):
        hook = ("", *served(host))[number % (1 + len(served(host)))]
        positions = sorted({5, len(prompt) - 1, len(prompt) + 2, len(prompt) + max_tokens - 4})
        shape = host.info["inside"].get(hook, {"heads": 0, "width": 0})
        vector = (
            np.random.default_rng(number)
            .normal(size=shape["heads"] * shape["width"])
            .astype(np.float32)
        )
        wanted.append(
            [Edit(2 * (number % 2), vector, positions, hook, ("add", "replace")[number // 2 % 2])]
            if hook
            else []
        )
        job = host.job(prompt, max_tokens=max_tokens, steering=host.steering(*wanted[-1]))
        spec = {"hooks": dict.fromkeys([*served(host), "post_block"], "1,3"), "positions": "all"}
        jobs.append(captured(host, job, **spec, at="after"))
    answers = host.run_together(*jobs)
    for job, edits in zip(jobs, wanted, strict=True):
        tokens = [*job.prompts[0].token_ids, *answers[job.id][0].token_ids][:-1]
        reader = host.capture(job)
        rows = reference.rows(tokens, *edits)
        assert len(answers[job.id][0].token_ids) == max_tokens
        assert reader.positions() == list(range(len(tokens)))
        assert reader.token_ids() == tokens
        for layer in (1, 3):
            for hook in reader.hooks():
                assert relative_error(reader.array(layer, hook), rows[hook, layer]) <= FP32_ROWS, (
                    edits,
                    hook,
                    layer,
                )
            assert (
                np.abs(reader.attention(layer) - rows["pattern", layer]).max() <= FP32_ATTENTION
            ), (edits, layer)
        assert (
            sum(receipt.applied for receipt in host.receipts(job))
            == sum(len(edit.positions) for edit in edits) * host.settings.vllm.tensor_parallel_size
        )


@pytest.mark.parametrize(
    ("way", "requests", "length", "tokens"), [("cached", 8, 100, 60), ("overlapped", 5, 58, 14)]
)
def test_preempted_requests_have_the_rows_edits_and_patterns_of_one_alone(
    way: str, requests: int, length: int, tokens: int, request: pytest.FixtureRequest
) -> None:
    """Blocks for three or four of them: what some had computed is computed again. One engine is
    the v2 runner on two stages, with steps under way.
    """
    host: Host = request.getfixturevalue(way)
    reference = request.getfixturevalue("inside" if way == "cached" else "inside_qwen3")
    before = host.call("midstream_status")[0]["preemptions"]
    prompts = [prompt_of(length, seed=300 + number) for number in range(requests)]
    check_together(host, reference, prompts, max_tokens=tokens)
    assert host.call("midstream_status")[0]["preemptions"] > before


# --- Families -------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_hooks_inside_are_proven_at_the_start_and_equal_to_transformers(
    name: str, nursery: Nursery, tmp_path: Path
) -> None:
    """The same hooks as on the page; all others are absent with a reason."""
    path = checkpoint(name, tmp_path / "checkpoint")
    host = engine(nursery, tmp_path / "engine", name, path)
    reference = InsideReference(path)
    with closing(host):
        found = measure(host, reference)
        if "router" in found:
            check_experts(host, reference)
    assert {hook: cell for hook, cell in found.items() if beyond(cell)} == {}
    assert found.keys() == read_table(PAGE.read_text())[name].keys()
    assert set(host.info["certificate"]["proven"]) >= found.keys()
    assert all(host.info["absent"][hook] for hook in INSIDE if hook not in found)


def check_experts(host: Host, reference: InsideReference) -> None:
    """Chosen experts and their weights are those that transformers' router gives, whatever their
    order.
    """
    job = captured(
        host,
        host.job(prompt_of(40), max_tokens=1),
        hook="router",
        layers="all",
        positions="all_prompt",
    )
    host.run(job)
    rows = reference.rows(prompt_of(40))
    reader = host.capture(job)
    for layer in range(LAYERS):
        theirs, ours = np.zeros((2, *rows["router", layer].shape))
        weights, chosen = rows["experts", layer]
        np.put_along_axis(theirs, chosen.numpy(), weights.numpy(), axis=1)
        np.put_along_axis(ours, *reader.experts(layer), axis=1)
        assert np.abs(ours - theirs).max() <= FP32_HOOKS, layer
