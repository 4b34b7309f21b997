"""Is every receipt and every row of 1,000 requests there, once, and right, after a rank and the
process that writes its files were killed at each of their boundaries? No vLLM: see `killed_rank`.
"""

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, cast

import killed_rank
import killed_rowd
import pytest
from killed_requests import BLOCKED, KINDS, check_files, check_receipt, kind_of
from test_durability import serving

from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.receipts.relay import Relay
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.jobs.receipts import LostRange, Receipt
from midstream.schemas.settings.settings import Settings
from midstream.workers.runner.files.desk import EXIT_NO_RECEIPTS
from midstream_ops.processes import wait_for

REQUESTS = 1_000
SEED = 20_261
#: Requests that a rank gets, the last one excepted, at most.
TOGETHER = 24
#: How often a process dies at each of its points, and at any time.
ROUNDS = 4
ANY_TIME = 34
#: Lives of a rank at most: one that did not come to its point is followed by another.
LIVES = 300
#: Seconds that what a rank has to do may take; only a hang reaches them.
WORK_S = 60.0
POINTS = killed_rank.POINTS | killed_rowd.POINTS
CONTEXT = multiprocessing.get_context("forkserver")


class Arrived:
    """Commits receipts for the relay as `Settler` does, in memory."""

    def __init__(self) -> None:
        self.receipts: dict[tuple[str, int], Receipt] = {}  # by epoch and number
        self.wrong: list[str] = []
        self._marks = Counter[str]()

    def mark(self, worker: str, rank: int, epoch: str) -> int:
        return self._marks[epoch]

    def settle(
        self, worker: str, rank: int, epoch: str, receipts: list[tuple[int, Receipt]]
    ) -> int:
        for number, receipt in sorted(receipts, key=lambda numbered: numbered[0]):
            if number == self._marks[epoch] + 1:
                self.receipts[epoch, number] = receipt
                self._marks[epoch] = number
            elif self.receipts.get((epoch, number), receipt) != receipt:
                self.wrong.append(f"receipt {number} was another one before")
        return self._marks[epoch]

    def lost(self, worker: str, rank: int, epoch: str, lost: LostRange) -> int:
        self.wrong.append(f"an outbox has lost receipts: {lost}")
        self._marks[epoch] = lost.last
        return lost.last

    @property
    def numbers(self) -> set[int]:
        """The requests with a receipt."""
        return {int(receipt.job[1:]) for receipt in list(self.receipts.values())}


