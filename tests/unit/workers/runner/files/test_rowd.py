"""The process that writes a rank's files: it writes what a thread of the rank would, and neither
survives the other.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plane_kit import Rig, capturing, run
from rank_kit import stream_of
from wait_kit import wait_until

from midstream.workers.runner.base.backlog import Backlog
from midstream.workers.runner.files.desk import StreamDropped
from midstream.workers.runner.files.streams import RecordingFile
from midstream.workers.runner.plane import data_plane
from midstream.workers.runner.rows import delivery
from midstream.workers.runner.rows.delivery import ForwardedReceipts


def process_of(rig: Rig) -> subprocess.Popen[bytes]:
    return rig.plane._delivery._far._process  # type: ignore[attr-defined]


@pytest.mark.slow("a rank that closes waits for a relay")
@pytest.mark.parametrize("options", [{}, {"capture_overload": "spill", "capture_window_mib": 0}])
def test_another_process_writes_the_rows_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Those that are spilled, and those that leave while their request runs, too."""
    # vLLM has torch's OpenMP loaded into the children of a process in which it was configured
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    rig = Rig(tmp_path, connect=delivery.connected, **options)
    two = (capturing(1), capturing(2))
    rig.plane._delivery.backlog.send(2 << 20 if options else 0)
    for request in two:
        request.max_tokens = 4
    run(rig, *two)
    modules = Path(f"/proc/{process_of(rig).pid}/maps").read_text()
    assert "midstream-rows" in modules
    assert "torch" not in modules, "it begins in a moment, and takes little memory"
    wait_until(lambda: rig.plane.status()["captured_rows"] == 2 * 2 * 7)
    assert [receipt.status for receipt in rig.receipts()] == ["ok", "ok"]
    assert process_of(rig).returncode == 0
    assert bool(rig.plane._arena.spilled) == bool(options)
    for request in two:
        rows = stream_of(request.number, "post_block", 1, 0, 7)
        assert (rig.reader(request).array(1) == rows).all()


@pytest.mark.parametrize(
    ("point", "layout"),
    [
        ("capture.written", "packed"),
        ("capture.renamed", "packed"),
        ("segment.written", "segment"),
        ("segment.indexed", "segment"),
        ("receipt.stored", "packed"),
        ("", "packed"),  # before it has anything to do
    ],
)
def test_a_rank_whose_process_dies_gives_up_and_nothing_is_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, layout: str
) -> None:
    said = threading.Event()
    monkeypatch.setattr(delivery, "_give_up", lambda error: said.set())
    monkeypatch.setattr(data_plane, "arm", lambda *_: None)  # this process is the rank
    first = Rig(tmp_path, connect=delivery.connected, fault=f"crash:at={point}" if point else "")
    if point:
        run(first, capturing(1, layout=layout))
    else:
        process_of(first).kill()
    assert said.wait(30)
    assert process_of(first).returncode == -signal.SIGKILL
    after = Rig(tmp_path, boot="c")
    request = capturing(1, layout=layout)
    request.tracked.spec = msgspec.structs.replace(request.tracked.spec, attempt=2)
    run(after, request)
    durable = [1] if point == "receipt.stored" else []
    receipts = after.receipts()
    assert [receipt.attempt for receipt in receipts] == [*durable, 2]
    assert {receipt.status for receipt in receipts} == {"ok"}
    rows = stream_of(1, "post_block", 1, 0, 7)
    assert (after.reader(request).array(1) == rows).all()


@pytest.mark.parametrize("broken", ["push", "__init__"])
def test_a_stream_that_cannot_take_its_rows_fails_its_capture_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def breaks(stream: RecordingFile, *arguments: Any) -> None:
        opened = arguments[0] if broken == "__init__" else stream.opened
        if opened.spec.job == two[0].tracked.spec.job:
            raise MemoryError
        works(stream, *arguments)

    works = getattr(RecordingFile, broken)
    monkeypatch.setattr(RecordingFile, broken, breaks)
    rig = Rig(tmp_path, capture_window_mib=0)
    two = (capturing(1), capturing(2))
    for request in two:
        request.max_tokens = 4
    run(rig, *two)
    failed, written = sorted(rig.receipts(), key=lambda receipt: receipt.status)
    assert failed.kind == "capture_failed"
    assert "rows that left before" in failed.message
    assert written.status == "ok"
    assert rig.plane._delivery.backlog.size == 0


