"""Does a survey find the strongest examples that a look at all rows at once finds?"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from survey_kit import examples_of

from midstream.schemas.base.errors import MidstreamError
from midstream_harvest.files.shards import RowOrigins
from midstream_harvest.files.surveys import Surveyed
from midstream_harvest.records.harvests import FeatureFigures, SurveyEntry
from midstream_harvest.records.work import Survey
from midstream_harvest.surveys import survey
from midstream_harvest.surveys.rows import DocumentRows, by_document

FEATURES = 6


def made(rng: np.random.Generator, levels: int) -> DocumentRows:
    """Documents of different lengths, some without a few of their rows, with many equal values."""
    keys = [
        (document, position)
        for document in range(40)
        for position in range(40 if document == 7 else int(rng.integers(0, 9)))
        if rng.random() < 0.9
    ]
    documents, positions = (np.array(column, np.int64) for column in zip(*keys, strict=True))
    values = np.maximum(0, rng.integers(-levels, levels, (len(keys), FEATURES)))
    values[:, 0] = 0  # a feature that is never active
    return DocumentRows(documents, positions, positions * 7 + documents, values.astype(np.float32))


def shard(rows: DocumentRows, order: np.ndarray) -> Any:
    mixed = [column[order] for column in rows]
    return SimpleNamespace(
        keys=lambda: RowOrigins(*mixed[:3]), rows=lambda *_: mixed[3], close=lambda: None
    )


def harvest(rows: DocumentRows, size: int, rng: np.random.Generator) -> Any:
    """Shards of `size` rows, each mixed, and one without rows."""
    parts = [rows.part(start, start + size) for start in range(0, len(rows.documents), size)]
    parts.insert(1, rows.part(0, 0))
    return SimpleNamespace(shards=[shard(part, rng.permutation(len(part[0]))) for part in parts])


@pytest.mark.parametrize(
    ("seed", "block", "size", "context", "top", "levels"),
    [(0, 5, 7, 0, 1, 3), (1, 4, 11, 4, 3, 2), (2, 1, 3, 2, 5, 50), (3, 64, 64, 9, 60, 4)],
)
def test_examples_equal_a_look_at_all_rows(
    seed: int,
    block: int,
    size: int,
    context: int,
    top: int,
    levels: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(seed)
    rows = made(rng, levels)
    monkeypatch.setattr(survey, "CHUNK_BYTES", block * 4 * FEATURES)  # documents come in pieces
    sae: Any = SimpleNamespace(
        form=SimpleNamespace(d_sae=FEATURES, d_in=FEATURES), encode=lambda values: values
    )
    documents = [*by_document(harvest(rows, size, rng), "post_block", 0, context)]
    assert max(len(each.positions) for each, *_ in documents) <= size + 2 * context
    examples = survey.featured(sae, documents, top, context)
    found = examples.arrays
    active = rows.values > 0
    assert examples.figures.tolist() == [active.sum(0).tolist(), rows.values.sum(0).tolist()]
    for feature in range(FEATURES):
        expected = examples_of(rows, feature, top, context)
        count = int((found["documents"][feature] >= 0).sum())
        assert count == len(expected)
        for slot, (document, position, value, near) in enumerate(expected):
            assert found["documents"][feature, slot] == document
            assert found["positions"][feature, slot] == position
            assert found["values"][feature, slot] == value
            tokens = found["tokens"][feature, slot]
            present = np.flatnonzero(tokens >= 0)
            assert near == list(
                zip(
                    (position - context + present).tolist(),  # type: ignore[operator]
                    tokens[present].tolist(),
                    found["around"][feature, slot][present].tolist(),
                    strict=True,
                )
            )
        assert (found["tokens"][feature, count:] == -1).all()
        assert not found["around"][feature, count:].any()


def test_a_view_has_the_first_features_and_the_figures_of_the_one_asked_for() -> None:
    class Known(Surveyed):
        def array(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
            shape = {"active": [1], "mean": [1], "tokens": [2, 3], "around": [2, 3]}.get(name, [2])
            return np.arange(300 * np.prod(shape)).reshape(300, *shape)[start:stop]

    kept = Survey(uris=[], top=2, context=1)
    entry = SurveyEntry(job="a", survey=kept, rows=900, key="k", bytes=1, crc32=0)
    for limit in (3, 200):
        view = Known(None, entry).view("mean", limit, feature=5)  # type: ignore[arg-type]
        assert [each.feature for each in view.features] == [*range(299, 299 - limit, -1)]
        assert view.figures == FeatureFigures(feature=5, density=[5 / 900], mean=[5])


def test_compared_features_come_by_the_change_of_the_mean_over_all_rows() -> None:
    """A survey of one harvest lists by the mean over active rows, which it shows."""
    figures = {"active": [[1, 1], [10, 10], [0, 5]], "mean": [[1.0, 9.0], [4.0, 5.5], [0.0, 6.0]]}
    for sides, wanted in ((2, [2, 1, 0]), (1, [1, 0, 2])):
        found = Surveyed(None, SimpleNamespace(rows=10))  # type: ignore[arg-type]
        found.array = lambda name, sides=sides: np.array(figures[name])[:, :sides]  # type: ignore[method-assign,misc]
        assert [each.feature for each in found.features("mean")] == wanted


def test_rows_that_are_not_in_their_order_are_damaged() -> None:
    rows = made(np.random.default_rng(4), 3)
    size = len(rows.documents) // 2
    halves = [shard(rows.part(at, at + size), np.arange(size)) for at in (size, 0)]
    for shards in (halves, [shard(rows.part(0, size), np.arange(size))] * 2):
        broken: Any = SimpleNamespace(shards=shards)
        with pytest.raises(MidstreamError, match="is not in its place"):
            list(by_document(broken, "post_block", 0))
