"""Requests that a rank tracks, from their admission to their reports; the batch of those of a step,
by what it has to do for them; and the base class of the parts of a step, with its phases.
"""

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ....schemas.base.version import __version__
from ....schemas.jobs.receipts import BY_REQUEST, Receipt
from ....schemas.prompts.selectors import select
from ..base.actions import ActionLedger
from ..base.config import PlaneConfig, RankPlace
from ..base.engine_step import Finish, NewRequest, StepView
from ..base.row_index import Keeping
from ..edits.taints import Taints
from ..files.desk import EndedRequest
from ..files.finished_rows import Origin
from ..probes.watches import ProbeError, SharedGates, Watch, shown
from ..rows.capture import Recording, ScoredRows
from ..rows.delivery import RowDelivery
from ..rows.planner import Tracked
from ..rows.slot_table import Slots, StepTokens


class Reports:
    """Reports of one rank; `Tracked.reported` ensures at most one receipt for each request."""

    def __init__(
        self,
        config: PlaneConfig,
        place: RankPlace,
        delivery: RowDelivery,
        actions: ActionLedger,
        *,
        num_layers: int,
    ) -> None:
        """`num_layers`: of the whole model."""
        self._config, self._place, self._delivery, self._actions = config, place, delivery, actions
        self._origin = Origin(
            config.worker,
            place.rank,
            place.pp,
            place.stages,
            num_layers,
            tuple(config.caveats),
            config.identity,
        )
        self.describe()

    def describe(self, **changed: Any) -> None:
        """Change fields of `Origin` for every later manifest."""
        self._origin = dataclasses.replace(self._origin, **changed)
        self._delivery.set_origin(self._origin)

    def over(self, step: int, tracked: Tracked, token_ids: list[int], rows: int) -> None:
        """Report a request that has ended, once its captured rows are written.

        `token_ids`: all its tokens, including those of the prompt. `rows`: how many of them,
        from the first on, have rows.
        """
        if tracked.reported:
            return
        if self._place.grades and (why := lacking(tracked)):
            self.failed(step, tracked, why, "intervention_failed")
            return
        if tracked.watch is not None:
            try:
                _score(tracked, tracked.watch, rows)
            except ProbeError as error:
                self.failed(step, tracked, f"{error} (rank {self._place.rank})", "probe_failed")
                return
        recordings = {
            number: recording
            for number, recording in tracked.recordings.items()
            if not recording.capture.scored
        }
        request = EndedRequest(
            self._receipt(step, tracked),
            tracked.spec,
            [
                recording.ended(number, _high(tracked, recording))
                for number, recording in recordings.items()
            ],
            token_ids,
            rows,
            tracked.unsound,
            [sizes.recorded for sizes in tracked.sizes.values()],
            self._place.tp == 0,
            tracked.results,
            self._actions.state,
            sum(recording.nbytes for recording in recordings.values()),
        )
        self._delivery.submit(request, recordings, list(tracked.sizes.values()))
        tracked.reported = True

    def failed(self, step: int, tracked: Tracked, message: str, kind: str) -> None:
        """Report a failure, without waiting for the request to end. `kind`: see `Receipt.kind`.

        The receipt has what policies have decided so far: no request hides it by failing.
        """
        if tracked.reported:
            return
        try:
            if tracked.watch is not None and (rows := tracked.watch.decide_all(tracked.counted)):
                _score(tracked, tracked.watch, rows)
        except Exception:
            logger.exception("a failed request is reported without the decisions of its policies")
        tracked.failure, tracked.failure_kind = message, kind
        tracked.forget()
        self._delivery.submit(EndedRequest(self._receipt(step, tracked), tracked.spec), {})
        tracked.reported = True

    def _receipt(self, step: int, tracked: Tracked) -> Receipt:
        spec, place = tracked.spec, self._place
        return Receipt(
            version=__version__,
            worker=self._config.worker,
            boot=self._config.boot,
            job=spec.job,
            request=spec.request,
            attempt=spec.attempt,
            rank=place.rank,
            world=place.world,
            tp=place.tp,
            pp=place.pp,
            step=step,
            actions=self._actions.count,
            checksum=self._actions.seal(tracked.results),
            status="error" if tracked.failure else "ok",
            message=tracked.failure,
            applied=tracked.applied,
            kind=tracked.failure_kind,
            global_version=spec.global_version,
            epoch=self._actions.epoch,
            graded=tracked.graded() if tracked.graded is not None and not tracked.failure else [],
            trace=spec.trace,
            # of a failure those of policies, from every rank: only the first such receipt counts
            scores=[score for score in tracked.scores if score.policy is not None]
            if tracked.failure
            else tracked.scores
            if place.tp == 0
            else [],
            identity=self._config.identity,
        )


