"""A long capture is written while its request runs: the file equals one written at the end, and
memory holds a window of it. A capture with a window stores what slicing a whole one gives.
"""

import errno
import gc
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import s3_kit
from plane_kit import Rig
from rank_kit import HIDDEN, Request, stream_of
from s3_kit import FaultProxy
from safetensors.numpy import load_file

from midstream.client import CaptureReader
from midstream.schemas.prompts.selectors import HOOKS, PositionSelector, PositionWindow, Span
from midstream.schemas.prompts.windows import Around, HeadAndTail, When
from midstream.schemas.requests.specs import StoredCapture
from midstream.storage.file_store import FileDraft, FileStore, FileWriter
from midstream.workers.runner.base.row_index import Keeping, KeptBlock
from midstream.workers.runner.files import streams
from midstream.workers.runner.files.streams import RecordingFile
from midstream.workers.runner.rows.capture import LATE, SPAN

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
    monkeypatch.setattr(rig.plane._rows.streams, "_window", window)
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
    assert load_file(path)["token_ids"].tolist() == [1000 + position for position in wanted]


def test_rows_leave_while_the_request_runs_and_the_file_is_whole(rig: Rig) -> None:
    request = long()
    run(rig, request)
    recording = request_recording(rig, request)
    wait_for(rig)
    assert recording.nbytes <= 2 * ROWS, "the rest has left"
    rig.plane._arena.take(1, 1)  # it notices what is free again
    assert rig.plane._arena.used <= 3 * ROWS
    receipt = rig.ended(request)  # also: the CRC32 of what is in the file
    assert receipt.status == "ok"
    assert receipt.files[0].rows == 49 * 12
    check(rig, request)


def test_rows_of_a_prompt_leave_when_it_is_over(rig: Rig) -> None:
    """The writers begin then, not when the request ends after many more tokens."""
    request = long(positions="all_prompt")
    for number, at in enumerate((0, *range(20, 24))):
        rig.step((request, at, 1 if number else 20), new=[] if number else [request])
    wait_for(rig)
    assert request_recording(rig, request).stream.begun
    rig.step(finished=[request])
    assert rig.told()["j1"].status == "ok"


def request_recording(rig: Rig, request: Request) -> Any:
    return rig.plane._tracked[str(request.number)].recordings[0]


def written(rig: Rig, request: Request) -> RecordingFile:
    return rig.desk._streams[request_recording(rig, request).stream.begun]


def wait_for(rig: Rig) -> None:
    """Until the writers have nothing to do."""
    for _ in range(2):  # the thread lets go of a part after it has written it
        done = threading.Event()
        rig.writer.stream(done.set, 0)
        assert done.wait(60)


@pytest.mark.parametrize(
    ("total", "options"),
    [
        (59, {}),
        (21, {}),
        (50, {"layout": "per_file"}),
        (50, {"layout": "segment"}),
        (50, {"dtype": "bfloat16"}),
        (50, {"consumers": ["filesystem", "logging"]}),
    ],
)
def test_a_streamed_file_equals_one_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], total: int
) -> None:
    """Also where the request ends before it had to, and the tensors are moved together."""
    found = []
    for name, window in (("streamed", 8 * ROWS), ("whole", 1 << 30)):
        rig = narrow(tmp_path / name, monkeypatch, window)
        request = long(total=total, **options)
        run(rig, request)
        receipt = rig.ended(request)
        assert receipt.status == "ok"
        reader = rig.reader(request)
        rows = {
            (hook, layer): reader.array(layer, hook).tobytes() for hook in HOOKS for layer in (0, 1)
        }
        found.append((rows, reader.positions(), reader.token_ids(), len(receipt.files)))
    assert found[0] == found[1]


def test_scattered_positions_lie_together(rig: Rig) -> None:
    request = long(sites={"post_block": [0, 1]}, positions="all", every_n=3)
    rig.plane._rows.streams._window = 20
    run(rig, request)
    assert rig.ended(request).status == "ok"
    check(rig, request, [*range(20), *range(20, 49, 3)], {"post_block": [0, 1]})


