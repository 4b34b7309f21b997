"""Aggregates, the account of a request's scores, and what the scheduler makes of a step's news."""

import random
import sys
import zlib
from collections import Counter
from math import fsum
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from aggregate_kit import aggregate
from line_kit import python_lines
from midstream_fake_engine.watch_kit import lone_watch, put_scores

from midstream.schemas.artifacts.conditions import Condition, Decision, Schedule, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeAction, ProbeContent, StoredProbe
from midstream.schemas.base.limits import MAX_DECISIONS
from midstream.schemas.prompts.sight import Sight, TurnLook, reads_answer
from midstream.workers.runner.probes import deciders
from midstream.workers.runner.probes.gates import open_among, shown
from midstream.workers.runner.probes.kinds import ProbeGroup
from midstream.workers.runner.probes.probe_news import (
    SCORES,
    STOPPED_BY,
    News,
    ProbeNews,
    Scored,
)
from midstream.workers.runner.probes.watches import ProbeError, ScoreTable, ScoreTables, Watch
from midstream.workers.runner.probes.weight_stacks import ProbedRows, Stacks


def probe(
    threshold: float | None,
    action: ProbeAction = "stop",
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
    actions = [] if action == "none" else [action]
    return StoredProbe(name=name, digest=content.digest, content=content, actions=actions)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("last", [1, 3, 2, 8]),
        ("max", [1, 3, 3, 8]),
        ("mean", [1, 2, 2, 3.5]),
        ("exponential", [1, 2, 2, 5]),
    ],
)
def test_aggregates_of_a_few_scores(kind: str, wanted: list[float]) -> None:
    scores = np.array([[1], [3], [2], [8]], dtype=np.float32)
    np.testing.assert_allclose(aggregate(kind, scores, 0.5)[:, 0], wanted)


@pytest.mark.parametrize("kind", ["last", "max", "mean", "exponential"])
def test_aggregates_in_pieces_equal_those_at_once(kind: str) -> None:
    scores = np.random.default_rng(1).normal(size=(300, 3)).astype(np.float32)
    whole = aggregate(kind, scores, 0.93)
    first = aggregate(kind, scores[:130], 0.93)
    rest = aggregate(kind, scores[130:], 0.93, first[-1], 130)
    np.testing.assert_allclose(np.concatenate([first, rest]), whole, atol=1e-12)
    slow = [scores[0].astype(np.float64)]
    for row in scores[1:].astype(np.float64):
        slow.append(0.93 * slow[-1] + 0.07 * row)
    if kind == "exponential":
        np.testing.assert_allclose(whole, slow, atol=1e-12)


def test_what_is_computed_again_replaces_what_was_there() -> None:
    """A rejected draft, and a preempted request."""
    watch = lone_watch("r", [probe(5.0, aggregation="max")])
    assert told((watch, put(watch, 0, 1, 2))) == []
    # the last is of a draft
    assert told((watch, put(watch, 2, 3, 9))) == [News("r", 3, "p", [])]
    assert told((watch, put(watch, 3, 4))) == []
    (score,), checksum = watch.results(4)
    assert score.score == [4.0]
    assert score.crossed == [None]
    assert score.positions == 4
    again = lone_watch("r", [probe(5.0, aggregation="max")])
    put(again, 0, 1, 2, 3, 4)
    assert again.results(4)[1] == checksum


class Noting(np.ndarray):
    """An array that notes how many rows each assignment writes."""

    written: ClassVar[list[int]] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        self.written.append(len(self[key]))
        super().__setitem__(key, value)


def test_a_request_clears_no_more_rows_than_the_one_before_it_used() -> None:
    first = lone_watch("long", [probe(5.0, aggregation="max")])
    table = first.table
    put_scores(first, 0, slice(None), np.zeros((5_000, 1), dtype=np.float32))
    del first
    short = Watch("short", [probe(5.0, aggregation="max")], table)
    put_scores(short, 0, slice(None), np.zeros((10, 1), dtype=np.float32))
    del short
    table.rows = table.rows.view(Noting)
    Watch("next", [probe(5.0, aggregation="max")], table)
    assert Noting.written == [10]


