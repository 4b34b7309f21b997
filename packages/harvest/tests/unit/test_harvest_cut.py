"""Sequences, positions and shards of a unit: what is cut follows from documents and specification
alone.
"""

from typing import Any

import numpy as np
import pytest

from midstream.schemas.jobs.jobs import SamplingRequest
from midstream_harvest.files.order import key_hash, keys_of, row_order, sampled
from midstream_harvest.records.harvests import (
    HarvestCut,
    HarvestPositions,
    HarvestShards,
    HarvestSource,
    StoredHarvest,
)
from midstream_harvest.run.cut import CutDocument, CutSequence, cut, shards_of

BOS = 1
EOS = 2


def harvest(**changes: Any) -> StoredHarvest:
    fields: dict[str, Any] = {
        "id": "hrv_1",
        "model": "m",
        "created": 0.0,
        "uri": "/none",
        "sites": {"post_block": [0]},
        "source": HarvestSource(lines=["a"]),
        "max_length": 4,
        "row_bytes": 1 << 10,
        "positions": HarvestPositions(skip_bos=False),
    }
    return StoredHarvest(**(fields | changes))


def documents(*lengths: int, first: int = 0) -> list[CutDocument]:
    return [
        CutDocument(first + number, np.arange(length) + 10 * (number + 1))
        for number, length in enumerate(lengths)
    ]


def keys(sequences: list[CutSequence]) -> list[tuple[int, int, int]]:
    """(document, position, token) of every row."""
    columns = [
        (*keys_of(sequence.chosen, sequence.spans), sequence.token_ids[sequence.chosen])
        for sequence in sequences
    ]
    return [tuple(row) for each in columns for row in np.stack(each, axis=1).tolist()]


@pytest.mark.parametrize(
    ("fit", "lengths", "made", "found"),
    [
        ({}, (2, 6, 0), [2, 4], [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]),
        ({"fit": "split"}, (9, 1), [4, 4, 1, 1], [*((0, place) for place in range(9)), (1, 0)]),
    ],
    ids=["truncated", "split"],
)
def test_documents_keep_their_first_tokens_or_give_every_token_once(
    fit: dict[str, Any], lengths: tuple[int, ...], made: list[int], found: list[tuple[int, int]]
) -> None:
    sequences = cut(harvest(cut=HarvestCut(**fit)), documents(*lengths), BOS, EOS)
    assert [len(sequence.token_ids) for sequence in sequences] == made
    assert keys(sequences) == [(one, place, 10 * (one + 1) + place) for one, place in found]


def test_packed_sequences_are_full_and_have_no_row_between_documents() -> None:
    made = cut(harvest(cut=HarvestCut(fit="pack")), documents(3, 0, 2, 4), BOS, EOS)
    assert [sequence.token_ids.tolist() for sequence in made] == [
        [10, 11, 12, EOS],
        [30, 31, EOS, 40],
        [41, 42, 43, EOS],
    ]
    assert keys(made) == [
        (0, 0, 10),
        (0, 1, 11),
        (0, 2, 12),
        (2, 0, 30),
        (2, 1, 31),
        *[(3, place, 40 + place) for place in range(4)],
    ]


def test_positions_are_skipped_thinned_and_never_those_of_bos() -> None:
    texts = [
        CutDocument(0, np.array([BOS, 11, BOS, 13])),
        CutDocument(1, np.array([20, 21, 22, 23])),
    ]
    assert [
        key[:2] for key in keys(cut(harvest(positions=HarvestPositions()), texts, BOS, EOS))
    ] == [
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
    ]
    thin = harvest(positions=HarvestPositions(every=2, skip_first=1, skip_bos=False))
    assert [key[:2] for key in keys(cut(thin, texts, BOS, EOS))] == [(0, 2), (1, 2)]


