"""Is a job's capture removed whole, its space given back, and nobody else's touched?"""

import ctypes
import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import s3_kit
from capture_kit import filesystem, finished, values, write
from refusal_kit import refuses

from midstream import CaptureReader, MidstreamError
from midstream.broker.artifacts import retention
from midstream.storage import file_store
from midstream.storage.store import ArtifactStore, Distant, open_store

LAYOUTS = ["packed", "per_file", "segment"]


def names(root: ArtifactStore | Path) -> list[str]:
    """The keys of everything in a store, of what is being deleted too."""
    if isinstance(root, Distant):
        return s3_kit.keys(root)
    folder = root if isinstance(root, Path) else Path(root.uri)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deletion_removes_only_the_jobs_files(tmp_path: Path, layout: str) -> None:
    mine = [finished("job_x", n, layout=layout, tag=tag) for n in range(4) for tag in ("a", "b")]
    others = [finished("job_y", n, layout=layout, tag=tag) for n in range(4) for tag in ("a", "b")]
    write(tmp_path, *mine, *others)
    assert retention.delete(open_store(tmp_path), ["job_x"]) == ["job_x"]
    for tag in ("a", "b"):
        with refuses():
            CaptureReader(tmp_path, "job_x", tag=tag)
        reader = CaptureReader(tmp_path, "job_y", tag=tag)
        assert reader.requests() == [0, 1, 2, 3]
        assert all(check.ok for check in reader.verify())
    assert not any("job_x" in name for name in names(tmp_path))
    assert list((tmp_path / ".deleted").iterdir()) == []


def test_the_space_of_blobs_in_a_segment_is_given_back(tmp_path: Path) -> None:
    store = filesystem(tmp_path)  # open while it happens
    captures = [
        finished(f"job_{n}", positions=range(500), layout="segment", dtype="float32")
        for n in range(8)
    ]
    store.consume(captures)
    before = open_store(tmp_path).used()
    retention.delete(open_store(tmp_path), [f"job_{n}" for n in range(0, 8, 2)])
    assert open_store(tmp_path).used() < 0.6 * before
    store.consume([finished("job_later", layout="segment")])
    assert CaptureReader(tmp_path, "job_later").requests() == [0]
    for n in range(1, 8, 2):
        np.testing.assert_array_equal(
            CaptureReader(tmp_path, f"job_{n}").array(3), values("post_block", 3, range(500))
        )
    store.close()


@pytest.mark.parametrize("store", ["folder"], indirect=True)
def test_a_segment_is_removed_after_its_last_blob_and_writer(store: ArtifactStore) -> None:
    disk = filesystem(store)
    disk.consume([finished("job_x"), finished("job_y", request=1)])
    retention.delete(store, ["job_x", "job_y"])
    assert len(names(store)) == 2  # it may still be appended to
    disk.consume([finished("job_z")])
    disk.close()
    assert CaptureReader(store, "job_z").requests() == [0]
    retention.delete(store, ["job_z"])
    assert names(store) == []


def test_a_segment_goes_with_its_last_blob_and_writer(store: ArtifactStore) -> None:
    disk = filesystem(store)
    disk.consume([finished("job_x")])
    retention.delete(store, ["job_x"])
    disk.close()
    write(store, finished("job_y"), owner="w.other.0")
    retention.delete(store, ["job_y"])
    assert names(store) == []
    assert retention.delete(store, ["job_x"]) == ["job_x"]


@pytest.mark.parametrize("store", ["folder"], indirect=True)
def test_files_being_read_are_kept_until_released(store: ArtifactStore) -> None:
    write(store, finished("job_x"), finished("job_y", layout="packed"))
    reader = CaptureReader(store, "job_x")
    assert retention.delete(store, ["job_x", "job_y"]) == ["job_y"]
    assert store.marks() == ["job_x"]
    view = reader.raw(2)
    np.testing.assert_array_equal(reader.array(2), values("post_block", 2, [0, 1, 2]))
    reader.close()
    assert retention.delete(store, store.marks()) == [], "a view still shows the file"
    del view
    assert retention.delete(store, store.marks()) == ["job_x"]
    assert store.marks() == []
    assert names(store) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("store", ["folder"], indirect=True)
