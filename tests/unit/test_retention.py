"""Is a job's capture removed whole, its space given back, and nobody else's touched?"""

import fcntl
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from capture_kit import filesystem, finished, values, write

from midstream.broker import retention
from midstream.client import CaptureReader
from midstream.schemas.errors import MidstreamError

LAYOUTS = ["packed", "per_file", "segment"]


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_of_a_job_goes_and_nothing_else(tmp_path: Path, layout: str) -> None:
    mine = [finished("job_x", n, layout=layout, tag=tag) for n in range(4) for tag in ("a", "b")]
    others = [finished("job_y", n, layout=layout, tag=tag) for n in range(4) for tag in ("a", "b")]
    write(tmp_path, *mine, *others)
    assert retention.delete(tmp_path, ["job_x"]) == ["job_x"]
    for tag in ("a", "b"):
        with pytest.raises(MidstreamError):
            CaptureReader(tmp_path, "job_x", tag=tag)
        reader = CaptureReader(tmp_path, "job_y", tag=tag)
        assert reader.requests() == [0, 1, 2, 3]
        assert all(check.ok for check in reader.verify())
    assert not any("job_x" in name for name in names(tmp_path))
    assert list((tmp_path / ".deleted").iterdir()) == []


def test_the_space_of_blobs_in_a_segment_is_given_back(tmp_path: Path) -> None:
    store = filesystem(tmp_path)  # open while it happens
    captures = [finished(f"job_{n}", positions=range(500), layout="segment", dtype="float32") for n in range(8)]
    store.consume(captures)
    before = retention.used_bytes(tmp_path)
    retention.delete(tmp_path, [f"job_{n}" for n in range(0, 8, 2)])
    assert retention.used_bytes(tmp_path) < 0.6 * before
    store.consume([finished("job_later", layout="segment")])
    assert CaptureReader(tmp_path, "job_later").requests() == [0]
    for n in range(1, 8, 2):
        np.testing.assert_array_equal(CaptureReader(tmp_path, f"job_{n}").array(3), values("post_block", 3, range(500)))
    store.close()


def test_a_segment_goes_when_its_last_blob_has_and_its_writer_is_done_with_it(tmp_path: Path) -> None:
    store = filesystem(tmp_path)
    store.consume([finished("job_x"), finished("job_y", request=1)])
    retention.delete(tmp_path, ["job_x", "job_y"])
    assert len(names(tmp_path)) == 2  # it may still be appended to
    store.consume([finished("job_z")])
    store.close()
    assert CaptureReader(tmp_path, "job_z").requests() == [0]
    retention.delete(tmp_path, ["job_z"])
    assert names(tmp_path) == []


def test_a_segment_that_its_writer_left_empty_goes_with_the_next_deletion(tmp_path: Path) -> None:
    store = filesystem(tmp_path)
    store.consume([finished("job_x")])
    retention.delete(tmp_path, ["job_x"])
    store.close()
    write(tmp_path, finished("job_y"), owner="w.other.0")
    retention.delete(tmp_path, ["job_y"])
    assert names(tmp_path) == []


