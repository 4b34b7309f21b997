"""The rank's side of harvests: rows of many sequences become one file, whole, ordered, in the asked
dtype, or a reason.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midstream.schemas.base.dtypes import float32_to_bfloat16
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.storage.store import open_store
from midstream.workers.runner.files.finished_rows import FinishedCapture
from midstream_harvest.consumer import OpenShards
from midstream_harvest.files.order import row_order
from midstream_harvest.files.shards import (
    checksum,
    decoded_rows,
    dtype_of,
    encoded_rows,
    shard_tensors,
    tensor_bits,
)
from midstream_harvest.names import HARVEST
from midstream_harvest.records.work import SCALED, SHARDS_AT_ONCE, HarvestPlace

WIDTH = 8
SITES = {"post_block": [1, 3]}


def row(layer: int, token: int) -> np.ndarray:
    return np.arange(WIDTH, dtype=np.float32) + 100 * layer + token


def finished(
    root: Path,
    index: int,
    sequences: int,
    spans: list[tuple[int, int, int, int]],
    *,
    key: str = "shards/u0.s0",
    computed: str = "float32",
    prompt_tokens: int | None = None,
    **changes: Any,
) -> FinishedCapture:
    tokens = sum(span[3] for span in spans)
    place = HarvestPlace(
        uri=str(root), key=key, index=index, sequences=sequences, spans=spans, **changes
    )
    positions = list(range(tokens))

    def rows(hook: str, layer: int) -> list[memoryview]:
        values = np.stack([row(layer, 1000 * index + position) for position in positions])
        return [
            memoryview(
                (float32_to_bfloat16(values) if computed == "bfloat16" else values).tobytes()
            )
        ]

    return FinishedCapture(
        spec=RankSpec(
            version="", job="j", request=index, attempt=1, prompt_tokens=prompt_tokens or tokens
        ),
        capture=StoredCapture(
            sites=SITES,  # type: ignore[arg-type]
            positions="all",
            tag=HARVEST,
            consumers=[HARVEST],
            place=to_msgpack(place),
        ),
        sites=SITES,
        hidden_size=WIDTH,
        dtype=computed,
        positions=positions,
        token_ids=[1000 * index + place for place in positions],
        worker="w",
        rank=0,
        pp=0,
        stages=1,
        rows=rows,
    )


def read(root: Path, key: str) -> dict[str, np.ndarray]:
    with open_store(root).open(key) as handle:
        return {
            name: tensor_bits(handle.read(tensor.start, tensor.length), tensor)
            for name, tensor in shard_tensors(handle).items()
        }


def test_a_shard_is_written_once_its_last_sequence_is_in(tmp_path: Path) -> None:
    consumer = OpenShards()
    captures = [
        finished(tmp_path, index, 3, [(5 + index, 0, 0, 4)], shuffle=9) for index in (2, 0, 1)
    ]
    outcomes = [outcome for capture in captures for outcome in consumer.consume([capture])]
    assert [len(outcome.files) for outcome in outcomes] == [0, 0, 1]
    (file,) = outcomes[-1].files
    made = read(tmp_path, file.path)
    assert file.positions == 12
    assert file.rows == 24
    assert file.sites == SITES
    with open_store(tmp_path).open(file.path) as handle:
        assert handle.size == file.bytes
        assert checksum(handle) == file.crc32
    numbers = np.repeat([5, 6, 7], 4)
    positions = np.tile(np.arange(4), 3)
    order = row_order(9, numbers, positions)
    assert made["documents"].tolist() == numbers[order].tolist()
    assert made["positions"].tolist() == positions[order].tolist()
    for layer in (1, 3):
        expected = np.stack(
            [
                row(layer, 1000 * (document - 5) + position)
                for document, position in zip(numbers, positions, strict=True)
            ]
        )
        assert np.array_equal(made[f"post_block.{layer}"], expected[order])


def test_keys_of_packed_sequences_are_positions_in_documents(tmp_path: Path) -> None:
    (outcome,) = OpenShards().consume([finished(tmp_path, 0, 1, [(3, 7, 0, 2), (4, 0, 2, 3)])])
    made = read(tmp_path, outcome.files[0].path)
    assert made["documents"].tolist() == [3, 3, 4, 4, 4]
    assert made["positions"].tolist() == [7, 8, 0, 1, 2]


def test_generated_rows_are_flagged_and_thinned(tmp_path: Path) -> None:
    capture = finished(tmp_path, 0, 1, [(3, 0, 0, 8)], prompt_tokens=3, prompt=[1], every=2)
    (outcome,) = OpenShards().consume([capture])
    made = read(tmp_path, outcome.files[0].path)
    assert made["positions"].tolist() == [1, 3, 5, 7]
    assert made["generated"].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "asked", ["model", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
)
@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_rows_are_stored_in_the_dtype_that_was_asked_for(
    tmp_path: Path, computed: str, asked: Any
) -> None:
    (outcome,) = OpenShards().consume(
        [finished(tmp_path, 0, 1, [(0, 0, 0, 4)], computed=computed, dtype=asked)]
    )
    dtype = computed if asked == "model" else asked
    with open_store(tmp_path).open(outcome.files[0].path) as handle:
        assert dtype_of(shard_tensors(handle)["post_block.1"]) == dtype
    made = read(tmp_path, outcome.files[0].path)
    back = decoded_rows(made["post_block.1"], dtype, made.get("post_block.1.scale"))
    values = np.stack([row(1, position) for position in range(4)])
    assert ("post_block.1.scale" in made) == (dtype in SCALED)
    tolerance = {"int8": 1 / 127, "float8_e4m3fn": 2**-4}.get(dtype, 2**-8)  # bfloat16 has 8 bits
    assert np.abs(back - values).max() <= tolerance * np.abs(values).max()


def test_float8_is_what_torch_makes_of_it() -> None:
    import torch

    values = np.random.default_rng(0).normal(size=(500, 32)).astype(np.float32) * 10
    values[0] = 0
    bits, scale = encoded_rows(values, "float32", "float8_e4m3fn")
    assert scale is not None
    expected = (torch.from_numpy(values) / torch.from_numpy(scale)[:, None]).to(torch.float8_e4m3fn)
    assert np.array_equal(bits, expected.view(torch.uint8).numpy())
    assert np.array_equal(
        decoded_rows(bits, "float8_e4m3fn", scale),
        (expected.float() * torch.from_numpy(scale)[:, None]).numpy(),
    )


def test_a_row_that_is_not_finite_stays_so() -> None:
    values = np.ones((2, WIDTH), np.float32)
    values[0, 3] = np.nan
    for dtype in ("int8", "float8_e4m3fn", "bfloat16", "float16"):
        bits, scale = encoded_rows(values, "float32", dtype)
        back = decoded_rows(bits, dtype, scale)
        assert not np.isfinite(back[0]).all(), dtype
        assert np.isfinite(back[1]).all(), dtype


def test_a_store_that_cannot_be_written_is_the_reason_and_a_repeat_works(tmp_path: Path) -> None:
    consumer = OpenShards()
    root = tmp_path / "file"
    root.write_text("not a folder")
    first = [
        consumer.consume([finished(root, index, 2, [(index, 0, 0, 2)])])[0] for index in range(2)
    ]
    assert [(bool(outcome.error), outcome.unavailable) for outcome in first] == [
        (False, False),
        (True, True),
    ]
    root.unlink()
    again = [
        consumer.consume([finished(root, index, 2, [(index, 0, 0, 2)])])[0] for index in range(2)
    ]
    assert [len(outcome.files) for outcome in again] == [0, 1]


def test_unfinished_shards_of_stopped_attempts_are_let_go(tmp_path: Path) -> None:
    consumer = OpenShards()
    for number in range(3 * SHARDS_AT_ONCE):
        consumer.consume([finished(tmp_path, 0, 2, [(0, 0, 0, 2)], key=f"shards/u{number}")])
    assert len(consumer._shards) == SHARDS_AT_ONCE + 1
