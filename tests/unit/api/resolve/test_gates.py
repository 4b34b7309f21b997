"""Gated steering: where a gate is open, what it comes to in a request, and what is refused by
name.
"""

from typing import Any

import model_kit
import msgspec
import numpy as np
import pytest
from midstream_fake_engine.watch_kit import lone_watch, put_scores
from model_kit import model
from refusal_kit import refuses

from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.steering import resolve_edits
from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.api.resolve.positions.gates import Gated, check_use, gated_by, generated
from midstream.schemas.artifacts.probes import (
    Probe,
    ProbeAction,
    ProbeContent,
    ProbeUse,
    StoredProbe,
)
from midstream.schemas.base.limits import MAX_GATE_RUNS
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.prompts.selectors import PositionSelector, PositionWindow, Span
from midstream.schemas.requests.specs import (
    RankSpec,
    SteeringSpec,
    StoredSteering,
    steering_digest,
    steering_rows,
)
from midstream.workers.engine.protocol import EngineRequest, Sampling
from midstream.workers.engine.ranks.rank_spec import rank_spec
from midstream.workers.runner.probes.gates import SharedGates, gates_of, open_among, shown
from midstream.workers.runner.probes.watches import Watch

PROMPT = 4


def probe(
    threshold: float = 5.0,
    action: ProbeAction = "steer",
    *,
    name: str = "p",
    aggregation: str = "last",
) -> StoredProbe:
    content = ProbeContent(
        hook="post_block",
        layer=0,
        tensors=["w", "b"],
        labels=["x"],
        thresholds=[threshold],
        aggregation=aggregation,
        decay=0.5,
    )
    return StoredProbe(name=name, digest=content.digest, content=content, actions=[action])


def put(watch: Watch, first: int, *scores: float) -> None:
    put_scores(watch, first, np.array([0]), np.array(scores, dtype=np.float32)[:, None])


def watch_after(*scores: float, one: StoredProbe | None = None) -> Watch:
    """Of a request with a prompt of `PROMPT` tokens, whose generated tokens come one by one."""
    watch = lone_watch("r", [one or probe()], PROMPT)
    assert closed(watch, PROMPT) == ([True], [])
    put(watch, 0, *scores[:PROMPT])
    for position in range(PROMPT, len(scores)):
        shut, failed = closed(watch, position + 1)
        assert shut == [not open_among(watch, "p", [position])]
        assert failed == []
        put(watch, position, scores[position])
    return watch


def closed(watch: Watch, stop: int, decides: bool = True) -> tuple[list[bool], list[str]]:
    """Whether a step finds the gate closed at the position before `stop`; why it cannot decide."""
    together = SharedGates([(0, watch)], [0], np.array([0]), decides=decides)
    shut = np.zeros((1, 2), bool)
    failed = together.decide(np.array([stop]), np.array([stop - 1]), shut)
    return shut[:, 1].tolist(), [why for _, why in failed]


def test_the_score_of_a_token_decides_about_the_next_one() -> None:
    """At the threshold is above it; prompt tokens are never edited, and the last one decides about
    the first generated token.
    """
    watch = watch_after(9, 9, 9, 5, 4, 6, 7, 1, 1)
    assert open_among(watch, "p", range(12)) == [4, 6, 7]
    assert open_among(watch, "p", [2, 6, 8]) == [6]


@pytest.mark.parametrize(
    ("aggregation", "wanted"), [("max", [5, 6, 7]), ("mean", [6]), ("exponential", [5, 6])]
)
def test_aggregates_decide_and_not_single_scores(aggregation: str, wanted: list[int]) -> None:
    watch = watch_after(0, 0, 4, 4, 9, 14, -4, 0, one=probe(aggregation=aggregation))
    assert open_among(watch, "p", range(8)) == wanted


def test_what_was_decided_stays_when_scores_are_computed_again() -> None:
    """As of a preempted request; tokens that were never computed are decided from the new
    scores.
    """
    watch = watch_after(0, 0, 0, 9, 0, 9)
    assert open_among(watch, "p", range(6)) == [4]
    put(watch, 0, 9, 9, 9, 0, 9, 9, 9)
    assert closed(watch, 7) == ([False], [])
    assert open_among(watch, "p", range(9)) == [4, 6, 7]


