"""Edits in a rank's step: acquires table rows for new requests and releases those of ended ones."""

import logging
from dataclasses import dataclass, field

from ....kernels.plan import ROWS_PER_TOKEN
from ....schemas.jobs.receipts import BY_REQUEST
from ....schemas.requests.specs import HOOK, LAYERS
from ..base.actions import ActionLedger
from ..base.engine_step import NewRequest, StepView
from ..edits.installed_ops import check_here
from ..edits.model_state import RankState
from ..edits.source_runs import RunStore
from ..edits.triggers import Search, SearchTable
from ..rows.banks import Banks
from ..rows.planner import Tracked
from .probe_scores import Scorer
from .requests import TAINTED, Requests
from .step_parts import StepBatch, StepPart

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class EditsPart(StepPart):
    """Step part for edits."""

    _requests: Requests
    _banks: Banks
    _state: RankState
    _runs: RunStore
    _actions: ActionLedger
    _scorer: Scorer
    _searches: SearchTable = field(default_factory=SearchTable)

    def __post_init__(self) -> None:
        self._rows = self._banks.table

    def admit(self, tracked: Tracked, request: NewRequest) -> None:
        with self._requests.guard([tracked], "intervention_failed"):
            for row in tracked.spec.rows:
                entry = row.entries[0]  # of which all have the trigger
                if entry.trigger and entry.condition not in tracked.searches:
                    found = tracked.spec.occurrences[entry.condition[1]]
                    tracked.searches[entry.condition] = Search(
                        self._searches, entry.trigger, request.token_ids, found
                    )

    def acquire(self, tracked: Tracked) -> None:
        """Acquire the table rows of a request's steering, or fail the request with the reason."""
        spec = tracked.spec
        step = self._requests.step
        entries = spec.steering
        try:
            if self._requests.taints.affects(spec, tracked.cached_tokens):
                raise RuntimeError(TAINTED)
            if (most := max((row.column for row in spec.rows), default=-1) + 1) > ROWS_PER_TOKEN:
                raise ValueError(
                    f"its steering takes {most} rows of the table at one token; at most "
                    f"{ROWS_PER_TOKEN} are allowed"
                )
            layers_of = map(tuple, map(LAYERS, entries))
            for hook, layers in dict.fromkeys(zip(map(HOOK, entries), layers_of, strict=True)):
                self._state.check_sites(hook, layers)
            check_here(entries)
            tracked.rows = self._rows.acquire(step, spec.rows)
            if spec.rows:
                self._actions.fold(step, "steer", *spec.ids, spec.digest)
        except Exception as error:
            # these types have a clear reason, and a sweep may raise thousands: no traceback
            known = type(error) in (LookupError, ValueError)
            logger.error("request %s cannot be steered: %s", spec.key, error, exc_info=not known)
            self._requests.fail(tracked, str(error), "intervention_failed")

    def release(self, tracked: Tracked) -> None:
        tracked.edited = [
            (spec, int(self._rows.of(spec).num_sites[row])) for row, spec in tracked.rows
        ]
        self._rows.release(self._requests.step, tracked.rows)
        tracked.rows = []

    def plan(self, batch: StepBatch, view: StepView) -> None:
        """Decide the gates and triggers of the step's positions, then plan its edits, and commit
        them with the captures.
        """
        requests = self._requests
        tokens = batch.tokens
        if batch.gated and tokens.closed is not None:
            try:
                self._scorer.settle({}, batch.deciding)
            except Exception as error:
                requests.blame(error, requests.watched(), "probe_failed")
            try:
                for gates in batch.gated:
                    for request, why in gates.decide(tokens.stops, tokens.positions, tokens.closed):
                        tracked = requests.tracked[tokens.ids[request]]
                        requests.fail(tracked, f"{why} (rank {requests.rank})", "probe_failed")
            except Exception as error:
                requests.blame(error, requests.watched(), "probe_failed")
                tokens.closed[:, 1:] = True
        if batch.searches is not None and tokens.closed is not None:
            triggered = [item for _, item in batch.special if item.searches]
            with requests.guard(triggered, "intervention_failed"):
                batch.searches.decide(
                    view,
                    tokens.closed,
                    lambda request, why: requests.fail(
                        requests.tracked[request], why, "intervention_failed"
                    ),
                )
        try:
            self._banks.plan_steering(batch.tokens, requests.slots)
        except Exception as error:
            requests.blame(error, batch.steered, "intervention_failed")
        try:
            self._banks.commit()
        except Exception as error:
            requests.blame(error, batch.planned, BY_REQUEST)

    def forget(self) -> None:
        self._rows.clear()
        self._runs.clear()
        self._state.vectors.clear()

    def close(self) -> None:
        self._rows.prepared.close()
