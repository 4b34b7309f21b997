"""Aggregates, the account of a request's scores, what the scheduler makes of a step's news, and
training.
"""

from types import SimpleNamespace

import numpy as np
import pytest

import midstream
from midstream.client.probes import fit
from midstream.schemas.artifacts.probes import Action, ProbeContent, StoredProbe
from midstream.schemas.base.errors import MidstreamError
from midstream.workers.runner.probes.aggregates import aggregate
from midstream.workers.runner.probes.probe_news import (
    SCORES,
    STOPPED_BY,
    News,
    ProbeNews,
    Scored,
)
from midstream.workers.runner.probes.watches import ProbeError, Watch, news_of_all


def probe(
    threshold: float | None, action: Action = "stop", *, name: str = "p", aggregation: str = "last"
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
    return StoredProbe(name=name, digest=content.digest, content=content, action=action)


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


def put(watch: Watch, first: int, *scores: float) -> None:
    watch.put(first, np.array([0]), np.array(scores, dtype=np.float32)[:, None])


def test_what_is_computed_again_replaces_what_was_there() -> None:
    """A rejected draft, and a preempted request."""
    watch = Watch("r", [probe(5.0, aggregation="max")])
    put(watch, 0, 1, 2)
    assert watch.news(watch.reached) is None
    put(watch, 2, 3, 9)  # the last is of a draft
    assert watch.news(watch.reached) == News("r", 3, "p", [])
    put(watch, 3, 4)
    assert watch.news(watch.reached) is None
    (score,), checksum = watch.results(4)
    assert (score.score, score.crossed, score.positions) == ([4.0], [None], 4)
    again = Watch("r", [probe(5.0, aggregation="max")])
    put(again, 0, 1, 2, 3, 4)
    assert again.results(4)[1] == checksum


def test_aggregates_by_single_positions_equal_those_at_once() -> None:
    """As a request that generates, and as one whose prompt has all of its tokens."""
    kinds = ("last", "max", "mean", "exponential")
    probes = [probe(1e9, name=kind, aggregation=kind) for kind in kinds]
    values = np.random.default_rng(2).normal(size=(40, 4)).astype(np.float32)
    one_by_one, at_once = Watch("r", probes), Watch("r", probes)
    for position in range(40):
        one_by_one.put(position, np.arange(4), values[position : position + 1])
        one_by_one.news(position + 1)
    at_once.put(0, np.arange(4), values)
    for first, second in zip(one_by_one.results(40)[0], at_once.results(40)[0], strict=True):
        np.testing.assert_allclose(first.score, second.score, atol=1e-12)


def test_news_of_many_requests_together_equal_those_of_each_alone() -> None:
    """Of two kinds, at different positions, one of which computes several at a time, as a prompt
    does.
    """
    kinds = ("last", "max", "mean", "exponential")
    probes = [[probe(limit, name=kind, aggregation=kind) for kind in kinds] for limit in (0.6, 1.0)]
    rng, together, alone = np.random.default_rng(5), [], []
    for into in (together, alone):
        into += [Watch(str(number), probes[number % 2]) for number in range(9)]
    crossed = 0
    for step in range(30):
        for number in range(9):
            count = 5 if (step + number) % 11 == 0 else 1
            values = rng.normal(scale=0.4, size=(count, 4)).astype(np.float32)
            for mine in (together, alone):
                mine[number].put(mine[number].reached, slice(0, 4), values)
        wanted = [news for watch in alone if (news := watch.news(watch.reached)) is not None]
        assert sorted(news_of_all(together)) == sorted(wanted)
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
    watch = Watch("r", [probe(None, "none")])
    put(watch, 0, *scores)
    with pytest.raises(ProbeError, match=words):
        watch.results(2)


def test_more_positions_than_there_is_room_for_at_first() -> None:
    watch = Watch("r", [probe(None, "none")])
    for first in range(0, 3000, 100):
        put(watch, first, *range(first, first + 100))
    assert watch.results(3000)[0][0].score == [2999.0]


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
    news.hear([])
    assert news.ended_by("r") == ""


# --- Training
# --------------------------------------------------------------------------------------------------


def rows_of(seed: int, number: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Two classes that one direction separates well, not perfectly."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, number)
    rows = rng.normal(size=(number, 16)) * np.linspace(1, 50, 16)
    rows[:, 3] += 3 * labels * np.linspace(1, 50, 16)[3]
    return rows, labels


def test_a_fit_is_measured_on_rows_that_it_has_not_seen() -> None:
    pytest.importorskip("sklearn")
    rows, labels = rows_of(1)
    made = midstream.probes.fit(rows, labels, held_out=0.25)
    assert (made.labels, made.weight.shape, made.weight.dtype) == (["1"], (1, 16), np.float32)
    assert sum(made.metrics.train.values()) == 150
    assert sum(made.metrics.held_out.values()) == 50
    assert made.metrics.auroc > 0.9
    assert 0.3 < made.metrics.baseline_auroc < 0.7
    other, truth = rows_of(2)
    assert ((made.scores(other)[:, 0] > made.thresholds[0]) == truth).mean() > 0.85


def test_noise_gives_no_better_than_chance() -> None:
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(3)
    metrics = fit(rng.normal(size=(400, 8)), rng.integers(0, 2, 400)).metrics
    assert abs(metrics.auroc - 0.5) < 0.15


def test_rows_of_a_group_are_never_on_both_sides() -> None:
    """Rows that repeat within a group are no proof of anything beyond it: noise, copied, is still
    noise.
    """
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(4)
    rows, labels, groups = (
        np.repeat(rng.normal(size=(80, 64)), 10, axis=0),
        np.repeat(np.tile([0, 1], 40), 10),
        np.repeat(range(80), 10),
    )
    assert fit(rows, labels).metrics.auroc > 0.95
    assert fit(rows, labels, groups=groups).metrics.auroc < 0.8


def test_several_classes_have_a_score_each() -> None:
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(5)
    labels = np.array(["a", "b", "c"])[rng.integers(0, 3, 300)]
    rows = rng.normal(size=(300, 8)) + 3 * np.eye(8)[[ord(label) - ord("a") for label in labels]]
    made = fit(rows, labels)
    assert (made.labels, made.weight.shape) == (["a", "b", "c"], (3, 8))
    assert made.metrics.accuracy > 0.8


@pytest.mark.parametrize(
    ("rows", "labels", "field"),
    [
        (np.full((8, 2), np.nan), [0, 1] * 4, "rows"),
        (np.zeros((8, 2)), [0] * 8, "labels"),
        (np.zeros((7, 2)), [0, 1] * 4, "rows"),
        (np.zeros((8, 2)), [0] * 7 + [1], "labels"),
    ],
)
def test_rows_that_train_nothing_are_refused(
    rows: np.ndarray, labels: list[int], field: str
) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(MidstreamError) as refused:
        fit(rows, labels)
    assert refused.value.field == field
