"""Requests that a rank tracks, from their admission to their reports."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import numpy as np

from ....schemas.jobs.receipts import BY_REQUEST
from ....schemas.requests.specs import WriterWork
from ..base.engine_step import Finish
from ..edits.taints import Taints
from ..rows.planner import Tracked
from ..rows.slot_table import Slots
from .reports import Reports
from .step_parts import StepBatch

logger = logging.getLogger(__name__)

TAINTED = "its cached prefix was computed by a request whose intervention failed"
_TAINTING = "its cached prefix is being computed by a request whose intervention failed"

#: Owner of an entry → who set its limit.
_WHOSE = {
    "request": "the strictest of its entry, its module and its tenant",
    "operator": "the operator's",
}


class WrongAdapterError(RuntimeError):
    """Rows were not computed with their request's adapter. Ends the engine: no row and no cached
    block of this rank can be trusted, even of other requests, and no receipt could say which.
    """


@dataclass(eq=False, slots=True)
class Guard:
    """Context in which an error fails the given requests and nothing else, except for
    `WrongAdapterError`.
    """

    _requests: "Requests"
    _concerned: Collection[Tracked]
    _kind: str

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, WrongAdapterError):
            return False
        self._requests.blame(error, self._concerned, self._kind)
        return True


class Requests:
    """Tracked requests of one rank."""

    def __init__(self, rank: int, reports: Reports) -> None:
        self.rank = rank
        self.reports = reports
        self.step = 0  # engine steps since this rank started
        self.tracked: dict[str, Tracked] = {}
        self.slot_of: dict[str, int] = {}  # tracked request → its slot
        self._keys = set[str]()  # `RankSpec.key` of the tracked requests
        self.edited = 0  # tracked requests with interventions, even if they have failed
        # slot → tracked request whose slot is to be written again
        self.stale: dict[int, Tracked] = {}
        self.taints = Taints()
        # ends that the worker reported, of requests that the scheduler has not ended yet
        self.ends: dict[str, int] = {}
        # requests that the scheduler ended, and whose end the worker has not reported yet
        self.finished: dict[str, tuple[Tracked, Finish]] = {}
        self.changes = 0  # how often what is planned has changed
        self.batch: StepBatch | None = None  # of the last step, until a change
        self.slots = Slots()
        #: (requests, kind of the failure) → a context in which an error fails these requests.
        self.guard = partial(Guard, self)

    def track(self, request_id: str, tracked: Tracked) -> None:
        """Begin to track a request."""
        tracked.slot = self.slots.take(tracked.touched, tracked.family)
        self.tracked[request_id] = tracked
        self.slot_of[request_id] = tracked.slot
        self._keys.add(tracked.spec.key)
        if tracked.spec.rows:
            self.edited += 1
        self.change(tracked)

    def leave(self, request_id: str) -> None:
        """Track a request no more."""
        tracked = self.tracked.pop(request_id)
        slot = self.slot_of.pop(request_id)
        self._keys.discard(tracked.spec.key)
        if tracked.spec.rows:
            self.edited -= 1
        self.stale.pop(slot, None)
        for sizes in tracked.sizes.values():
            sizes.leave()
        self.slots.give(slot)
        tracked.slot = 0
        self.forget_plan()

    def change(self, tracked: Tracked) -> None:
        """Have what is planned for a request planned again."""
        if tracked.slot:
            self.stale[tracked.slot] = tracked
        self.forget_plan()

    def slots_of(self, ids: Sequence[str], without: Collection[str] = ()) -> np.ndarray:
        """Return the slots of a step's requests, int64; 0: not tracked, or `without`."""
        slots = np.fromiter(map(self.slot_of.get, ids, repeat(0)), np.int64, len(ids))
        if without:
            slots[[request_id in without for request_id in ids]] = 0
        return slots

    def forget_plan(self) -> None:
        self.changes += 1
        self.batch = None

    # Only for failures: a step looks at no request by itself.

    def recorded(self) -> list[Tracked]:
        """Return the requests with captures."""
        return [item for item in self.tracked.values() if item.recordings and not item.reported]

    def stored(self, work: WriterWork) -> list[Tracked]:
        """Return those of one kind of work whose rows are not only scored."""
        return [
            item
            for item in self.recorded()
            if item.spec.work == work
            and not all(each.capture.scored for each in item.recordings.values())
        ]

    def watched(self) -> list[Tracked]:
        """Return the requests with probes."""
        return [
            item for item in self.tracked.values() if item.watch is not None and not item.reported
        ]

    def blame(self, error: Exception, concerned: Collection[Tracked], kind: str) -> None:
        """Fail these requests because of an error, see `guard`."""
        logger.error("the data plane failed in step %d", self.step, exc_info=error)
        why = f"internal error on rank {self.rank}: {type(error).__name__}: {error}"
        for tracked in list(concerned):
            self.fail(tracked, why, kind)

    def resume(self, tracked: Tracked, cached_tokens: int) -> None:
        """Check a resumed request, which may use cache blocks that another request computed."""
        self.change(tracked)  # it computes positions again, whose blocks may be kept for others
        tracked.admitted = self.step
        tracked.cached_tokens = cached_tokens
        if self.taints.affects(tracked.spec, cached_tokens):
            self.fail(tracked, TAINTED, "intervention_failed")

    def finish(self, tracked: Tracked, finish: Finish) -> None:
        """Close a request that the scheduler ended, if its end is known; else wait for `end`."""
        tracked.stopped_by = finish.stopped_by
        key = tracked.spec.key
        end = self.ends.pop(key, None)
        if tracked.reported:
            self.taints.renew(tracked.spec.digest, self.step)
            return
        if not finish.aborted and not tracked.spec.worker_reports_end:
            end = len(finish.token_ids)
        if end is None:
            self.finished[key] = (tracked, finish)
        else:
            self._close(tracked, finish.token_ids, end)

    def end(self, key: str, num_tokens: int) -> None:
        """Record where the worker ends a request (`RankSpec.key`): after `num_tokens`, including
        the prompt; -1: forget the request. It is closed once the scheduler has ended it, too.

        Called in `begin`, since the end is sent with a step: every rank gets it in the same step.
        The engine may have computed more tokens by then. It reports requests that a stop string
        ended as aborted, as it does cancelled ones.
        """
        if key in self.finished:
            tracked, finish = self.finished.pop(key)
            with self.guard([tracked], BY_REQUEST):
                self._close(tracked, finish.token_ids, num_tokens)
        elif key in self._keys:
            self.ends[key] = num_tokens

    def _close(self, tracked: Tracked, token_ids: list[int], num_tokens: int) -> None:
        """Write the rows of the first `num_tokens` tokens, and report; with -1 do neither."""
        if num_tokens >= 0:
            kept_ids = token_ids[:num_tokens]
            # The last sampled token was never fed back and has no row, unless a probe ended the
            # request because of that row's score.
            rows = len(kept_ids) - (
                1 if len(kept_ids) < len(token_ids) or not tracked.stopped_by else 0
            )
            tracked.counted = rows
            for row, sites in tracked.edited:
                tracked.applied -= tracked.miscounted(row, rows) * sites
            for sizes in tracked.sizes.values():
                sizes.close(rows)
            self.check_sizes(tracked)
            self.reports.over(self.step, tracked, kept_ids, rows)
        else:
            tracked.forget()

    def check_sizes(self, tracked: Tracked) -> None:
        """Fail a request if an edit exceeded a limit that says so."""
        for sizes in tracked.sizes.values():
            if sizes.too_large:
                limits = {
                    f"{-each.limit:g}, {_WHOSE[each.owner]}"
                    for each in tracked.spec.steering
                    if each.limit < 0
                } or {_WHOSE["operator"]}
                self.fail(
                    tracked, f"{sizes.too_large}, {' or '.join(sorted(limits))}", "edit_too_large"
                )

    def fail(self, tracked: Tracked, message: str, kind: str, since: int | None = None) -> None:
        """Report the failure of a request now, without waiting for the request to end.

        The request continues in the engine, and its blocks enter the prefix cache under a digest
        that includes its interventions: this digest is tainted. `since`: the step of the failure,
        if not this one.
        """
        self.change(tracked)  # its rows are not captured any more
        tracked.count(self.slots)
        self.reports.failed(self.step, tracked, message, kind)
        digest = tracked.spec.digest
        edited = kind not in ("capture_failed", "probe_failed", "edit_too_large")
        # whether other requests may be served edited blocks that it fills under this digest
        shared = edited and tracked.spec.entry is None
        if digest and shared and (self.taints.add(digest, self.step) or since is not None):
            first = self.step if since is None else since
            for other in list(self.tracked.values()):
                # began in that step or later, on cache blocks that the failed request filled
                served = other.cached_tokens > other.spec.first_affected
                if (
                    other.spec.digest == digest
                    and other.admitted >= first
                    and served
                    and not other.reported
                ):
                    self.fail(other, _TAINTING, kind)

    def fail_all(self, message: str) -> None:
        """Fail every request, and drop its rows.

        Requests that the engine continues stay tracked, as failed.
        """
        waiting = [tracked for tracked, _ in self.finished.values()]
        for tracked in [*waiting, *self.tracked.values()]:
            self.fail(tracked, message, BY_REQUEST)
            tracked.rows = []
            tracked.recordings = {}
        self.finished.clear()

    def forget_failures(self, step: int) -> None:
        """Forget failures up to `step`, except those of requests that are still tracked."""
        self.taints.forget(
            step, {tracked.spec.digest for tracked in self.tracked.values() if tracked.failure}
        )
