"""Does a rank hold of a source run what its own sites need, bit for bit, and refuse what is not
whole?
"""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from capture_kit import HIDDEN, finished, run_of, values, write

from midstream.schemas.jobs.receipts import READ_LATER
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.source_runs import RunRow, row_name, run_key
from midstream.storage.file_store import FileStore
from midstream.storage.store import ArtifactStore, open_store
from midstream.workers.runner.edits.source_runs import RunStore
from midstream.workers.runner.hooks.sites import RankSite

KEY = run_key("job_x", 0, "tag")
SITES = {"post_block": [2, 3], "pre_attn": [2]}


def store_of(
    root: Path | ArtifactStore,
    layers: Sequence[int] = (0, 1, 2, 3),
    hidden_size: int = HIDDEN,
) -> RunStore:
    return RunStore(
        open_store(root) if isinstance(root, Path) else root,
        [RankSite(hook, layer, "pair") for layer in layers for hook in HOOKS],
        hidden_size,
    )


def bytes_in(store: RunStore) -> int:
    """The bytes of all rows that it holds."""
    return sum(rows.nbytes for run in store._runs.values() for rows in run.rows.values())


def name(
    hook: str = "post_block",
    layer: int = 2,
    position: int | None = 1,
    mean: Sequence[int] = (),
    key: str = KEY,
) -> str:
    return row_name(RunRow(key, hook, layer, position, tuple(mean)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("packed", "bfloat16"), ("per_file", "float16"), ("segment", "float32")],
)
def test_a_row_has_the_bits_that_were_captured_whatever_the_store_dtype_and_layout(
    store: ArtifactStore, dtype: str, layout: str
) -> None:
    kind = getattr(torch, dtype)
    captured = torch.randn(3, HIDDEN).to(kind)
    stored = captured.view(torch.uint8).numpy()
    wrote = write(
        store,
        finished(
            sites=SITES,
            dtype=dtype,
            layout=layout,
            rows=lambda hook, layer: [
                memoryview(stored[:1].tobytes()),
                memoryview(stored[1:].tobytes()),
            ],
        ),
    )
    runs = store_of(store)
    runs.put(run_of(wrote, SITES))
    for hook, layer in (("post_block", 2), ("post_block", 3), ("pre_attn", 2)):
        held = runs.rows(KEY, hook, layer, [0, 1, 2])  # type: ignore[arg-type]
        assert held.dtype == kind
        assert torch.equal(held, captured)
        row = runs.row(name(hook, layer, 1))
        assert row.dtype == torch.float32
        assert torch.equal(row.to(kind), captured[1])
    assert bytes_in(runs) == 3 * captured.nbytes