@pytest.mark.parametrize(
    ("score", "words"), [(np.nan, "not finite at position 3"), (None, "not scored at position 3")]
)
def test_a_gate_without_a_score_fails_the_request(score: float | None, words: str) -> None:
    one = probe(aggregation="max")
    watch = lone_watch("r", [one], PROMPT)
    put(watch, 0, *([0.0, 0.0, 0.0] + ([score] if score is not None else [])))
    assert closed(watch, PROMPT + 1, decides=False) == ([True], [])
    shut, (why,) = closed(watch, PROMPT + 1)
    assert shut == [True]
    assert words in why
    assert open_among(watch, "p", range(9)) == []


def test_a_probe_that_is_not_scored_here_gates_nothing() -> None:
    entry = StoredSteering(
        layers=[0],
        hook="post_block",
        positions="all_generated",
        family="add",
        tensors=["v"],
        gate="digest",
    )
    spec = RankSpec(
        version="", job="j", request=0, attempt=1, prompt_tokens=PROMPT, rows=steering_rows([entry])
    )
    for watch in (None, lone_watch("r", [probe()])):
        with pytest.raises(LookupError, match="does not score"):
            gates_of(spec, watch)
    assert gates_of(msgspec.structs.replace(spec, rows=[]), None) == []


def test_the_result_names_runs_of_open_positions_up_to_a_bound() -> None:
    watch = watch_after(0, 0, 0, 9, 9, 0, 9, 0, 9)
    score = watch.results(8)[0][0]
    assert shown(watch, score, 8).gate == [(4, 5), (7, 7)]
    assert shown(watch, score, 8).gated == 3
    assert shown(watch, score, 7).gated == 2
    watch = watch_after(*[0, 0, 0], *[9, 0] * (MAX_GATE_RUNS + 5))
    told = shown(watch, watch.results(MAX_GATE_RUNS)[0][0], 10**6)
    assert len(told.gate or []) == MAX_GATE_RUNS
    assert told.gated == MAX_GATE_RUNS + 5


def test_decisions_that_differ_give_other_checksums() -> None:
    """Decisions beyond the end do not count."""
    checksums = []
    for last in (9, 0):
        watch = watch_after(0, 0, 0, last, 0, 0, 0)
        put(watch, 0, 0, 0, 0, 0, 0, 0, 0)
        checksums.append((watch.results(PROMPT - 1)[1], watch.results(6)[1]))
    (first_prompt, first), (second_prompt, second) = checksums
    assert first_prompt == second_prompt
    assert first != second


# --- In a request ---------------------------------------------------------------------------------


def entry(gate: str = "", vector: str = "v") -> StoredSteering:
    return StoredSteering(
        layers=[0],
        hook="post_block",
        positions="all_generated",
        family="add",
        tensors=[vector],
        gate=gate,
    )


def test_gated_entries_share_no_row_with_others_and_no_cached_block_with_any() -> None:
    rows = steering_rows([entry(), entry(vector="w"), entry("p"), entry("q")])
    assert [(row.gate, len(row.entries)) for row in rows] == [("", 2), ("p", 1), ("q", 1)]
    assert rows[1].key == rows[2].key, "equal content is stored once"
    assert len({steering_digest([entry(gate)]) for gate in ("", "p", "q")}) == 3

    def digest(job: str, steering: StoredSteering) -> str:
        asked = EngineRequest(
            job=job,
            request=0,
            attempt=1,
            token_ids=[1] * PROMPT,
            sampling=Sampling(),
            steering=[steering],
        )
        spec = rank_spec(asked)
        assert spec is not None
        return spec.digest

    assert digest("a", entry()) == digest("b", entry())
    assert digest("a", entry("p")) != digest("b", entry("p"))


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ("all", "all_generated"),
        ("all_generated", "all_generated"),
        ("all_prompt", None),
        ("last_prompt", None),
        ([1, 2], None),
        (PositionWindow(start=2), PositionWindow(start=4)),
        (PositionWindow(start=6, stop=9), PositionWindow(start=6, stop=9)),
        (PositionWindow(start=0, stop=4), None),
    ],
)
def test_only_generated_tokens_are_gated(
    own: PositionSelector, wanted: PositionSelector | None
) -> None:
    assert generated(own, PROMPT) == wanted


