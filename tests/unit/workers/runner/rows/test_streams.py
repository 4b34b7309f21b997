"""A long capture is written while its request runs: the file equals one written at the end, and
memory holds a window of it.
"""

import errno
import gc
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3_kit
from memory_store import MemoryStore
from plane_kit import Rig
from rank_kit import HIDDEN, Request, stream_of
from s3_kit import FaultProxy
from safetensors.numpy import load_file

from midstream.client import CaptureReader
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.specs import StoredCapture
from midstream.storage.file_store import FileDraft, FileStore
from midstream.workers.runner.base.row_index import Keeping, KeptBlock
from midstream.workers.runner.rows import streams

WIDE = {hook: [0, 1] for hook in HOOKS}
ROWS = 12 * HIDDEN * 4  # bytes of a position of those


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return narrow(tmp_path, monkeypatch)


def narrow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, window: int = 8 * ROWS, **options: Any
) -> Rig:
    """A rank that holds a window of 8 positions, and lets rows go one position at a time."""
    rig = Rig(folder, **{"row_store_mib": 0} | options)
    monkeypatch.setattr(rig.plane._streams, "_window", window)
    return rig


def long(
    number: int = 1, prompt: int = 20, total: int = 50, most: int = 40, **options: Any
) -> Request:
    capture = StoredCapture(
        **{"sites": WIDE, "positions": "all", "tag": "t", "layout": "packed"} | options
    )  # type: ignore[arg-type]
    return Request(number, prompt, total, [capture], max_tokens=most)


def run(rig: Rig, request: Request, steps: Sequence[tuple[int, int]] = ()) -> None:
    """The steps given as (first position, count), or the prompt in two and each generated token in
    its own.
    """
    half = request.prompt_tokens // 2
    single = [(at, 1) for at in range(request.prompt_tokens, request.total - 1)]
    for number, (first, count) in enumerate(
        steps or [(0, half), (half, request.prompt_tokens - half), *single]
    ):
        rig.step((request, first, count), new=[] if number else [request])


def check(
    rig: Rig, request: Request, positions: Sequence[int] | None = None, sites: Any = None
) -> None:
    """The request's file holds exactly these rows, as our reader and safetensors' see it."""
    wanted = list(range(request.total - 1)) if positions is None else list(positions)
    reader = rig.reader(request)
    assert reader.positions() == wanted
    for hook, layers in (sites or WIDE).items():
        for layer in layers:
            rows = stream_of(request.number, hook, layer, 0, request.total)[wanted]
            assert (reader.array(layer, hook) == rows).all(), (hook, layer)
    (path,) = (rig.directory / "captures" / "t" / f"j{request.number}").glob("*.safetensors")
    tensors = load_file(path)
    assert tensors["token_ids"].tolist() == [1000 + position for position in wanted]


def test_rows_leave_while_the_request_runs_and_the_file_is_whole(rig: Rig) -> None:
    request = long()
    run(rig, request)
    recording = request_recording(rig, request)
    wait_for(rig)
    gc.collect()
    assert recording.num_rows <= 2 * 12, "the rest has left"
    assert (
        rig.plane._mover.submit(
            lambda: (rig.plane._pieces.collect(), rig.plane._pieces.alive)
        ).result()[1]
        <= 2 << 14
    )
    rig.step(finished=[request])
    (receipt,) = rig.receipts()  # also: the CRC32 of what is in the file
    assert (receipt.status, receipt.files[0].rows) == ("ok", 49 * 12)
    check(rig, request)


def request_recording(rig: Rig, request: Request) -> Any:
    return rig.plane._tracked[str(request.number)].recordings[0]


def wait_for(rig: Rig) -> None:
    """Until the writers have nothing to do."""
    rig.plane._mover.submit(lambda: None).result()
    done = threading.Event()
    for _ in range(2):  # the thread lets go of a part after it has written it
        done.clear()
        rig.plane._writer.stream(done.set, 0)
        assert done.wait(10)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "per_file"},
        {"layout": "segment"},
        {"dtype": "bfloat16"},
        {"consumers": ["filesystem", "logging"]},
    ],
)
@pytest.mark.parametrize("total", [59, 50, 21])
def test_a_streamed_file_equals_one_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], total: int
) -> None:
    """Also where the request ends before it had to, and the tensors are moved together."""
    found = []
    for name, window in (("streamed", 8 * ROWS), ("whole", 1 << 30)):
        rig = narrow(tmp_path / name, monkeypatch, window)
        request = long(total=total, **options)
        run(rig, request)
        rig.step(finished=[request])
        (receipt,) = rig.receipts()
        assert receipt.status == "ok"
        reader = rig.reader(request)
        rows = {
            (hook, layer): reader.array(layer, hook).tobytes() for hook in HOOKS for layer in (0, 1)
        }
        found.append((rows, reader.positions(), reader.token_ids(), len(receipt.files)))
    assert found[0] == found[1]


