"""What do named modules and global steering come to, and which of it is refused, by which field?"""

from typing import Any

import msgspec
import numpy as np
import pytest
from model_kit import HIDDEN, LAYERS, model, module
from refusal_kit import refuses

from midstream.api.resolve.admission.admission import under_limit
from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.module_export import entries_of
from midstream.api.resolve.edits.steering import resolve_edits, resolve_global, resolve_module
from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.schemas.base.edit_sizes import EditLimit, strictest
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.model.banks import RowShape
from midstream.schemas.prompts.selectors import HOOKS, PositionWindow, SelectorError, Span
from midstream.schemas.prompts.windows import Trigger
from midstream.schemas.requests.specs import (
    SteeringSpec,
    StoredSteering,
    steering_digest,
    steering_rows,
)
from midstream.schemas.requests.steering import GlobalSteering, Module, views_of
from midstream.workers.engine.requests import prompt_request

VECTOR = from_numpy(np.ones(HIDDEN, np.float32))
OTHER = from_numpy(np.arange(1, HIDDEN + 1, dtype=np.float32))
RANK2 = from_numpy(np.ones((2, HIDDEN), np.float32))


def spec(**fields: Any) -> SteeringSpec:
    return SteeringSpec(**({"layers": 0, "vector": VECTOR} | fields))


def resolved(
    specs: list[SteeringSpec],
    *modules: Module,
    lengths: tuple[int, ...] = (6,),
    **changes: Any,
) -> Any:
    bounds = Bounds(model(**changes), [PromptFacts(length, _find) for length in lengths], 4)
    model_state = ModelState(
        {one.name: one for one in modules},
        sorted(one.name for one in modules),
    )
    return resolve_edits([], specs, bounds, model_state)


def _find(span: Span) -> list[int]:
    if span.text != "here":
        raise SelectorError(f"{span.text!r} is not there")
    return [2]


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


def test_a_request_chooses_among_the_layers_of_a_module() -> None:
    joy = module(spec(layers=[0, 2]), spec(layers=1), spec(layers=[1, 2], op="ablate"))
    ((*entries,),), _ = resolved([SteeringSpec(module="joy", layers=[0, -2])], joy)
    assert [(entry.family, entry.layers) for entry in entries] == [("add", [0, 2]), ("ablate", [2])]
    chosen = [SteeringSpec(module="joy", layers=2)]
    limits = Bounds(model(), [PromptFacts(6)])
    resolve_edits([], chosen, limits, ModelState({"joy": joy}), scales=[1.0, -1.0])


@pytest.mark.parametrize("positions", ["all_generated", "all_prompt"])  # field case 25
def test_a_module_of_one_phase_stays_one_in_each_prompt(positions: Any) -> None:
    per_prompt, _ = resolved(
        [SteeringSpec(module="joy", scale=0.5)], module(spec(positions=positions)), lengths=(6, 3)
    )
    assert [[entry.positions for entry in entries] for entries in per_prompt] == [
        [positions],
        [positions],
    ]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("fields", "most", "words"),
    [
        ({"scale": 2.0}, 32752.0, "scaled vector has an element"),
        ({"op": "replace", "scale": 2.0}, 32752.0, "scaled vector has an element"),
        ({"scale": 2.0, "norm_match": True}, 50.0, "'add with norm_match': -100 to 100"),
        ({"op": "ablate", "strength": 2.0}, 50.0, "'ablate': -100 to 100"),
        ({"op": "clamp", "low": 0.0, "strength": 2.0}, 50.0, "'clamp': -100 to 100"),
    ],
)
def test_a_doses_scales_keep_entries_within_the_limits_of_requests(
    fields: dict[str, Any], most: float, words: str, named: bool
) -> None:
    own = spec(**fields)
    limits = Bounds(model(), [PromptFacts(6)])
    used = [SteeringSpec(module="joy")] if named else [own]
    known = ModelState({"joy": module(own)})
    resolve_edits([], used, limits, known, scales=[most, -most])
    with refuses(words, "steering[0]'s", field="scales[1]", status=400):
        resolve_edits([], used, limits, known, scales=[most, -1.01 * most])


ONCE = [Span(start=0)]
#: As many as a request may have at one token.
FULL = [[0, 1], [0, 2], [0, 3], [0, 4]]


def modules(*positions: Any) -> list[Module]:
    return [module(spec(positions=each), name=f"m{n}") for n, each in enumerate(positions)]


def uses(*names: str) -> list[SteeringSpec]:
    return [SteeringSpec(module=name) for name in names]


