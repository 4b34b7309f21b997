"""Harvests over the fake engine: what must come out of them, row by row, and two harvests
compared.
"""

import numpy as np
from midstream_fake_engine.model import make_tokenizer, residual_rows

from midstream.storage.store import ArtifactStore
from midstream_harvest.reader import Harvest, open, verify


def texts(count: int, length: int = 40) -> list[str]:
    return [
        f"{number:06d} " + "abcdefghij"[number % 10] * (length + number % 17)
        for number in range(count)
    ]


def check_rows(
    harvest: Harvest, documents: list[str], sites: list[tuple[str, int]], weights: int = 0
) -> None:
    """Every token of every document has its row at every site, once, and it is the fake model's
    with these weights.
    """
    tokenizer = make_tokenizer()
    expected = {
        (number, position): token
        for number, text in enumerate(documents)
        for position, token in enumerate(tokenizer.encode(text, add_special_tokens=True).ids)
    }
    keys = harvest.keys(slice(None))
    found = list(zip(keys.documents.tolist(), keys.positions.tolist(), strict=True))
    assert len(found) == len(set(found)) == len(expected)
    assert dict(zip(found, keys.token_ids.tolist(), strict=True)) == expected
    assert harvest.sites == sites
    for hook, layer in sites:
        rows = harvest.rows(slice(None), layer, hook)
        assert np.array_equal(
            rows, residual_rows(layer, keys.positions, keys.token_ids, hook, weights)
        )


def check_equal(first: Harvest, second: Harvest) -> None:
    """The same rows in the same order in the same shards."""
    assert [len(shard) for shard in first.shards] == [len(shard) for shard in second.shards]
    for mine, other in zip(first.shards, second.shards, strict=True):
        for left, right in zip(mine.keys(), other.keys(), strict=True):
            assert np.array_equal(left, right)
        for site in first.sites:
            assert np.array_equal(mine.rows(*site), other.rows(*site))


def checked(uri: str) -> Harvest:
    """The harvest, once it is verified; only what its manifest names is in its folder."""
    assert verify(uri).faults == []
    harvest = open(uri)
    named = {file.key for shard in harvest.shards for file in shard.entry.files} | {
        part.key for part in harvest.manifest.parts
    }
    (plan,) = harvest.store.children("plans/")
    assert objects(harvest.store) == named | {"manifest.json", plan}
    return harvest


def objects(store: ArtifactStore, folder: str = "") -> set[str]:
    """The keys of all objects.

    (A killed writer leaves files whose names begin with a dot: they are no objects.)
    """
    below = store.children(folder)
    return {key for key in below if not key.endswith("/")}.union(
        *[objects(store, key) for key in below if key.endswith("/")]
    )