def test_only_the_models_thread_counts_what_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads or processes that add to one counter may lose what one of them adds."""
    first = Rig(tmp_path / "first")
    sizes = list[int]()
    run(first, capturing(1))
    rig = Rig(tmp_path, connect=delivery.connected)
    far = rig.plane._delivery._far  # type: ignore[attr-defined]
    monkeypatch.setattr(Backlog, "send", lambda _, size: sizes.append(size))
    ForwardedReceipts("w", 0, far).append(first.receipts()[0])
    rig.plane._delivery._near.desk.writer.stream(lambda: None, 8)
    assert not sizes
    far._closing = True
    process_of(rig).kill()


def test_a_rank_whose_process_hangs_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(delivery, "_give_up", lambda error: said.append(str(error)))
    rig = Rig(tmp_path, connect=delivery.connected, answer_s=1.0)
    for _ in range(60):
        time.sleep(0.02)
        rig.plane.status()
    assert not said, "it answers"
    process_of(rig).send_signal(signal.SIGSTOP)
    wait_until(lambda: rig.plane.status() and said)
    assert said[0] == "the process that writes files does not answer"
    assert rig.plane.status()["silent_s"] > 0
    ended(rig)


def ended(rig: Rig) -> None:
    """Kill the process, of which nothing is wanted any more."""
    rig.plane._delivery._far._closing = True  # type: ignore[attr-defined]
    process_of(rig).kill()


def end_many(rig: Rig) -> None:
    """Send a message for each of many requests, without listening."""
    for number in range(1000):
        rig.plane._delivery._far.send(StreamDropped(number))


@pytest.fixture
def small_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has who is over `pipe-user-pages-soft`."""
    monkeypatch.setattr(delivery, "_PIPE_BYTES", 4096)


def test_a_step_may_end_more_requests_than_the_pipes_have_room_for(
    tmp_path: Path, small_pipes: None
) -> None:
    """The process answers each message, and the rank listens once a step."""
    rig = Rig(tmp_path, connect=delivery.connected)
    far = rig.plane._delivery._far
    step = threading.Thread(target=end_many, args=[rig], daemon=True)
    step.start()
    step.join(20)
    stuck = step.is_alive()
    if not stuck:
        wait_until(lambda: far.turn() or far.held.keys() == {0})
    ended(rig)
    assert not stuck


def test_a_rank_that_waits_for_room_in_a_pipe_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pipes: None
) -> None:
    """Its process hangs, and the model's thread asks for no status while it waits."""

    class GivenUp(Exception):
        pass

    said = list[str]()

    def give_up(error: Exception) -> None:
        said.append(str(error))
        raise GivenUp

    monkeypatch.setattr(delivery, "_give_up", give_up)
    rig = Rig(tmp_path, connect=delivery.connected, answer_s=0.1)
    process_of(rig).send_signal(signal.SIGSTOP)

    def until_given_up() -> None:
        with suppress(GivenUp, BrokenPipeError):
            end_many(rig)

    step = threading.Thread(target=until_given_up, daemon=True)
    step.start()
    step.join(20)  # without a time of its own it would wait until the process ends
    found = list(said)
    ended(rig)
    assert found == ["the process that writes files does not answer"]


@pytest.mark.slow("a rank waits for another process to leave its outbox")
def test_an_outbox_that_another_process_holds_is_an_error_at_the_start(tmp_path: Path) -> None:
    rig = Rig(tmp_path, connect=delivery.connected)
    with pytest.raises(RuntimeError, match=r"OutboxError: .* in use by process"):
        Rig(tmp_path, connect=delivery.connected)
    rig.plane._delivery._far._closing = True  # type: ignore[attr-defined]
    process_of(rig).kill()


@pytest.mark.slow("a rank in a process of its own imports torch")
def test_the_process_ends_with_its_rank(tmp_path: Path) -> None:
    made = (
        "import sys, time; sys.path[:] = sys.argv[2:]; from pathlib import Path; "
        "from plane_kit import Rig; from midstream.workers.runner.rows import delivery; "
        "rig = Rig(Path(sys.argv[1]), connect=delivery.connected); "
        "print(rig.plane._delivery._far._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", made, str(tmp_path), *sys.path], stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        os.kill(pid, signal.SIGTERM)  # as a group's processes get it: the rank decides
        time.sleep(0.1)
        assert "midstream" in Path(f"/proc/{pid}/cmdline").read_text()
        rank.kill()
    command = Path(f"/proc/{pid}/cmdline")
    wait_until(lambda: not command.exists() or not command.read_text())
