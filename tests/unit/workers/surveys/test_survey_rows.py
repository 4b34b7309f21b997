"""Does a survey find the strongest examples that a look at all rows at once finds?"""

import numpy as np
import pytest
from survey_kit import examples_of

from midstream.workers.surveys.rows import Block, Examples, blocks_of, neighbourhoods


def made(rng: np.random.Generator, features: int, levels: int) -> Block:
    """Documents of different lengths, some without a few of their rows, with many equal values."""
    keys = [
        (document, position)
        for document in range(40)
        for position in range(int(rng.integers(0, 9)))
        if rng.random() < 0.9
    ]
    documents, positions = (np.array(column, np.int64) for column in zip(*keys, strict=True))
    values = np.maximum(0, rng.integers(-levels, levels, (len(keys), features)))
    values[:, 0] = 0  # a feature that is never active
    return Block(documents, positions, positions * 7 + documents, values.astype(np.float32))


@pytest.mark.parametrize(
    ("seed", "block", "shard", "context", "top", "levels"),
    [(0, 5, 7, 0, 1, 3), (1, 4, 11, 4, 3, 2), (2, 16, 3, 2, 5, 50), (3, 64, 64, 9, 60, 4)],
)
def test_examples_equal_a_look_at_all_rows(
    seed: int, block: int, shard: int, context: int, top: int, levels: int
) -> None:
    rows, features = made(np.random.default_rng(seed), 6, levels), 6
    shards = [rows.part(start, start + shard) for start in range(0, len(rows.documents), shard)]
    examples = Examples(features, top, context)
    for around, start, stop in neighbourhoods(blocks_of(shards, max(block, context)), context):
        examples.add(around, start, stop)
    found, active = examples.arrays, rows.values > 0
    assert examples.active.tolist() == active.sum(0).tolist()
    assert examples.total.tolist() == rows.values.sum(0).tolist()
    for feature in range(features):
        expected = examples_of(rows, feature, top, context)
        count = int((found["documents"][feature] >= 0).sum())
        assert count == len(expected)
        for slot, (document, position, value, near) in enumerate(expected):
            assert (
                found["documents"][feature, slot],
                found["positions"][feature, slot],
                found["values"][feature, slot],
            ) == (document, position, value)
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
