"""Is the KL divergence of two harvests that of their predictions, in the order of the keys?"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from midstream.client.harvest import Harvest
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.requests.harvest_work import Survey
from midstream.storage.harvests import Keys
from midstream.workers.surveys.survey import divergences

VOCABULARY = 11


class Shard:
    def __init__(self, keys: Keys, rows: np.ndarray) -> None:
        self._keys, self._rows = keys, rows

    def keys(self) -> Keys:
        return self._keys

    def rows(self, hook: str, layer: int) -> np.ndarray:
        assert (hook, layer) == ("post_block", 3)
        return self._rows

    def close(self) -> None:
        pass


def harvest(keys: Keys, rows: np.ndarray) -> Any:
    """Two shards, each in another order than its keys."""
    half = len(rows) // 2
    orders = np.random.default_rng(2).permutation(half), np.arange(half, len(rows))[::-1]
    return SimpleNamespace(
        shards=[Shard(Keys(*[part[order] for part in keys]), rows[order]) for order in orders],
        manifest=SimpleNamespace(id="hrv_x"),
    )


def test_kl_is_that_of_the_predictions_and_other_tokens_are_refused() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))
    model: Any = SimpleNamespace(config=config, logits=lambda rows: rows * 2)
    rng = np.random.default_rng(1)
    keys = Keys(np.repeat(np.arange(5), 6), np.tile(np.arange(6), 5), np.arange(30))
    rows = [rng.standard_normal((30, VOCABULARY)).astype(np.float32) * 3 for _ in range(2)]
    rows[1][7] = np.nan
    pair: list[Harvest] = [harvest(keys, each) for each in rows]
    survey, kept = Survey(uris=[], top=1, context=2, against="hrv_y", last_layer=3), []
    blocks = list(divergences(model, pair, survey, kept))
    p, q = (torch.from_numpy(each).double().mul(2).log_softmax(-1) for each in rows)
    wanted = (p.exp() * (p - q)).sum(1).nan_to_num(0).numpy()
    found = np.concatenate(kept)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert found[7] == 0
    assert np.concatenate([block.documents for block in blocks]).tolist() == keys[0].tolist()
    other = Keys(keys.documents, keys.positions, np.where(keys.token_ids == 21, 99, keys.token_ids))
    with pytest.raises(MidstreamError, match="hrv_y has rows of other tokens"):
        list(divergences(model, [pair[0], harvest(other, rows[1])], survey, []))
