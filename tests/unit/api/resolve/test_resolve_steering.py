"""What do named modules and global steering come to, and which of it is refused, by which field?"""

from typing import Any

import msgspec
import numpy as np
import pytest
from model_kit import HIDDEN, model
from refusal_kit import refuses

from midstream.api.resolve.admission.admission import under_limit
from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.steering import resolve_edits, resolve_global, resolve_module
from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.schemas.base.edit_sizes import EditLimit, strictest
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.model.banks import RowShape
from midstream.schemas.prompts.selectors import HOOKS, SelectorError, Span, Window
from midstream.schemas.requests.specs import (
    SteeringSpec,
    StoredSteering,
    steering_digest,
    steering_rows,
)
from midstream.schemas.requests.steering import GlobalSteering, Module, content_digest
from midstream.workers.engine.requests import prompt_request

VECTOR = from_numpy(np.ones(HIDDEN, np.float32))
OTHER = from_numpy(np.arange(1, HIDDEN + 1, dtype=np.float32))
RANK2 = from_numpy(np.ones((2, HIDDEN), np.float32))


def spec(**fields: Any) -> SteeringSpec:
    return SteeringSpec(**({"layers": 0, "vector": VECTOR} | fields))


def module(*specs: SteeringSpec, name: str = "joy") -> Module:
    content = resolve_module(specs or [spec()], model())
    return Module(
        name=name,
        model="m",
        digest=content_digest(content.entries),
        entries=content.entries,
        bytes=content.size,
        created=0.0,
        hidden_size=HIDDEN,
        reach=content.reach,
    )


def resolved(
    specs: list[SteeringSpec],
    *modules: Module,
    lengths: tuple[int, ...] = (6,),
    global_steering: Any = None,
    **changes: Any,
) -> Any:
    bounds = Bounds(model(**changes), [PromptFacts(length, _find) for length in lengths], 4)
    model_state = ModelState(
        {one.name: one for one in modules},
        global_steering or GlobalSteering(),
        sorted(one.name for one in modules),
    )
    return resolve_edits([], specs, bounds, model_state)


def _find(span: Span) -> list[int]:
    if span.text != "here":
        raise SelectorError(f"{span.text!r} is not there")
    return [2]


def refused(call: Any, *arguments: Any, **more: Any) -> MidstreamError:
    with refuses(status=400) as found:
        call(*arguments, **more)
    return found.value


# --- Modules in a request
# ----------------------------------------------------------------------------------------------


def test_a_module_is_its_entries_at_their_own_positions_and_brings_no_tensor() -> None:
    joy = module(
        spec(layers="1,3", hook="resid_pre", positions=[-1], scale=2.0),
        spec(op="ablate", vector=OTHER),
    )
    (first, second), blobs = resolved(
        [SteeringSpec(module="joy"), spec(vector=OTHER)], joy, lengths=(6, 3)
    )
    assert first[:2] == [
        StoredSteering(
            layers=[1, 3],
            hook="pre_attn",
            positions=[5],
            family="add",
            tensors=[content_hash(VECTOR)],
            scale=2.0,
        ),
        StoredSteering(
            layers=[0],
            hook="post_block",
            positions="all",
            family="ablate",
            tensors=[content_hash(OTHER)],
            numbers=[1.0],
        ),
    ]
    assert [entry.positions for entry in second] == [[2], "all", "all"]
    assert list(blobs) == [content_hash(OTHER)], "what came with the request, not with the module"


def test_a_request_sets_scale_and_positions_of_a_module() -> None:
    everything = module(
        spec(scale=3.0),
        spec(layers=1, norm_match=True, scale=0.5),
        spec(layers=1, op="ablate", strength=0.25),
        spec(layers=1, op="clamp", strength=0.5, low=-1.0, high=1.0),
        spec(layers=2, op="replace", alpha=0.5, scale=2.0),
        SteeringSpec(
            layers=3,
            op="lowrank",
            rotation=RANK2,
            weight=RANK2,
            bias=from_numpy(np.zeros(2, np.float32)),
            strength=2.0,
        ),
    )
    ((*entries,),), _ = resolved(
        [SteeringSpec(module="joy", scale=2.0, positions=[0, -1])], everything
    )
    assert [(entry.scale, entry.numbers) for entry in entries] == [
        (6.0, []),
        (1.0, [1.0]),
        (1.0, [0.5]),
        (1.0, [1.0, -1.0, 1.0]),
        (4.0, [0.5]),
        (1.0, [4.0]),
    ]
    assert {tuple(entry.positions) for entry in entries} == {(0, 5)}