def everywhere(*specs: SteeringSpec, state: ModelState | None = None, **changes: Any) -> Any:
    return resolve_global(list(specs), model(**changes), state or ModelState())


THREE = [spec(positions=[place]) for place in range(3)]


LISTS = [spec(positions=list(range(1 << 13)), layers=layer) for layer in range(LAYERS)]


AT_EACH = [spec(layers=layer) for layer in range(LAYERS)]


@pytest.mark.parametrize(
    ("resolve", "field", "words"),
    [
        # a module that a request names; field case 27
        *(
            (
                lambda wish=wish: resolved([spec(), SteeringSpec(**wish)], module(spec())),
                f"steering[1].{field}",
                words,
            )
            for wish, field, words in (
                ({"module": "sad"}, "module", "unknown module 'sad'"),
                ({"module": "joy", "layers": 1}, "layers", "'joy' edits none of them (allowed: 0)"),
                ({"module": "joy", "layers": 99}, "layers", "layer 99 is out of range"),
                (
                    {"module": "joy", "alpha": 1.0},
                    "alpha",
                    "valid fields: module, layers, positions, scale, limit, trigger",
                ),
                ({"module": "joy", "vector": VECTOR}, "vector", "not valid together with module"),
                ({"module": "joy", "op": "ablate"}, "op", "not valid together with module"),
                ({"module": "joy", "hook": "pre_attn"}, "hook", "not valid together with module"),
                (
                    {"module": "joy", "norm_match": True},
                    "norm_match",
                    "not valid together with module",
                ),
                ({"module": "joy", "strength": 1.0}, "strength", "not valid together with module"),
                ({"module": "joy", "scale": 1e6}, "scale", "float16 allows at most"),
                ({"module": "joy", "scale": 1e300}, "scale", "out of range for op"),
                (
                    {"module": "joy", "positions": [6]},
                    "positions[0]",
                    "out of range: the prompt has",
                ),
                ({"module": "joy", "positions": Span(text="nowhere")}, "positions", "not there"),
            )
        ),
        # a module for a former model of that name; field case 27
        *(
            (
                lambda changes=changes: resolved(
                    uses("joy"), module(spec(layers="0-3")), **changes
                ),
                "steering[0].module",
                words,
            )
            for changes, words in (
                ({"hidden_size": 4}, "hidden size 8, but the model has 4"),
                ({"num_layers": 1}, "layer 3"),
                ({"hooks": ["pre_attn"]}, "hook post_block"),
            )
        ),
        # a request
        (
            lambda: resolved(uses("joy"), module(spec(positions=[Span(text="gone")]))),
            "steering[0].module",
            "entry 0",
        ),
        (
            lambda: resolved(uses(*(f"m{n}" for n in range(5))), *modules(*FULL, [0, 5])),
            "steering",
            "needs 5 rows",
        ),
        (
            lambda: resolved(THREE, steering_rows=2),
            "steering",
            "needs 3 steering rows for prompt 0",
        ),
        (
            lambda: resolved(
                [spec(hook="z", limit=EditLimit(relative=1))],
                hooks=[*HOOKS, "z"],
                inside={"z": RowShape(heads=1, width=HIDDEN)},
            ),
            "steering[0].limit",
            "cannot be limited",
        ),
        # a module; the last place may be token 0
        (
            lambda: resolve_module([spec(positions=each) for each in [*FULL, [-5]]], model()),
            "steering",
            "",
        ),
        (lambda: resolve_module(AT_EACH, model(steering_entries=3)), "steering", ""),
        # global steering
        (
            lambda: everywhere(
                *uses("joy", "joy"), state=ModelState({"joy": module(*[spec()] * 2049)})
            ),
            "steering",
            "has 4098 entries",
        ),
        (lambda: everywhere(*LISTS, spec(positions=[0])), "steering[4].positions", ""),
        # 64 positions each: as long as the model's requests
        (lambda: everywhere(*[spec(positions=ONCE * 257)] * 2), "steering[1].positions", ""),
        (
            lambda: everywhere(*THREE[:2], steering_rows=2),
            "steering",
            "needs 2 steering rows as global steering",
        ),
        (lambda: everywhere(*AT_EACH, steering_entries=6), "steering", ""),
    ],
)
def test_what_is_not_valid_or_does_not_fit_is_refused(resolve: Any, field: str, words: str) -> None:
    with refuses(words, field=field, status=400):
        resolve()