def resolved(
    *specs: SteeringSpec,
    lengths: tuple[int, ...] = (4, 6),
    scale: float | None = None,
    module: str = "joy",
) -> Any:
    bounds = Bounds(model(), [PromptFacts(length) for length in lengths], 4)
    state = ModelState({"joy": model_kit.module(*specs)}, ["joy"])
    return resolve_edits(
        [],
        [SteeringSpec(layers=0, vector=from_numpy(np.ones(8, np.float32)))],
        bounds,
        state,
        [Gated("probes[0]", SteeringSpec(module=module, scale=scale), "digest")],
    )


def adds(**fields: Any) -> SteeringSpec:
    return SteeringSpec(
        **({"layers": [1, 2], "vector": from_numpy(np.ones(8, np.float32))} | fields)
    )


def test_a_use_names_its_module_its_scale_and_its_probe() -> None:
    asked = ["other", ProbeUse(probe="p", action="steer", module="joy", scale=2.0)]
    assert gated_by(asked) == [Gated("probes[1]", SteeringSpec(module="joy", scale=2.0), "p")]


def test_a_module_becomes_gated_entries_behind_the_requests_own() -> None:
    per_prompt, blobs = resolved(adds(scale=3.0), adds(positions=Span(start=5)), scale=2.0)
    for entries, length in zip(per_prompt, (4, 6), strict=True):
        assert [(each.gate, each.scale, each.positions) for each in entries] == [
            ("", 1.0, "all"),
            ("digest", 6.0, "all_generated"),
            ("digest", 2.0, PositionWindow(start=max(5, length))),
        ]
    assert len(blobs) == 1, "tensors of modules are stored already"


def registered() -> Probe:
    one = probe()
    return Probe(
        name="p",
        model="m",
        digest=one.digest,
        content=one.content,
        hidden_size=8,
        bytes=0,
        created=0.0,
    )


def used(action: ProbeAction, **more: Any) -> None:
    changes = {name: more.pop(name) for name in ("pp", "speculative_tokens") if name in more}
    check_use(
        ProbeUse(probe="p", action=action, **more), registered(), "probes[0]", model(**changes)
    )


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        (
            lambda: resolved(adds(), adds(positions="last_prompt")),
            "probes[0].module",
            "entry 1 of 'joy' edits no generated token",
        ),
        (
            lambda: resolved(adds(positions=Span(start=0, stop=5))),
            "probes[0].module",
            "after prompt 1",
        ),
        (lambda: resolved(adds(), module="grief"), "probes[0].module", "unknown module 'grief'"),
        (lambda: resolved(adds(), scale=1e30), "probes[0].scale", "out of range"),
        (
            lambda: resolved(*[adds(positions=Span(start=n)) for n in (4, 5, 6, 7)]),
            "steering",
            "needs 5 rows",
        ),
        (
            lambda: used("flag", module="joy"),
            "probes[0].module",
            "is not valid for action 'flag'",
        ),
        (lambda: used("none", scale=2.0), "probes[0].scale", "is not valid for action 'none'"),
        (lambda: used("steer"), "probes[0].module", "is required"),
        (
            lambda: used("steer", module="joy", pp=2),
            "probes[0].action",
            "pipeline parallelism",
        ),
        (
            lambda: used("steer", module="joy", speculative_tokens=2),
            "probes[0].action",
            "speculative decoding",
        ),
        (
            lambda: used("stop", pp=2),
            "probes[0].action",
            "(allowed: none, flag)",
        ),
    ],
)
def test_what_cannot_be_gated_or_served_is_refused(call: Any, field: str, words: str) -> None:
    with refuses(words, field=field):
        call()


def test_stop_is_served_without_pipeline_parallelism() -> None:
    used("stop")
