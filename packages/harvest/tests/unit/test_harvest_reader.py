"""Readers of harvests: random access, datasets that shuffle, split and resume, exports,
verification.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from refusal_kit import refuses
from safetensors import safe_open
from zlib_ng import zlib_ng

from midstream import harvest as reading
from midstream.schemas.base.dtypes import float32_to_bfloat16
from midstream.schemas.base.records import from_json, to_json
from midstream_harvest.files.order import row_order
from midstream_harvest.files.shards import shard_buffers
from midstream_harvest.records.harvests import (
    FORMAT,
    MANIFEST,
    CheckedFile,
    HarvestManifest,
    HarvestPositions,
    PartManifest,
    ShardEntry,
    ShardFile,
    UnitEntry,
)

WIDTH = 8
TOKENS = 6
DOCUMENTS = 5
UNITS = 12
ROWS = UNITS * DOCUMENTS * TOKENS


def value(documents: Any, positions: Any, layer: int) -> Any:
    return np.asarray(documents) * 16 + np.asarray(positions) + layer / 4


def write(root: Path, dtype: str = "float32", **changes: Any) -> str:
    """Twelve units of one shard of five documents of six tokens, at two layers."""
    (root / "shards").mkdir(parents=True)
    (root / "parts").mkdir()
    units = []
    total = 0
    for unit in range(UNITS):
        documents = np.repeat(np.arange(DOCUMENTS) + unit * DOCUMENTS, TOKENS)
        positions = np.tile(np.arange(TOKENS), DOCUMENTS)
        order = row_order(1, documents, positions)
        documents = documents[order]
        positions = positions[order]
        tensors = [
            ("documents", "int64", documents),
            ("positions", "int64", positions),
            ("token_ids", "int64", documents + positions),
        ]
        for layer in (2, 5):
            rows = np.repeat(value(documents, positions, layer)[:, None], WIDTH, axis=1).astype(
                np.float32
            )
            tensors.append(
                (
                    f"post_block.{layer}",
                    dtype,
                    float32_to_bfloat16(rows) if dtype == "bfloat16" else rows,
                )
            )
        buffers, size, crc32 = shard_buffers(tensors, {})
        key = f"shards/u{unit}.safetensors"
        (root / key).write_bytes(b"".join(buffers))
        total += size
        file = ShardFile(key=key, bytes=size, crc32=crc32, sites={"post_block": [2, 5]})
        units.append(
            UnitEntry(
                unit=unit,
                first=unit * DOCUMENTS,
                documents=DOCUMENTS,
                tokens=DOCUMENTS * TOKENS,
                rows=len(order),
                bytes=size,
                shards=[ShardEntry(rows=len(order), files=[file])],
            )
        )
    part = to_json(PartManifest(part=0, units=units))
    (root / "parts/0000.json").write_bytes(part)
    manifest = HarvestManifest(
        format=FORMAT,
        version="0",
        id="hrv_1",
        model="m",
        created=0.0,
        finished=1.0,
        sites={"post_block": [2, 5]},
        widths={"post_block": WIDTH},
        at="before",
        dtype=dtype,
        max_length=8,
        fit="truncate",
        positions=HarvestPositions(),
        shuffle=1,
        source="lines",
        documents=UNITS * DOCUMENTS,
        tokens=ROWS,
        rows=ROWS,
        bytes=total,
        shards=UNITS,
        parts=[CheckedFile(key="parts/0000.json", crc32=zlib_ng.crc32(part))],
        **changes,
    )
    (root / MANIFEST).write_bytes(to_json(manifest))
    return str(root)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return write(tmp_path / "harvest")


def test_rows_keys_and_documents_are_read_by_number(uri: str) -> None:
    made = reading.open(uri)
    assert len(made) == ROWS
    assert "360 rows" in repr(made)
    for index in (slice(None), slice(5, 200, 7), np.array([3, 359, 3, 40]), [0, -1]):
        keys = made.keys(index)
        assert np.array_equal(made.rows(index, 5)[:, 0], value(keys.documents, keys.positions, 5))
    assert made.rows(17, 2).shape == made.rows(17, 2, "resid_post").shape == (WIDTH,)
    assert made.rows([], 2).shape == (0, WIDTH)
    for index, row in (([3, -ROWS - 1], -ROWS - 1), (ROWS, ROWS)):
        with pytest.raises(IndexError, match=f"^row {row} is out of range"):
            made.rows(index, 2)
    for layer, words in ((None, "several sites"), (3, "no site of layer 3")):
        with refuses(words):
            made.rows(0, layer)
    keys, rows = reading.open(uri).document(23, 2)
    assert keys.positions.tolist() == list(range(TOKENS))
    assert rows[:, 0].tolist() == value(23, np.arange(TOKENS), 2).tolist()
    assert len(reading.open(uri).document(10_000, 2)[1]) == 0


def test_a_whole_harvest_verifies_and_is_drawn_as_norms_of_each_site(uri: str) -> None:
    found = reading.verify(uri)
    assert found.faults == []
    assert found.shards == UNITS
    assert found.rows == ROWS
    (axes,) = reading.open(uri).plot(count=30).get_axes()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        f"{hook} {layer}" for hook, layer in reading.open(uri).sites
    ]


@pytest.mark.parametrize(
    ("number", "changes", "said"),
    [
        (0, {"first": 1, "documents": 4, "skipped": 0}, "documents 0 to 0 are in no unit"),
        (4, {"documents": 4}, "documents 24 to 24 are in no unit"),
        (4, {"documents": 6}, "have documents in common"),
        (11, {"documents": 9, "skipped": 4}, "the manifest says 60 documents; the files have 64"),
        (11, {"documents": 6}, r"unit 11: 1 documents have no row \(60\), and 0 should have none"),
        (2, {"unit": 12}, "a unit is missing or listed twice"),
    ],
)
def test_gaps_are_faults(uri: str, number: int, changes: dict[str, int], said: str) -> None:
    part = Path(uri) / "parts/0000.json"
    made = from_json(part.read_bytes(), PartManifest)
    made.units[number] = msgspec.structs.replace(made.units[number], **changes)
    part.write_bytes(to_json(made))
    manifest = from_json((Path(uri) / MANIFEST).read_bytes(), HarvestManifest)
    parts = [msgspec.structs.replace(manifest.parts[0], crc32=zlib_ng.crc32(part.read_bytes()))]
    (Path(uri) / MANIFEST).write_bytes(to_json(msgspec.structs.replace(manifest, parts=parts)))
    assert re.search(said, "; ".join(reading.verify(uri).faults))


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "part", "count"])
def test_damage_is_found(uri: str, damage: str) -> None:
    shard, part, manifest = (
        Path(uri) / name for name in ("shards/u3.safetensors", "parts/0000.json", MANIFEST)
    )
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "missing":
        shard.unlink()
    elif damage == "part":
        part.write_bytes(part.read_bytes().replace(b'"unit":3', b'"unit":4'))
    else:
        manifest.write_bytes(
            manifest.read_bytes().replace(b'"rows":360,"bytes"', b'"rows":361,"bytes"')
        )
    assert not reading.verify(uri).ok


def test_a_folder_without_a_manifest_is_no_harvest(tmp_path: Path) -> None:
    with refuses("has no manifest.json"):
        reading.open(str(tmp_path))


def seen(batches: Any) -> list[float]:
    return [float(row[0]) for batch in batches for row in batch]


def expected() -> Counter[float]:
    return Counter(
        value(document, position, 5)
        for document in range(UNITS * DOCUMENTS)
        for position in range(TOKENS)
    )


@pytest.mark.parametrize("workers", [0, 3])
def test_every_row_is_in_an_epoch_once_over_all_loader_workers(uri: str, workers: int) -> None:
    from torch.utils import data

    found = seen(
        data.DataLoader(
            reading.RowDataset(uri, [("post_block", 5)], batch_size=7),
            batch_size=None,
            num_workers=workers,
        )
    )
    assert Counter(found) == expected()
    assert found != sorted(found)


def test_replicas_share_the_rows_epochs_differ_and_activations_never_end(uri: str) -> None:
    halves = [
        seen(reading.RowDataset(uri, [("post_block", 5)], replica=replica, replicas=2))
        for replica in range(2)
    ]
    assert Counter(halves[0] + halves[1]) == expected()
    first, again, other = (
        seen(reading.RowDataset(uri, [("post_block", 5)], epoch=epoch)) for epoch in (0, 0, 1)
    )
    assert first == again != other
    stream = reading.activations(uri, 5, batch_size=50)
    batches = [next(stream) for _ in range(20)]
    assert {tuple(batch.shape) for batch in batches} == {(50, WIDTH)}


@pytest.mark.parametrize("taken", [0, 1, 9, 25, 52])
def test_a_dataset_goes_on_where_it_was(uri: str, taken: int) -> None:
    whole = seen(reading.RowDataset(uri, [("post_block", 5)], batch_size=7))
    dataset = reading.RowDataset(uri, [("post_block", 5)], batch_size=7)
    stream = iter(dataset)
    before = seen([next(stream) for _ in range(taken)])
    resumed = reading.RowDataset(uri, [("post_block", 5)], batch_size=7)
    resumed.load_state_dict(dataset.state_dict())
    assert before + seen(resumed) == whole
    started = reading.RowDataset(uri, [("post_block", 5)], batch_size=7, start=taken)
    assert before + seen(started) == whole


def test_a_plain_loader_with_workers_goes_on_from_a_number_of_batches(uri: str) -> None:
    from torch.utils import data

    def loader(start: int) -> Any:
        return data.DataLoader(
            reading.RowDataset(uri, [("post_block", 5)], batch_size=7, start=start),
            batch_size=None,
            num_workers=2,
        )

    whole = [batch[:, 0].tolist() for batch in loader(0)]
    assert [batch[:, 0].tolist() for batch in loader(10)] == whole[10:]


def test_several_sites_and_keys_come_as_a_dict(tmp_path: Path) -> None:
    import torch

    dataset = reading.RowDataset(write(tmp_path / "h", "bfloat16"), keys=True, dtype=torch.bfloat16)
    batch = next(iter(dataset))
    assert set(batch) == {"post_block.2", "post_block.5", "document", "position", "token_id"}
    assert batch["post_block.2"].dtype == torch.bfloat16
    assert torch.equal(batch["token_id"], batch["document"] + batch["position"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_are_written_as_vllms_connector_does(tmp_path: Path, dtype: str) -> None:
    paths = reading.to_hidden_states(write(tmp_path / "h", dtype), tmp_path / "out")
    assert len(paths) == UNITS * DOCUMENTS
    with safe_open(paths[7], framework="pt") as file:
        states = file.get_tensor("hidden_states")
        mask = file.get_tensor("loss_mask")
        assert tuple(states.shape) == (TOKENS, 2, WIDTH)
        assert str(states.dtype) == f"torch.{dtype}"
        assert states[:, 1, 0].float().tolist() == pytest.approx(
            value(7, np.arange(TOKENS), 5).tolist(), rel=2**-8
        )
        assert file.get_tensor("token_ids").tolist() == [7 + position for position in range(TOKENS)]
        assert mask.tolist() == [1] * TOKENS


def test_thinned_positions_cannot_train_a_draft_model(tmp_path: Path) -> None:
    uri = write(tmp_path / "h")
    manifest = Path(uri) / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"every":1', b'"every":2'))
    with refuses("leave gaps"):
        reading.to_hidden_states(uri, tmp_path / "out")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_have_a_column_for_each_site(uri: str, tmp_path: Path, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    export = reading.to_parquet if kind == "parquet" else reading.to_arrow
    paths = export(uri, tmp_path / "out", [("post_block", 5)])
    assert len(paths) == UNITS
    read = (
        parquet.read_table(paths[4])
        if kind == "parquet"
        else pa.ipc.open_file(str(paths[4])).read_all()
    )
    assert read.column_names == ["document", "position", "token_id", "post_block.5"]
    row = read.slice(3, 1).to_pylist()[0]
    assert row["post_block.5"] == [value(row["document"], row["position"], 5)] * WIDTH