def _score(tracked: Tracked, watch: Watch, rows: int) -> None:
    """Set the results of a request's probes, about its first `rows` tokens. Raises ProbeError."""
    tracked.scores, tracked.results = watch.results(rows, tracked.stopped_by)
    tracked.scores = [
        shown(watch, score, rows) if score.name in tracked.gates else score
        for score in tracked.scores
    ]


def _high(tracked: Tracked, recording: Recording) -> list[bool]:
    """Return for each token whether the probe that a capture's window names is high."""
    window = recording.capture.window
    if window is None or window.when is None:
        return []
    assert tracked.watch is not None, "the window's probe scores every token"
    return list(tracked.watch.high(window.when.probe, window.when.at_least))


def lacking(tracked: Tracked) -> str:
    """Return why an ended request has no grade of its next token; empty if it has a grade, or
    requested none.
    """
    if tracked.spec.grade is None:
        return ""
    if tracked.graded is None:
        return "the next token was not graded: no logits at the end of the prompt"
    values = tracked.graded()
    return (
        "" if all(map(math.isfinite, values)) else f"the next token's grade is not finite: {values}"
    )


logger = logging.getLogger(__name__)

TAINTED = "its cached prefix was computed by a request whose intervention failed"
_TAINTING = "its cached prefix is being computed by a request whose intervention failed"


class WrongAdapterError(RuntimeError):
    """Rows were not computed with their request's adapter. Ends the engine: no row and no cached
    block of this rank can be trusted, even of other requests, and no receipt could say which.
    """


class Guard:
    """Context in which an error fails the given requests and nothing else, except for
    `WrongAdapterError`.
    """

    __slots__ = ("_concerned", "_kind", "_requests")

    def __init__(self, requests: "Requests", concerned: Collection[Tracked], kind: str) -> None:
        self._requests, self._concerned, self._kind = requests, concerned, kind

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, WrongAdapterError):
            return False
        self._requests.blame(error, self._concerned, self._kind)
        return True


class Kinds(NamedTuple):
    """Tracked requests by what they need in a step."""

    recorded: list[Tracked]  # those with captures
    stored: list[Tracked]  # those whose rows are not only scored
    watched: list[Tracked]  # those with probes
    edits: bool  # whether one has interventions, even if it has failed


class Requests:
    """Tracked requests of one rank."""

    def __init__(self, rank: int, reports: Reports) -> None:
        self.rank, self.reports = rank, reports
        self.step = 0  # engine steps since this rank started
        self.tracked: dict[str, Tracked] = {}
        self.taints = Taints()
        # ends that the worker reported, of requests that the scheduler has not ended yet
        self.ends: dict[str, int] = {}
        # requests that the scheduler ended, and whose end the worker has not reported yet
        self.finished: dict[str, tuple[Tracked, Finish]] = {}
        self.changes = 0  # calls of `change`
        self.batch: StepBatch | None = None  # of the last step, until a change
        self.slots = Slots()
        self.sorted = 0  # `changes` when `kinds` was set
        self.kinds = Kinds([], [], [], False)  # as they were when the step began
        #: (requests, kind of the failure) → a context in which an error fails these requests.
        self.guard = partial(Guard, self)

    def change(self) -> None:
        """Precede everything that changes the tracked requests or what is planned for one."""
        self.changes += 1
        self.batch = None

    def sort(self) -> None:
        """Sort the tracked requests by what they need, for the step that begins."""
        every, self.sorted = self.tracked.values(), self.changes
        recorded = [item for item in every if item.recordings and not item.reported]
        self.kinds = Kinds(
            recorded,
            [
                item
                for item in recorded
                if not all(each.capture.scored for each in item.recordings.values())
            ],
            [item for item in every if item.watch is not None and not item.reported],
            any(item.spec.steering for item in every),
        )

    def blame(self, error: Exception, concerned: Collection[Tracked], kind: str) -> None:
        """Fail these requests because of an error, see `guard`."""
        logger.error("the data plane failed in step %d", self.step, exc_info=error)
        why = f"internal error on rank {self.rank}: {type(error).__name__}: {error}"
        for tracked in list(concerned):
            self.fail(tracked, why, kind)

    def resume(self, tracked: Tracked, cached_tokens: int) -> None:
        """Check a resumed request, which may use cache blocks that another request computed."""
        self.change()
        tracked.admitted, tracked.cached_tokens = self.step, cached_tokens
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
        elif any(tracked.spec.key == key for tracked in self.tracked.values()):
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
                # edits of rejected drafts, and after the end, do not count
                beyond = select(row.positions, rows, tracked.reached, tracked.spec.prompt_tokens)
                tracked.applied -= len(tracked.open_of(row, beyond)) * sites
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
                self.fail(tracked, sizes.too_large, "edit_too_large")

    def fail(self, tracked: Tracked, message: str, kind: str, since: int | None = None) -> None:
        """Report the failure of a request now, without waiting for the request to end.

        The request continues in the engine, and its blocks enter the prefix cache under a digest
        that includes its interventions: this digest is tainted. `since`: the step of the failure,
        if not this one.
        """
        self.change()
        tracked.count(self.slots)
        tracked.stale = True  # its rows are not captured any more
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
            tracked.set_rows([])
            tracked.recordings = {}
        self.finished.clear()

    def forget_failures(self, step: int) -> None:
        """Forget failures up to `step`, except those of requests that are still tracked."""
        self.taints.forget(
            step, {tracked.spec.digest for tracked in self.tracked.values() if tracked.failure}
        )


