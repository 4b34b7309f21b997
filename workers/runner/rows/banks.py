"""Banks of a rank: tables, planner and checks for the sites whose rows have one width, and all
banks together as the data plane uses them.

The residual bank is the first, and the only bank if no hooks inside layers are served. See
`schemas.model.banks`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ....kernels.plan import Buffers
from ....schemas.requests.specs import StoredCapture
from ..base.engine_step import StepView
from ..edits.source_runs import RunStore
from ..edits.steering_tables import RowTable, Tables
from ..files.finished_rows import BankColumns
from ..hooks.sites import RankSite
from .arena import Arena, BankRows
from .capture import Ports, Recording, ScoredRows
from .edit_sizes import SizeTable
from .finite_check import FiniteCheck, Miscount, NonFiniteRow, StepSizes
from .overload import Overloads
from .planner import Planner, Tracked
from .slot_table import Slots, StepTokens


class BankPart(NamedTuple):
    """Installed parts of one bank."""

    name: str  # see `schemas.model.banks.BANKS`
    sites: Sequence[RankSite]
    buffers: Buffers
    columns: BankColumns | None = None  # None: the residual bank


class Bank:
    """One bank of this rank."""

    def __init__(
        self,
        part: BankPart,
        table: RowTable,
        arena: Arena,
        overloads: Overloads,
        copies: "torch.cuda.Stream | None",
    ) -> None:
        self.name = part.name
        self.sites = part.sites
        self.columns = part.columns
        self.table = table
        pool = part.buffers.pool
        memory = BankRows(
            arena,
            pool.shape[1],
            pool.dtype,
            lambda: any(each.spills() for each in overloads.values()),
        )
        self.ports = Ports(part.sites, pool.shape[1], memory.dtype, part.columns)
        self.planner = Planner(
            part.sites,
            part.buffers,
            table,
            memory,
            overloads,
            copies,
            bank=part.name,
        )
        whole = part.columns is None or not part.columns.sharded
        self.finite = FiniteCheck(part.sites, part.buffers, whole=whole)
        self.sizes = SizeTable(part.sites, arena)

    def recording(
        self, capture: StoredCapture, prompt_tokens: int, first_of_stage: bool
    ) -> Recording | None:
        """Return this rank's recording of a capture; None if it records nothing.

        `first_of_stage`: all ranks of a stage hold equal residual rows, so only its first rank
        records them, unless the capture needs every rank. Raises ValueError for rows of another
        shape.
        """
        if capture.row != (None if self.columns is None else self.columns.row):
            raise ValueError(
                f"its rows are {capture.row}, but those of {', '.join(capture.sites)} are "
                f"{self.columns and self.columns.row}"
            )
        records = first_of_stage if self.columns is None else self.columns.records
        if not (records or capture.everywhere):
            return None
        return Recording.of(capture, self.ports, prompt_tokens)


class Banks:
    """All banks of a rank."""

    def __init__(
        self,
        residual: BankPart,
        inside: Sequence[BankPart],
        table: Tables,
        runs: RunStore,
        arena: Arena,
        overloads: Overloads,
    ) -> None:
        """`table`: gets the tables of the banks."""
        parts = [residual, *inside]
        device = residual.buffers.ring.device
        self._device = device
        copies = None if device.type == "cpu" else torch.cuda.Stream(device)
        self.table = table
        self._banks = [
            Bank(
                part,
                table.add(part.name, part.sites, part.buffers, runs, part.columns),
                arena,
                overloads,
                copies,
            )
            for part in parts
        ]
        self._by_name = {bank.name: bank for bank in self._banks}
        #: Whether the current forward edits or records anything; the next one may find a plan.
        self.busy = self.loaded = False
        self.begun = False  # rows may leave recordings once the step is over
        self.again = False  # the current forward computes positions that an earlier one computed

    @property
    def first(self) -> Bank:
        """Return the residual bank."""
        return self._banks[0]

    def recording(
        self, capture: StoredCapture, prompt_tokens: int, first_of_stage: bool
    ) -> Recording | None:
        """Return a recording like `Bank.recording`.

        Raises ValueError also for hooks that this rank does not serve.
        """
        if capture.bank not in self._by_name:
            raise ValueError(f"hook {next(iter(capture.sites))} is not served")
        return self._by_name[capture.bank].recording(capture, prompt_tokens, first_of_stage)

    # --- A step; the methods of `Planner`

    def leave(self) -> None:
        self.begun = False
        for bank in self._banks:
            bank.planner.leave()

    def clear(self) -> None:
        for bank in self._banks:
            bank.planner.clear()
        self.busy = self.loaded = False

    def write(self, tracked: Tracked) -> None:
        """Write the request's slot in the tables."""
        for bank in self._banks:
            bank.planner.write(tracked)

    def erase(self, slot: int) -> None:
        for bank in self._banks:
            bank.planner.erase(slot)

    def plan_steering(self, tokens: StepTokens, slots: Slots) -> None:
        try:
            for bank in self._banks:
                bank.planner.plan_steering(tokens, slots)
        except Exception:  # the requests fail; no bank may edit as in the step before
            for bank in self._banks:
                bank.planner.clear_edits()
            raise
        reached = slots.reached[tokens.of_requests]
        self.again = bool((tokens.firsts < reached).any())
        slots.reached[tokens.of_requests] = np.maximum(reached, tokens.stops)
        slots.reached[0] = 0

    def plan_capture(self, tokens: StepTokens) -> None:
        try:
            for bank in self._banks:
                bank.planner.plan_capture(tokens)
                self.begun = self.begun or bool(bank.planner.begun)
        except Exception:  # none may capture as in the step before
            for bank in self._banks:
                bank.planner.clear_captures()
            raise

    def commit(self) -> None:
        try:
            self.busy = False  # unless clear() says otherwise
            self.loaded = True
            for bank in self._banks:
                bank.planner.commit()
                if bank.planner.due is not None:
                    self.busy = True
        except Exception:  # the others would do what they did in the last step
            for bank in self._banks:
                bank.planner.abandon()
            self.busy = False
            raise

    def drain(self) -> list[ScoredRows]:
        recorded = list[ScoredRows]()
        errors = list[Exception]()
        self.busy = False
        for bank in self._banks:
            try:
                recorded += bank.planner.drain()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return recorded

    # --- Findings; the methods of `FiniteCheck`

    def precede(self) -> None:
        """Have the next forward wait until the last one's observations are over."""
        for bank in self._banks:
            over = bank.finite.over
            bank.finite.over = None
            if over is not None and not over.query():
                torch.cuda.current_stream(self._device).wait_event(over)

    def take(self, step: int, view: StepView | None, hidden: torch.Tensor | None) -> None:
        """Observe the forward of `view`. `hidden`: output of the last layer, checked only once.

        An error of one bank is raised once all are done: what the step left in the buffers of the
        others would be blamed on later steps.
        """
        errors = list[Exception]()
        for bank in self._banks:
            try:
                bank.finite.take(step, view, bank.planner.due, hidden, again=self.again)
            except Exception as error:
                errors.append(error)
            hidden = None
        if errors:
            raise errors[0]

    def settle(
        self, needed: Mapping[str, int] | None = None
    ) -> list[tuple[Bank, NonFiniteRow | Miscount | StepSizes]]:
        found = list[tuple[Bank, NonFiniteRow | Miscount | StepSizes]]()
        for bank in self._banks:
            if bank.finite.pending:
                for finding in bank.finite.settle(needed):
                    found.append((bank, finding))
        return found

    def found(self) -> Callable[[], list[tuple[str, int]]] | None:
        """Return a function that returns (request, position) of the last step's non-finite rows;
        None if nothing was observed.

        The function may be called in any thread, and waits for the step.
        """
        last = list[Callable[[], list[tuple[str, int]]]]()
        for bank in self._banks:
            if (finding := bank.finite.last) is not None:
                last.append(partial(finding.found, bank.sites))
                bank.finite.last = None
        if len(last) == 1:
            return last[0]
        return (lambda: [item for found in last for item in found()]) if last else None