@pytest.mark.parametrize("positions", ["all_generated", "all_prompt"])  # field case 25
def test_a_module_of_one_phase_stays_one_in_each_prompt(positions: Any) -> None:
    per_prompt, _ = resolved(
        [SteeringSpec(module="joy", scale=0.5)], module(spec(positions=positions)), lengths=(6, 3)
    )
    assert [[entry.positions for entry in entries] for entries in per_prompt] == [
        [positions],
        [positions],
    ]


# field case 27
@pytest.mark.parametrize(
    ("wish", "field", "words"),
    [
        ({"module": "sad"}, "module", "unknown module 'sad'"),
        ({"module": "joy", "layers": 1}, "layers", "not valid together with module"),
        ({"module": "joy", "vector": VECTOR}, "vector", "not valid together with module"),
        ({"module": "joy", "op": "ablate"}, "op", "not valid together with module"),
        ({"module": "joy", "hook": "pre_attn"}, "hook", "not valid together with module"),
        ({"module": "joy", "norm_match": True}, "norm_match", "not valid together with module"),
        ({"module": "joy", "strength": 1.0}, "strength", "not valid together with module"),
        ({"module": "joy", "scale": 1e6}, "scale", "float16 allows at most"),
        ({"module": "joy", "scale": 1e300}, "scale", "out of range for op"),
        ({"module": "joy", "positions": [6]}, "positions[0]", "out of range: the prompt has"),
        ({"module": "joy", "positions": Span(text="nowhere")}, "positions", "not there"),
    ],
)
def test_invalid_module_use_in_a_request_names_the_field(
    wish: dict[str, Any], field: str, words: str
) -> None:
    problem = refused(resolved, [spec(), SteeringSpec(**wish)], module())
    assert problem.field == f"steering[1].{field}"
    assert words in problem.detail
    if wish["module"] == "sad":
        assert problem.allowed == "joy"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 4}, "hidden size 8, but the model has 4"),
        ({"num_layers": 1}, "layer 3"),
        ({"hooks": ["pre_attn"]}, "hook post_block"),
    ],
)
def test_a_module_for_a_former_model_of_that_name_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    # field case 27
    problem = refused(resolved, [SteeringSpec(module="joy")], module(spec(layers="0-3")), **changes)
    assert (problem.field, words in problem.detail) == ("steering[0].module", True)


def test_a_module_with_positions_outside_a_prompt_is_refused_unless_overridden() -> None:
    there = module(spec(positions=[Span(text="gone")]))
    problem = refused(resolved, [SteeringSpec(module="joy")], there)
    assert problem.field == "steering[0].module"
    assert "entry 0" in problem.detail
    assert "steering[0].positions" in str(problem.hint)
    ((entry,),), _ = resolved([SteeringSpec(module="joy", positions=[Span(text="here")])], there)
    assert entry.positions == [2]


def test_rows_of_modules_and_of_global_steering_count_as_those_of_the_request() -> None:
    five = [module(spec(positions=[0, place]), name=f"m{place}") for place in range(1, 6)]
    problem = refused(resolved, [SteeringSpec(module=f"m{place}") for place in range(1, 6)], *five)
    assert (problem.field, "needs 5 rows" in problem.detail) == ("steering", True)
    assert resolved([SteeringSpec(module=f"m{place}") for place in range(1, 5)], *five)
    global_steering = GlobalSteering(
        version=1,
        entries=resolve_global(
            [spec(positions=[0]), spec(positions=[1])], model(), ModelState()
        ).entries,
    )
    mine = [spec(positions=[place]) for place in range(3)]
    assert resolved(mine, steering_rows=5, global_steering=global_steering)
    problem = refused(resolved, mine, steering_rows=4, global_steering=global_steering)
    assert (
        "needs 3 steering rows for prompt 0; the worker has 4 (setting steering_rows), "
        "of which global steering takes 2"
    ) in problem.detail
    assert resolved(mine, steering_rows=4, lengths=(6,)), "alone it fits"


# --- Modules
# --------------------------------------------------------------------------------------------------


