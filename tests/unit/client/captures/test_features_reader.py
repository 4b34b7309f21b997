"""A rank's reader of features: the part that it returns, how large that is, and how it joins to a
result.
"""

import numpy as np
import pytest
import torch
from sae_rows import D_IN, D_SAE, ROOT

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.readings.features import FeaturesPart, StoredFeatures
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.storage.formats.sae_files import reading
from midstream.workers.runner.files.finished_rows import FinishedCapture, ReadingError
from midstream.workers.runner.readings.features import FeatureReader
from midstream.workers.runner.readings.sae import load

#: What a part has apart from its positions, at most.
HEADER = 300
#: Numbers as large as MessagePack's longest for 32 bits.
FIRST = 1 << 20


def stored(top_k: int) -> StoredFeatures:
    with reading(ROOT / "jumprelu") as (content, _):
        digest = content.digest
    return StoredFeatures(
        sae=StoredSae(
            name="words", digest=digest, path="jumprelu", hook="post_block", layer=1, bytes=1
        ),
        top_k=top_k,
    )


def capture(wanted: StoredFeatures, rows: np.ndarray, prepared: object) -> FinishedCapture:
    places = [FIRST + place for place in range(len(rows))]
    one = StoredCapture(
        sites={"post_block": [1]}, positions=places, tag="", consumers=[READER], reading=wanted
    )
    return FinishedCapture(
        spec=RankSpec(version="v", job="j", request=0, attempt=1, prompt_tokens=6, captures=[one]),
        capture=one,
        sites={"post_block": [1]},
        hidden_size=D_IN,
        dtype="float32",
        positions=places,
        token_ids=places,
        worker="w",
        rank=0,
        pp=0,
        stages=1,
        rows=lambda *_: [memoryview(rows.tobytes())],
        prepared=prepared,
    )


@pytest.mark.parametrize("top_k", [1, 10, D_SAE])
def test_a_part_has_the_bytes_that_admission_counts(top_k: int) -> None:
    wanted, rows = (
        stored(top_k),
        np.random.default_rng(2).standard_normal((500, D_IN)).astype(np.float32),
    )
    reader = FeatureReader([("post_block", 1)])
    reader.put(wanted.sae.digest, "post_block", 1, str(ROOT / "jumprelu"))
    part = reader(capture(wanted, rows, reader.prepare(wanted)), 0)
    counted = wanted.size(len(rows), 1)
    assert counted * 0.98 < len(to_msgpack(part)) <= counted + HEADER
    joined, wide = (
        FeaturesPart.joined(3, [part]),
        load(ROOT / "jumprelu", wanted.sae.digest).encode(torch.from_numpy(rows)).numpy(),
    )
    assert (joined.request, joined.sae, joined.positions[0], len(joined.features)) == (
        3,
        "words",
        FIRST,
        len(rows),
    )
    for row, features, values in zip(wide, joined.features, joined.activations, strict=True):
        assert len(features) == min(top_k, int((row > 0).sum()))
        np.testing.assert_allclose(row[features], values, atol=1e-6)


def test_an_autoencoder_of_another_stages_layer_is_not_loaded() -> None:
    wanted, reader = stored(3), FeatureReader([("post_block", 0)])
    reader.put(wanted.sae.digest, "post_block", 1, str(ROOT / "jumprelu"))
    assert reader.prepare(wanted) is None
    with pytest.raises(ReadingError, match=r"'words' .* is not loaded"):
        reader(capture(wanted, np.zeros((1, D_IN), np.float32), None), 0)
