"""A process next to the worker that reads sources of harvests, so that no file can exhaust the
worker's memory or delay a cancellation.

The two exchange MessagePack messages over a connection. The process ends with its worker,
however that ends, and after `IDLE_S` without a request.
"""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections import OrderedDict
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from midstream.broker.processes.orphans import die_with_parent
from midstream.schemas.base.errors import MidstreamError, Problem, Translated, error_of, invalid
from midstream.schemas.base.records import from_msgpack, to_msgpack
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.settings.settings import Settings

from ..records.harvests import (
    HarvestPlan,
    PlannedUnit,
    SourceFile,
    StoredHarvest,
    SurveyEntry,
    SurveyTask,
)
from .cut import CutDocument
from .source import SourceFiles

#: The process's RLIMIT_DATA, which does not count mapped files. Sources that need more are refused.
#: pyarrow and tokenizers allocate what a file asks for, and take no limit (a footer can be checked,
#: a compressed buffer cannot), so the kernel enforces one.
LIMIT_MIB = 2048
#: That of a process that computes surveys, with an autoencoder or the model's output matrix.
SURVEY_MIB = 1 << 15
#: A request is repeated in a new process when the process ends: something else may have killed it.
TRIES = 2
#: Seconds without a request after which the process ends; the next request starts another.
IDLE_S = 600.0
#: Exit status of the process when it runs out of memory.
EXIT_MEMORY = 3
#: Seconds that it gets to exit.
ENDING_S = 5.0
#: Sources that the process keeps open: as many as a worker runs parts at a time.
OPEN = 2

T = TypeVar("T")


class Opening(msgspec.Struct, frozen=True):
    """Facts that the process needs to open a harvest's source."""

    harvest: StoredHarvest
    bundle: TokenizerBundle
    roots: str  # the setting `harvest_sources`
    vocabulary: int


class ReadRequest(msgspec.Struct, frozen=True):
    """A request to the process: with `special`, return the special tokens; with `unit`, read a unit
    of `file` (None: of `source.lines`); otherwise plan the source.
    """

    harvest: str
    opening: Opening | None = None
    special: bool = False
    file: SourceFile | None = None
    unit: PlannedUnit | None = None
    survey: SurveyTask | None = None  # of a finished harvest, whose source is not read


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The process's reply to a request."""

    at: str = ""  # the place that is being read; another reply follows
    unknown: bool = False  # the harvest is not open: repeat the request with `opening`
    problem: Problem | None = None
    answer: bytes = b""  # MessagePack


class SourceReader:
    """Reads the documents of one harvest through the process.

    Tasks of one event loop may share it.
    """

    def __init__(
        self,
        process: "SourceProcess",
        harvest: StoredHarvest,
        bundle: TokenizerBundle,
        roots: str,
        vocabulary: int,
    ) -> None:
        self._process = process
        self._opening = Opening(harvest, bundle, roots, vocabulary)

    async def plan(self) -> HarvestPlan:
        """See `SourceFiles.plan`."""
        return await self._ask("the source", ReadRequest(self._opening.harvest.id), HarvestPlan)

    async def special(self) -> tuple[int | None, int | None]:
        """Return the ids of the model's BOS and EOS tokens."""
        request = ReadRequest(self._opening.harvest.id, special=True)
        return await self._ask("the tokenizer", request, tuple[int | None, int | None])

    async def read(self, plan: HarvestPlan, unit: PlannedUnit) -> list[CutDocument]:
        """See `SourceFiles.read`."""
        file = plan.files[unit.file] if plan.files else None
        place = (
            f"documents {unit.document} to {unit.document + unit.documents - 1} (in "
            f"{file.key if file else 'source.lines'})"
        )
        request = ReadRequest(self._opening.harvest.id, file=file, unit=unit)
        found = await self._ask(place, request, list[tuple[int, bytes, bytes | None]])
        return [
            CutDocument(
                number,
                np.frombuffer(ids, np.int32),
                None if in_spans is None else np.frombuffer(in_spans, bool),
            )
            for number, ids, in_spans in found
        ]

    async def survey(self, task: SurveyTask) -> SurveyEntry:
        """Compute a survey and write its file. Raises MidstreamError."""
        return await self._ask(
            "the survey", ReadRequest(self._opening.harvest.id, survey=task), SurveyEntry
        )

    async def _ask(self, place: str, request: ReadRequest, answer: type[T]) -> T:
        stopped = threading.Event()
        try:
            reply = await asyncio.to_thread(
                self._process.ask, self._opening, request, place, stopped
            )
            return from_msgpack(reply.answer, answer)
        except asyncio.CancelledError:
            self._process.stop(stopped)
            raise