def test_rows_of_an_unfinished_block_stay_until_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = narrow(tmp_path, monkeypatch, row_store_mib=1)
    rig.plane.block_size = 16
    first = long(1, prompt=40, total=42, most=10)
    second = long(2, prompt=40, total=42, most=10)
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


def test_a_full_disk_fails_the_capture_and_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    request = long(1)
    beside = long(2, total=24)
    with monkeypatch.context() as broken:
        broken.setattr(FileDraft, "write", full)
        run(rig, request)
        wait_for(rig)
        assert written(rig, request)._draft is None, "its blocks are free at once"
    rig.step((beside, 0, 20), new=[beside])
    for at in range(20, 23):
        rig.step((beside, at, 1))
    rig.step(finished=[request, beside])
    failed, fine = rig.receipts()
    assert failed.status == "error"
    assert failed.kind == "capture_failed"
    assert "No space left on device" in failed.message
    assert fine.status == "ok"
    check(rig, beside)


def test_a_step_in_which_a_capture_fails_does_not_open_its_stream_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are recorded all the same, and nobody would drop a new stream."""
    request = long()
    plan = rig.plane.banks.plan_capture

    def fails(tokens: Any) -> None:
        rig.plane._requests.fail(rig.plane._tracked["1"], "it cannot be", "capture_failed")
        plan(tokens)

    rig.step((request, 0, 20), new=[request])
    monkeypatch.setattr(rig.plane.banks, "plan_capture", fails)
    rig.step((request, 20, 1))
    assert rig.desk._streams == {}
    rig.step(finished=[request])
    assert rig.told()["j1"].kind == "capture_failed"


def test_a_cancelled_capture_leaves_nothing_on_the_disk(rig: Rig) -> None:
    request = long()
    run(rig, request)
    wait_for(rig)
    stream = written(rig, request)
    held = FileStore(rig.directory / "captures").used()
    rig.plane._requests.end("j1.0.1", -1)
    rig.step(aborted=[request])
    descriptor = stream._draft._descriptor
    assert os.fstat(descriptor).st_size > held
    del stream, request
    wait_for(rig)
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
    rig.plane._rows.streams._window = 20
    run(rig, request)
    receipt = rig.ended(request)
    assert receipt.status == "ok"
    assert receipt.files[0].non_finite == 49


def test_a_failed_commit_is_tried_again_with_a_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a name gets one once."""
    commit = FileWriter.commit
    failures = [1]

    def failing(writer: Any) -> None:
        if failures:
            failures.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        commit(writer)

    monkeypatch.setattr(FileWriter, "commit", failing)
    two = [long(1), long(2)]
    for request in two:
        run(rig, request)
    held = threading.Event()
    go = threading.Event()
    # both are then written as one group
    rig.writer.stream(lambda: (held.set(), go.wait(60)), 0)  # type: ignore[arg-type]
    held.wait(60)
    rig.step(finished=two)
    go.set()
    assert [receipt.status for receipt in rig.receipts()] == ["ok", "ok"]
    for request in two:
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
    assert rig.ended(request).status == "ok"
    check(rig, request)


def test_a_capture_within_the_window_does_not_stream(rig: Rig) -> None:
    short = long(1, prompt=4, total=6, most=4)
    unbounded = long(2, most=0)
    rig.step((short, 0, 4), (unbounded, 0, 20), new=[short, unbounded])
    assert [request_recording(rig, request).stream for request in (short, unbounded)] == [
        None,
        None,
    ]
    wait_for(rig)
    assert request_recording(rig, unbounded).held


def test_a_long_capture_goes_to_a_bucket_from_a_scratch_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: FaultProxy
) -> None:
    uri = s3_kit.uri(s3)
    rig = narrow(tmp_path, monkeypatch, capture_root=uri)
    request = long()
    run(rig, request)
    assert s3.count("PUT") == 0
    receipt = rig.ended(request)
    assert receipt.status == "ok"
    assert receipt.files[0].rows == 49 * 12
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


# --- Windows