class StepBatch:
    """The requests of a step."""

    def __init__(
        self, view: StepView, tracked: Mapping[str, Tracked], without: Collection[str] = ()
    ) -> None:
        """`without`: requests for which the step does nothing."""
        self.members = [
            (number, item)
            for number, request in enumerate(view.ids)
            if (item := tracked.get(request)) is not None and request not in without
        ]
        slots = np.zeros(len(view.ids), dtype=np.int64)
        for number, item in self.members:
            slots[number] = item.slot
        self.tokens = StepTokens(view, slots)
        every = [item for _, item in self.members]
        self.steered = [item for item in every if item.rows]
        self.recording = [item for item in every if item.recordings]
        self.planned = [item for item in every if item.rows or item.recordings]
        self.gated = self._gated()
        #: The kinds of watches whose scores decide gates of the step.
        self.deciding = {gates.kind for gates in self.gated if gates.decides}
        #: Whether more may be decided in a step than gates.
        self.watched = any(
            item.spec.entry is not None
            or (item.spec.grade is not None and item.graded is None and not item.reported)
            for item in every
        )

    def _gated(self) -> list[SharedGates]:
        groups: dict[Any, list[tuple[int, Watch]]] = {}
        for number, item in self.members:
            if item.gates and (watch := item.watch) is not None:
                key = not item.reported, watch.kind, tuple(item.gates)
                groups.setdefault(key, []).append((number, watch))
        if groups:
            columns = 1 + max(len(probes) for _, _, probes in groups)
            self.tokens.closed = np.zeros((len(self.tokens.slots), columns), dtype=bool)
        members = self.tokens.members
        return [
            SharedGates(each, probes, members, decides=decides)
            for (decides, _, probes), each in groups.items()
        ]


@dataclass(slots=True)
class RanStep:
    """A step whose forward pass ran."""

    view: StepView | None  # None: it was not planned
    # output of the last layer, `[tokens, hidden_size]`; None on other stages
    hidden: torch.Tensor | None
    # the recorded rows that probes read; None: no site had anything to do
    recorded: list[ScoredRows] | None = None


class StepPart:
    """One concern of a rank; a part overrides the phases that concern it.

    The data plane calls the phases in the order of the methods below, each for all parts before the
    next. An error that a part raises ends the engine; therefore a part guards work that only some
    requests need, see `Requests.guard`.
    """

    def begin(self, ended: Mapping[str, int]) -> None:
        """Begin a step before which requests ended. `ended`: request → its `Finish.rows`."""

    def release(self, tracked: Tracked) -> None:
        """Take back from an ended request what `acquire` gave it."""

    def admit(self, tracked: Tracked, request: NewRequest) -> None:
        """Set up a new request's captures and probes."""

    # Apart from `admit`: a request is steered even if it cannot be captured, as its cached blocks
    # say.
    def acquire(self, tracked: Tracked) -> None:
        """Give a new request its share of common resources, even if `admit` failed it."""

    def prepare(self, keeping: Keeping | None) -> None:
        """Prepare the step, whose requests are admitted. `keeping`: commands about stored rows.
        Not called if there are none, and nothing waits for the writers.
        """

    def plan(self, batch: StepBatch, view: StepView) -> None:
        """Set up the next forward. `batch`: the tracked requests of `view`."""

    def drain(self, step: RanStep) -> None:
        """Take the results of the forward."""

    def settle(self, step: RanStep) -> None:
        """Check the step, and pass on rows that are no longer needed."""

    def forget(self) -> None:
        """Drop the state of requests, which have all failed, and what the worker's calls set."""

    def close(self) -> None:
        """Finish pending work, and stop."""
