"""Rows of which ranks stored columns: what a reader, an export and the joined download make of
them.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from capture_kit import write

from midstream.api.responses import packed
from midstream.broker.artifacts.headers import Place
from midstream.client.captures.export import export
from midstream.client.captures.reader import CaptureReader
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.model.banks import RowShape
from midstream.schemas.model.routing import RoutingKind
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.storage.store import open_store
from midstream.workers.runner.files.finished_rows import Columns, FinishedCapture

SHAPE = RowShape(heads=4, width=3)
ROWS = np.arange(24, dtype=np.float32).reshape(2, 12)
STREAM = np.arange(10, dtype=np.float32).reshape(2, 5)


def part(
    hook: str, rows: np.ndarray, columns: Columns | None, rank: int, heads: tuple[int, ...] = ()
) -> FinishedCapture:
    """What one rank stores at `hook` of layer 1; the capture also names the other of `z` and
    `post_block`.
    """
    beside = {"post_block": [1]} if hook == "z" else {"z": [1]}
    capture = StoredCapture(
        sites={hook: [1]},
        positions="all",
        tag="tag",
        layout="packed",
        row=columns and columns.row,
        beside=beside,
        heads=list(heads),  # type: ignore[dict-item]
    )
    return FinishedCapture(
        spec=RankSpec(
            version="v", job="job_x", request=0, attempt=1, prompt_tokens=2, requests={"tag": 1}
        ),
        capture=capture,
        sites={hook: [1]},
        hidden_size=rows.shape[1],
        dtype="float32",
        positions=[0, 1],
        token_ids=[7, 8],
        worker="w",
        rank=rank,
        pp=0,
        stages=1,
        rows=lambda *_: [memoryview(np.ascontiguousarray(rows)).cast("B")],
        columns=columns,
    )


def parts(heads: tuple[int, ...] = ()) -> list[FinishedCapture]:
    """Two ranks with two heads each; the first also stores the stream."""
    found = [part("post_block", STREAM, None, 0)]
    for rank in (0, 1):
        columns = Columns(SHAPE, 6 * rank, 6 * rank + 6)
        if chosen := columns.chosen(heads):
            rows = np.concatenate(
                [ROWS[:, columns.start : columns.stop][:, each] for each in chosen], axis=1
            )
            found.append(part("z", rows, columns, rank, heads))
    return found


def test_a_reader_puts_the_columns_of_ranks_side_by_side(tmp_path: Path) -> None:
    write(tmp_path, *parts())
    reader = CaptureReader(tmp_path / "tag", "job_x")
    assert (reader.hooks(), len(reader.files)) == (["z", "post_block"], 3)
    assert np.array_equal(reader.array(1, "z"), ROWS)
    assert np.array_equal(reader.array(1, "post_block"), STREAM)
    assert np.array_equal(reader.heads(1, "z"), ROWS.reshape(2, 4, 3))
    assert all(check.ok for check in reader.verify())
    with pytest.raises(MidstreamError, match="post_block has no heads"):
        reader.heads(1, "post_block")


def test_chosen_heads_of_several_ranks_are_read_in_their_order(tmp_path: Path) -> None:
    write(tmp_path, *parts(heads=(1, 2)))
    assert np.array_equal(
        CaptureReader(tmp_path / "tag", "job_x").heads(1, "z"), ROWS.reshape(2, 4, 3)[:, 1:3]
    )


@pytest.mark.parametrize("missing", [1, 2])
def test_a_rank_that_is_missing_leaves_the_rows_incomplete(tmp_path: Path, missing: int) -> None:
    write(tmp_path, *(part for number, part in enumerate(parts()) if number != missing))
    with pytest.raises(MidstreamError, match=r"incomplete: missing tensors \(1\): z.1"):
        CaptureReader(tmp_path / "tag", "job_x").array(1, "z")


def test_the_joined_download_and_an_export_have_whole_rows(tmp_path: Path) -> None:
    files = write(tmp_path, *parts())
    store = open_store(tmp_path)
    places = [
        (Place(file.path, file.offset, file.bytes, "job_x", 0, "tag"), file.crc32) for file in files
    ]
    joined = packed.join(packed.open_blobs(store, "job_x", places), {"z": [1], "post_block": [1]})
    raw = b"".join(joined.chunks())
    assert len(raw) == joined.length
    export(CaptureReader(tmp_path / "tag", "job_x"), tmp_path / "rows.safetensors")
    for reader in (
        CaptureReader.from_bytes(raw),
        CaptureReader.from_bytes((tmp_path / "rows.safetensors").read_bytes()),
    ):
        assert np.array_equal(reader.array(1, "z"), ROWS)
        assert np.array_equal(reader.array(1, "post_block"), STREAM)
        assert not [check.detail for check in reader.verify() if "expected" in check.detail]


def test_experts_are_chosen_by_the_rule_that_the_capture_holds(tmp_path: Path) -> None:
    logits = np.log(np.array([[1, 2, 4, 1], [8, 2, 4, 2]], dtype=np.float32))
    router = part("router", logits, Columns(RowShape(heads=1, width=4), 0, 4), 0)
    router = replace(
        router,
        routing=(
            RoutingKind(layers=[1], experts=4, top=2),
            RoutingKind(layers=[2], experts=4, top=1),
        ),
    )
    write(tmp_path, router, part("post_block", STREAM, None, 0), *parts()[1:])
    reader = CaptureReader(tmp_path / "tag", "job_x", partial=True)
    chosen, weights = reader.experts(1)
    assert chosen.tolist() == [[2, 1], [0, 2]]
    assert np.allclose(weights, [[2 / 3, 1 / 3], [2 / 3, 1 / 3]])
