"""Does an outbox keep what it is given, on the disk it has, with nobody at the other end?"""

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from wait_kit import wait_until, warn_if_late

from midstream.broker.receipts.outbox import Outbox, OutboxError
from midstream.broker.receipts.outbox_store import JobLog, Store
from midstream.schemas.base.file_names import file_stem
from midstream.schemas.jobs.receipts import Receipt

NOBODY = "tcp://127.0.0.1:9"  # the discard port: nothing listens


def receipt(number: int, worker: str = "w", rank: int = 0) -> Receipt:
    return Receipt(
        version="0.1.0",
        worker=worker,
        boot="boot",
        job=f"job_{number}",
        request=0,
        attempt=1,
        rank=rank,
        world=1,
        tp=rank,
        pp=0,
        step=number,
        actions=number,
        checksum=f"{number:016x}",
        status="ok",
    )


def rows_on_disk(path: Path) -> list[tuple[int, str]]:
    with sqlite3.connect(path) as other:
        return other.execute("SELECT seq, job FROM receipts ORDER BY seq").fetchall()


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(tmp_path, "w", 0, NOBODY) as box:
        yield box


def test_an_appended_receipt_reaches_the_disk_and_waits_there(outbox: Outbox) -> None:
    outbox.append(receipt(1))
    wait_until(lambda: rows_on_disk(outbox.store.path) == [(1, "job_1.1")])
    assert outbox.depth() == 1


@pytest.mark.parametrize(("before", "after"), [(None, 0o700), (0o755, 0o750), (0o750, 0o750)])
def test_no_other_account_reads_an_outbox_but_a_group_that_was_let_in(
    tmp_path: Path, before: int | None, after: int
) -> None:
    folder = tmp_path / "data" / "outbox"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
    Store(folder, "w1", 0).close()
    assert stat.S_IMODE(folder.stat().st_mode) == after


def test_commits_reach_the_disk_each_time(outbox: Outbox) -> None:
    with sqlite3.connect(outbox.store.path) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    # FULL: one fsync of the log per commit
    assert outbox.store._db.execute("PRAGMA synchronous").fetchone() == (2,)


# field case 46
def test_receipts_of_many_threads_share_transactions_and_keep_the_order_of_each(
    outbox: Outbox,
) -> None:
    def work(base: int) -> None:
        for number in range(base, base + 500):
            outbox.append(receipt(number))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(0, 8000, 1000)))
    outbox.close()
    jobs = [
        int(job.removeprefix("job_").removesuffix(".1"))
        for _, job in rows_on_disk(outbox.store.path)
    ]
    for base in range(0, 8000, 1000):
        assert [job for job in jobs if base <= job < base + 1000] == list(range(base, base + 500))
    assert outbox.store.transactions <= 200  # at most one disk round trip per 20 receipts


def test_flush_waits_for_a_relay_only_while_there_is_a_receipt(outbox: Outbox) -> None:
    assert outbox.flush(0) is True
    outbox.append(receipt(1))
    assert outbox.flush(0.05) is False


def test_what_was_appended_is_durable_when_close_returns_and_the_next_process_has_it(
    tmp_path: Path,
) -> None:
    with Outbox(tmp_path, "w", 0, NOBODY) as first:
        for number in range(300):
            first.append(receipt(number))
        epoch = first.store.epoch
    with Outbox(tmp_path, "w", 0, NOBODY) as second:
        assert second.store.epoch == epoch
        assert second.depth() == 300
        second.append(receipt(300))
    assert rows_on_disk(second.store.path) == [
        (number + 1, f"job_{number}.1") for number in range(301)
    ]


def test_a_closed_outbox_takes_nothing_and_may_be_closed_again(outbox: Outbox) -> None:
    outbox.close()
    outbox.close()
    with pytest.raises(OutboxError, match="closed"):
        outbox.append(receipt(1))


def test_a_receipt_of_another_rank_is_refused(outbox: Outbox) -> None:
    with pytest.raises(ValueError, match="w/1 in the outbox of w/0"):
        outbox.append(receipt(1, rank=1))


def test_a_second_process_on_an_outbox_is_refused_with_the_owner(tmp_path: Path) -> None:
    """The lock is of an open file: another one in this process is as good as in another."""
    holder = Outbox(tmp_path, "w", 0, NOBODY)
    with pytest.raises(OutboxError, match=f"process {os.getpid()} on ") as caught:
        Outbox(tmp_path, "w", 0, NOBODY, lock_wait_s=0)
    assert caught.value.kind == "conflict"
    # One that is on its way out is waited for.
    threading.Timer(0.1, holder.close).start()
    Outbox(tmp_path, "w", 0, NOBODY, lock_wait_s=60).close()


def test_the_outbox_of_another_worker_is_refused_by_name(tmp_path: Path) -> None:
    Store(tmp_path, "w", 0).close()
    for tail in (".sqlite", ".jobs"):
        shutil.move(tmp_path / f"w.rank0{tail}", tmp_path / f"v.rank0{tail}")
    with pytest.raises(OutboxError, match="belongs to worker 'w', rank 0"):
        Store(tmp_path, "v", 0)


