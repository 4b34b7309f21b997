"""Calls to all ranks: every answer is checked; an action that fails on a rank is undone on all."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from ....schemas.base.errors import MidstreamError

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Calls a method on all ranks and returns their answers in rank order; raises
#: MidstreamError("engine_failed") when it cannot.
CollectiveCall = Callable[[str, tuple[Any, ...]], Awaitable[Sequence[Any]]]


class Refused(MidstreamError):
    """A rank refused an action requested of all."""

    def __init__(self, detail: str) -> None:
        super().__init__("intervention_failed", detail)


class Quarantined(MidstreamError):
    """The state of the ranks may differ: no job may run here until they are resynced."""

    def __init__(self, detail: str) -> None:
        super().__init__("intervention_failed", detail)


class Undo(NamedTuple):
    """The call that undoes an action; harmless on a rank where it never succeeded."""

    method: str
    arguments: tuple[Any, ...]


def check_apply_results(action: str, results: Sequence[tuple[bool, str]], world: int) -> None:
    """Raises Refused (`intervention_failed`) naming every rank that failed and why.

    `results`: one `(ok, message)` of each rank, in rank order.
    """
    if len(results) != world:
        raise Refused(f"{action}: {len(results)} of {world} ranks answered")
    failures = [
        f"rank {rank}: {message or 'no reason was given'}"
        for rank, (ok, message) in enumerate(results)
        if not ok
    ]
    if failures:
        raise Refused(f"{action} failed on {'; '.join(failures)}")


class Ranks:
    """All ranks of an engine.

    `on_quarantine(reason)` is called, in addition to the exception, if the ranks may differ from
    now on.
    """

    def __init__(
        self, call: CollectiveCall, world: int, on_quarantine: Callable[[str], None]
    ) -> None:
        self._call, self._world, self._on_quarantine = call, world, on_quarantine

    async def check(self, action: str, method: str, *arguments: Any) -> None:
        """Call a method that changes nothing. Raises Refused with rank and reason."""
        check_apply_results(action, await self._ask(method, arguments), self._world)

    async def apply(
        self, action: str, method: str, *arguments: Any, undo: Undo | None = None
    ) -> None:
        """Change something on every rank, or on none.

        Once begun it is completed, even if the caller is cancelled.

        Raises Refused with rank and reason if a rank failed and all rolled back, and Quarantined if
        the rollback also failed or there is none.
        """
        await unbroken(self._apply(action, method, arguments, undo))

    async def _apply(
        self, action: str, method: str, arguments: tuple[Any, ...], undo: Undo | None
    ) -> None:
        results = await self._ask(method, arguments)
        try:
            check_apply_results(action, results, self._world)
        except Refused as failure:
            if undo is None:
                raise self._quarantine(failure.detail) from failure
            try:
                check_apply_results(f"undoing {action}", await self._ask(*undo), self._world)
            except Refused as undo_failure:
                detail = f"{failure.detail}; {undo_failure.detail}"
                raise self._quarantine(detail) from undo_failure
            raise

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> list[tuple[bool, str]]:
        return [(bool(ok), str(message)) for ok, message in await self._call(method, arguments)]

    def _quarantine(self, detail: str) -> Quarantined:
        self._on_quarantine(detail)
        return Quarantined(detail)


async def unbroken(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to completion; a cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception as error:
            if cancelled is not None:
                logger.info("a call begun by a cancelled caller failed: %s", error)
    if cancelled is not None:
        raise cancelled
    return task.result()