class SourceProcess:
    """The process that reads sources, started at the first request. Thread-safe."""

    def __init__(self, limit_mib: int = LIMIT_MIB, idle_s: float = IDLE_S) -> None:
        self._limit = limit_mib
        self._idle_s = idle_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None  # to the process
        self._asking = threading.Lock()
        self._killing = threading.Lock()
        self._current: threading.Event | None = None  # `stopped` of the running request

    def ask(
        self, opening: Opening, request: ReadRequest, place: str, stopped: threading.Event
    ) -> Reply:
        """Send `request` and return the reply.

        Raises MidstreamError, also if reading `place` takes too much memory, and EOFError once
        `stopped` is set, see `stop`.
        """
        with self._asking:
            for attempt in range(1, TRIES + 1):
                with self._killing:
                    if stopped.is_set():
                        raise EOFError("the request was stopped")
                    self._current = stopped
                try:
                    return self._exchange(opening, request)
                except _Ended as end:
                    code = self.close(ENDING_S)
                    if not stopped.is_set() and attempt == TRIES:
                        raise self._failure(code, end.args[0] or place, request.survey) from end
                finally:
                    with self._killing:
                        self._current = None
        raise EOFError("the request was stopped")

    def _failure(self, code: int, place: str, task: SurveyTask | None) -> MidstreamError:
        """Return the error for a process that ended with `code`: out of memory, which a signal from
        the kernel or a library also means, or an internal failure.
        """
        if code < 0 or code == EXIT_MEMORY:
            field = "source"
            if task is not None:
                field = "against" if task.survey.against else "sae"
            return invalid(field, f"{place} takes more than {self._limit} MiB of memory")
        return MidstreamError(
            "internal",
            (
                f"{place}: the process that reads sources ended with {code}; the worker's log "
                "has the reason"
            ),
        )

    def stop(self, stopped: threading.Event) -> None:
        """Stop the request that was made with `stopped`; if it is running, kill the process."""
        with self._killing:
            stopped.set()
            if self._current is stopped and self._process is not None:
                self._process.kill()

    def close(self, wait_s: float = 0.0) -> int:
        """Kill the process after `wait_s` seconds, in which it may exit; returns its exit code."""
        process = self._process
        self._process = None
        code = 0
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
            process.kill()
            code = process.wait()
        if self._connection is not None:
            self._connection.close()
        return code

    def _exchange(self, opening: Opening, request: ReadRequest) -> Reply:
        connection = self._connected()
        at = ""
        with Translated((EOFError, OSError), lambda error: _Ended(at)):
            connection.send_bytes(to_msgpack(request))
            while (reply := from_msgpack(connection.recv_bytes(), Reply)).at or reply.unknown:
                if reply.unknown:
                    opened = msgspec.structs.replace(request, opening=opening)
                    connection.send_bytes(to_msgpack(opened))
                at = reply.at
        if reply.problem is not None:
            raise error_of(reply.problem)
        return reply

    def _connected(self) -> Connection:
        """Return the connection to the process, which is started if there is none."""
        with self._killing:
            if self._connection is None or self._process is None:
                self._connection, its = Pipe()
                values = (self._limit, self._idle_s, os.getpid(), its.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, *map(str, values)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(its.fileno(),),
                    start_new_session=True,  # Ctrl-C is its worker's to handle
                    # Arrow's other memory pools reserve more than they use
                    env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},
                )
                its.close()
            return self._connection


class _Ended(Exception):
    """The process has ended; the argument is the place that it was reading."""


class ReadingServer:
    """The process's side of the exchange."""

    def __init__(self, worker: Connection) -> None:
        self._worker = worker
        self._sources: OrderedDict[str, SourceFiles] = OrderedDict()

    def answer(self, request: ReadRequest) -> Reply:
        """Return the reply to a request. Raises MemoryError, which ends the process."""
        try:
            if request.survey is not None:
                from ..surveys.survey import run_survey

                return Reply(answer=to_msgpack(run_survey(request.survey)))
            if (opening := request.opening) is not None:
                self._sources[request.harvest] = SourceFiles(
                    opening.harvest,
                    opening.bundle,
                    Settings(harvest_sources=opening.roots),
                    opening.vocabulary,
                    self._show,
                )
                while len(self._sources) > OPEN:
                    self._sources.popitem(last=False)
            if (source := self._sources.get(request.harvest)) is None:
                return Reply(unknown=True)
            self._sources.move_to_end(request.harvest)
            return Reply(answer=to_msgpack(self._execute(source, request)))
        except MidstreamError as error:
            return Reply(problem=error.problem())
        except MemoryError:
            raise
        except Exception as error:
            traceback.print_exc()
            failed = MidstreamError("internal", f"{type(error).__name__}: {error}")
            return Reply(problem=failed.problem())

    def _execute(self, source: SourceFiles, request: ReadRequest) -> object:
        if request.special:
            return [source.tokens.special(name) for name in ("bos_token", "eos_token")]
        if request.unit is None:
            return source.plan()
        return [
            (
                each.number,
                each.token_ids.tobytes(),
                None if each.in_spans is None else each.in_spans.tobytes(),
            )
            for each in source.read(request.file, request.unit)
        ]

    def _show(self, place: str) -> None:
        self._worker.send_bytes(to_msgpack(Reply(at=place)))


def main() -> None:
    limit = int(sys.argv[1]) << 20
    idle_s = float(sys.argv[2])
    die_with_parent(int(sys.argv[3]))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        # if the machine runs out of memory first, the kernel kills this process, not the worker
        Path("/proc/self/oom_score_adj").write_text("1000")
    worker = Connection(int(sys.argv[4]))
    server = ReadingServer(worker)
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        try:
            while True:
                signal.setitimer(signal.ITIMER_REAL, idle_s)  # SIGALRM ends the process
                request = from_msgpack(worker.recv_bytes(), ReadRequest)
                signal.setitimer(signal.ITIMER_REAL, 0)
                worker.send_bytes(to_msgpack(server.answer(request)))
        except MemoryError:
            os._exit(EXIT_MEMORY)


if __name__ == "__main__":
    main()