def test_a_position_that_is_computed_again_is_overwritten(rig: Rig) -> None:
    """After a preemption, or where a draft token was rejected."""
    request = long()
    request.number, other = 1, 9
    run(rig, request, [(0, 20), *((at, 1) for at in range(20, 35))])
    wait_for(rig)
    tracked = rig.plane._tracked["1"]
    rig.plane._tracked["9"] = tracked
    request.number = other  # what is computed from now on is something else
    for first, count in [(10, 10), *((at, 1) for at in range(20, 49))]:
        rig.step((request, first, count))
    rig.plane._tracked.pop("9")
    request.number = 1
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert receipt.status == "ok"
    rows = rig.reader(request).array(1, "post_block")
    assert (rows[:10] == stream_of(1, "post_block", 1, 0, 10)).all()
    assert (rows[10:] == stream_of(9, "post_block", 1, 10, 39)).all()


def test_rows_beyond_the_end_and_beyond_the_bound_are_not_in_the_file(rig: Rig) -> None:
    request = long(total=50, most=31)  # drafts behind the last token that may be generated
    run(rig, request, [(0, 20), *((at, 4) for at in range(20, 52, 4))])
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert receipt.status == "ok"
    check(rig, request)


def test_scattered_positions_lie_together(rig: Rig) -> None:
    request = long(sites={"post_block": [0, 1]}, positions="all", every_n=3)
    rig.plane._streams._window = 20
    run(rig, request)
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert receipt.status == "ok"
    check(rig, request, [*range(20), *range(20, 49, 3)], {"post_block": [0, 1]})


def test_dropped_positions_are_holes_that_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = narrow(tmp_path, monkeypatch, capture_overload="drop")
    request = long()
    run(rig, request, [(0, 20), (20, 1), (21, 1)])
    wait_for(rig)
    rig.plane._writer.backlog += 2 << 20
    rig.step((request, 22, 1))
    rig.step((request, 23, 1))
    rig.plane._writer.backlog -= 2 << 20
    for at in range(24, 49):
        rig.step((request, at, 1))
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert (receipt.status, receipt.files[0].dropped) == ("partial", [22, 23])
    check(rig, request, [position for position in range(49) if position not in (22, 23)])


def test_rows_of_an_unfinished_block_stay_until_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = narrow(tmp_path, monkeypatch, row_store_mib=1)
    rig.plane.block_size = 16
    first, second = long(1, prompt=40, total=42, most=10), long(2, prompt=40, total=42, most=10)
    block = KeptBlock("1", 0, 0, 16, 7)
    rig.step((first, 0, 10), new=[first])
    wait_for(rig)
    rig.step((first, 10, 30), keeping=Keeping(keep=[block]))
    rig.step((first, 40, 1))
    rig.step(
        (second, 16, 24),
        new=[second],
        keeping=Keeping(serve=[block._replace(request_id="2")]),
        cached=16,
    )
    rig.step((second, 40, 1))
    rig.step(finished=[first, second])
    receipts = rig.receipts()
    assert [(receipt.status, receipt.files[0].reused) for receipt in receipts] == [
        ("ok", 0),
        ("ok", 16 * 12),
    ]
    check(rig, first)
    rows = rig.reader(second).array(1, "post_block")
    assert (rows[:16] == stream_of(1, "post_block", 1, 0, 16)).all()
    assert (rows[16:] == stream_of(2, "post_block", 1, 16, 25)).all()


def test_a_store_without_drafts_gets_the_rows_from_a_scratch_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = narrow(tmp_path, monkeypatch)
    monkeypatch.setattr(rig.plane._streams, "_store", MemoryStore())
    request = long()
    run(rig, request)
    wait_for(rig)
    assert not request_recording(rig, request).stream._draft.adoptable
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert receipt.status == "ok"
    check(rig, request)
    assert os.listdir(tmp_path / "spill") == []


def test_a_full_disk_fails_the_capture_and_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    request, beside = long(1), long(2, total=24)
    with monkeypatch.context() as broken:
        broken.setattr(FileDraft, "write", full)
        run(rig, request)
        wait_for(rig)
        assert request_recording(rig, request).stream._draft is None, "its blocks are free at once"
    rig.step((beside, 0, 20), new=[beside])
    for at in range(20, 23):
        rig.step((beside, at, 1))
    rig.step(finished=[request, beside])
    failed, fine = rig.receipts()
    assert (failed.status, failed.kind) == ("error", "capture_failed")
    assert "No space left on device" in failed.message
    assert fine.status == "ok"
    check(rig, beside)