class Ranks:
    """The lives of one rank, in one folder, one after another."""

    def __init__(self, folder: Path, draws: random.Random, url: str, arrived: Arrived) -> None:
        self.folder = folder
        self._draws = draws
        self._url = url
        self._arrived = arrived
        self.attempts = Counter[int]()  # by request; one that was not sent is not in it
        self.durable: dict[tuple[str, int], Receipt] = {}  # in the outbox after a death
        self.deaths = Counter[str]()  # by point
        self.boots = 0

    def live(self, point: str, requests: int) -> bool:
        """Let a rank compute this many requests until it, or its process, dies at `point`, which
        may also be "rank" or "rowd": at any time. Return whether it came to its point; else it is
        killed without.
        """
        armed = f"{point}:{self._draws.randint(1, POINTS[point].most)}" if point in POINTS else ""
        rank, driver = self._begin(
            armed, spills=point in ("rows spilled", "writers behind") or self._draws.random() < 0.2
        )
        served = self._compute(rank, driver, requests, "" if armed else point)
        victim = "rowd" if point in killed_rowd.POINTS or point == "rowd" else "rank"
        died = not armed or self._until(lambda: False, rank, 0.3)
        self.deaths[point] += died
        self.kill("rank" if not died else "")
        # what has not come to its point may do so just before it is killed
        self._end(rank, {victim} if died else {"rank", victim}, point, served=served)
        return died

    def close(self) -> dict[str, Any]:
        """Let a last rank compute what is left, and end; return what it holds before."""
        rank, driver = self._begin("", spills=False)
        assert self._compute(rank, driver, REQUESTS, ""), "it begins"
        driver.send(None)
        left = driver.recv()
        (rowd,) = self._started()
        files = {str(each.resolve()) for each in Path(f"/proc/{rowd}/fd").iterdir()}
        files -= {os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)}  # where it prints
        unnamed = [name for name in files if "(deleted)" in name and "/memfd:" not in name]
        unnamed += map(str, (self.folder / "spill").glob("*"))
        driver.send(None)
        rank.join(killed_rank.PATIENCE_S)
        return left | {"files": unnamed, "code": rank.exitcode, "processes": self._started()}

    def _begin(self, armed: str, *, spills: bool) -> tuple[Any, Any]:
        self.boots += 1
        driver, theirs = CONTEXT.Pipe()
        arguments = str(self.folder), f"boot{self.boots}", self._url, armed, spills, theirs
        rank = CONTEXT.Process(target=killed_rank.main, args=arguments, daemon=True)
        rank.start()
        theirs.close()
        self._rank = rank
        return rank, driver

    def _compute(self, rank: Any, driver: Any, requests: int, victim: str) -> bool:
        """Return whether the rank served: until all its requests have receipts, or it is dead, or
        `victim` is killed.
        """
        try:
            assert driver.poll(WORK_S), "the rank does not begin"
            driver.recv()
        except EOFError:
            return False
        assert self._until(lambda: self.durable.keys() <= self._arrived.receipts.keys(), rank), (
            "a rank's process sends the receipts of those before it"
        )
        owed = sorted(set(range(1, REQUESTS + 1)) - self._arrived.numbers)[:requests]
        self.attempts.update(owed)
        with contextlib.suppress(OSError):  # it may be dead
            for number in owed:
                driver.send((number, self.attempts[number]))
            seconds = self._draws.random() * 0.4
            if victim:
                time.sleep(seconds)
            self.kill(victim)
        assert self._until(lambda: self._arrived.numbers.issuperset(owed), rank), (
            f"no receipts of some of {owed}"
        )
        return True

    def kill(self, victim: str) -> None:
        rank = [self._rank.pid]
        rowd = self._started()
        for pid in {"rank": rank, "rowd": rowd, "both": rank + rowd}.get(victim, []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _until(self, reached: Callable[[], bool], rank: Any, seconds: float = WORK_S) -> bool:
        """Wait until this is so, or the rank is dead; return whether it is."""
        return wait_for(lambda: reached() or not rank.is_alive(), seconds, step=0.01)

    def _started(self) -> list[int]:
        """Return the processes that ranks of this folder have started, and which still run."""
        mark = f"{killed_rank.FOLDER}={self.folder}\0".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found

    def _end(self, rank: Any, victims: Set[str], point: str, *, served: bool) -> None:
        """Check that neither process survives the other, and note what the outbox has then.
        `victims`: any of them may have died first.
        """
        codes = {"rank": [-signal.SIGKILL], "rowd": [EXIT_NO_RECEIPTS]}
        if not served:  # without its process a rank cannot begin, and says so
            codes["rowd"].append(1)
        expected = [code for victim in victims for code in codes[victim]]
        gone = wait_for(
            lambda: not (rank.is_alive() or self._started()), killed_rank.PATIENCE_S, step=0.01
        )
        assert gone, f"{victims} died at {point!r}: {rank}, {self._started()} still run"
        assert rank.exitcode in expected, f"{victims} died at {point!r}"
        # from a copy: to open the outbox would repair it
        copy = shutil.copytree(self.folder / "outbox", self.folder / f"outbox{self.boots}")
        for file in copy.glob("*.sqlite"):
            with contextlib.closing(sqlite3.connect(file)) as database:
                if database.execute("SELECT 1 FROM sqlite_master").fetchone():
                    ((epoch,),) = database.execute("SELECT epoch FROM outbox")
                    for number, raw in database.execute("SELECT seq, payload FROM receipts"):
                        self.durable[epoch, number] = from_msgpack(raw, Receipt)
        shutil.rmtree(copy)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "seed", [SEED, random.SystemRandom().randrange(10**9)], ids=["fixed", "random"]
)
def test_a_rank_killed_at_every_boundary_loses_nothing(  # field case 37
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    CONTEXT.set_forkserver_preload(["killed_rank", "pytest"])
    draws = random.Random(seed)
    captures = tmp_path / "captures"
    captures.mkdir()
    (captures / BLOCKED).touch()
    deaths = [*POINTS] * ROUNDS + ["rank", "rowd"] * (ANY_TIME // 2)
    draws.shuffle(deaths)
    arrived = Arrived()
    began = time.monotonic()
    with serving(Relay(cast(Settler, arrived), Settings())) as relay:
        ranks = Ranks(tmp_path, draws, relay.endpoint, arrived)
        try:
            for number, point in enumerate(deaths, 1):
                due = REQUESTS * number // len(deaths) - len(arrived.numbers)
                served = ranks.live(point, min(max(due, len(KINDS)), TOGETHER))
                if not served and len(deaths) < LIVES:
                    deaths.append(point)
            left = ranks.close()
        finally:
            ranks.kill("both")
    print(
        f"\nrank kills with seed {seed}: {ranks.boots} boots, {ranks.deaths.total()} deaths, "
        f"{ranks.attempts.total()} attempts, "
        f"{len(ranks.durable)} receipts found after a death, {time.monotonic() - began:.0f} s"
    )
    assert arrived.wrong == []
    receipts = list(arrived.receipts.values())
    assert sorted(int(receipt.job[1:]) for receipt in receipts) == list(range(1, REQUESTS + 1))
    assert ranks.durable.items() <= arrived.receipts.items(), "a durable receipt is lost"
    for receipt in receipts:
        check_receipt(receipt, captures)
    check_files(captures)
    assert left == dict.fromkeys(("messages", "bytes", "backlog", "code"), 0) | {
        "files": [],
        "processes": [],
    }
    # what was never renamed goes with its job's folder
    assert all(path.parent.name.startswith("j") for path in captures.rglob(".*"))
    assert len(list((tmp_path / "outbox").glob("*.backlog"))) == 1
    assert min(ranks.deaths[point] for point in deaths) >= ROUNDS // 2, ranks.deaths
    assert {kind_of(number) for number, count in ranks.attempts.items() if count > 1} == set(KINDS)