@pytest.mark.parametrize(
    "resolve",
    [
        lambda: resolved(uses(*(f"m{n}" for n in range(4))), *modules(*FULL)),
        lambda: resolved(THREE, steering_rows=3),
        # no token is in all of them
        lambda: resolve_module([spec(positions=each) for each in [*FULL, [5]]], model()),
        lambda: everywhere(*LISTS),
        lambda: everywhere(*[spec(positions=Span(start=0))] * 1000),  # alone they are no list
        lambda: everywhere(*THREE[:2], steering_rows=3),
        lambda: everywhere(spec(layers="all"), steering_entries=2),  # one vector, at four sites
    ],
)
def test_what_just_fits_is_taken(resolve: Any) -> None:
    assert resolve()


def test_the_positions_of_a_request_override_those_of_the_module() -> None:
    assert resolved(
        [SteeringSpec(module="joy", positions=[Span(text="here")])],
        module(spec(positions=[Span(text="gone")])),
    )[0][0][0].positions == [2]


def test_a_tenants_limit_is_that_of_its_jobs_and_sweeps_are_refused() -> None:
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
    before = module(spec())
    after = module(spec(vector=OTHER))
    assert before.digest != after.digest
    ((entry,),), _ = resolved([SteeringSpec(module="joy")], before)
    ((later,),), _ = resolved([SteeringSpec(module="joy")], after)
    assert entry.tensors == [content_hash(VECTOR)]
    assert later.tensors == [content_hash(OTHER)]


# field case 27
@pytest.mark.parametrize(
    "resolve", [lambda *entries: resolve_module([*entries], model()), everywhere]
)
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
    resolve: Any, entry: SteeringSpec, field: str
) -> None:
    with refuses(field=f"steering[1].{field}", status=400):
        resolve(spec(), entry)


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
        PositionWindow(start=2),
        "all_generated",
    ]
    assert [entry.positions for entry in global_steering.at(3)] == [
        [1],
        PositionWindow(start=2),
        "all_generated",
    ]
    assert [entry.positions for entry in global_steering.at(1)] == [
        PositionWindow(start=2),
        "all_generated",
    ]
    assert [
        content_hash(msgspec.msgpack.decode(raw, type=Tensor)) for raw in content.blobs.values()
    ] == [content_hash(VECTOR)]


def test_a_global_module_is_its_content_at_scale_and_positions() -> None:
    joy = module(spec(scale=3.0, positions="all_prompt"), spec(layers=1, op="ablate", vector=OTHER))
    model_state = ModelState({"joy": joy}, ["joy"])
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
    with refuses(field=f"steering[1].positions{place}", status=400):
        everywhere(spec(), spec(positions=positions))
    inside = ModelState({"joy": module(spec(positions=positions))})
    with refuses(field="steering[0].module", status=400):
        everywhere(*uses("joy"), state=inside)


def test_the_stricter_limit_of_request_module_and_entry_counts() -> None:
    gentle = EditLimit(relative=0.9)
    hard = EditLimit(relative=0.5, then="fail")
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


# --- Triggers

AT_3 = Trigger(token_ids=[[3]])
FROM_45 = Trigger(token_ids=[[4, 5]], after="end")


def test_an_entry_keeps_its_trigger_and_a_request_replaces_a_modules() -> None:
    own = module(spec(trigger=AT_3), spec())
    for asked, wanted in ((None, [AT_3, None]), (FROM_45, [FROM_45, FROM_45])):
        use = SteeringSpec(module="joy", trigger=asked)
        ((found,), _) = resolved([use], own)
        globally = everywhere(use, state=ModelState({"joy": own}))
        for entries in (found, globally.entries):
            assert [entry.trigger or None for entry in entries] == wanted
    assert [view.trigger for view in views_of(own.entries)] == [AT_3, None]
    exported = entries_of(own, dict.fromkeys(own.tensors, VECTOR))
    assert [entry.trigger for entry in exported] == [AT_3, None]


@pytest.mark.parametrize(
    ("triggers", "field", "valid"),
    [
        ([Trigger(text="a")], "steering[0].trigger.text", "token_ids instead of text"),
        (
            [AT_3, Trigger(token_ids=[[3], [4, 9]])],
            "steering[1].trigger.token_ids[1][1]",
            "0 to 8",
        ),
        ([Trigger(token_ids=[[n]]) for n in range(5)], "steering", "at most 4"),
    ],
)
def test_what_ranks_cannot_search_for_is_refused(
    triggers: list[Trigger], field: str, valid: str
) -> None:
    specs = [spec(trigger=trigger, positions=[n]) for n, trigger in enumerate(triggers)]
    for resolve in (resolved, lambda each: everywhere(*each), lambda each: module(*each)):
        with refuses(match=valid, status=400, field=field):
            resolve(specs)