def test_where_a_score_is_high_takes_as_many_lines_for_all_tokens_as_for_few() -> None:
    def lines(tokens: int) -> int:
        watch = lone_watch("r", [probe(5.0, aggregation="max")])
        put_scores(watch, 0, slice(None), np.arange(tokens, dtype=np.float32)[:, None])
        assert watch.high("p", 2.0) == [False, False] + [True] * (tokens - 2)
        return python_lines(lambda: watch.high("p", 2.0))

    assert lines(200) == lines(2)


def test_news_of_many_requests_together_equal_those_of_each_alone() -> None:
    """Of two kinds, at different positions, one of which computes several at a time, as a prompt
    does.
    """
    kinds = ("last", "max", "mean", "exponential")
    probes = [[probe(limit, name=kind, aggregation=kind) for kind in kinds] for limit in (0.6, 1.0)]
    rng = np.random.default_rng(5)
    together = []
    alone = []
    for into in (together, alone):
        shared = [ScoreTable(ProbeGroup(each)) for each in probes]
        into += [Watch(str(number), probes[number % 2], shared[number % 2]) for number in range(9)]
    crossed = 0
    for step in range(30):
        new = []
        for number in range(9):
            count = 5 if (step + number) % 11 == 0 else 1
            values = rng.normal(scale=0.4, size=(count, 4)).astype(np.float32)
            new.append(range(together[number].reached, together[number].reached + count))
            for mine in (together, alone):
                put_scores(mine[number], new[-1].start, slice(0, 4), values)
        wanted = [news for item in zip(alone, new, strict=True) for news in told(item)]
        assert sorted(told(*zip(together, new, strict=True))) == sorted(wanted)
        crossed += len(wanted)
    assert crossed > 20
    for first, second in zip(together, alone, strict=True):
        assert first.results(30)[1] == second.results(30)[1]
        np.testing.assert_allclose(
            [each.score for each in first.results(30)[0]],
            [each.score for each in second.results(30)[0]],
            atol=1e-12,
        )


@pytest.mark.parametrize(
    ("scores", "words"),
    [((1.0, np.nan), "not finite at position 1"), ((1.0,), "not scored at position 1")],
)
def test_a_token_without_a_score_is_an_error(scores: tuple[float, ...], words: str) -> None:
    watch = lone_watch("r", [probe(None, "none")])
    put(watch, 0, *scores)
    with pytest.raises(ProbeError, match=words):
        watch.results(2)


def test_more_positions_than_there_is_room_for_at_first() -> None:
    watch = lone_watch("r", [probe(None, "none")])
    for first in range(0, 3000, 100):
        put(watch, first, *range(first, first + 100))
    assert watch.results(3000)[0][0].score == [2999.0]