def test_a_mean_is_over_the_positions_that_are_named_or_all(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.put(
        run_of(
            write(tmp_path, finished(positions=[2, 5, 6, 9])), {"post_block": [2, 3]}, [2, 5, 6, 9]
        )
    )
    rows = values("post_block", 3, [2, 5, 6, 9]).astype(np.float64)
    assert (
        store.row(name(layer=3, position=None)).tolist() == rows.mean(0).astype(np.float32).tolist()
    )
    assert (
        store.row(name(layer=3, position=None, mean=[5, 6])).tolist()
        == rows[1:3].mean(0).astype(np.float32).tolist()
    )
    assert (
        store.row(name(layer=3, position=None, mean=[2, 9])).tolist()
        == rows[[0, 3]].mean(0).astype(np.float32).tolist()
    )


def test_rows_come_by_position_in_the_order_asked(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.put(
        run_of(
            write(tmp_path, finished(positions=[2, 5, 6, 9], dtype="float32")),
            {"post_block": [2, 3]},
            [2, 5, 6, 9],
        )
    )
    for asked in ([5, 6], [9, 2], [6], [2, 5, 6, 9], [6, 5]):
        assert (
            store.rows(KEY, "post_block", 2, asked).tolist()
            == values("post_block", 2, asked).tolist()
        )
    assert (
        store.rows(KEY, "post_block", 2, range(5, 7)).tolist()
        == values("post_block", 2, [5, 6]).tolist()
    )


def test_a_stage_keeps_its_own_layers_and_reads_no_other_stages_rows(tmp_path: Path) -> None:
    lower = finished(
        sites={"post_block": [0, 1]}, all_sites={"post_block": [0, 1, 2, 3]}, pp=0, stages=2
    )
    upper = finished(
        sites={"post_block": [2, 3]}, all_sites={"post_block": [0, 1, 2, 3]}, pp=1, stages=2
    )
    wrote = write(tmp_path, lower, upper, segment_limit=0)
    run = run_of(wrote, {"post_block": [0, 1, 2, 3]})
    (tmp_path / wrote[0].path).write_bytes(b"\0" * 8 + b"damage" * 200)
    with pytest.raises(ValueError, match="deleted"):
        store_of(tmp_path, layers=[0, 1]).put(run)
    (tmp_path / wrote[0].path).unlink()
    write(tmp_path, lower, segment_limit=0)
    damaged = bytearray((tmp_path / wrote[0].path).read_bytes())
    damaged[-60] ^= 1
    (tmp_path / wrote[0].path).write_bytes(damaged)
    store = store_of(tmp_path, layers=[2, 3])
    store.put(run)
    assert bytes_in(store) == 2 * 3 * HIDDEN * 2
    assert store.row(name(layer=3)).tolist() == values("post_block", 3, [1])[0].tolist()
    with pytest.raises(
        LookupError, match=r"no rows of post_block of layer 1, which is not on this rank"
    ):
        store.row(name(layer=1))
    nothing = store_of(tmp_path, layers=[7])
    nothing.put(run)
    assert bytes_in(nothing) == 0, "a stage without a layer of it has nothing of it"
    assert KEY in nothing, "but it has the run"


def test_of_a_file_with_other_stages_layers_only_the_own_rows_stay(tmp_path: Path) -> None:
    """The run was captured by a worker that was divided otherwise."""
    wrote = write(tmp_path, finished(sites={"post_block": [0, 1, 2, 3]}))
    store = store_of(tmp_path, layers=[2, 3])
    store.put(run_of(wrote, {"post_block": [0, 1, 2, 3]}))
    held = store.rows(KEY, "post_block", 2, [0, 1, 2])
    assert held.untyped_storage().nbytes() == held.nbytes
    assert bytes_in(store) == 2 * held.nbytes


def test_missing_rows_of_a_run_are_named(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.put(run_of(write(tmp_path, finished(sites=SITES)), SITES))
    for asked, words in (
        (name(key="job_y.0.tag"), "source run job_y.0.tag is not on this rank"),
        (name(hook="mlp_out"), "has no rows of mlp_out of layer 2"),
        (name(position=3), "has no row of post_block of layer 2 at position 3"),
        (
            name(position=None, mean=[1, 7, 8]),
            "has no row of post_block of layer 2 at position 7-8",
        ),
    ):
        with pytest.raises(LookupError, match=words):
            store.row(asked)
    with pytest.raises(LookupError, match="at position 3"):
        store.rows(KEY, "post_block", 2, range(4))
    with pytest.raises(ValueError, match="not a valid name for a row of a source run"):
        store.row("run:x")


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_row_with_a_value_that_is_not_finite_is_refused(tmp_path: Path, bad: float) -> None:
    # field case 27
    rows = np.zeros((3, HIDDEN), dtype=np.float32)
    rows[1, 2] = bad
    wrote = write(
        tmp_path,
        finished(
            sites={"post_block": [2]},
            dtype="float32",
            rows=lambda hook, layer: [memoryview(rows.tobytes())],
        ),
    )
    store = store_of(tmp_path)
    store.put(run_of(wrote, {"post_block": [2]}))
    with pytest.raises(ValueError, match="not finite"):
        store.row(name(position=1))
    assert store.row(name(position=0)).tolist() == [0.0] * HIDDEN


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"hidden_size": HIDDEN + 1}, "its rows have 6 elements, but the model's have 5"),
        ({"key": "job_x.1.tag"}, "these are rows of job_x.0.tag"),
        ({"positions": [0, 1]}, "it has positions 0-2, but the run has 0-1"),
        ({"positions": [0, 1, 4]}, "it has positions 0-2, but the run has 0-1, 4"),
        ({"positions": []}, "it has no rows"),
        ({"sites": {"post_block": [1, 2, 3]}}, "none of its files contains post_block of layer 1"),
        ({"files": []}, "none of its files contains post_block of layer 2"),
    ],
)
def test_a_run_file_that_mismatches_its_record_is_refused(
    tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    store = store_of(tmp_path)
    run = msgspec.structs.replace(
        run_of(write(tmp_path, finished()), {"post_block": [2, 3]}), **other
    )
    with pytest.raises(ValueError, match=words):
        store.put(run)
    assert len(store) == 0
    assert bytes_in(store) == 0
    assert store.names() == []


def test_missing_damaged_or_foreign_run_files_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "captures"
    store = store_of(root)
    (wrote,) = write(root, finished())
    run = run_of([wrote], {"post_block": [2, 3]})

    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=words):
            store.put(
                msgspec.structs.replace(
                    run, files=[msgspec.structs.replace(run.files[0], **changes)]
                )
            )
        assert len(store) == 0

    refused("has changed since the capture", crc32=wrote.crc32 ^ 1)
    refused("truncated", bytes=wrote.bytes - 1)
    (tmp_path / "outside.seg").write_bytes((root / wrote.path).read_bytes())
    refused("not inside the capture root", path="../outside.seg")
    refused("not inside the capture root", path=str(tmp_path / "outside.seg"))
    with pytest.raises(ValueError, match="in two of its files"):
        store.put(msgspec.structs.replace(run, files=run.files * 2))
    (root / wrote.path).unlink()
    refused("No such file")


def test_run_keys_are_equal_exactly_for_equal_runs(tmp_path: Path) -> None:
    prints = []
    for folder, shift in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        store = store_of(tmp_path / folder)
        run = run_of(
            write(tmp_path / folder, finished(shift=shift, dtype="float32")), {"post_block": [2, 3]}
        )
        store.put(run)
        store.put(run)
        prints.append(store.names())
        store.drop([KEY, "job_y.0.tag"])  # one that was never here is dropped without a word
        assert store.names() == []
        assert bytes_in(store) == 0
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("error", "later"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), True),
        (OSError(errno.EIO, "bad"), False),
    ],
)
def test_a_rank_says_when_a_run_can_only_be_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, later: bool
) -> None:
    run = run_of(write(tmp_path, finished()), {"post_block": [2, 3]})
    store = store_of(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(FileStore, "open", fail)
    with pytest.raises(ValueError, match=str(error.strerror)) as caught:
        store.put(run)
    assert (READ_LATER in str(caught.value)) is later