def test_modules_are_resolved_to_content_at_admission() -> None:
    one = module(spec())
    variants = [
        spec(vector=OTHER),
        spec(scale=2.0),
        spec(layers=1),
        spec(hook="pre_attn"),
        spec(positions="all_prompt"),
        spec(op="ablate"),
        spec(op="replace"),
        spec(norm_match=True),
    ]
    digests = {module(variant).digest for variant in variants} | {
        one.digest,
        module(spec(), spec()).digest,
    }
    assert len(digests) == len(variants) + 2
    assert module(spec(), name="other").digest == one.digest
    assert one.bytes == module(spec(), spec(layers=1)).bytes == 4 * HIDDEN, (
        "equal tensors are held once"
    )
    before, after = module(spec()), module(spec(vector=OTHER))
    assert before.digest != after.digest
    ((entry,),), _ = resolved([SteeringSpec(module="joy")], before)
    ((later,),), _ = resolved([SteeringSpec(module="joy")], after)
    assert (entry.tensors, later.tensors) == ([content_hash(VECTOR)], [content_hash(OTHER)])


# field case 27
@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (SteeringSpec(module="joy"), "module"),
        (spec(vector=from_numpy(np.ones(7, np.float32))), "vector.shape"),
        (spec(vector=from_numpy(np.full(HIDDEN, np.nan, np.float32))), "vector.data"),
        (spec(layers=4), "layers"),
        (spec(layers="zero"), "layers"),
        (spec(positions=[]), "positions"),
        (spec(strength=1.0), "strength"),
        (spec(scale=1e6), "scale"),
        (SteeringSpec(layers=0), "vector"),
        (SteeringSpec(vector=VECTOR), "layers"),
    ],
)
def test_invalid_modules_and_global_steering_name_the_field(
    entry: SteeringSpec, field: str
) -> None:
    assert refused(resolve_module, [spec(), entry], model()).field == f"steering[1].{field}"
    assert (
        refused(resolve_global, [spec(), entry], model(), ModelState()).field
        == f"steering[1].{field}"
    )


def test_a_module_that_no_request_could_use_is_refused() -> None:
    five = [[0, 1], [0, 2], [0, 3], [0, 4], [5]]
    assert resolve_module([spec(positions=places) for places in five], model()), (
        "no token is in all of them"
    )
    five[-1] = [-5]
    assert (
        refused(resolve_module, [spec(positions=places) for places in five], model()).field
        == "steering"
    ), "which may be token 0"
    assert (
        refused(
            resolve_module, [spec(layers=layer) for layer in range(4)], model(steering_entries=3)
        ).field
        == "steering"
    )


# --- Everyone
# --------------------------------------------------------------------------------------------------


def test_global_steering_is_clipped_to_each_prompt() -> None:
    content = resolve_global(
        [
            spec(positions=[1, 5]),
            spec(layers=1, positions=Span(start=2)),
            spec(layers=2, positions="all_generated"),
        ],
        model(),
        ModelState(),
    )
    global_steering = GlobalSteering(version=1, entries=content.entries)
    assert [entry.positions for entry in global_steering.at(6)] == [
        [1, 5],
        Window(start=2),
        "all_generated",
    ]
    assert [entry.positions for entry in global_steering.at(3)] == [
        [1],
        Window(start=2),
        "all_generated",
    ]
    assert [entry.positions for entry in global_steering.at(1)] == [
        Window(start=2),
        "all_generated",
    ]
    assert [
        content_hash(msgspec.msgpack.decode(raw, type=Tensor)) for raw in content.blobs.values()
    ] == [content_hash(VECTOR)]


def test_a_global_module_is_its_content_at_scale_and_positions() -> None:
    joy = module(spec(scale=3.0, positions="all_prompt"), spec(layers=1, op="ablate", vector=OTHER))
    model_state = ModelState({"joy": joy}, GlobalSteering(), ["joy"])
    own = resolve_global([SteeringSpec(module="joy", scale=2.0)], model(), model_state)
    assert [(entry.scale, entry.numbers, entry.positions) for entry in own.entries] == [
        (6.0, [], "all_prompt"),
        (1.0, [2.0], "all"),
    ]
    assert not own.blobs
    placed = resolve_global([SteeringSpec(module="joy", positions=[0])], model(), model_state)
    assert [entry.positions for entry in placed.entries] == [[0], [0]]


# field case 27
@pytest.mark.parametrize(
    ("positions", "place"),
    [
        ([0, -1], "[1]"),
        ([Span(text="a")], "[0]"),
        (Span(text="a"), ""),
        (Span(start=-3), ""),
        (Span(start=0, stop=-1), ""),
        ([3, Span(start=-2, stop=-1)], "[1]"),
    ],
)
def test_positions_that_need_a_prompt_are_refused_globally(positions: Any, place: str) -> None:
    problem = refused(resolve_global, [spec(), spec(positions=positions)], model(), ModelState())
    assert problem.field == f"steering[1].positions{place}"
    joy = module(spec(positions=positions))
    inside = refused(
        resolve_global,
        [SteeringSpec(module="joy")],
        model(),
        ModelState({"joy": joy}, GlobalSteering(), []),
    )
    assert inside.field == "steering[0].module"