SITES = {"post_block": [0, 1]}
TOTAL = 360  # of which the last token has no row
WINDOWS = {
    "last": Span(last=10),
    "more than there are": Span(last=5000),
    "head and tail": Span(head_and_tail=HeadAndTail(head=70, tail=3)),
    "head": Span(head_and_tail=HeadAndTail(head=5, tail=0)),
    "around": Span(around=Around(token_ids=[[1007], [1300, 1301], [1359]], before=2, after=3)),
    "nowhere": Span(around=Around(token_ids=[[7]])),
}
#: The prompt in three chunks, then each token in a step of its own.
CHUNKS = [(0, 100), (100, 100), (200, 100), *((at, 1) for at in range(300, TOTAL - 1))]


def within(window: Span) -> list[int]:
    """Written by hand: the request's token ids are 1000 + position."""
    rows = list(range(TOTAL - 1))
    around = window.around
    if around is None:
        head, tail = window.ends
        return [at for at in rows if at < head or at >= len(rows) - tail]
    hits = [token - 1000 for found in around.token_ids or () for token in found if token >= 1000]
    return [at for at in rows if any(-around.before <= at - hit <= around.after for hit in hits)]


@pytest.mark.parametrize("head", [15, 16, 17, 32, 64])
@pytest.mark.parametrize(
    ("positions", "every_n"),
    [("all", 1), (PositionWindow(start=1), 1), (PositionWindow(start=1, step=2), 3)],
)
def test_a_head_counts_captured_positions(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    head: int,
    positions: PositionSelector,
    every_n: int,
) -> None:
    """Blocks have 16 positions, and the prompt comes in chunks of whole blocks."""
    rig = Rig(tmp_path)
    window = Span(head_and_tail=HeadAndTail(head=head, tail=3))
    monkeypatch.setattr(rig.plane._rows, "block_size", lambda: 16)
    request = windowed(window, positions=positions, every_n=every_n)
    run(rig, request, [*((at, 48) for at in range(0, 288, 48)), (288, 48), (336, 23)])
    assert rig.ended(request).status == "ok"
    start, step = (0, 1) if positions == "all" else (positions.start, positions.step)
    rows = [at for at in range(start, TOTAL - 1, step) if at < 300 or (at - 300) % every_n == 0]
    check(rig, request, [*rows[:head], *rows[-3:]], SITES)


@pytest.mark.parametrize(
    ("window", "every_n", "block"),
    [
        (Span(last=40), 4, 1),
        (Span(last=60), 4, 64),
        (Span(last=20), 9, 16),
        (Span(head_and_tail=HeadAndTail(head=3, tail=30)), 7, 1),
    ],
)
def test_a_tail_counts_captured_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: Span, every_n: int, block: int
) -> None:
    rig = Rig(tmp_path)
    monkeypatch.setattr(rig.plane._rows, "block_size", lambda: block)
    request = windowed(window, 30, every_n=every_n)
    run(rig, request, [(0, 30), *((at, 1) for at in range(30, TOTAL - 1))])
    held = request_recording(rig, request).nbytes
    assert rig.ended(request).status == "ok"
    head, tail = window.ends
    rows = [at for at in range(TOTAL - 1) if at < 30 or (at - 30) % every_n == 0]
    check(rig, request, [*rows[:head], *rows[-tail:]], SITES)
    assert held <= window.held(0) * 2 * HIDDEN * 4, "of two layers"


@pytest.mark.parametrize("window", [Span(last=10), Span(head_and_tail=HeadAndTail(head=2, tail=5))])
@pytest.mark.parametrize("kept", [101, 102, 160])
def test_a_stop_string_that_is_found_late_finds_its_rows(
    tmp_path: Path, window: Span, kept: int
) -> None:
    """The worker looks for it, and the engine goes on for any number of tokens meanwhile."""
    rig = Rig(tmp_path)
    request = windowed(window, 100)
    request.tracked.spec = msgspec.structs.replace(request.tracked.spec, worker_reports_end=True)
    run(rig, request, [(0, 100), *((at, 1) for at in range(100, TOTAL - 1))])
    recording = request_recording(rig, request)
    most = recording.capture.count_held(100, request.max_tokens, ends_late=True)
    assert recording.nbytes <= most * 2 * HIDDEN * 4, "of two layers"
    rig.plane._requests.end("j1.0.1", kept)
    rig.step(aborted=[request])
    assert rig.told()["j1"].status == "ok"
    head, tail = window.ends
    rows = list(range(kept - 1))
    check(rig, request, [*rows[:head], *rows[-tail:]], SITES)


