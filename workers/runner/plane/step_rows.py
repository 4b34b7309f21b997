"""Captured rows in a rank's step: records and checks them, keeps them for later requests with the
same prompt, and passes them on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ....schemas.jobs.receipts import BY_REQUEST
from ..base.attribution import precedes_edits
from ..base.config import RankPlace
from ..base.engine_step import NewRequest, StepView
from ..base.row_index import Keeping, KeptBlock
from ..edits.model_state import RankState
from ..rows.arena import Arena
from ..rows.banks import Bank, Banks
from ..rows.capture import Recording
from ..rows.delivery import RowDelivery
from ..rows.finite_check import Miscount, NonFiniteRow, StepSizes, reason
from ..rows.overload import Overloads
from ..rows.planner import Tracked
from ..rows.row_store import RowStore
from ..rows.streams import Streams
from .requests import Requests
from .step_parts import RanStep, StepBatch, StepPart


class _Edited(NamedTuple):
    """The requests with sizes in steps that edit the same ones, until the tracked ones change."""

    key: tuple[object, ...]  # the changes so far, all requests of the step, and which were edited
    slots: np.ndarray  # of each one's sizes
    places: np.ndarray  # of each in the step


@dataclass(eq=False)
class RowsPart(StepPart):
    """Step part for captured rows."""

    requests: Requests
    place: RankPlace
    banks: Banks
    state: RankState
    streams: Streams
    overloads: Overloads
    arena: Arena
    delivery: RowDelivery
    block_size: Callable[[], int]  # the tokens in a KV block, the unit in which rows are kept
    # the last step in which rows were not kept although the scheduler assumes so; 0: none
    unkept: int = 0
    _recording: int = 0  # tracked requests with recordings
    _keeping: Keeping | None = None  # the scheduler's orders for this step
    _edited: dict[str, _Edited] = field(default_factory=dict)  # by bank

    def __post_init__(self) -> None:
        self.store = RowStore(self.arena)
        self._grades = self.place.grades  # read in each step

    def begin(self, ended: Mapping[str, int]) -> None:
        self._settle(ended)

    def admit(self, tracked: Tracked, request: NewRequest) -> None:
        """Set up a request's recordings. A request that cannot be captured is still steered, since
        its cache blocks are stored under a digest of that steering.
        """
        spec = tracked.spec
        try:
            for capture in spec.captures:
                for hook, layers in capture.sites.items():
                    self.state.check_sites(hook, layers)
            first = self.place.tp == 0
            recordings = [
                self.banks.recording(capture, spec.prompt_tokens, first)
                for capture in spec.captures
            ]
            tracked.recordings = {
                number: recording
                for number, recording in enumerate(recordings)
                if recording is not None
            }
        except ValueError as error:
            self.requests.fail(tracked, str(error), "capture_failed")
            return
        if tracked.recordings:
            self._recording += 1
        with self.requests.guard([tracked], "capture_failed"):
            for number, recording in tracked.recordings.items():
                self.streams.prepare(spec, number, recording, request.max_tokens, self.block_size())

    def release(self, tracked: Tracked) -> None:
        if tracked.recordings:
            self._recording -= 1
        for recording in tracked.recordings.values():
            recording.landing = self.arena.landing.number

    def prepare(self, keeping: Keeping | None) -> None:
        """Serve stored rows for tokens that the prefix cache skips; fail captures if the writers
        are behind.
        """
        self._keeping = keeping
        if keeping is not None:
            for block in keeping.serve:
                self._with_recording(block, self.store.serve)
        if not (self.delivery.held and self._recording):  # the writers have read all messages
            return
        for work, overload in self.overloads.items():
            try:
                overload.check()
            except Exception as error:
                self.requests.blame(error, self.requests.stored(work), "capture_failed")

    def plan(self, batch: StepBatch, view: StepView) -> None:
        """Plan the captures."""
        try:
            self.banks.plan_capture(batch.tokens)
        except Exception as error:
            self.requests.blame(error, batch.recording, "capture_failed")

    def drain(self, step: RanStep) -> None:
        requests = self.requests
        busy = self.banks.busy
        # rows of requests that no edit reaches are finite if the model's are
        checked = step.hidden is not None and self._grades and requests.edited
        if busy or checked or (self.banks.again and requests.edited):
            try:
                self.banks.take(requests.step, step.view, step.hidden if checked else None)
            except Exception as error:
                requests.blame(error, requests.tracked.values(), BY_REQUEST)
        if busy:
            step.recorded = []
            try:
                step.recorded = self.banks.drain()
            except Exception as error:
                requests.blame(error, requests.recorded(), "capture_failed")

    def settle(self, step: RanStep) -> None:
        self._settle()
        if (keeping := self._keeping) is not None:
            for block in keeping.keep:
                self._with_recording(block, self.store.keep)
                tracked = self.requests.tracked.get(block.request_id)
                if tracked is not None and tracked.reported:
                    self.unkept = self.requests.step
            self.store.drop(keeping.drop)
            self._keeping = None
        if self.banks.begun:
            try:
                self.banks.leave()
            except Exception as error:
                self.requests.blame(error, self.requests.recorded(), "capture_failed")

    def forget_failures(self, step: int) -> None:
        """Clear `unkept` if the prefix cache was reset at `step`, after those rows were lost."""
        if self.unkept <= step:
            self.unkept = 0

    def forget(self) -> None:
        self._recording = 0  # the failed requests, which stay tracked, have none

    def drop_kept(self) -> None:
        """Drop the rows that are kept for other requests."""
        self.store.clear()
        self.unkept = 0

    def close(self) -> None:
        self.delivery.close()

    def _settle(self, ended: Mapping[str, int] | None = None) -> None:
        """Fail requests whose edits made rows non-finite, or whose sites deviated from the plan;
        mark requests whose rows the unedited model made non-finite.

        `ended`: wait for the steps of these requests.
        """
        try:
            for bank, item in self.banks.settle(ended):
                if isinstance(item, Miscount):
                    self._miscounted(item)
                elif isinstance(item, StepSizes):
                    self._sized(bank, item)
                else:
                    self._not_finite(item)
        except Exception as error:
            self.requests.blame(error, self.requests.tracked.values(), BY_REQUEST)

    def _not_finite(self, item: NonFiniteRow) -> None:
        tracked = self.requests.tracked.get(item.id)
        if tracked is None or tracked.reported:
            return
        place = (item.site.hook, item.site.layer) if item.site is not None else None
        # What no edit can have reached comes from the unedited model, and is only counted. If it
        # overflows after an edit, the cause is unknown: the request fails.
        if not item.edited and (
            tracked.unsound or precedes_edits(tracked.spec, item.position, place, after=False)
        ):
            tracked.unsound = True
        else:
            why = f"{reason(tracked.spec, item)} (rank {self.place.rank})"
            self.requests.fail(tracked, why, "intervention_failed", since=item.step)

    def _sized(self, bank: Bank, item: StepSizes) -> None:
        """Keep the sizes of a step's edits with their requests."""
        key = self.requests.changes, item.view.ids, item.edited.tobytes()
        known = self._edited.get(bank.name)
        if known is None or known.key != key:
            known = self._edited[bank.name] = self._edited_in(bank, item, key)
        if bank.sizes.add(item, known.slots, known.places):
            for tracked in list(self.requests.tracked.values()):
                self.requests.check_sizes(tracked)

    def _edited_in(self, bank: Bank, item: StepSizes, key: tuple[object, ...]) -> _Edited:
        ids = item.view.ids
        requests = self.requests.slots_of(ids)
        begun = item.edited & (requests > 0) & ~bank.sizes.has(requests)
        for place in np.flatnonzero(begun).tolist():
            tracked = self.requests.tracked[ids[place]]
            if not tracked.reported:
                tracked.sizes[bank.name] = bank.sizes.begin(tracked.slot)
        places = np.flatnonzero(bank.sizes.has(requests))
        return _Edited(key, requests[places], places)

    def _miscounted(self, miscount: Miscount) -> None:
        """Fail the request; if its rows were not captured as planned, also requests that may have
        been served stored rows of that step.
        """
        requests = self.requests
        counted = requests.tracked.get(miscount.id)
        concerned = [] if counted is None else [counted]
        # Rows may have been kept for later requests before their step was judged.
        if miscount.kind == "capture_failed":
            self.store.clear()
            self.unkept = requests.step
            concerned += [
                item
                for item in requests.tracked.values()
                if any(recording.reused for recording in item.recordings.values())
            ]
        for tracked in concerned:
            why = f"{miscount} (rank {self.place.rank})"
            requests.fail(tracked, why, miscount.kind, since=miscount.step)

    def _with_recording(
        self, block: KeptBlock, action: Callable[[int, Recording, int, int], None]
    ) -> None:
        """Call `action` of the row store for the recording of a block, if this rank has it."""
        tracked = self.requests.tracked.get(block.request_id)
        if tracked is None or tracked.reported:
            return
        if (recording := tracked.recordings.get(block.capture)) is not None:
            with self.requests.guard([tracked], "capture_failed"):
                action(block.number, recording, block.first, block.stop)
