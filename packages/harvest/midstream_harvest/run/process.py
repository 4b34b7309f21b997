"""A process next to the worker that reads sources of harvests, so that no file can exhaust the
worker's memory or delay a cancellation.

The process ends with its worker, however that ends, and after `IDLE_S` without a request.
"""

import asyncio
import resource
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from midstream.broker.processes.helper_process import (
    OUT_OF_MEMORY,
    HelperAnswers,
    HelperEnded,
    HelperProcess,
    answer_all,
    begin,
    limit_memory,
)
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.recent import Recent
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
        return from_msgpack(await self._process.ask(self._opening, request, place), answer)


class SourceProcess:
    """The process that reads sources, started at the first request. Requests take turns."""

    def __init__(self, limit_mib: int = LIMIT_MIB, idle_s: float = IDLE_S) -> None:
        self._limit = limit_mib
        self.helper = HelperProcess(
            __name__,
            limit_mib,
            idle_s,
            # Arrow's other memory pools reserve more than they use
            ARROW_DEFAULT_MEMORY_POOL="system",
        )
        self._turns = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()

    async def ask(self, opening: Opening, request: ReadRequest, place: str) -> bytes:
        """Send `request` and return the reply.

        Raises MidstreamError, also if reading `place` takes too much memory.
        """
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with turn:
            for attempt in range(1, TRIES + 1):
                try:
                    if raw := await self.helper.ask(to_msgpack(request)):
                        return raw
                    opened = msgspec.structs.replace(request, opening=opening)
                    return await self.helper.ask(to_msgpack(opened))
                except HelperEnded as end:
                    if attempt == TRIES:
                        raise self._failure(end.status, end.at or place, request.survey) from end
        raise AssertionError("the last attempt returns or raises")

    def _failure(self, code: int, place: str, task: SurveyTask | None) -> MidstreamError:
        """Return the error for a process that ended with `code`: out of memory, which a signal from
        the kernel or a library also means, or an internal failure.
        """
        if code < 0 or code == OUT_OF_MEMORY:
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


class ReadingServer:
    """The process's side of the exchange."""

    def __init__(self, answers: HelperAnswers) -> None:
        self._answers = answers
        self._sources = Recent[str, SourceFiles](OPEN)

    def answer(self, raw: bytes) -> object:
        """Return the answer to a request; None if its harvest is not open."""
        request = from_msgpack(raw, ReadRequest)
        if request.survey is not None:
            from ..surveys.survey import run_survey

            return run_survey(request.survey)
        if (opening := request.opening) is not None:
            self._sources[request.harvest] = SourceFiles(
                opening.harvest,
                opening.bundle,
                Settings(harvest_sources=opening.roots),
                opening.vocabulary,
                self._answers.show,
            )
        if (source := self._sources.get(request.harvest)) is None:
            return None
        self._sources.move_to_end(request.harvest)
        return self._execute(source, request)

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


def main() -> None:
    limit_mib, idle_s = begin(niceness=0)
    limit_memory(int(limit_mib) << 20)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        # if the machine runs out of memory first, the kernel kills this process, not the worker
        Path("/proc/self/oom_score_adj").write_text("1000")
    answers = HelperAnswers()
    answer_all(answers, ReadingServer(answers).answer, idle_s=float(idle_s))


if __name__ == "__main__":
    main()