def test_watches_keep_their_scores_while_others_come_grow_and_go() -> None:
    """All scores of a kind are in one table, which goes with the last watch."""
    rng = random.Random(6)
    made = [probe(1e9, aggregation="max")]
    kind = ProbeGroup(made)
    tables = ScoreTables()
    live: list[tuple[Watch, list[float]]] = []
    for step in range(200):
        if len(live) < 70 and rng.random() < 0.6:
            live.append((Watch(str(step), made, tables.of(kind)), []))
        for watch, scores in rng.sample(live, len(live) // 2):
            new = [rng.random() for _ in range(rng.choice([1, 1, 1, 70]))]
            assert told((watch, put(watch, len(scores), *new))) == []
            scores += new
        if live and rng.random() < 0.2:
            watch, scores = live.pop(rng.randrange(len(live)))
            if scores:
                assert watch.results(len(scores))[0][0].score == [np.float32(max(scores))]
    for watch, scores in live:
        assert watch.reached == len(scores)
        found = watch.rows["scores"]
        assert found[: len(scores), 0].tolist() == np.float32(scores).tolist()
        assert np.isnan(found[len(scores) :]).all()
    assert len(watch.table.rows) > 20_000
    del watch
    live.clear()
    assert len(tables.of(kind).rows) < 20_000  # a new one


def request(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(request_id="r", num_tokens=tokens)


@pytest.mark.parametrize(
    ("stop_at", "new", "kept", "name"),
    [
        (9, [1], [], "p"),  # the row of the last known token crosses: the sampled one is dropped
        (10, [1, 2, 3], [1], "p"),  # an accepted draft crosses
        (12, [1, 2, 3], [1, 2, 3], ""),  # a rejected one does
        (4, [1], [], "p"),  # an earlier chunk of the prompt did
    ],
)
def test_tokens_behind_the_one_that_crosses_are_dropped(
    stop_at: int, new: list[int], kept: list[int], name: str
) -> None:
    news = ProbeNews()
    news.hear([News("r", stop_at, "p", [])])
    assert news.cut(request(10), new) == (kept, name)
    assert news.cut(request(13), [5]) == ([5], "")


def test_scores_of_kept_tokens_travel_and_those_of_rejected_drafts_do_not() -> None:
    news = ProbeNews()
    news.hear([News("r", -1, "", [Scored(position, [0.5], [0.5]) for position in (9, 10, 11)])])
    news.cut(request(10), [1, 2])
    output = SimpleNamespace(request_id="r", kv_transfer_params=None)
    news.attach({0: SimpleNamespace(outputs=[output])})
    assert [each[0] for each in output.kv_transfer_params[SCORES]] == [9, 10]


def test_the_probe_that_ends_a_request_travels_apart_from_vllms_stop_reason() -> None:
    """vLLM's is the user's stop string, which may read like a probe's name."""
    news = ProbeNews()
    outputs = [
        SimpleNamespace(request_id=name, kv_transfer_params=None, stop_reason="probe:x")
        for name in ("r", "other")
    ]
    news.end("r", "p")
    news.attach({0: SimpleNamespace(outputs=outputs)})
    assert [output.kv_transfer_params for output in outputs] == [{STOPPED_BY: "p"}, None]
    news.forget("r")
    # of a step that was on its way when the request ended
    news.hear([News("r", 9, "p", [Scored(9, [0.5], [0.5])])])
    assert news.ended_by("r") == ""
    assert not news.tell


# --- The state machine of policies, against a plain reference and by hand


def policy(*actions: Any, acts: bool = True, inherited: str = "", **condition: Any) -> StoredPolicy:
    return StoredPolicy(
        name="p",
        version=1,
        digest="d",
        condition=Condition(**{"at_least": 3.0, "schedule": Schedule(tokens="all"), **condition}),
        actions=list(actions) or ["flag"],
        mode="active",
        acts=acts,
        inherited=inherited,
    )


def probes_of(*policies: StoredPolicy | None) -> list[StoredProbe]:
    content = ProbeContent(
        hook="post_block", layer=0, tensors=["w", "b"], labels=["x"], thresholds=[-100.0]
    )
    return [
        StoredProbe(
            name=f"policy:{number}",
            digest=content.digest,
            content=content,
            actions=each.actions if each is not None and each.acts else [],
            policy=each,
        )
        for number, each in enumerate(policies)
    ]


def watch_of(*policies: StoredPolicy, prompt_tokens: int = 0) -> Watch:
    return lone_watch("r", probes_of(*policies), prompt_tokens)


def put(watch: Watch, first: int, *scores: float) -> range:
    """Returns the positions."""
    columns = np.arange(watch.kind.width)
    table = np.repeat(np.array(scores, dtype=np.float32)[:, None], len(columns), axis=1)
    put_scores(watch, first, columns, table)
    return range(first, first + len(scores))


def told(*scored: tuple[Watch, range]) -> list[News]:
    """The news from the scores at these positions."""
    kinds: dict[Any, list[tuple[Watch, int]]] = {}
    for watch, positions in scored:
        kinds.setdefault(watch.table, []).extend((watch, position) for position in positions)
    news: list[News] = []
    for table, items in kinds.items():
        watches, positions = zip(*items, strict=True)
        slots = np.array([watch.slot for watch in watches])
        news += table.news(watches, slots, np.array(positions), np.full(len(slots), -1))
    return news


def states_of(watch: Watch, number: int = 0) -> bytes:
    """Of the positions that are decided."""
    return watch.rows["on"][: watch.decide(), number].tobytes()


def decided(scores: list[float], prompt_tokens: int = 0, **condition: Any) -> list[tuple]:
    watch = watch_of(policy(**condition), prompt_tokens=prompt_tokens)
    put(watch, 0, *scores)
    (result,), _ = watch.results(len(scores))
    return [(item.event, item.position, item.score) for item in result.decisions]


@pytest.mark.parametrize(
    ("condition", "scores", "wanted"),
    [
        # hysteresis: 2 is below the threshold, and not below the release
        ({"release_below": 2.0}, [1, 3, 2, 1, 3], [("t", 1), ("r", 3), ("t", 4)]),
        ({}, [3, 2, 3], [("t", 0), ("r", 1), ("t", 2)]),
        ({"latch": "request"}, [0, 4, -9, 4], [("t", 1)]),
        # off at 1; positions 2 and 3 cool down
        ({"cool_down": 2}, [4, 0, 4, 4, 4], [("t", 0), ("r", 1), ("t", 4)]),
        # the prompt has two tokens
        ({"schedule": Schedule(tokens="generated")}, [9, 9, 0, 9], [("t", 3)]),
        ({"schedule": Schedule()}, [0, 9, 0, 9], [("t", 1), ("r", 2), ("t", 3)]),
        ({"schedule": Schedule(tokens="all", start=1, stop=3)}, [9, 0, 9, 0], [("t", 2)]),
        ({"schedule": Schedule(tokens="generated", every=2)}, [0, 0, 0, 9, 9], [("t", 4)]),
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


def test_a_policy_reads_what_it_looks_at_and_keeps_its_state_elsewhere() -> None:
    """Windows are of the tokens that it reads, across those that it does not."""
    scores = [9, 4, 0, 9, 0, 2, 9, 9, 1]
    sight = Sight(runs=[(1, 3), (4, 6)])
    for looks, wanted in (
        ("content", [("t", 1), ("r", 2), ("t", 6), ("r", 8)]),
        ([TurnLook(role="user")], [("t", 1), ("r", 2)]),
    ):
        made = policy(schedule=Schedule(tokens=looks))
        watch = watch_of(msgspec.structs.replace(made, sight=sight), prompt_tokens=6)
        put(watch, 0, *scores)
        (result,), _ = watch.results(len(scores))
        assert [(each.event[0], each.position) for each in result.decisions] == wanted
    mean = {"aggregation": "mean", "window": 3, "at_least": 2.0, "schedule": Schedule()}
    sums = [4, 4 / 2, 4 / 3, 2 / 3, 11 / 3, 20 / 3, 19 / 3]
    watch = watch_of(msgspec.structs.replace(policy(**mean), sight=sight), prompt_tokens=6)
    put(watch, 0, *scores)
    (result,), _ = watch.results(len(scores))
    read = dict(zip([1, 2, 4, 5, 6, 7, 8], sums, strict=True))
    assert [(each.position, each.score) for each in result.decisions] == [
        (place, read[place]) for place in (1, 4, 6)
    ]


def test_a_step_of_policies_takes_as_many_lines_for_many_requests_as_for_few() -> None:
    """Also where their windows begin in what each reads of its prompt."""

    def lines(requests: int) -> int:
        fields = {"aggregation": "mean", "window": 4, "at_least": 1e6}
        sight = Sight(runs=[(1, 3), (4, 5)])
        schedules = (
            Schedule(),
            Schedule(tokens=[TurnLook(role="user"), TurnLook(role="assistant")]),
        )
        made = [policy(**fields, schedule=each) for each in schedules]
        probes = probes_of(*(msgspec.structs.replace(each, sight=sight) for each in made))
        table = ScoreTable(ProbeGroup(probes))
        watches = [Watch(str(number), probes, table, 6) for number in range(requests)]
        for watch in watches:
            put_scores(watch, 0, slice(None), np.zeros((6, 2), dtype=np.float32))
            watch.decide()
        slots = np.array([watch.slot for watch in watches])
        positions = np.full(requests, 6)
        scores = np.zeros((requests, 2), dtype=np.float32)
        count = python_lines(lambda: table.put(np.arange(2), slots, positions, scores))
        assert [watch.decided for watch in watches] == [7] * requests
        return count

    assert lines(64) == lines(4)


class Reference:
    """A policy on one request, a token after the other."""

    def __init__(self, made: StoredPolicy, prompt_tokens: int) -> None:
        self.policy = made
        self.condition = made.condition
        self.prompt = prompt_tokens
        self.number = 0  # of the next token that it reads
        self.on = bool(made.inherited)
        self.off_until = 0
        self.seen: list[float] = []
        self.states: list[bool] = []
        self.decisions: list[Decision] = []

    def read(self, score: float) -> None:
        position = len(self.states)
        schedule = self.condition.schedule
        if self._reads(position):
            since = self.number - schedule.start
            beyond = schedule.stop is not None and self.number >= schedule.stop
            self.number += 1
            if since >= 0 and not beyond and since % schedule.every == 0:
                self._decide(position, self._aggregate(score))
        self.states.append(self.on)

    def _reads(self, position: int) -> bool:
        tokens = self.condition.schedule.tokens
        if position >= self.prompt:
            return reads_answer(tokens)
        if tokens == "generated":
            return False
        sight = self.policy.sight
        return (
            sight is None
            or bool(sight.whole)
            or any(start <= position < stop for start, stop in sight.runs)
        )

    def _aggregate(self, score: float) -> float:
        condition = self.condition
        if condition.aggregation == "exponential":
            decay = condition.decay
            self.seen.append(decay * self.seen[-1] + (1.0 - decay) * score if self.seen else score)
            return self.seen[-1]
        self.seen.append(score)
        window = self.seen[-(condition.window or 1) :]
        return max(window) if condition.aggregation == "max" else fsum(window) / len(window)

    def _decide(self, position: int, value: float) -> None:
        condition = self.condition
        below = condition.at_least if condition.release_below is None else condition.release_below
        if not self.on and value >= condition.at_least and position >= self.off_until:
            self.on = True
        elif self.on and value < below and condition.latch == "none":
            self.on = False
            self.off_until = position + 1 + condition.cool_down
        else:
            return
        self.decisions.append(
            Decision(position=position, event="trigger" if self.on else "release", score=value)
        )

    def report(self, positions: int) -> tuple[list[Decision], int]:
        kept = [item for item in self.decisions if item.position < positions]
        return kept[:MAX_DECISIONS], sum(item.event == "trigger" for item in kept)


def random_policy(rng: random.Random) -> StoredPolicy:
    aggregation = rng.choice(["last", "mean", "mean", "max", "exponential"])
    at_least = rng.choice([-0.5, 0.0, 0.3, 1.0])
    return policy(
        *rng.choice([["flag"], ["steer", "flag"], ["flag"], ["capture"], ["stop"]]),
        acts=rng.random() < 0.9,
        at_least=at_least,
        release_below=rng.choice([None, at_least - 0.5]),
        latch=rng.choice(["none", "none", "none", "request", "conversation"]),
        cool_down=rng.choice([0, 0, 1, 9]),
        aggregation=aggregation,
        window=rng.choice([1, 2, 7, 256]) if aggregation in ("mean", "max") else None,
        decay=rng.choice([0.5, 0.9]) if aggregation == "exponential" else None,
        schedule=Schedule(
            tokens=rng.choice(["all", "generated", "content", [TurnLook(role="user")]]),
            start=rng.choice([0, 0, 3, 40]),
            stop=rng.choice([None, None, 60]),
            every=rng.choice([1, 1, 3, 2**31 - 1]),
        ),
    )


def of_request(probe: StoredProbe, rng: random.Random, prompt_tokens: int) -> StoredProbe:
    """The probe, its policy with what one request decides about it."""
    if probe.policy is None:
        return probe
    inherited = rng.choice(["", "", "j"])
    sight = None
    if probe.policy.condition.schedule.tokens not in ("all", "generated"):
        ends = sorted(rng.sample(range(prompt_tokens + 1), 2 * rng.randint(0, prompt_tokens // 4)))
        runs = list(zip(ends[::2], ends[1::2], strict=True))
        sight = rng.choice([Sight(whole="so"), Sight(runs=runs), Sight(runs=runs)])
    policy = msgspec.structs.replace(probe.policy, inherited=inherited, sight=sight)
    return msgspec.structs.replace(probe, policy=policy)


def random_scores(rng: random.Random, numbers: np.random.Generator, width: int) -> np.ndarray:
    """Float32; some near a threshold, large, repeated or opposite."""
    scores = numbers.normal(scale=rng.choice([0.2, 0.7, 3.0]), size=(120, width))
    scores[numbers.random((120, width)) < 0.05] = 0.3
    scores[numbers.random((120, width)) < 0.01 * rng.randrange(2)] = 1e30
    if rng.random() < 0.5:
        scores = np.round(scores * 4) / 4  # means that equal a threshold
    if rng.random() < 0.2:
        scores *= 10.0 ** rng.choice([-30, -3, 30]) * 10 ** numbers.uniform(-8, 7, scores.shape)
    return np.clip(scores, -3e38, 3e38).astype(np.float32)


def test_decisions_equal_a_plain_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests of several kinds together: steps of one token, chunks, steps that some sit out,
    positions that are computed again, a row beyond the last token, ends at any time.
    """
    rng = random.Random(40)
    numbers = np.random.default_rng(40)
    quiet = []
    turns = 0
    original = deciders.Deciders.quiet

    def kept(*arguments: Any) -> Any:
        result = original(*arguments)
        quiet.extend(result[0].tolist())
        return result

    monkeypatch.setattr(deciders.Deciders, "quiet", kept)
    for _ in range(60):
        kinds = [
            probes_of(*(rng.choice([None, random_policy(rng)]) for _ in range(width)))
            for width in (1, 8, 16)
        ]
        shared = [ScoreTable(ProbeGroup(probes)) for probes in kinds]
        watches = []
        tables = []
        prompts = []
        heard = []
        for number in range(9):
            prompts.append(rng.choice([1, 20]))
            probes = [of_request(probe, rng, prompts[-1]) for probe in kinds[number % 3]]
            watches.append(Watch(str(number), probes, shared[number % 3], prompts[-1]))
            tables.append(random_scores(rng, numbers, len(probes)))
        ends = [rng.randrange(1, 119) for _ in watches]
        while any(watch.reached <= end for watch, end in zip(watches, ends, strict=True)):
            moved = []
            for watch, table, end in zip(watches, tables, ends, strict=True):
                if watch.reached > end or rng.random() < 0.1:
                    continue
                first = watch.reached
                count = rng.choice([1] * 9 + [25]) if first else rng.choice([1, 20, 70])
                stop = min(first + count, end + 1)
                if rng.random() < 0.05:
                    again = rng.randrange(first + 1)
                    known = table[again:first] + 1.0 if watch.kind.once else table[again:first]
                    whole = np.concatenate([known, table[first:stop]])
                    put_scores(watch, again, slice(0, watch.kind.width), whole)
                    first = again
                else:
                    put_scores(watch, first, slice(0, watch.kind.width), table[first:stop])
                moved.append((watch, range(first, stop)))
            heard += told(*moved)
        stops = {}
        for number, (watch, table, end, prompt) in enumerate(
            zip(watches, tables, ends, prompts, strict=True)
        ):
            scores, checksum = watch.results(end)
            states = table[:end] >= -100
            fields = []
            for column, (probe, score) in enumerate(zip(watch.probes, scores, strict=True)):
                if probe.policy is None:
                    continue
                reference = Reference(probe.policy, prompt)
                for value in table[: end + 1, column].tolist():
                    reference.read(value)
                decisions, triggers = reference.report(end)
                assert score.decisions == decisions
                assert score.triggers == triggers
                assert list(states_of(watch, column)[:end]) == reference.states[:end]
                states[:, column] = reference.states[:end]
                fields.append(
                    {"policy": probe.policy, "decisions": decisions, "triggers": triggers}
                )
                turns += len(decisions)
                if "stop" in probe.actions and any(reference.states):
                    stop = reference.states.index(True), column, probe.name
                    stops[str(number)] = min(stops.get(str(number), stop), stop)
            wanted = np.ascontiguousarray(table[:end]).tobytes() + states.tobytes()
            wanted += b"".join(map(msgspec.msgpack.encode, fields))
            assert checksum == zlib.crc32(wanted)
        assert {news.request_id: (news.stop_at, news.stopped_by) for news in heard} == {
            request: (position, name) for request, (position, _, name) in stops.items()
        }
    assert turns > 2000
    assert sum(quiet) > 2000


@pytest.mark.parametrize(
    "condition",
    [
        {"aggregation": "mean", "window": 255},
        {"aggregation": "max", "window": 256},
        {"aggregation": "exponential", "decay": 0.1},
        {},
    ],
    ids=str,
)
def test_a_long_step_is_decided_in_a_few_calls_for_each_token(condition: dict[str, Any]) -> None:
    """Even if the policy turns at each token."""
    condition |= {"at_least": 0.0, "schedule": Schedule(tokens="all")}
    watch = watch_of(policy(**condition))
    calls = Counter[str]()
    put(watch, 0, *[9, -9] * 4096)
    sys.setprofile(lambda frame, event, what: calls.update([event]))
    try:
        decided = watch.decide()
    finally:
        sys.setprofile(None)
    assert decided == 8192
    assert calls["call"] + calls["c_call"] < 4 * 8192


def test_a_policy_that_only_records_ends_no_request() -> None:
    watch = watch_of(policy("stop"), policy("stop", acts=False, at_least=0.0))
    assert watch.kind.decides
    assert told((watch, put(watch, 0, 1, 2))) == []
    assert told((watch, put(watch, 2, 3))) == [News("r", 2, "policy:0", [])]
    scores, _ = watch.results(3, "policy:0")
    assert [score.stopped for score in scores] == [True, False]
    assert scores[0].crossed == [2]
    assert not scores[0].flagged


def test_a_latch_of_the_conversation_is_on_from_the_start() -> None:
    watch = watch_of(policy("stop", "flag", latch="conversation", inherited="job_1"))
    # a prompt of one token
    assert told((watch, put(watch, 0, 0))) == [News("r", 0, "policy:0", [])]
    (score,), _ = watch.results(1)
    assert score.flagged
    assert score.triggers == 0
    # without an effect in a request in which the policy only records
    watch = watch_of(policy("stop", acts=False, inherited="job_1"))
    assert told((watch, put(watch, 0, 0, 0))) == []


def test_gates_follow_the_policy() -> None:
    """The token after the decision is the first one that is edited."""
    watch = watch_of(policy("steer", release_below=1.0), prompt_tokens=2)
    put(watch, 0, 0, 3, 1, 0, 5)
    watch.decide()
    assert open_among(watch, "policy:0", range(2, 7)) == [2, 3, 5]
    (score,), _ = watch.results(5)
    assert shown(watch, score, 5).gate == [(2, 3)]


def test_decisions_are_bounded_and_counted() -> None:
    watch = watch_of(policy())
    put(watch, 0, *[3.0, 0.0] * MAX_DECISIONS)
    (score,), _ = watch.results(2 * MAX_DECISIONS)
    assert len(score.decisions) == MAX_DECISIONS
    assert score.triggers == MAX_DECISIONS


def test_a_score_that_is_not_finite_is_not_read() -> None:
    watch = watch_of(policy())
    told((watch, put(watch, 0, 0, float("nan"), 9)))
    assert len(states_of(watch)) == 1
    with pytest.raises(ProbeError, match="not finite at position 1"):
        watch.results(3)


def test_versions_of_a_policy_do_not_share_conditions() -> None:
    """A plan is kept for requests with the same probes, and has the conditions."""
    vectors: Any = SimpleNamespace(get=lambda name, shape: torch.zeros(shape))
    stacks = Stacks(vectors, 4)
    side = ProbedRows("before", {("post_block", 0): 0}, b"")
    first = policy(at_least=1.0)
    second = msgspec.structs.replace(policy(at_least=2.0), digest="e")
    plans = [stacks.plan(probes_of(each), [side]) for each in (first, second, first)]
    assert [plan.kind.deciders.at_least.tolist() for plan in plans] == [[1.0], [2.0], [1.0]]
    assert plans[0] is plans[2]