def windowed(window: Span, prompt: int = 300, **options: Any) -> Request:
    return long(1, prompt, TOTAL, TOTAL, sites=SITES, window=window, **options)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_window_stores_what_slicing_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, streamed: bool
) -> None:
    rig = narrow(tmp_path, monkeypatch, 4096 if streamed else 64 << 20)
    request = windowed(WINDOWS[name])
    run(rig, request, CHUNKS)
    assert rig.ended(request).status == "ok"
    check(rig, request, within(WINDOWS[name]), SITES)


def test_rows_outside_of_the_ends_are_not_held(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    window = Span(head_and_tail=HeadAndTail(head=3, tail=10))
    request = windowed(window, prompt=40)
    held = []
    rig.step((request, 0, 40), new=[request])
    for at in range(40, TOTAL - 1):
        rig.step((request, at, 1))
        held.append(request_recording(rig, request).nbytes)
    row = 2 * HIDDEN * 4  # of two layers
    assert max(held) <= window.held(0) * row < TOTAL * row
    assert rig.ended(request).status == "ok"
    check(rig, request, within(window), SITES)


@pytest.mark.parametrize(
    ("held", "options", "positions"),
    [
        (8 * ROWS, {}, range(199)),
        (32 * ROWS, {}, range(199)),  # blocks of 4 positions
        (128 * ROWS, {}, range(199)),
        (64 << 20, {"window": Span(last=10)}, range(189, 199)),
    ],
)
def test_rows_of_rejected_drafts_are_not_stored_and_push_no_rows_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held: int,
    options: dict[str, Any],
    positions: range,
) -> None:
    """Of each step the first row is that of a token, and the others are computed again."""
    rig = narrow(tmp_path, monkeypatch, held)
    request = long(total=200, most=180, **options)
    other = long(2)
    run(rig, request, [(0, 20)])
    forward = rig._rank.forward
    for at in range(20, request.total - 1):
        drafted = partial(forward, (request, at, 1), (other, at + 1, 8))
        monkeypatch.setattr(rig._rank, "forward", lambda *_, drafted=drafted: drafted())
        rig.step((request, at, 9))
        wait_for(rig)
    assert rig.ended(request).status == "ok"
    check(rig, request, positions)


def test_a_preempted_request_has_its_window(tmp_path: Path) -> None:
    window = Span(head_and_tail=HeadAndTail(head=2, tail=100))
    rig = Rig(tmp_path)
    request = windowed(window)
    run(rig, request, CHUNKS[:30])
    rig.step((request, 0, 200), new=[request])  # preempted, and computed again
    rig.step((request, 200, TOTAL - 1 - 200))
    assert rig.ended(request).status == "ok"
    check(rig, request, within(window), SITES)


def test_the_window_of_a_probe_has_the_rows_where_it_is_high() -> None:
    window = Span(when=When(probe="p", at_least=0.5, before=1, after=2))
    high = [at in (0, 6) for at in range(10)]
    assert sorted(window.keep(range(9), [0] * 10, high)) == [0, 1, 2, 5, 6, 7, 8]
    assert sorted(window.keep([0, 2, 7], [0] * 10, high)) == [0, 2, 7]


@pytest.mark.timeout(30)
def test_surroundings_that_overlap_are_joined_before_they_are_listed() -> None:
    """Thousands of occurrences with the widest surroundings: listing each takes minutes."""
    window = Span(around=Around(token_ids=[[7]], before=1 << 16, after=1 << 16))
    assert window.keep(range(8192), [7] * 8192) == {*range(8192)}


def test_blocks_are_smaller_than_the_slack() -> None:
    assert Span(last=1).held(0) > LATE + SPAN * 2