def test_a_sample_is_of_the_whole_document_and_follows_the_seed() -> None:
    asked = harvest(
        cut=HarvestCut(fit="split"), positions=HarvestPositions(sample=3, seed=7, skip_bos=False)
    )
    made = keys(cut(asked, documents(9, 2), BOS, EOS))
    assert [key[0] for key in made] == [0, 0, 0, 1, 1]
    assert made == keys(cut(asked, documents(9, 2), BOS, EOS))
    others = [
        keys(
            cut(
                harvest(cut=asked.cut, positions=HarvestPositions(sample=3, seed=seed)),
                documents(9, 2),
                None,
                EOS,
            )
        )
        for seed in range(9)
    ]
    assert len({tuple(other) for other in others}) > 4


@pytest.mark.parametrize(
    ("fit", "rule", "expected"),
    [
        ("truncate", {}, [(0, 2), (0, 3), (1, 0), (1, 1)]),
        ("split", {}, [(0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]),
        ("pack", {}, [(0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]),
        ("pack", {"skip_bos": True}, [(0, 2), (0, 3), (0, 4), (1, 1)]),
        ("split", {"every": 2}, [(0, 2), (0, 4), (1, 0)]),
        ("split", {"skip_first": 1}, [(0, 2), (0, 3), (1, 1)]),
        ("pack", {"sample": 1}, [(0, 2), (1, 0)]),
    ],
)
def test_spans_choose_beside_the_other_rules(
    fit: Any, rule: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    given = [
        CutDocument(0, np.arange(10, 17), np.isin(np.arange(7), [2, 3, 4])),
        CutDocument(1, np.array([BOS, 21, 22]), np.isin(np.arange(3), [0, 1])),
    ]
    asked_for = harvest(
        cut=HarvestCut(fit=fit), positions=HarvestPositions(**{"skip_bos": False} | rule)
    )
    assert [key[:2] for key in keys(cut(asked_for, given, BOS, EOS))] == expected


def test_documents_without_a_row_are_left_out_but_not_with_generation() -> None:
    asked = harvest(positions=HarvestPositions(skip_first=3, skip_bos=False))
    assert [sequence.spans[0][0] for sequence in cut(asked, documents(2, 4), BOS, EOS)] == [1]
    both = harvest(positions=asked.positions, generate=SamplingRequest(max_tokens=2))
    assert [sequence.spans[0][0] for sequence in cut(both, documents(2, 4), BOS, EOS)] == [0, 1]


def test_shards_hold_as_many_sequences_as_their_size_allows() -> None:
    asked = harvest(row_bytes=1 << 18, shards=HarvestShards(mib=2))
    made = shards_of(asked, cut(asked, documents(4, 4, 4, 1, 4), BOS, EOS))
    assert [[sequence.spans[0][0] for sequence in shard] for shard in made] == [[0, 1], [2, 3], [4]]
    assert shards_of(asked, []) == []
    wide = harvest(row_bytes=1 << 22, shards=HarvestShards(mib=1))
    # each is larger than a shard alone
    assert len(shards_of(wide, cut(wide, documents(1, 1), BOS, EOS))) == 2


def test_the_order_of_rows_follows_from_seed_and_keys() -> None:
    numbers = np.repeat(np.arange(50), 4)
    positions = np.tile(np.arange(4), 50)
    order = row_order(3, numbers, positions)
    assert sorted(order.tolist()) == list(range(200))
    shuffled = np.random.default_rng(0).permutation(200)
    again = row_order(3, numbers[shuffled], positions[shuffled])
    assert np.array_equal(numbers[order], numbers[shuffled][again])
    assert np.array_equal(positions[order], positions[shuffled][again])
    assert not np.array_equal(order, row_order(4, numbers, positions))
    assert np.array_equal(row_order(None, numbers, positions), np.arange(200))
    assert (np.abs(np.corrcoef(np.arange(200), order)[0, 1])) < 0.2


def test_hashes_of_keys_are_frozen() -> None:
    """Harvests of other versions are read and verified: these numbers must never change."""
    found = key_hash(5, np.array([0, 0, 1]), np.array([0, 1, 0]))
    assert [f"{value:016x}" for value in found.tolist()] == FROZEN
    assert sampled(5, np.zeros(6, np.int64), np.arange(6), 2).tolist() == SAMPLED


FROZEN = ["a711a1abdd4d6f75", "efb5c93f929b4221", "a51a08e999e06950"]
SAMPLED = [False, True, False, True, False, False]