def test_an_outbox_of_a_later_layout_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path, "w", 0)
    store._db.execute("PRAGMA user_version = 9")
    store.close()
    with pytest.raises(OutboxError, match="layout 9"):
        Store(tmp_path, "w", 0)
    assert [path.name for path in tmp_path.glob("*damaged*")] == []


def test_workers_with_odd_names_have_files_of_their_own(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "a b", "../up", "x" * 190]
    assert len({file_stem(name) for name in names}) == len(names)
    for name in names:
        Store(tmp_path, name, 0).close()
    assert {path.parent for path in tmp_path.rglob("*")} == {tmp_path}


# field case 19
def test_a_full_disk_holds_receipts_back_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # that is for a disk that is broken
    monkeypatch.setattr("midstream.broker.receipts.outbox.GIVE_UP_S", 0.1)
    with Outbox(tmp_path, "w", 0, NOBODY) as outbox:
        pages = outbox.store._db.execute("PRAGMA page_count").fetchone()[0]
        # SQLite answers as it does when the disk is full
        outbox.store._db.execute(f"PRAGMA max_page_count = {pages}")
        for number in range(2000):
            outbox.append(receipt(number))
        time.sleep(0.5)
        assert rows_on_disk(outbox.store.path) == []
        outbox.store._db.execute("PRAGMA max_page_count = 1000000")
        wait_until(lambda: len(rows_on_disk(outbox.store.path)) == 2000)
    assert [seq for seq, _ in rows_on_disk(outbox.store.path)] == list(range(1, 2001))


# field case 19
def test_a_disk_that_stays_broken_is_reported_and_ends_in_errors_not_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.broker.receipts.outbox.GIVE_UP_S", 0.2)
    errors: list[Exception] = []
    told = threading.Event()

    def on_fatal(error: Exception) -> None:
        errors.append(error)
        told.set()

    outbox = Outbox(tmp_path, "w", 0, NOBODY, on_fatal)
    outbox.store._db.execute("PRAGMA query_only = 1")
    outbox.append(receipt(1))
    assert told.wait(60)
    assert "readonly" in str(errors[0])
    assert outbox.flush(60) is False
    with pytest.raises(OutboxError, match="has failed"):
        outbox.append(receipt(2))
    outbox.close()


def overwrite(path: Path, start: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xa5" * count)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "header": lambda path: overwrite(path, 0, 100),
    "page": lambda path: overwrite(path, 4096 * 5, 4096 * 3),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": os.unlink,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_database_is_moved_aside_and_its_epoch_remembered(
    tmp_path: Path, how: str
) -> None:
    store = Store(tmp_path, "w", 0)
    store.commit([(f"job_{number}", os.urandom(200)) for number in range(400)])
    former = store.epoch
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    DAMAGES[how](store.path)

    store = Store(tmp_path, "w", 0)
    assert store.epoch != former
    assert store.last == 0
    assert store.read(0, 10) == []
    (lost,) = store.past_epochs()
    assert lost.epoch == former
    assert lost.last == 400
    assert lost.jobs == [(number + 1, f"job_{number}") for number in range(400)]
    assert len(list(tmp_path.glob("w.rank0.sqlite.damaged-*"))) == (how != "removed")
    store.forget(former)
    assert store.past_epochs() == []
    store.close()
    assert Store(tmp_path, "w", 0).epoch == store.epoch  # the fresh one is sound


def test_numbers_go_on_after_everything_was_acknowledged_and_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path, "w", 0)
    store.commit([("job", b"x")] * 5)
    store.commit([], acked=5, prune=5)
    store.close()
    store = Store(tmp_path, "w", 0)
    assert store.last == 5
    assert store.acked == 5
    assert store.read(0, 10) == []
    assert store.commit([("job", b"y")]) == 6
    store.close()


def test_the_job_log_survives_a_torn_last_line(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "x.jobs")
    log.rewrite("ab" * 16, 3, [(3, "job_3")])
    log.append([(4, "job_4"), (5, "job_5")])
    log.close()
    os.truncate(log.path, log.path.stat().st_size - 4)
    assert log.read() == ("ab" * 16, 4, [(3, "job_3"), (4, "job_4")])


def test_the_job_log_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.broker.receipts.outbox_store.JOB_LOG_BYTES", 10_000)
    store = Store(tmp_path, "w", 0)
    for _ in range(100):
        last = store.commit([("job_" + "x" * 30, b"x")] * 100, acked=store.last, prune=store.last)
    size = (tmp_path / "w.rank0.jobs").stat().st_size
    store.close()
    assert size < 25_000
    assert JobLog(tmp_path / "w.rank0.jobs").read().last == last


def test_an_idle_outbox_does_not_burn_cpu(outbox: Outbox) -> None:
    outbox.append(receipt(1))  # waits for a relay that is not there
    time.sleep(0.3)
    before = time.process_time()
    time.sleep(1.5)
    warn_if_late(time.process_time() - before, 0.05, "it looks for a relay all the time")


def test_the_outbox_brings_nothing_heavy_into_a_rank_process() -> None:
    program = (
        "import sys; import midstream.broker.receipts.outbox; print({'torch', 'vllm', "
        "'celery', 'redis', 'asyncio'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )
