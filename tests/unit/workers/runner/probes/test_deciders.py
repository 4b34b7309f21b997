"""The state machine of policies, against a slow reference and by hand."""

import random
from typing import Any

import numpy as np
import pytest
from policy_kit import decisions_of

from midstream.schemas.artifacts.conditions import Condition, Schedule, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.schemas.base.limits import MAX_DECISIONS
from midstream.workers.runner.probes.deciders import Decider
from midstream.workers.runner.probes.gates import Gates
from midstream.workers.runner.probes.probe_news import News
from midstream.workers.runner.probes.watches import ProbeError, Watch, news_of_all


def policy(*actions: Any, acts: bool = True, inherited: str = "", **condition: Any) -> StoredPolicy:
    fields = {"at_least": 3.0, "schedule": Schedule(tokens="all"), **condition}
    return StoredPolicy(
        name="p",
        version=1,
        digest="d",
        condition=Condition(**fields),
        actions=list(actions) or ["flag"],
        mode="active",
        acts=acts,
        inherited=inherited,
    )


def watch_of(*policies: StoredPolicy, prompt_tokens: int = 0) -> Watch:
    content = ProbeContent(
        hook="post_block", layer=0, tensors=["w", "b"], labels=["x"], thresholds=[-100.0]
    )
    probes = [
        StoredProbe(
            name=f"policy:{number}",
            digest=content.digest,
            content=content,
            action="steer" if each.takes("steer") else "stop" if each.takes("stop") else "none",
            policy=each,
        )
        for number, each in enumerate(policies)
    ]
    return Watch("r", probes, prompt_tokens=prompt_tokens)


def put(watch: Watch, first: int, *scores: float) -> None:
    columns = np.arange(watch.kind.width)
    table = np.repeat(np.array(scores, dtype=np.float32)[:, None], len(columns), axis=1)
    watch.put(first, columns, table)


def decided(scores: list[float], prompt_tokens: int = 0, **condition: Any) -> list[tuple]:
    decider = Decider(policy(**condition), prompt_tokens)
    decider.read(scores)
    return [(item.event, item.position, item.score) for item in decider.decisions]


@pytest.mark.parametrize(
    ("condition", "scores", "wanted"),
    [
        # hysteresis: 2 is below the threshold, and not below the release
        ({"release_below": 2.0}, [1, 3, 2, 1, 3], [("t", 1), ("r", 3), ("t", 4)]),
        ({}, [3, 2, 3], [("t", 0), ("r", 1), ("t", 2)]),
        ({"latch": "request"}, [0, 4, -9, 4], [("t", 1)]),
        # off at 1; positions 2 and 3 cool down
        ({"cool_down": 2}, [4, 0, 4, 4, 4], [("t", 0), ("r", 1), ("t", 4)]),
        ({"schedule": Schedule()}, [9, 9, 0, 9], [("t", 3)]),  # the prompt has two tokens
        ({"schedule": Schedule(tokens="all", start=1, stop=3)}, [9, 0, 9, 0], [("t", 2)]),
        ({"schedule": Schedule(every=2)}, [0, 0, 0, 9, 9], [("t", 4)]),
        ({"aggregation": "mean", "window": 2}, [5, 0, 6, 1], [("t", 0), ("r", 1), ("t", 2)]),
        ({"aggregation": "max", "window": 2}, [5, 0, 0], [("t", 0), ("r", 2)]),
        ({"aggregation": "exponential", "decay": 0.5}, [0, 4, 4], [("t", 2)]),
    ],
)
def test_decisions_by_hand(
    condition: dict[str, Any], scores: list[float], wanted: list[tuple[str, int]]
) -> None:
    result = decided(scores, prompt_tokens=2, **condition)
    assert [(event[0], position) for event, position, _ in result] == wanted


def test_decisions_equal_a_slow_reference_in_any_pieces() -> None:
    """Scores are multiples of 1/8, so that every order of additions gives the same sum."""
    rng = random.Random(40)
    triggered = 0
    for _ in range(400):
        aggregation = rng.choice(["last", "mean", "max", "exponential"])
        condition: dict[str, Any] = {
            "at_least": rng.choice([1.0, 1.5]),
            "release_below": rng.choice([None, 0.0, 0.5]),
            "latch": rng.choice(["none", "none", "request"]),
            "cool_down": rng.choice([0, 0, 1, 5]),
            "aggregation": aggregation,
            "window": rng.choice([1, 2, 3, 7]) if aggregation in ("mean", "max") else None,
            "decay": 0.5 if aggregation == "exponential" else None,
            "schedule": Schedule(
                tokens=rng.choice(["all", "generated"]),
                start=rng.choice([0, 0, 3]),
                stop=rng.choice([None, 20]),
                every=rng.choice([1, 1, 3]),
            ),
        }
        made, prompt_tokens = policy(**condition), rng.choice([1, 4])
        scores = [rng.randrange(-16, 17) / 8 for _ in range(60)]
        if aggregation == "exponential":
            scores = scores[:20]  # its bits grow by one with each score
        decider = Decider(made, prompt_tokens)
        rest = list(scores)
        while rest:
            size = rng.randrange(1, 9)
            decider.read(rest[:size])
            rest = rest[size:]
        wanted = decisions_of(scores, made.condition, prompt_tokens)
        assert [(d.event, d.position, d.score) for d in decider.decisions] == wanted
        triggered += len(wanted)
    assert triggered > 400


def test_a_large_score_leaves_no_rounding_behind() -> None:
    scores = [1e30, 1.0, 1.0, 1.0]
    (_, release, after) = decided(scores, aggregation="mean", window=2, at_least=2.0)[1]
    assert (release, after) == (2, 1.0)


def test_scores_computed_again_change_no_decision() -> None:
    """A preempted request, whose rows round differently in another batch."""
    watch = watch_of(policy("flag", latch="none"))
    put(watch, 0, 1, 3, 1)
    watch.decide(watch.reached)
    put(watch, 0, 3, 2.9, 3, 3)
    (score,), _ = watch.results(4)
    assert [d.position for d in score.decisions] == [1, 2, 3]
    assert watch.scores[:4, 0].tolist() == [1, 3, 1, 3]


def test_the_stop_is_news_once() -> None:
    watch = watch_of(policy("stop"), policy("stop", acts=False, at_least=0.0))
    assert watch.urgent
    put(watch, 0, 1, 2)
    assert news_of_all([watch]) == []
    put(watch, 2, 3)
    assert news_of_all([watch]) == [News("r", 2, "policy:0", [])]
    put(watch, 3, 9)
    assert news_of_all([watch]) == []
    scores, _ = watch.results(3, "policy:0")
    assert [score.stopped for score in scores] == [True, False]
    assert scores[0].crossed == [2]
    assert not scores[0].flagged


def test_a_latch_of_the_conversation_is_on_from_the_start() -> None:
    latched = policy("stop", "flag", latch="conversation", inherited="job_1")
    watch = watch_of(latched)
    put(watch, 0, 0, 0)
    assert news_of_all([watch]) == [News("r", 0, "policy:0", [])]
    (score,), _ = watch.results(1)
    assert score.flagged
    assert score.triggers == 0
    # without an effect in a request in which the policy only records
    assert Decider(policy("stop", acts=False, inherited="job_1"), 0).stop_at == -1


def test_gates_follow_the_policy() -> None:
    """The token after the decision is the first one that is edited."""
    watch = watch_of(policy("steer", release_below=1.0), prompt_tokens=2)
    gates = Gates(watch, ["policy:0"], 2)
    put(watch, 0, 0, 3, 1, 0, 5)
    gates.decide(6)
    assert gates.among("policy:0", range(2, 6)) == [2, 3, 5]
    with pytest.raises(ProbeError, match="policy:0"):
        gates.decide(7)
    (score,), _ = watch.results(5)
    assert gates.shown(score, 5).gate == [(2, 3)]


def test_the_checksum_covers_decisions() -> None:
    """Two ranks with equal scores and different conditions do not agree."""
    sums = set()
    for at_least in (2.0, 3.0, 9.0):
        watch = watch_of(policy(at_least=at_least))
        put(watch, 0, 1, 2, 3)
        sums.add(watch.results(3)[1])
    assert len(sums) == 3


def test_decisions_are_bounded_and_counted() -> None:
    decider = Decider(policy(), 0)
    decider.read([3.0, 0.0] * MAX_DECISIONS)
    fields, _ = decider.report(4 * MAX_DECISIONS, 0)
    assert (len(fields["decisions"]), fields["triggers"]) == (MAX_DECISIONS, MAX_DECISIONS)


def test_decisions_beyond_the_end_do_not_count() -> None:
    """With asynchronous scheduling, a row after the last token may have been scored."""
    watch = watch_of(policy())
    put(watch, 0, 0, 1, 3)
    watch.decide(3)
    (score,), _ = watch.results(2)
    assert (score.decisions, score.triggers, score.crossed) == ([], 0, [None])


def test_a_score_that_is_not_finite_is_not_read() -> None:
    watch = watch_of(policy())
    put(watch, 0, 0, float("nan"), 9)
    watch.decide(3)
    assert len(watch.deciders[0].states) == 1
    with pytest.raises(ProbeError, match="not finite at position 1"):
        watch.results(3)
