"""Does each layout hold every row, together with others or alone, and does one that cannot be
written fail alone?
"""

import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_kit import filesystem, finished, values, write

from midstream.broker.artifacts import retention
from midstream.client import CaptureReader
from midstream.schemas.jobs.captures import index_of
from midstream.storage import capture_usage, file_store
from midstream.storage.blobs import read_entries
from midstream.storage.store import ArtifactStore, open_store
from midstream.workers.runner.files.finished_rows import Outcome

SITES = {"pre_attn": [0, 3], "mlp_out": [1], "post_block": [0, 1, 2]}


#: Where the store makes no difference.
in_a_folder = pytest.mark.parametrize("store", ["folder"], indirect=True)


@pytest.mark.parametrize(
    ("layout", "dtype", "blobs", "files"),
    [("packed", "float32", 1, 1), ("per_file", "bfloat16", 6, 6), ("segment", "bfloat16", 1, 1)],
)
def test_every_layout_holds_every_row(
    store: ArtifactStore, layout: str, dtype: str, blobs: int, files: int
) -> None:
    captures = [
        finished(request=n, sites=SITES, positions=[n, n + 2], layout=layout, dtype=dtype)
        for n in range(3)
    ]
    written = write(store, *captures)
    assert len(written) == 3 * blobs
    assert sum(file.rows for file in written) == 3 * 6 * 2
    assert len({file.path for file in written}) == (1 if layout == "segment" else 3 * files)
    assert {(file.layout, file.tag, file.positions) for file in written} == {(layout, "tag", 2)}
    with CaptureReader(store, "job_x") as reader:
        for request in range(3):
            for hook, layers in SITES.items():
                for layer in layers:
                    np.testing.assert_array_equal(
                        reader.array(layer, hook, request),
                        values(hook, layer, [request, request + 2]),
                    )
        assert [check.ok for check in reader.verify()] == [True] * len(written)


def test_small_captures_share_a_segment_and_larger_ones_get_a_file(tmp_path: Path) -> None:
    small = finished(request=0, positions=range(3))
    large = finished(request=1, positions=range(4))
    written = write(tmp_path, small, large, segment_limit=small.size)
    assert [file.layout for file in written] == ["segment", "packed"]
    reader = CaptureReader(tmp_path / "tag" / "job_x")
    assert [reader.positions(request) for request in reader.requests()] == [[0, 1, 2], [0, 1, 2, 3]]


def test_a_job_that_lies_in_segments_alone_is_found_by_its_folder_all_the_same(
    tmp_path: Path,
) -> None:
    write(tmp_path, finished())
    assert not (tmp_path / "tag" / "job_x").exists()
    assert CaptureReader(tmp_path / "tag" / "job_x").requests() == [0]


@in_a_folder
def test_a_segment_is_closed_at_its_size_and_the_next_one_opened(store: ArtifactStore) -> None:
    disk = filesystem(store, segment_bytes=8 << 10)
    paths = [disk.consume([finished(request=n)])[0].files[0].path for n in range(5)]
    disk.close()
    assert [path.rpartition(".seg")[0][-1] for path in paths] == ["0", "0", "0", "1", "1"]
    assert CaptureReader(store, "job_x").requests() == [0, 1, 2, 3, 4]


@in_a_folder
def test_threads_ranks_and_starts_never_share_a_segment(store: ArtifactStore) -> None:
    paths = [
        write(store, finished(request=n), owner=owner)[0].path
        for n, owner in enumerate(["w.boot1.0", "w.boot1.1", "w.boot2.0"])
    ]
    assert len(set(paths)) == 3


def test_two_captures_of_one_job_lie_apart(tmp_path: Path) -> None:
    for layout in ("packed", "segment", "per_file"):
        root = tmp_path / layout
        write(
            root,
            finished(tag="mine", layout=layout),
            finished(tag="global", layout=layout, dtype="float32", shift=512.0),
        )
        mine, everyones = (CaptureReader(root, "job_x", tag=tag) for tag in ("mine", "global"))
        np.testing.assert_array_equal(mine.array(2), values("post_block", 2, [0, 1, 2]))
        np.testing.assert_array_equal(
            everyones.array(2)[:, 0], values("post_block", 2, [0, 1, 2])[:, 0] + 512
        )