def test_global_steering_is_bounded_by_per_prompt_cost() -> None:
    large = module(*[spec()] * 2049)
    problem = refused(
        resolve_global, [SteeringSpec(module="joy")] * 2, model(), ModelState({"joy": large})
    )
    assert (problem.field, problem.detail) == ("steering", "has 4098 entries")
    lists = [spec(positions=list(range(1 << 13)), layers=layer) for layer in range(4)]
    assert resolve_global(lists, model(), ModelState()), "at the limit"
    assert (
        refused(resolve_global, [*lists, spec(positions=[0])], model(), ModelState()).field
        == "steering[4].positions"
    )
    # 64 positions each: as long as the model's requests
    ranges = [spec(positions=[Span(start=0)] * 257)] * 2
    assert refused(resolve_global, ranges, model(), ModelState()).field == "steering[1].positions"
    assert resolve_global([spec(positions=Span(start=0))] * 1000, model(), ModelState()), (
        "alone they are no list"
    )


def test_global_steering_uses_at_most_half_of_the_tables() -> None:
    two = [spec(positions=[0]), spec(positions=[1])]
    assert resolve_global(two, model(steering_rows=4), ModelState())
    assert (
        "global steering may take 1"
        in refused(resolve_global, two, model(steering_rows=3), ModelState()).detail
    )
    at_each_layer = [spec(layers=layer) for layer in range(4)]
    assert (
        refused(resolve_global, at_each_layer, model(steering_entries=7), ModelState()).field
        == "steering"
    )
    assert resolve_global([spec(layers="all")], model(steering_entries=2), ModelState()), (
        "one vector, at four sites"
    )


def test_the_stricter_limit_of_request_module_and_entry_counts() -> None:
    gentle, hard = EditLimit(relative=0.9), EditLimit(relative=0.5, then="fail")
    entries = [spec(limit=gentle), spec(layers=1)]
    kept = resolve_module(entries, model(), limit=EditLimit(relative=0.8)).entries
    assert [entry.limit for entry in kept] == [0.8, 0.8]
    assert [entry.limit for entry in resolve_module(entries, model()).entries] == [0.9, 0.0]
    one = module(spec(limit=gentle))
    for asked, wanted in ((None, 0.9), (hard, -0.5), (EditLimit(relative=2), 0.9)):
        ((found,), _) = resolved([SteeringSpec(module="joy", limit=asked)], one)
        assert [entry.limit for entry in found] == [wanted]
    assert strictest(0.7, -0.7, 0.0) == -0.7
    assert strictest(0.0) == 0.0
    ((found,), _) = resolved([spec(limit=hard), spec(), spec(limit=gentle)])
    rows = steering_rows(found)
    assert [[entry.limit for entry in row.entries] for row in rows] == [[-0.5], [0.0], [0.9]]
    assert len({row.key for row in rows}) == 3
    assert len({steering_digest([entry]) for entry in found}) == 3


@pytest.mark.parametrize("relative", [0.0, -1.0, 1e-7, 2e6])
def test_limits_beyond_their_range_are_refused(relative: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"layers": 0, "limit": {"relative": relative}}, SteeringSpec)


def test_limits_are_of_the_stream_and_a_tenants_is_that_of_its_jobs() -> None:
    shape = RowShape(heads=1, width=HIDDEN)
    inside = spec(hook="z", limit=EditLimit(relative=1))
    with refuses("cannot be limited", field="steering[0].limit"):
        resolved([inside], hooks=[*HOOKS, "z"], inside={"z": shape})
    ((found,), _) = resolved([spec()])
    job = Job(
        id="j",
        kind="generate",
        model="m",
        prompts=[StoredPrompt(token_ids=[1, 2])],
        sampling=Sampling(max_tokens=1),
        created=0.0,
        steering=[found],
    )
    limited = under_limit(job, EditLimit(relative=0.7, then="fail"))
    assert [entry.limit for entry in prompt_request(limited, 0, 1).steering] == [-0.7]
    assert under_limit(job, None) == job
    inside = msgspec.structs.replace(found[0], hook="z")
    with refuses("edits at z cannot be limited"):
        under_limit(msgspec.structs.replace(job, steering=[[inside]]), EditLimit(relative=1))
