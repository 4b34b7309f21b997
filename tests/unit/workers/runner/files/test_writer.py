"""Does every finished request get the receipt that says what became of its captures, whatever else
goes wrong?
"""

import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_kit import HIDDEN, finished, values
from midstream_fake_engine.rank_faults import Faults, wrap_writer
from wait_kit import wait_until

from midstream.broker.receipts.outbox import Outbox
from midstream.client import CaptureReader
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.requests.specs import memory_bytes
from midstream.storage.store import ArtifactStore, open_store
from midstream.workers.runner.base.shared_memory import HostMemoryError
from midstream.workers.runner.files.consumers import Installed, available, installed
from midstream.workers.runner.files.finished_rows import FinishedCapture, Outcome
from midstream.workers.runner.files.layouts import StoreConfig
from midstream.workers.runner.files.writer import CaptureWriter, WriteJob

MEMORY_LIMIT = 4096


class Desk:
    """A writer over a real outbox that no relay answers; the receipts are read as it gets them."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        threads: int = 1,
        into: ArtifactStore | None = None,
        **store: int,
    ):
        self.store = into or open_store(folder / "captures")
        self.receipts: list[Receipt] = []
        self.outbox = Outbox(folder / "outbox", "w", 0, "tcp://127.0.0.1:9")
        append = self.outbox.append

        def appended(receipt: Receipt) -> None:
            append(receipt)
            self.receipts.append(receipt)

        monkeypatch.setattr(self.outbox, "append", appended)
        config = StoreConfig(self.store, "w.boot.0", **store)
        self.writer = CaptureWriter(config, self.outbox, threads, MEMORY_LIMIT)

    def submit(
        self,
        *builds: Callable[[], FinishedCapture],
        request: int = 0,
        status: str = "ok",
        job: str = "job_x",
        **more: Any,
    ) -> None:
        receipt = Receipt(
            version="1",
            worker="w",
            boot="boot",
            job=job,
            request=request,
            attempt=1,
            rank=0,
            world=1,
            tp=0,
            pp=0,
            step=1,
            actions=0,
            checksum="0" * 16,
            status=status,
            message="",
        )
        self.writer.submit(WriteJob(receipt, builds, 100, **more))

    def close(self) -> dict[int, Receipt]:
        self.writer.close()
        assert not self.writer.backlog.size
        self.outbox.close()
        return {receipt.request: receipt for receipt in self.receipts}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def capture(**changes: object) -> Callable[[], FinishedCapture]:
    return lambda: finished(**changes)  # type: ignore[arg-type]


def broken() -> FinishedCapture:
    raise RuntimeError("positions [3] were not recorded (1 of 4)")


def late(free: threading.Event, **changes: object) -> Callable[[], FinishedCapture]:
    return lambda: capture(**changes)() if free.wait(60) else broken()


# field case 19
def test_a_receipt_says_ok_when_its_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: ArtifactStore
) -> None:
    desk = Desk(tmp_path, monkeypatch, into=store)
    desk.submit(capture())
    receipt = desk.close()[0]
    assert receipt.status == "ok"
    assert receipt.message == ""
    assert [(told.name, told.ok) for told in receipt.consumed] == [("filesystem", True)]
    assert [file.rows for file in receipt.files] == [6]
    np.testing.assert_array_equal(
        CaptureReader(desk.store, "job_x").array(2), values("post_block", 2, [0, 1, 2])
    )


@pytest.mark.parametrize("work", ["placed", "reading"])
def test_captures_do_not_wait_for_the_store_of_a_harvest_or_for_readings(
    desk: Desk, work: str
) -> None:
    answers = threading.Event()
    for request in range(8):
        desk.submit(late(answers), request=request, work=work)
    desk.submit(capture(), request=8)
    wait_until(lambda: desk.receipts)
    assert [(told.request, told.status) for told in desk.receipts] == [(8, "ok")]
    answers.set()
    assert desk.close().keys() == set(range(9))


def test_rows_that_leave_early_are_work_of_their_requests_kind(desk: Desk) -> None:
    """So that a harvest's store that does not answer fills no queue but its own."""
    threads = list[str]()
    desk.writer.stream(lambda: threads.append(threading.current_thread().name), 8, "placed")
    desk.close()
    assert threads == ["midstream-placed-0"]
    assert desk.writer.backlog.freed("placed") == 8
    assert desk.writer.backlog.size == 0


