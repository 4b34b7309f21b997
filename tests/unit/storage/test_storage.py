"""A published blob is whole, in place and inside the root; a failed group leaves nothing behind; a
segment survives a crash.
"""

import errno
import json
import os
import resource
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_kit import finished, values
from safetensors.numpy import load, load_file

from midstream.storage import blobs, file_store
from midstream.storage.blobs import SEGMENT_ALIGNMENT, FileBytes, read_entries
from midstream.storage.file_store import FileSegment
from midstream.storage.store import open_store
from midstream.workers.runner.files.layouts import blob_of


def blob(request: int = 0, rows: int = 3) -> FileBytes:
    capture = finished(request=request, positions=range(rows), dtype="float32")
    return blob_of(capture, capture.sites)


def pending(key: str, rows: int = 3) -> tuple[str, FileBytes]:
    return key, blob(rows=rows)


def publish(root: Path, files: Sequence[tuple[str, FileBytes]]) -> None:
    blobs.publish(open_store(root), files)


def opened(root: Path, key: str = "tag/segments/w.0.seg") -> FileSegment:
    return open_store(root).segment(key)


def contents(root: Path) -> dict[str, bytes]:
    """Of every file below `root`, by name."""
    return {path.name: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def requests(root: Path) -> list[int]:
    """Of the blobs that the segment's index names."""
    return [
        entry.manifest.request for entry in read_entries(open_store(root), "tag/segments/w.0.jsonl")
    ]


# field case 47
@pytest.mark.parametrize("count", [1, 3, 20])
def test_groups_of_any_size_are_readable_and_carry_their_checksum(
    tmp_path: Path, count: int
) -> None:
    files = [pending(f"tag/job{n}/p0000.a1.pp0.safetensors", rows=n + 1) for n in range(count)]
    publish(tmp_path, files)
    for n, (key, one) in enumerate(files):
        path = tmp_path / key
        raw = path.read_bytes()
        assert len(raw) == one.size
        assert zlib.crc32(raw) == one.crc32
        assert values("post_block", 3, range(n + 1)).tobytes() in raw, "as they are"
        np.testing.assert_array_equal(
            load_file(path)["post_block.2"], values("post_block", 2, range(n + 1))
        )
        beside = json.loads(path.with_suffix(".json").read_text())
        assert beside["file"] == path.name
        assert beside["bytes"] == one.size
        assert beside["crc32"] == one.crc32
    assert not list(tmp_path.rglob("*.tmp"))


# field case 40
@pytest.mark.parametrize(
    "path", ["../out.safetensors", "/etc/out.safetensors", "tag/../../out.safetensors", ""]
)
def test_a_path_that_leaves_the_root_is_refused(tmp_path: Path, path: str) -> None:
    root = tmp_path / "captures"
    root.mkdir()
    with pytest.raises(ValueError, match="not inside the capture root"):
        publish(root, [pending("tag/ok.safetensors"), pending(path)])
    for place in (open_store(root).segment, open_store(root).draft):
        with pytest.raises(ValueError, match="not inside the capture root"):
            place(path)
    assert contents(tmp_path) == {}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which writes, syncs and renames happen, in order, each with the path."""
    seen: list[tuple[str, str]] = []

    def noting(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def noted(first: Any, *more: Any) -> Any:
            path = more[0] if name == "rename" else os.readlink(f"/proc/self/fd/{first}")
            seen.append((name, str(path)))
            return real(first, *more)

        return noted

    for name in ("fsync", "fdatasync", "rename", "pwritev"):
        monkeypatch.setattr(os, name, noting(name))
    return seen


# field case 22
def test_contents_are_synced_before_the_rename_and_directories_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, str]]
) -> None:
    """The order in which a power cut cannot leave a name without its content, or a reported file
    without its name.
    """
    monkeypatch.setattr(file_store, "_SYNC_SINGLY", 100)
    publish(tmp_path, [pending("tag/job/p.safetensors")])
    durable = [step for step in steps if step[0] != "pwritev"]
    assert [kind for kind, _ in durable[:4]] == ["fsync", "fsync", "rename", "rename"]
    assert all(path.endswith(".tmp") for _, path in durable[:2])
    assert {str(tmp_path), str(tmp_path / "tag"), str(tmp_path / "tag" / "job")} <= {
        path for _, path in durable[4:]
    }


# field case 22
def test_a_segments_blobs_are_synced_before_the_lines_that_name_them(
    tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    segment = opened(tmp_path)
    assert {str(tmp_path), str(tmp_path / "tag"), str(tmp_path / "tag" / "segments")} <= {
        path for _, path in steps
    }
    steps.clear()
    blobs.append(segment, [blob(request) for request in range(30)])
    segment.close()
    assert [(kind, Path(path).suffix) for kind, path in steps] == [
        ("pwritev", ".seg"), ("fdatasync", ".seg"), ("pwritev", ".jsonl"), ("fdatasync", ".jsonl"),
    ]  # fmt: skip


# field case 46
def test_many_files_cost_two_round_trips_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    syncfs = file_store._syncfs
    monkeypatch.setattr(
        file_store, "_syncfs", lambda descriptor: (calls.append("syncfs"), syncfs(descriptor))
    )
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    publish(tmp_path, [pending(f"tag/job{n}/p.safetensors") for n in range(50)])
    assert calls == ["syncfs", "syncfs"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os,
        "pwritev",
        lambda descriptor, buffers, offset: os.pwrite(descriptor, buffers[0][:7], offset),
    )
    key, one = pending("tag/job/p.safetensors", rows=9)
    publish(tmp_path, [(key, one)])
    assert zlib.crc32((tmp_path / key).read_bytes()) == one.crc32


# --- Segments ---


def test_blobs_of_a_segment_begin_at_pages_and_are_whole_files(tmp_path: Path) -> None:
    segment = opened(tmp_path)
    offsets = blobs.append(segment, [blob(0), blob(1, rows=900)]) + blobs.append(segment, [blob(2)])
    segment.close()
    assert [offset % SEGMENT_ALIGNMENT for offset in offsets] == [0, 0, 0]
    raw = (tmp_path / "tag/segments/w.0.seg").read_bytes()
    entries = list(read_entries(open_store(tmp_path), "tag/segments/w.0.jsonl"))
    assert [(entry.file, entry.offset, entry.manifest.request) for entry in entries] == [
        ("w.0.seg", at, n) for n, at in enumerate(offsets)
    ]
    for entry in entries:
        part = raw[entry.offset : entry.offset + entry.bytes]
        assert zlib.crc32(part) == entry.crc32
        np.testing.assert_array_equal(
            load(part)["post_block.3"], values("post_block", 3, entry.manifest.positions)
        )


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_torn_last_line_is_no_blob(tmp_path: Path, cut: int) -> None:
    segment = opened(tmp_path)
    blobs.append(segment, [blob(0)])
    blobs.append(segment, [blob(1)])
    segment.close()
    index = tmp_path / "tag/segments/w.0.jsonl"
    index.write_bytes(index.read_bytes()[:-cut])
    assert requests(tmp_path) == [0]


def test_a_segment_that_is_there_is_never_appended_to(tmp_path: Path) -> None:
    """What a crash left in it stays as it is."""
    segment = opened(tmp_path)
    blobs.append(segment, [blob(0)])
    segment.close()
    before = contents(tmp_path)
    with pytest.raises(FileExistsError):
        opened(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("failing", [".seg", ".jsonl"])
def test_a_group_that_cannot_be_appended_leaves_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    segment = opened(tmp_path)
    blobs.append(segment, [blob(0)])
    before = contents(tmp_path)
    pwritev = os.pwritev

    def full(descriptor: int, buffers: list, offset: int) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(failing):
            return pwritev(descriptor, buffers, offset)
        os.pwrite(descriptor, b"half of it", offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        blobs.append(segment, [blob(1), blob(2)])
    assert contents(tmp_path) == before
    monkeypatch.undo()
    assert segment.usable
    blobs.append(segment, [blob(3)])
    assert requests(tmp_path) == [0, 3]


def test_after_a_failed_sync_a_segment_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a lost write once; the next sync would succeed without it."""
    segment = opened(tmp_path)

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        blobs.append(segment, [blob(0)])
    assert not segment.usable
    assert requests(tmp_path) == []


# --- Disks that refuse ---


@pytest.fixture
def short_files() -> Iterator[None]:
    """Files of this process may not grow beyond 64 KiB: the kernel's own refusal, for everybody to
    have.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# field case 19
def test_a_file_that_may_not_grow_raises_and_leaves_nothing(
    tmp_path: Path, short_files: None
) -> None:
    with pytest.raises(OSError, match="File too large"):
        publish(
            tmp_path,
            [pending("tag/job/small.safetensors"), pending("tag/job/large.safetensors", rows=4000)],
        )
    assert contents(tmp_path) == {}


# field case 19
def test_a_directory_at_the_target_path_raises(tmp_path: Path) -> None:
    (tmp_path / "tag").write_text("a file where a folder should be")
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        publish(tmp_path, [pending("tag/job/p.safetensors")])
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        opened(tmp_path)
