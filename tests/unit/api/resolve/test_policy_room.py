"""Do policies have room of their own, and is what does not fit refused where it is registered?"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from model_kit import HIDDEN, bounds, model, module
from refusal_kit import refuses

from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.steering import resolve_edits
from midstream.api.resolve.positions.captures import resolve_captures
from midstream.api.resolve.positions.gates import Gated
from midstream.api.resolve.prompts.request_parsing import ParsedRequest
from midstream.api.resolve.readings.probes import (
    changed,
    check_beside,
    policies_of,
    resolve_policy,
)
from midstream.broker.ledger.named.registry import Lookup
from midstream.schemas.access.keys import EVERYBODY
from midstream.schemas.artifacts.conditions import Condition
from midstream.schemas.artifacts.probes import Probe, ProbeContent
from midstream.schemas.base.limits import MAX_POLICY_VECTORS, MAX_STEERING_ROWS
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.jobs import Sampling
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.prompts.windows import Trigger
from midstream.schemas.requests.policies import (
    POLICIES,
    CaptureWindow,
    Policy,
    PolicyChange,
    PolicyRequest,
    Steer,
)
from midstream.schemas.requests.specs import (
    CaptureSpec,
    SteeringSpec,
    columns_of,
    probe_captures,
    steering_rows,
)
from midstream.schemas.settings.tuning import Tuning
from midstream.workers.engine.ranks.control import _demand

VECTOR = from_numpy(np.ones(HIDDEN, np.float32))
CONTENT = ProbeContent(hook=HOOKS[0], layer=0, tensors=["w"], labels=["x"], thresholds=[1.0])
PROBE = Probe("p", "m", CONTENT.digest, 0.0, content=CONTENT, hidden_size=HIDDEN, bytes=0)
ABLATION = SteeringSpec(layers=0, op="ablate", vector=VECTOR)


def triggered(number: int) -> SteeringSpec:
    return SteeringSpec(layers=0, vector=VECTOR, trigger=Trigger(token_ids=[[number]]))


def policy(
    *entries: SteeringSpec, name: str = "guard", actions: Any = None, **fields: Any
) -> Policy:
    """A policy with a module of these entries, as it is registered."""
    modules = {"joy": module(*entries)} if entries else {}
    condition = Condition(at_least=1.0)
    acts = actions or [Steer(module="joy")]
    content = PolicyRequest(probe="p", condition=condition, actions=acts, **fields)
    made = resolve_policy(
        content,
        name,
        model(),
        PROBE,
        ModelState(modules),
        caller=EVERYBODY,
        settings=Any,  # type: ignore[arg-type]
    )
    return Policy(name=name, model="m", digest="", created=0.0, versions=[made])


def guards(number: int, *entries: SteeringSpec, **fields: Any) -> list[Policy]:
    fields = {"mode": "active", "all_traffic": True, **fields}
    names = (f"guard{index}" for index in range(number))
    return [policy(*(entries or (ABLATION,)), name=name, **fields) for name in names]


def parsed(*policies: str) -> ParsedRequest:
    """A request that names these policies."""
    return ParsedRequest(
        kind="generate", model="m", prompts=[], sampling=Sampling(), policies=[*policies]
    )


def applied(watching: list[Policy], named: list[Policy] | None = None) -> Any:
    named = named or []
    found = Lookup("m", {(POLICIES.plural, each.name): each for each in named})
    asked = parsed(*(each.name for each in named))
    return policies_of(asked, model(), found, watching)


@pytest.mark.parametrize(
    ("make", "field", "words"),
    [
        (
            lambda: policy(*[ABLATION] * 3, actions=[Steer("joy"), Steer("joy", 2.0)]),
            "actions",
            "the modules of guard need 6 rows of the steering table",
        ),
        (
            lambda: policy(
                ABLATION, actions=[Steer("joy"), Steer("joy", 2.0), *[Steer("joy", 3.0)] * 3]
            ),
            "actions",
            "need 5 rows",
        ),
        (
            lambda: policy(triggered(1), actions=[Steer("joy", scale=1e6)]),
            "actions[0].scale",
            "float16 allows at most",
        ),
        (lambda: policy(actions=[CaptureWindow(layers=9)]), "actions[0].layers", "9"),
    ],
)
def test_a_policy_that_fits_no_request_is_not_registered(
    make: Callable[[], object], field: str, words: str
) -> None:
    with refuses(words, field=field, status=400):
        make()


def test_a_policy_with_more_vectors_than_there_is_room_for_is_not_registered() -> None:
    rank = 32
    wide = from_numpy(np.ones((rank, HIDDEN), np.float32))
    tall = from_numpy(np.arange(rank, dtype=np.float32))
    every = [
        SteeringSpec(layers=layer, hook=hook, op="lowrank", rotation=wide, weight=wide, bias=tall)
        for layer in range(4)
        for hook in HOOKS[:5]
    ]
    fitting = MAX_POLICY_VECTORS // (2 * rank)
    policy(*every[:fitting])
    with refuses(f"need {MAX_POLICY_VECTORS + 2 * rank} vectors", field="actions"):
        policy(*every[: fitting + 1])


def test_the_fifth_row_of_all_traffic_is_refused_where_a_policy_begins_to_act() -> None:
    """When it is registered, and when its mode or its reach changes."""
    others = guards(MAX_STEERING_ROWS)
    check_beside(model(), others[-1], others)
    with refuses("guard0, guard1, guard2, guard3 need 5 rows", field="all_traffic", status=400):
        check_beside(model(), policy(ABLATION, all_traffic=True, mode="active"), others)
    for given, change in (
        ({"mode": "shadow", "all_traffic": True}, PolicyChange(mode="active")),
        ({"mode": "active"}, PolicyChange(all_traffic=True)),
    ):
        silent = policy(ABLATION, **given)
        check_beside(model(), silent, others)
        acting = msgspec.structs.replace(silent, versions=[changed(silent, change)])
        with refuses("need 5 rows", field="all_traffic"):
            check_beside(model(), acting, others)


def test_the_fifth_trigger_of_all_traffic_is_refused() -> None:
    others = [*guards(1, *(triggered(number) for number in range(4)))]
    more = policy(triggered(5), mode="active", all_traffic=True)
    check_beside(model(), policy(triggered(3), mode="active", all_traffic=True), [])
    with refuses("need 5 ", field="all_traffic"):
        check_beside(model(), more, others)


def test_what_does_not_fit_the_served_model_stops_all_traffic_and_not_one_request() -> None:
    """The worker may have been restarted since with fewer hooks."""
    late = msgspec.structs.replace(ABLATION, hook="mlp_out")
    ended = policy(late, mode="active", all_traffic=True)
    served = model(hooks=["post_block", HOOKS[0]])
    with refuses("mlp_out", kind="unavailable", field=None):
        policies_of(parsed(), served, Lookup("m"), [ended])


@pytest.mark.parametrize("mode", [{"mode": "shadow"}, {"mode": "active"}])
def test_what_a_request_names_fits_or_not_whatever_the_mode(mode: dict[str, Any]) -> None:
    """A change of the mode fails no request."""
    named = guards(5, all_traffic=False, **mode)
    applied(guards(4, ABLATION), [policy(ABLATION, name="one", **mode)])
    with refuses("need 5 rows", field="policies", status=400):
        applied([], named)


#: What a request may have at one token, and what the operator may add to it.
FULL = [[0, 1], [0, 2], [0, 3], [0, 4]]


def full(places: list[Any]) -> list[SteeringSpec]:
    """Steering with all rows and triggers that a request may have."""
    return [
        msgspec.structs.replace(triggered(number), positions=place, op="ablate")
        for number, place in enumerate(places)
    ]


def test_policies_take_no_rows_nor_triggers_of_a_requests_own() -> None:
    watching = guards(4, triggered(0))
    named = policy(*full(["all"] * 4), name="own", mode="active")
    gated = applied(watching, [named]).gated
    assert len(gated) == 5
    (entries,), _ = resolve_edits([], full(FULL), bounds(6, steering_rows=4), gated=gated)
    assert len(entries) == 4 + 4 + 4


def test_the_ranks_tables_hold_the_most_of_a_request_and_of_the_operator() -> None:
    """In columns of one token, in rows and in vectors, also where the settings are small."""
    tuning = Tuning(steering_rows=1, steering_entries=1)
    watching = guards(4)
    named = guards(4, all_traffic=False)
    named = [msgspec.structs.replace(each, name=f"own{n}") for n, each in enumerate(named)]
    (entries,), _ = resolve_edits(
        [], [ABLATION], bounds(6, steering_rows=1), gated=applied(watching, named).gated
    )
    everyone = msgspec.structs.replace(entries[0], owner="operator")
    rows = steering_rows([everyone, *entries])
    assert max(columns_of(rows)) + 1 == 1 + 1 + 4 + 4 == tuning.table_rows
    assert sum(demand.entries for demand in _demand(rows)) <= tuning.table_entries


@pytest.mark.parametrize("captured", ["all", "0-2"])
def test_policies_take_no_rows_of_a_requests_captures(captured: str) -> None:
    """And global capture refuses none, whatever the probes of the request read."""
    stored = [] if captured == "all" else [PROBE.stored("none")]
    own = CaptureSpec(layers=captured)
    scored = [("probes", capture) for capture in probe_captures(stored)]
    everyone = CaptureSpec(layers=3, tag="global")  # it would fit without what probes read
    full = bounds(6, capture_row_limit=4, global_captures=[everyone])
    (captures,) = resolve_captures(own, full, held=scored)
    assert [capture.tag for capture in captures] == ["default"]


def test_the_probes_of_a_request_count_with_its_captures() -> None:
    scored = [("probes", capture) for capture in probe_captures([PROBE.stored("none")])]
    with refuses("5 rows in one engine step", field="probes", status=400):
        resolve_captures(CaptureSpec(layers="all"), bounds(6, capture_row_limit=4), held=scored)


def test_captures_of_a_policy_count_whether_or_not_it_acts() -> None:
    windows = [
        policy(actions=[CaptureWindow(layers=0)], mode=mode) for mode in ("active", "shadow")
    ]
    asked = [applied([], [window]) for window in windows]
    assert [(len(each.captures), len(each.idle)) for each in asked] == [(1, 0), (0, 1)]


def test_a_probes_own_module_is_the_requests_and_a_policys_the_operators() -> None:
    (gated,) = applied(guards(1)).gated
    own = Gated("probes[0]", SteeringSpec(module="joy"), "p")
    state = ModelState({"joy": module(ABLATION)})
    (entries,), _ = resolve_edits([], [], bounds(6), state, [gated, own])
    assert [(each.owner, each.gate) for each in entries] == [
        ("request", "p"),
        ("operator", "policy:guard0"),
    ]