def test_an_interrupted_deletion_is_completed_by_the_next(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    write(
        store,
        *(finished("job_x", n, layout=layout, tag=tag) for n in range(3) for tag in ("a", "b")),
    )
    rename = os.rename
    punch = file_store._punch
    seen: list[int] = []

    def dies(*arguments: object) -> None:
        seen.append(1)
        if len(seen) > 1:
            raise KeyboardInterrupt
        (punch if layout == "segment" else rename)(*arguments)  # type: ignore[operator]

    if layout == "segment":
        monkeypatch.setattr(file_store, "_punch", dies)
    else:
        monkeypatch.setattr(os, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        retention.delete(store, ["job_x"])
    monkeypatch.undo()
    for tag in ("a", "b"):
        with refuses():
            CaptureReader(store, "job_x", tag=tag)
    assert store.marks() == ["job_x"]
    assert retention.delete(store, store.marks()) == ["job_x"]
    assert names(store) == []


def test_without_a_capture_root_nothing_counts_as_deleted(tmp_path: Path) -> None:
    with pytest.raises(retention.RemovalError, match="nowhere") as caught:
        retention.delete(open_store(tmp_path / "nowhere"), ["job_x"])
    assert caught.value.done == []
    filesystem(tmp_path / "nowhere").close()  # whoever writes captures makes it when it starts
    assert retention.delete(open_store(tmp_path / "nowhere"), ["job_x"]) == ["job_x"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_written_after_a_deletion_are_hidden_then_removed(
    tmp_path: Path, layout: str
) -> None:
    write(tmp_path, finished("job_x", 0, layout=layout))
    assert retention.delete(open_store(tmp_path), ["job_x"], keep=["job_x"]) == ["job_x"]
    write(tmp_path, finished("job_x", 1, layout=layout), owner="w.late.0")
    for source in (tmp_path, tmp_path / "tag"):
        with refuses(kind="gone"):
            CaptureReader(source, "job_x")
    assert retention.delete(open_store(tmp_path), ["job_x"]) == ["job_x"]
    assert open_store(tmp_path).marks() == []
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "damage", [bytes(100), b'{"file":"\xff"}', b'{"manifest":{"job":"\xff"}}', b"[]"]
)
def test_a_damaged_line_does_not_stop_the_deletion_of_other_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    jobs = ["job_x", "job_y", "job_z"]
    file, *_ = write(tmp_path, *(finished(job, layout="segment") for job in jobs))
    write(tmp_path, finished("job_y", 1, layout="segment"), owner="w.other.0")
    write(tmp_path, finished("job_z", 1, layout="packed"))
    index = (tmp_path / file.path).with_suffix(".jsonl")
    index.write_bytes(damage + b"\n" + b'{"manifest":{"job":"job_x"}\n' + index.read_bytes())
    assert retention.delete(open_store(tmp_path), jobs) == jobs
    assert names(tmp_path) == sorted(
        str(path.relative_to(tmp_path)) for path in (index, index.with_suffix(".seg"))
    )
    blobs = index.with_suffix(".seg").read_bytes()
    # behind its own damaged line
    assert [blobs[at : at + 8] != bytes(8) for at in range(0, len(blobs), 4096)] == [
        True,
        False,
        False,
    ]
    assert [record.message for record in caplog.records if index.name in record.message]


@pytest.mark.parametrize("store", ["folder"], indirect=True)
def test_a_job_that_cannot_be_removed_does_not_hold_up_the_others(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = ["job_x", "job_y", "job_z"]
    write(store, *(finished(job, layout="packed") for job in jobs))
    rename = os.rename

    def refusing(source: Path, target: Path) -> None:
        if source.name == "job_x":
            raise PermissionError(13, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    with pytest.raises(
        retention.RemovalError, match=r"1 of 3 jobs, the first of them job_x.*Permission denied"
    ) as caught:
        retention.delete(store, jobs)
    assert caught.value.done == ["job_y", "job_z"]
    assert store.marks() == ["job_x"]
    monkeypatch.undo()
    assert retention.delete(store, ["job_x"]) == ["job_x"]
    assert names(store) == []


def test_concurrent_deletions_of_one_job_succeed(store: ArtifactStore) -> None:
    """As several sweepers and an API do: rounds in which each goes through every step at about the
    same time.
    """
    errors: list[BaseException] = []
    for number in range(2 if isinstance(store, Distant) else 12):
        jobs = [f"job_{number}_{n}" for n in range(3)]
        write(
            store,
            *(finished(job, q, layout=layout) for job in jobs for q, layout in enumerate(LAYOUTS)),
            owner=f"w.{number}",
        )
        go = threading.Barrier(4)

        def deletes(keep: list[str], jobs: list[str] = jobs, go: threading.Barrier = go) -> None:
            go.wait()
            try:
                for _ in range(3):
                    retention.delete(store, jobs, keep)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=deletes, args=(keep,)) for keep in ([], [], jobs, [])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert retention.delete(store, jobs) == jobs
        assert store.marks() == []
        assert names(store) == []


@pytest.mark.parametrize("store", ["folder"], indirect=True)
def test_without_hole_punching_zeros_are_written(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, finished("job_x", positions=range(40)), finished("job_y"))

    def no_holes(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(file_store._libc(), "fallocate", no_holes)
    assert retention.delete(store, ["job_x"]) == ["job_x"]
    with refuses("deleted"):
        CaptureReader(store, "job_x")
    assert all(check.ok for check in CaptureReader(store, "job_y").verify())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_during_a_deletion_get_all_rows_or_an_error(
    store: ArtifactStore, layout: str
) -> None:
    """Many rounds: readers open and read while another thread deletes."""
    rounds, requests = (3, 4) if isinstance(store, Distant) else (12, 12)
    bad: list[object] = []
    outcomes = {"whole": 0, "gone": 0}

    def read(job: str, go: threading.Barrier) -> None:
        go.wait()
        for _ in range(4):
            try:
                with CaptureReader(store, job) as reader:
                    for request in range(requests):
                        np.testing.assert_array_equal(
                            reader.array(3, request=request), values("post_block", 3, [0, 1, 2])
                        )
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
        write(
            store,
            *(finished(job, n, layout=layout) for n in range(requests)),
            owner=f"w.{number}",
            segment_bytes=20 << 10,
        )
        go = threading.Barrier(4)
        threads = [threading.Thread(target=read, args=(job, go)) for _ in range(3)]
        for thread in threads:
            thread.start()
        go.wait()
        retention.delete(store, [job])
        for thread in threads:
            thread.join()
        assert retention.delete(store, [job]) == [job]
    assert bad == []
    assert outcomes["gone"] > 0


def test_the_space_taken_counts_blocks_of_files_that_stay(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "full").write_bytes(os.urandom(20_000))
    assert 20_000 <= open_store(tmp_path).used() < 100_000


def test_files_removed_while_measuring_do_not_stop_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in range(10):
        (tmp_path / str(name)).write_bytes(os.urandom(20_000))
    whole = open_store(tmp_path).used()
    scandir = os.scandir

    class Racing:
        def __init__(self, path: Path) -> None:
            with scandir(path) as entries:
                self._entries = list(entries)
            Path(self._entries[0].path).unlink()

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self._entries

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Racing)
    assert open_store(tmp_path).used() == whole * 9 // 10
