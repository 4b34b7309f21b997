"""A published file is whole, in place and inside the root; a failed group leaves nothing behind."""

import errno
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from midstream.workers import storage
from midstream.workers.storage import PendingFile, publish


def pending(path: str, rows: int = 3) -> PendingFile:
    data = np.arange(rows * 4, dtype="<f4").reshape(rows, 4)
    half = rows // 2
    tensors = [
        ("post_block.2", "float32", [rows, 4], [memoryview(data[:half]).cast("B") if half else b"", memoryview(data[half:]).cast("B")]),
        ("positions", "int64", [rows], [np.arange(rows, dtype="<i8").tobytes()]),
    ]
    return PendingFile(path, tensors, {"job": "j"}, rows=rows, layers=[2], positions=rows)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_groups_of_any_size_are_readable_and_carry_their_checksum(tmp_path: Path, count: int) -> None:
    files = [pending(f"tag/job{n}/p0000.a1.pp0.safetensors", rows=n + 1) for n in range(count)]
    for n, captured in enumerate(publish(tmp_path, files)):
        path = tmp_path / captured.path
        raw = path.read_bytes()
        assert (len(raw), zlib.crc32(raw)) == (captured.bytes, captured.crc32)
        tensors = load_file(path)
        assert tensors["post_block.2"].tolist() == np.arange((n + 1) * 4).reshape(n + 1, 4).tolist()
        manifest = json.loads(path.with_suffix(".json").read_text())
        assert (manifest["file"], manifest["bytes"], manifest["crc32"]) == (path.name, captured.bytes, captured.crc32)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("path", ["../out.safetensors", "/etc/out.safetensors", "tag/../../out.safetensors", ""])
def test_a_path_that_leaves_the_root_is_refused(tmp_path: Path, path: str) -> None:
    root = tmp_path / "captures"
    root.mkdir()
    with pytest.raises(ValueError, match="not inside the capture root"):
        publish(root, [pending("tag/ok.safetensors"), pending(path)])  # field case 40
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_contents_are_synced_before_the_rename_and_directories_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which a power cut cannot leave a name without its content, or a reported file without its name."""  # field case 22
    order: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        order.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recorded_rename(source: Path, target: Path) -> None:
        order.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    monkeypatch.setattr(storage, "_SYNC_SINGLY", 100)
    publish(tmp_path, [pending("tag/job/p.safetensors")])
    kinds = [kind for kind, _ in order]
    assert kinds[:4] == ["fsync", "fsync", "rename", "rename"]
    assert all(path.endswith(".tmp") for kind, path in order[:2])
    assert {str(tmp_path), str(tmp_path / "tag"), str(tmp_path / "tag" / "job")} <= {path for kind, path in order[4:]}


def test_many_files_cost_two_round_trips_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []  # field case 46
    syncfs = storage._syncfs
    monkeypatch.setattr(storage, "_syncfs", lambda descriptor: (calls.append("syncfs"), syncfs(descriptor)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    publish(tmp_path, [pending(f"tag/job{n}/p.safetensors") for n in range(50)])
    assert calls == ["syncfs", "syncfs"]


def test_a_full_disk_raises_and_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, seen = os.writev, []

    def full(descriptor: int, buffers: list) -> int:
        seen.append(descriptor)
        if len(seen) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(descriptor, buffers)

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, [pending(f"tag/job{n}/p.safetensors") for n in range(4)])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: os.write(descriptor, buffers[0][:7]))
    captured = publish(tmp_path, [pending("tag/job/p.safetensors", rows=9)])[0]
    raw = (tmp_path / captured.path).read_bytes()
    assert zlib.crc32(raw) == captured.crc32