@in_a_folder
def test_many_tags_do_not_keep_many_files_open(store: ArtifactStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    disk = filesystem(store)
    disk.consume([finished(job=f"job_{n}", tag=f"tag{n}") for n in range(60)])
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 16
    disk.close()
    assert [CaptureReader(store, f"job_{n}").tag for n in (0, 59)] == ["tag0", "tag59"]


# field case 20
@pytest.mark.parametrize(
    ("store", "layout"),
    [("folder", "packed"), ("folder", "per_file"), ("folder", "segment"), ("s3", "packed")],
    indirect=["store"],
)
def test_one_capture_that_cannot_be_written_fails_alone(store: ArtifactStore, layout: str) -> None:
    def broken(hook: str, layer: int) -> list[memoryview]:
        raise OSError("the spilled rows are gone")

    captures = [
        finished(request=n, layout=layout, **({"rows": broken} if n == 2 else {})) for n in range(5)
    ]
    disk = filesystem(store)
    outcomes = disk.consume(captures)
    disk.close()
    assert [outcome.error for outcome in outcomes] == [
        "",
        "",
        "write failed: the spilled rows are gone",
        "",
        "",
    ]
    assert CaptureReader(store, "job_x").requests() == [0, 1, 3, 4]


# field case 46
@in_a_folder
def test_a_group_of_any_layout_mix_costs_four_syncs(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = filesystem(store)
    disk.consume([finished(layout="segment")])  # opens the segment
    calls: list[str] = []
    for module, name in ((os, "fsync"), (os, "fdatasync"), (file_store, "_syncfs")):
        monkeypatch.setattr(module, name, lambda descriptor, name=name: calls.append(name))
    disk.consume(
        [
            finished(f"job_{n}", layout=layout)
            for n in range(40)
            for layout in ("segment", "packed", "per_file")
        ]
    )
    disk.close()
    assert sorted(calls) == ["_syncfs", "_syncfs", "fdatasync", "fdatasync"]


@in_a_folder
def test_dropped_and_reused_positions_are_in_file_and_receipt(store: ArtifactStore) -> None:
    file, *_ = write(store, finished(positions=[0, 3], dropped=(1, 2), reused=2, layout="per_file"))
    assert file.dropped == [1, 2]
    assert file.reused == 1
    reader = CaptureReader(store, "job_x")
    assert reader.dropped() == [1, 2]
    assert reader.manifest().reused == 1


def test_a_capture_of_no_position_has_no_rows_and_is_no_error(tmp_path: Path) -> None:
    for layout in ("packed", "segment", "per_file"):
        written = write(tmp_path / layout, finished(positions=[], layout=layout))
        assert sum(file.rows for file in written) == 0
        reader = CaptureReader(tmp_path / layout, "job_x")
        assert reader.array(2).shape == (0, 5)
        assert reader.positions() == []
        assert all(check.ok for check in reader.verify())


# field case 19
@pytest.mark.parametrize("layout", ["packed", "segment"])
def test_beyond_the_quota_nothing_is_written_until_something_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(capture_usage, "MEASURE_FULL_S", 0.0)
    monkeypatch.setattr(capture_usage, "MEASURE_SHARE", 0)
    store = filesystem(tmp_path / "captures", quota=60 << 10)

    def put(job: str) -> Outcome:
        return store.consume([finished(job, layout=layout)])[0]

    outcomes = [put(f"job_{n}") for n in range(20)]
    written = [n for n, outcome in enumerate(outcomes) if not outcome.error]
    assert written == list(range(len(written)))
    assert 3 <= len(written) < 20
    assert "capture_quota_mib" in outcomes[-1].error
    assert open_store(tmp_path / "captures").used() <= 60 << 10
    retention.delete(open_store(tmp_path / "captures"), [f"job_{n}" for n in written])
    assert put("job_later").error == ""
    store.close()


def _remove(pattern: str) -> Callable[[Path], None]:
    def remove(tag: Path) -> None:
        for path in tag.glob(pattern):
            path.unlink()

    return remove


def _replace_segment(tag: Path) -> None:
    for path in tag.glob("segments/*.seg"):
        path.with_suffix(".copy").write_bytes(path.read_bytes())
        path.with_suffix(".copy").rename(path)


#: What happens to a tag's folder: its segment is gone, its index, the segment is another file, all.
HARMS = [_remove("segments/*.seg"), _remove("segments/*.jsonl"), _replace_segment, shutil.rmtree]


@pytest.mark.parametrize("harm", HARMS)
def test_captures_after_a_segment_was_removed_or_replaced_are_at_their_path(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    store = filesystem(tmp_path)
    store.consume([finished("job_before", layout="segment")])
    harm(tmp_path / "tag")
    outcomes = store.consume([finished(f"job_{n}", layout="segment") for n in range(3)])
    store.close()
    _read_where_reported(tmp_path, outcomes)


@pytest.mark.parametrize("layout", ["packed", "segment"])
@pytest.mark.parametrize("harm", HARMS)
def test_files_removed_while_they_are_written_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None], layout: str
) -> None:
    """The file is replaced once, between the last sync and the report."""
    module, name = (os, "fdatasync") if layout == "segment" else (file_store, "_sync")
    store = filesystem(tmp_path)
    real = getattr(module, name)
    syncs = []

    def sync(*args: Any) -> None:
        real(*args)
        syncs.append(args)
        if len(syncs) == 2:
            for path in tmp_path.rglob("*.safetensors"):
                path.unlink()
            harm(tmp_path / "tag")

    monkeypatch.setattr(module, name, sync)
    outcomes = store.consume([finished("job_0", layout=layout), finished("job_1", layout=layout)])
    monkeypatch.undo()
    store.close()
    _read_where_reported(tmp_path, outcomes)


def test_a_file_that_is_removed_each_time_fails_its_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_store._sync

    def sync(root: Path, paths: Sequence[Path]) -> None:
        real(root, paths)
        for path in tmp_path.rglob("*.safetensors"):
            path.unlink()

    monkeypatch.setattr(file_store, "_sync", sync)
    (outcome,) = filesystem(tmp_path).consume([finished(layout="packed")])
    assert outcome.files == ()
    assert "was deleted while being written" in outcome.error


def _read_where_reported(root: Path, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.error == ""
        for file in outcome.files:
            content = (root / file.path).read_bytes()[file.offset : file.offset + file.bytes]
            assert len(content) == file.bytes
            assert zlib.crc32(content) == file.crc32
            index = index_of(file.path)
            assert (file.offset, file.crc32) in [
                (entry.offset, entry.crc32) for entry in read_entries(open_store(root), index)
            ]


def test_a_read_only_folder_is_an_error_of_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root nothing is read-only, so the refusal is put where the kernel gives it."""
    real = os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    store = filesystem(tmp_path)
    errors = [
        outcome.error
        for outcome in store.consume([finished(layout="packed"), finished(layout="segment")])
    ]
    assert all("Permission denied" in error for error in errors)


def test_a_crash_between_blobs_and_lines_loses_only_what_was_not_reported(tmp_path: Path) -> None:
    """The tail that a crash leaves: bytes that no line names, and half a line."""
    write(tmp_path, finished(request=0), finished(request=1))
    segments = tmp_path / "tag" / "segments"
    (index,) = segments.glob("*.jsonl")
    with index.with_suffix(".seg").open("ab") as data:
        data.write(b"\xff" * 5000)
    with index.open("ab") as lines:
        lines.write(index.read_bytes()[:120])
    write(tmp_path, finished(request=2), owner="w.nextboot.0")
    assert len(list(segments.glob("*.seg"))) == 2
    reader = CaptureReader(tmp_path, "job_x")
    assert reader.requests() == [0, 1, 2]
    assert all(check.ok for check in reader.verify())
    assert len(list(read_entries(open_store(tmp_path), str(index.relative_to(tmp_path))))) == 2
