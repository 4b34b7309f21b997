"""Training of probes: what is held out, the baseline, groups, and which class is positive."""

from typing import Any

import numpy as np
import pytest
from refusal_kit import refuses

import midstream
from midstream_lab.client.probes import classes_of, fit


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
    assert made.labels == ["1"]
    assert made.weight.shape == (1, 16)
    assert made.weight.dtype == np.float32
    assert sum(made.metrics.train.values()) == 150
    assert sum(made.metrics.held_out.values()) == 50
    assert made.metrics.auroc > 0.9
    assert 0.3 < made.metrics.baseline_auroc < 0.7
    other, truth = rows_of(2)
    assert ((made.scores(other)[:, 0] > made.thresholds[0]) == truth).mean() > 0.85


def test_noise_gives_no_better_than_chance() -> None:
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(3)
    assert abs(fit(rng.normal(size=(400, 8)), rng.integers(0, 2, 400)).metrics.auroc - 0.5) < 0.15


def test_rows_of_a_group_are_never_on_both_sides() -> None:
    """Rows that repeat within a group are no proof of anything beyond it: noise, copied, is still
    noise.
    """
    pytest.importorskip("sklearn")
    rows = np.repeat(np.random.default_rng(4).normal(size=(40, 64)), 10, axis=0)
    labels = np.repeat(np.tile([0, 1], 20), 10)
    groups = np.repeat(range(40), 10)
    assert fit(rows, labels).metrics.auroc > 0.95
    assert fit(rows, labels, groups=groups).metrics.auroc < 0.8


def test_several_classes_have_a_score_each() -> None:
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(5)
    labels = np.array(["a", "b", "c"])[rng.integers(0, 3, 300)]
    rows = rng.normal(size=(300, 8)) + 3 * np.eye(8)[[ord(label) - ord("a") for label in labels]]
    made = fit(rows, labels)
    assert made.labels == ["a", "b", "c"]
    assert made.weight.shape == (3, 8)
    assert made.metrics.accuracy > 0.8


@pytest.mark.parametrize(
    ("rows", "labels", "field"),
    [
        (np.full((8, 2), np.nan), [0, 1] * 4, "rows"),
        (np.zeros((8, 2)), [0] * 8, "labels"),
        (np.zeros((7, 2)), [0, 1] * 4, "rows"),
        (np.zeros((8, 2)), [0] * 7 + [1], "labels"),
        (np.zeros((8, 2)), [*range(8)], "labels"),
    ],
)
def test_rows_that_train_nothing_are_refused(
    rows: np.ndarray, labels: list[int], field: str
) -> None:
    pytest.importorskip("sklearn")
    with refuses(field=field):
        fit(rows, labels)


def test_the_positive_class_is_named_not_guessed() -> None:
    pytest.importorskip("sklearn")
    rows, truth = rows_of(1)
    labels = np.where(truth, "harmful", "ok").tolist()
    for positive in (None, "harmfull"):
        with refuses("'harmful' and 'ok'", field="positive", allowed="harmful, ok"):
            fit(rows, labels, positive=positive)
    made = fit(rows, labels, positive="Harmful")
    assert made.labels == ["harmful"]
    assert [*made.metrics.train] == ["ok", "harmful"]
    assert made.scores(rows)[truth == 1].mean() > made.scores(rows)[truth == 0].mean()
    with refuses("'ok'", "positive='ok'", field="labels"):
        made.fields(["ok"])
    made.fields("violence")
    with refuses(field="positive"):
        classes_of([None, "x"] * 4)
    with refuses("a score each", field="positive"):
        fit(rows, np.arange(len(rows)) % 3, positive=1)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 1),
        (1.0, 0.0),
        ("0", "1"),
        (-1, 1),
        (False, True),
        ("no", "Yes"),
        ("NEGATIVE", "Positive"),
    ],
)
def test_classes_that_say_which_is_positive_need_no_name(low: Any, high: Any) -> None:
    names = sorted((str(low), str(high)), key=lambda name: name.casefold())
    assert classes_of([high, low] * 4) == names
    assert classes_of([high, low] * 4, positive=names[0]) == names[::-1]