def test_a_cancelled_capture_leaves_nothing_on_the_disk(rig: Rig) -> None:
    request = long()
    run(rig, request)
    wait_for(rig)
    stream = request_recording(rig, request).stream
    held = FileStore(rig.directory / "captures").used()
    rig.plane.end("j1.0.1", -1)
    rig.step(aborted=[request])
    draft = stream._draft
    descriptor = draft._descriptor
    assert os.fstat(descriptor).st_size > held
    del stream, draft, request
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert rig.receipts() == []
    assert not [path for path in (rig.directory / "captures").rglob("*") if path.is_file()]


def test_values_that_are_not_finite_are_counted_in_streamed_rows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the stored dtype cannot hold; a row that is computed again counts as it was computed
    last.
    """
    huge = StoredCapture(
        sites={"post_block": [1]}, positions="all", tag="t", dtype="float16", layout="packed"
    )
    request = Request(400, 20, 50, [huge], max_tokens=40)  # its rows are beyond 65504
    rig.plane._streams._window = 20
    run(rig, request)
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert (receipt.status, receipt.files[0].non_finite) == ("ok", 49)


def test_a_failed_commit_is_tried_again_with_a_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a name gets one once."""
    from midstream.storage import file_store

    commit, failures = file_store.FileWriter.commit, [1]

    def failing(writer: Any) -> None:
        if failures:
            failures.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        commit(writer)

    monkeypatch.setattr(file_store.FileWriter, "commit", failing)
    two = [long(1), long(2)]
    for request in two:
        run(rig, request)
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(10)

    rig.plane._writer.stream(hold, 0)  # both are then written as one group
    held.wait(10)
    rig.step(finished=two)
    go.set()
    assert [receipt.status for receipt in rig.receipts()] == ["ok", "ok"]
    for request in two:
        check(rig, request)


@pytest.mark.parametrize("seed", range(4))
def test_streamed_rows_equal_those_of_any_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Several requests, random chunks, drafts that are rejected, preemptions."""
    rng = np.random.default_rng(seed)
    rig = narrow(tmp_path, monkeypatch, int(rng.integers(1, 10)) * ROWS)
    requests = [
        long(number, prompt=int(rng.integers(5, 30)), total=int(rng.integers(40, 60)), most=60)
        for number in range(1, 4)
    ]
    at = {request.number: 0 for request in requests}
    begun: set[int] = set()
    while any(at[request.number] < request.total - 1 for request in requests):
        windows = []
        for request in requests:
            first = at[request.number]
            if first >= request.total - 1 or rng.random() < 0.3:
                continue
            if first and rng.random() < 0.03:
                first = 0  # preempted
            count = (
                int(rng.integers(1, 9))
                if first < request.prompt_tokens
                else int(rng.integers(1, 4))
            )
            taken = (
                count if first + count <= request.prompt_tokens else int(rng.integers(1, count + 1))
            )
            windows.append((request, first, count))
            at[request.number] = first + taken
        new = [request for request, _, _ in windows if request.number not in begun]
        begun |= {request.number for request in new}
        if windows:
            rig.step(*windows, new=new)
    rig.step(finished=requests)
    assert [receipt.status for receipt in rig.receipts()] == ["ok"] * 3
    for request in requests:
        check(rig, request)


def test_the_header_has_room_for_the_longest_manifest(
    monkeypatch: pytest.MonkeyPatch, rig: Rig
) -> None:
    """A request that captures all that it may, with the largest token ids and every row not
    finite.
    """
    request = long(total=59)
    monkeypatch.setattr(
        streams, "_LARGEST", 2000
    )  # a digit more than needed: no slack hides a mistake
    run(rig, request)
    rig.step(finished=[request])
    assert [receipt.status for receipt in rig.receipts()] == ["ok"]
    check(rig, request)


def test_a_capture_within_the_window_does_not_stream(rig: Rig) -> None:
    short, unbounded = long(1, prompt=4, total=6, most=4), long(2, most=0)
    rig.step((short, 0, 4), (unbounded, 0, 20), new=[short, unbounded])
    assert [request_recording(rig, request).stream for request in (short, unbounded)] == [
        None,
        None,
    ]
    assert request_recording(rig, unbounded).pieces()


def test_a_long_capture_goes_to_a_bucket_from_a_scratch_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: FaultProxy
) -> None:
    uri = s3_kit.uri(s3)
    rig = narrow(tmp_path, monkeypatch, capture_root=uri)
    request = long()
    run(rig, request)
    assert s3.count("PUT") == 0
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert (receipt.status, receipt.files[0].rows) == ("ok", 49 * 12)
    reader = CaptureReader(uri, f"j{request.number}")
    for hook in HOOKS:
        np.testing.assert_array_equal(
            reader.array(1, hook), stream_of(request.number, hook, 1, 0, request.total)[:49]
        )
    assert all(check.ok for check in reader.verify())
    assert not [
        path
        for folder in ("captures", "spill")
        for path in (tmp_path / folder).rglob("*")
        if path.is_file()
    ]