def test_what_is_being_read_stays_until_it_is_not(tmp_path: Path) -> None:
    write(tmp_path, finished("job_x"), finished("job_y", layout="packed"))
    reader = CaptureReader(tmp_path, "job_x")
    assert retention.delete(tmp_path, ["job_x", "job_y"]) == ["job_y"]
    assert retention.unfinished(tmp_path) == ["job_x"]
    np.testing.assert_array_equal(reader.array(2), values("post_block", 2, [0, 1, 2]))
    reader.close()
    assert retention.delete(tmp_path, retention.unfinished(tmp_path)) == ["job_x"]
    assert (retention.unfinished(tmp_path), names(tmp_path)) == ([], [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deletion_that_was_interrupted_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    write(tmp_path, *(finished("job_x", n, layout=layout, tag=tag) for n in range(3) for tag in ("a", "b")))
    rename, punch = os.rename, retention._punch
    seen: list[int] = []

    def dies(*arguments: object) -> None:
        seen.append(1)
        if len(seen) > 1:
            raise KeyboardInterrupt
        (punch if layout == "segment" else rename)(*arguments)  # type: ignore[operator]

    if layout == "segment":
        monkeypatch.setattr(retention, "_punch", dies)
    else:
        monkeypatch.setattr(os, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        retention.delete(tmp_path, ["job_x"])
    monkeypatch.undo()
    for tag in ("a", "b"):
        with pytest.raises(MidstreamError):
            CaptureReader(tmp_path, "job_x", tag=tag)
    assert retention.unfinished(tmp_path) == ["job_x"]
    assert retention.delete(tmp_path, retention.unfinished(tmp_path)) == ["job_x"]
    assert names(tmp_path) == []


def test_deleting_what_is_not_there_is_done_at_once(tmp_path: Path) -> None:
    assert retention.delete(tmp_path / "nowhere", ["job_x"]) == ["job_x"]
    assert retention.delete(tmp_path, ["job_x"]) == ["job_x"]


def test_where_the_disk_knows_no_holes_zeros_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, finished("job_x", positions=range(40)), finished("job_y"))

    class NoHoles:
        @staticmethod
        def fallocate(*_: object) -> int:
            import ctypes
            import errno

            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(retention, "_libc", NoHoles)
    assert retention.delete(tmp_path, ["job_x"]) == ["job_x"]
    with pytest.raises(MidstreamError, match="deleted"):
        CaptureReader(tmp_path, "job_x")
    assert all(check.ok for check in CaptureReader(tmp_path, "job_y").verify())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_beside_a_deletion_get_everything_or_are_told(tmp_path: Path, layout: str) -> None:
    """Many rounds: readers open and read while another thread deletes."""
    rounds, readers, requests = 12, 3, 12
    bad: list[object] = []
    outcomes = {"whole": 0, "gone": 0}

    def read(job: str, go: threading.Barrier) -> None:
        go.wait()
        for _ in range(6):
            try:
                with CaptureReader(tmp_path, job) as reader:
                    for request in range(requests):
                        np.testing.assert_array_equal(reader.array(3, request=request), values("post_block", 3, [0, 1, 2]))
                    assert reader.requests() == list(range(requests))
                outcomes["whole"] += 1
            except MidstreamError as error:
                if error.kind not in ("gone", "not_found"):
                    bad.append(error)
                outcomes["gone"] += 1
            except AssertionError as error:
                bad.append(error)

    for number in range(rounds):
        job = f"job_{number}"
        write(tmp_path, *(finished(job, n, layout=layout) for n in range(requests)), owner=f"w.{number}", segment_bytes=20 << 10)
        go = threading.Barrier(readers + 1)
        threads = [threading.Thread(target=read, args=(job, go)) for _ in range(readers)]
        for thread in threads:
            thread.start()
        go.wait()
        retention.delete(tmp_path, [job])
        for thread in threads:
            thread.join()
        assert retention.delete(tmp_path, [job]) == [job]
    assert bad == []
    assert outcomes["gone"] > 0


def test_the_space_taken_counts_blocks_and_not_lengths(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "full").write_bytes(os.urandom(20_000))
    assert 20_000 <= retention.used_bytes(tmp_path) < 100_000


def test_a_lock_of_a_reader_is_given_up_with_the_reader(tmp_path: Path) -> None:
    (file,) = write(tmp_path, finished())
    reader = CaptureReader(tmp_path, "job_x")
    view = reader.raw(2)
    with (tmp_path / file.path).open("rb") as segment:
        with pytest.raises(BlockingIOError):
            fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
        reader.close()
        with pytest.raises(BlockingIOError):  # a view still shows the file
            fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
        del view
        fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lines_of_a_segment_name_their_job_where_deleting_looks_for_it(tmp_path: Path) -> None:
    """The job is found in a line without decoding it: the manifest must stay written that way."""
    (file,) = write(tmp_path, finished("job_x"))
    line = (tmp_path / file.path).with_suffix(".jsonl").read_bytes()
    assert json.loads(line)["manifest"]["job"] == "job_x"
    assert b'"job":"job_x"' in line