def test_readings_take_turns_between_tenants_and_between_jobs_of_a_tenant(desk: Desk) -> None:
    free = threading.Event()
    desk.submit(late(free), job="first", work="reading", tenant="c")
    for tenant, job, requests in (("a", "long", 3), ("a", "short", 2), ("b", "other", 2)):
        for request in range(requests):
            desk.submit(capture(), request=request, job=job, work="reading", tenant=tenant)
    threading.Timer(0.2, free.set).start()  # while it closes
    desk.close()
    assert [f"{receipt.job} {receipt.request}" for receipt in desk.receipts] == [
        "first 0", "long 0", "other 0", "short 0", "other 1", "long 1", "short 1", "long 2",
    ]  # fmt: skip


def test_a_request_without_captures_is_reported_at_once(desk: Desk) -> None:
    desk.submit()
    assert [receipt.status for receipt in desk.receipts] == ["ok"]
    desk.close()


def test_several_captures_go_each_to_its_own_consumers(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    desk.submit(
        capture(consumers=["memory", "filesystem"], tag="mine"),
        capture(consumers=["logging"], tag="global", dtype="float32"),
    )
    receipt = desk.close()[0]
    assert receipt.status == "ok"
    assert [told.name for told in receipt.consumed] == ["memory", "filesystem", "logging"]
    assert [file.tag for file in receipt.files] == ["mine"]
    reader = CaptureReader.from_bytes(receipt.consumed[0].rows)
    np.testing.assert_array_equal(reader.array(3), values("post_block", 3, [0, 1, 2]))
    (line,) = [
        record.getMessage() for record in caplog.records if "captured job=" in record.getMessage()
    ]
    first, last = np.linalg.norm(values("post_block", 2, [0, 2]), axis=1)
    assert "job=job_x request=0 tag=global pp=0 positions=3 hidden=5 dtype=float32" in line
    assert f"post_block.2 {first:.4g} … {last:.4g}" in line


def test_the_logging_consumer_defaults_to_stderr() -> None:
    """As in a rank's process: vLLM sets up its own loggers only."""
    code = (
        "from midstream.workers.runner.files.consumers import Logging; from capture_kit "
        "import finished; Logging().consume([finished()])"
    )
    paths = os.pathsep.join(
        [str(Path(__file__).parents[4]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert "INFO midstream.captures: captured job=job_x request=0" in done.stderr


# field case 19
@pytest.mark.parametrize(
    ("build", "status", "said"),
    [
        (broken, "error", "failed: positions [3] were not recorded"),
        (
            capture(positions=range(500), consumers=["memory", "logging"]),
            "error",
            "4096 (4 KiB, tuning.memory_limit_kib)",
        ),
        (capture(consumers=["nobody"]), "error", "rank 0 has no such consumer"),
        (
            capture(consumers=["filesystem", "nobody"]),
            "partial",
            "consumer nobody failed: rank 0 has no such consumer",
        ),
        (
            capture(positions=[0, 9], dropped=(4, 5)),
            "partial",
            "positions dropped under overload: 4, 5 (2 in total)",
        ),
    ],
)
def test_failed_or_dropped_captures_are_never_ok(
    desk: Desk, build: Callable[[], FinishedCapture], status: str, said: str
) -> None:
    desk.submit(build)
    receipt = desk.close()[0]
    assert receipt.status == status
    assert said in receipt.message
    assert receipt.kind == ("capture_failed" if status == "error" else "")


# field case 19
def test_a_capture_that_cannot_be_written_is_an_error_with_the_reason(desk: Desk) -> None:
    wrap_writer(desk.writer, Faults("write", 0))
    desk.submit(capture())
    receipt = desk.close()[0]
    assert receipt.status == "error"
    assert receipt.kind == "capture_failed"
    assert receipt.files == []
    assert "fault injected" in receipt.message


def test_an_earlier_error_keeps_its_reason(desk: Desk) -> None:
    desk.submit(capture(dropped=(7,)), status="error")
    assert desk.close()[0].status == "error"
    assert desk.receipts[0].message == ""


def test_a_receipt_that_cannot_be_delivered_fails_its_request_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a rank without room for a receipt with rows: the thread serves those that follow."""
    deliver = desk.outbox.append

    def small(receipt: Receipt) -> None:
        if receipt.request == 0 and receipt.files:
            raise HostMemoryError("no room")
        deliver(receipt)

    monkeypatch.setattr(desk.outbox, "append", small)
    for request in (0, 1):
        desk.submit(capture(request=request), request=request)
    receipts = desk.close()
    assert receipts[0].message.startswith("its receipt could not be delivered")
    assert receipts[1].status == "ok"


def test_a_thread_outlives_a_receipt_that_nobody_takes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = desk.outbox.append

    def refuses(receipt: Receipt) -> None:
        if receipt.request == 0:
            raise HostMemoryError("no room")
        deliver(receipt)

    monkeypatch.setattr(desk.outbox, "append", refuses)
    for request in (0, 1):
        desk.submit(capture(request=request), request=request)
    assert [*desk.close()] == [1]


# field case 20
def test_one_capture_that_fails_neither_fails_nor_holds_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path, monkeypatch, threads=2)
    for request in range(40):
        bad = request % 5 == 2
        desk.submit(
            *([capture(request=request), broken] if bad else [capture(request=request)]),
            request=request,
        )
    receipts = desk.close()
    assert {request for request, receipt in receipts.items() if receipt.status == "error"} == set(
        range(2, 40, 5)
    )
    assert all(receipts[request].status == "ok" for request in range(40) if request % 5 != 2)
    assert CaptureReader(desk.store, "job_x").requests() == list(range(40))


# field case 20
def test_a_receipt_does_not_wait_for_what_comes_after_it(desk: Desk) -> None:
    """Each is on its way when its own group is durable, however much is being written behind it."""
    free = threading.Event()
    desk.submit(capture(request=0), request=0)
    wait_until(lambda: desk.receipts)
    desk.submit(late(free, request=1), request=1)
    assert [receipt.request for receipt in desk.receipts] == [0]
    assert desk.writer.backlog.size
    free.set()
    assert sorted(desk.close()) == [0, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_captures_up_to_the_limit_are_returned(desk: Desk, dtype: str) -> None:
    """Neither the blob's header nor the manifest in it counts."""
    fit = MEMORY_LIMIT // memory_bytes(1, 2, HIDDEN, dtype)
    for positions in (fit, fit + 1):
        desk.submit(
            capture(positions=range(positions), consumers=["memory"], dtype=dtype),
            request=positions,
        )
    receipts = desk.close()
    assert receipts[fit].status == "ok"
    assert receipts[fit + 1].status == "error"
    assert CaptureReader.from_bytes(receipts[fit].consumed[0].rows).positions() == list(range(fit))


# field case 47
def test_returned_rows_are_raw_bytes_in_the_receipt(desk: Desk) -> None:
    desk.submit(capture(consumers=["memory"], dtype="float32"))
    receipt = desk.close()[0]
    assert values("post_block", 3, [0, 1, 2]).tobytes() in receipt.consumed[0].rows
    assert desk.store.children() == []


# --- Consumers of other packages ---

PLUGIN = """
import sys

import numpy as np
from midstream.workers.runner.files.finished_rows import Outcome

SEEN = []

class Counting:
    def consume(self, captures):
        SEEN.extend((str(capture), capture.num_rows) for capture in captures)
        unwanted = [capture.spec.request == 3 for capture in captures]
        return [Outcome(error="unwanted" if wrong else "") for wrong in unwanted]

class Raising:
    def consume(self, captures):
        if any(capture.spec.request % 2 for capture in captures):
            raise ValueError("an odd request")
        return [Outcome() for _ in captures]

class Careless:
    def consume(self, captures):
        return None

class Altering:
    def consume(self, captures):
        for capture in captures:
            for hook, layers in capture.sites.items():
                for layer in layers:
                    for buffer in capture.rows(hook, layer):
                        if not buffer.readonly:
                            np.frombuffer(buffer, np.uint8)[:] = 0
            spec, stored = capture.spec, capture.capture
            lists = (capture.positions, capture.token_ids, capture.sites, stored.consumers)
            for held in (*lists, spec.captures):
                held.clear()
        return [Outcome() for _ in captures]

class Leaving:
    def consume(self, captures):
        sys.exit("usage: leaving [options]")

def unmakeable():
    raise OSError("no connection")

def exiting():
    sys.exit(2)

def shadow():
    return Counting()
"""
ENTRY_POINTS = """[midstream.capture_consumers]
counting = capture_plugin_of_the_tests:Counting
raising = capture_plugin_of_the_tests:Raising
careless = capture_plugin_of_the_tests:Careless
altering = capture_plugin_of_the_tests:Altering
leaving = capture_plugin_of_the_tests:Leaving
exiting = capture_plugin_of_the_tests:exiting
unmakeable = capture_plugin_of_the_tests:unmakeable
missing = capture_plugin_of_the_tests:NotThere
nowhere = capture_plugin_that_is_not_installed:Anything
filesystem = capture_plugin_of_the_tests:shadow
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package as pip leaves it: a module, and its entry points in a dist-info
    folder.
    """
    site = tmp_path / "site"
    info = site / "capture_plugin_of_the_tests-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "capture_plugin_of_the_tests.py").write_text(PLUGIN)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: capture-plugin-of-the-tests\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    installed.cache_clear()
    yield
    installed.cache_clear()
    sys.modules.pop("capture_plugin_of_the_tests", None)


def test_consumers_of_installed_packages_are_found_and_broken_ones_left_out(
    plugin: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert available() == [
        "filesystem",
        "memory",
        "logging",
        "altering",
        "careless",
        "counting",
        "leaving",
        "raising",
    ]
    assert available() == available()
    told = [record.getMessage() for record in caplog.records]
    for name in ("unmakeable", "exiting", "missing", "nowhere", "filesystem"):
        assert len([line for line in told if f"capture consumer {name} " in line]) == 1


def test_an_installed_consumer_gets_the_captures_that_name_it(plugin: None, desk: Desk) -> None:
    for request in range(5):
        desk.submit(
            capture(request=request, consumers=["filesystem", "counting"]),
            capture(tag="other"),
            request=request,
        )
    receipts = desk.close()
    seen = sys.modules["capture_plugin_of_the_tests"].SEEN  # type: ignore[attr-defined]
    assert sorted(seen) == [
        (f"capture tag of job job_x request {request}", 6) for request in range(5)
    ]
    assert [receipts[request].status for request in range(5)] == ["ok", "ok", "ok", "partial", "ok"]
    assert "tag: consumer counting failed: unwanted" in receipts[3].message
    assert [(told.name, told.ok, told.message) for told in receipts[3].consumed] == [
        ("filesystem", True, ""), ("counting", False, "unwanted"), ("filesystem", True, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "said"),
    [("raising", "an odd request"), ("careless", "NoneType"), ("leaving", "SystemExit")],
)
def test_a_failing_consumer_does_not_affect_others(
    plugin: None, desk: Desk, name: str, said: str
) -> None:
    gate = threading.Event()  # so that the others form one group behind the first
    desk.submit(late(gate, request=0, consumers=["filesystem", name]))
    for request in (1, 2):
        desk.submit(capture(request=request, consumers=["filesystem", name]), request=request)
    gate.set()
    receipts = desk.close()
    odd = receipts[1]
    assert odd.status == "partial"
    assert len(odd.files) == 1
    assert said in odd.consumed[1].message
    if name == "raising":
        assert [receipts[request].status for request in (0, 2)] == ["ok", "ok"]
    assert CaptureReader(desk.store, "job_x").requests() == [0, 1, 2]


def test_a_consumer_that_calls_exit_is_asked_again_the_next_time(plugin: None) -> None:
    leaving = installed()["leaving"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"SystemExit\('usage: leaving"):
            leaving.consume([finished()])


@pytest.mark.parametrize("reused", [False, True])
def test_a_consumer_cannot_modify_anothers_capture(plugin: None, desk: Desk, reused: bool) -> None:
    """Neither in what the others get, before or after it, nor in rows that serve a later request,
    too.
    """
    store = {
        (hook, layer): bytearray(values(hook, layer, [0, 1, 2]).tobytes())
        for hook, layer in (("post_block", 2), ("post_block", 3))
    }

    before = {site: bytes(rows) for site, rows in store.items()}
    made: list[FinishedCapture] = []

    def build() -> FinishedCapture:
        kept = {"rows": lambda hook, layer: [memoryview(store[hook, layer])]} if reused else {}
        made.append(
            finished(
                consumers=["altering", "counting", "memory", "filesystem"], dtype="float32", **kept
            )
        )
        return made[-1]

    desk.submit(build, build)
    receipt = desk.close()[0]
    assert receipt.status == "ok"
    assert receipt.message == ""
    rows, *_ = [told.rows for told in receipt.consumed if told.name == "memory"]
    for reader in (CaptureReader.from_bytes(rows), CaptureReader(desk.store, "job_x")):
        assert reader.positions() == [0, 1, 2]
        np.testing.assert_array_equal(reader.array(3), values("post_block", 3, [0, 1, 2]))
    assert store == before
    assert [one.spec.captures for one in made] == [[one.capture] for one in made]
    assert [rows for _, rows in sys.modules["capture_plugin_of_the_tests"].SEEN] == [6, 6]  # type: ignore[attr-defined]


def test_built_in_consumers_take_precedence(
    plugin: None, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that rows are durable and on their way whatever an installed one does."""
    order: list[str] = []
    action = desk.writer._action

    def noted(name: str, consumers: object) -> object:
        order.append(name)
        return action(name, consumers)  # type: ignore[arg-type]

    monkeypatch.setattr(desk.writer, "_action", noted)
    desk.submit(capture(consumers=["altering", "logging", "memory", "counting", "filesystem"]))
    desk.close()
    assert order == ["filesystem", "memory", "logging", "altering", "counting"]


def test_a_hung_consumer_is_skipped_until_it_answers() -> None:
    let_go = threading.Event()

    class Hanging:
        calls = 0

        def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
            self.calls += 1
            if self.calls == 1:
                assert let_go.wait(60)
            return [Outcome()] * len(captures)

    hanging = Hanging()
    apart = Installed("hanging", hanging, patience_s=0.05)
    assert "longer than 0.05 s" in apart.consume([finished()])[0].error
    apart.thread.patience_s = 3600.0  # nobody sits it out again: the test would hang
    assert "has been busy" in apart.consume([finished(), finished(request=1)])[1].error
    let_go.set()
    wait_until(lambda: not apart.consume([finished()])[0].error)
    assert hanging.calls == 2


def test_row_memory_is_freed_once_the_receipt_is_queued(desk: Desk) -> None:
    made: list[weakref.ref[FinishedCapture]] = []

    def build() -> FinishedCapture:
        one = finished(consumers=["filesystem", "memory", "logging"])
        made.append(weakref.ref(one))
        return one

    for request in range(5):
        desk.submit(build, request=request)
    wait_until(lambda: not desk.writer.backlog.size)
    assert [ref() for ref in made] == [None] * 5
    desk.close()
