"""Finds rows that are not finite, sites that did not do their part, and the sizes of edits, without
making a step wait for the device.

Three things are observed: the sites' counts of each row that they edit or capture
(`kernels.plan.Buffers.counts`), by which a site is found that did not run, ran twice, or ran with
another plan; the relative sizes of edits, which also say what edited rows are not finite
(`Buffers.sizes`); and the sum of each row that leaves the last layer, which is not finite if a
value of the row is not. On an accelerator they are copied to pinned memory and read when that is
over; on the CPU they are copied immediately. Nothing is set back: counts are compared with all
work planned so far, and sizes are read where the step has edits.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ....kernels.plan import CAPTURED_AFTER, CAPTURED_BEFORE, EDITED, LARGEST_SIZE, Buffers
from ....schemas.prompts.selectors import select
from ....schemas.requests.interventions import FAMILY
from ....schemas.requests.specs import RankSpec
from ..base.engine_step import StepView
from ..base.host_memory import locked_like
from ..hooks.sites import RankSite
from .slot_table import StepTokens
from .step_places import Places

#: Column of `counts` → description of what is counted.
_WHAT = {
    EDITED: "edits",
    CAPTURED_BEFORE: "rows captured before edits",
    CAPTURED_AFTER: "rows captured after edits",
}

_NO_SITES = np.zeros(0, dtype=np.int64)
_DTYPES = {"counts": np.int32, "sizes": np.float32, "sums": np.float32}


@dataclass(frozen=True, slots=True)
class Miscount:
    """A site whose work in a step differs from its plan, and one request that is affected."""

    id: str  # of the request in the engine
    step: int
    site: RankSite
    column: int  # of `counts`
    expected: int  # over all requests of the step
    counted: int

    @property
    def kind(self) -> str:
        """The problem's kind, see `Receipt.kind`."""
        return "intervention_failed" if self.column == EDITED else "capture_failed"

    def __str__(self) -> str:
        what = f"{_WHAT[self.column]} at {self.site.hook} of layer {self.site.layer}"
        return f"step {self.step}, {what}: {self.expected} planned, {self.counted} counted"


@dataclass(frozen=True, eq=False)
class Due:
    """Counts that the sites of one step must reach, and for which requests."""

    counts: np.ndarray  # int32 [sites, COUNTS]
    tokens: StepTokens
    places: Places | None  # of the captured rows
    masks: np.ndarray  # bool [n, sites]: sites that each configuration of the step edits
    masked: np.ndarray  # [tokens, columns]: the numbers of those that edit each token

    @cached_property
    def edited(self) -> np.ndarray:
        """Whether rows of each request of the step are edited, bool `[requests]`."""
        found = np.zeros(len(self.tokens.ids), dtype=bool)
        found[self.tokens.members[np.flatnonzero(self.masked.any(axis=1))]] = True
        return found

    @cached_property
    def edits(self) -> bool:
        """Whether rows are edited."""
        return bool(self.edited.any())

    @cached_property
    def sites(self) -> np.ndarray:
        """The numbers of the sites that edit rows, int64."""
        return np.flatnonzero(self.counts[:, EDITED])

    @cached_property
    def span(self) -> tuple[int, int]:
        """The number of the first site that edits rows, and of the last one plus 1."""
        return (int(self.sites[0]), int(self.sites[-1]) + 1) if len(self.sites) else (0, 0)

    @cached_property
    def edited_rows(self) -> np.ndarray:
        """Return which rows each of `sites` edits, bool `[sites, tokens]`."""
        return np.ascontiguousarray(self.masks[:, self.sites][self.masked].any(axis=1).T)

    def miscounts(
        self, step: int, counts: np.ndarray, sites: Sequence[RankSite]
    ) -> Iterator[Miscount]:
        """Yield each request's first site whose actual `counts` differ, for each `kind`."""
        failed: set[tuple[str, str]] = set()
        for number, column in np.argwhere(counts != self.counts).tolist():
            for request in self._planned_at(number, column):
                miscount = Miscount(
                    request,
                    step,
                    sites[number],
                    column,
                    int(self.counts[number, column]),
                    int(counts[number, column]),
                )
                if (request, miscount.kind) not in failed:
                    failed.add((request, miscount.kind))
                    yield miscount

    def _planned_at(self, site: int, column: int) -> list[str]:
        """Return the requests whose rows the site was to edit or capture; if it was planned for
        none, all requests of the step with edits or captures.
        """
        ids = self.tokens.ids
        captures = [] if self.places is None else self.places.captures()
        if column == EDITED:
            rows = np.flatnonzero(self.masks[:, site][self.masked].any(axis=1))
            planned = [ids[number] for number in np.unique(self.tokens.members[rows]).tolist()]
        else:
            place = 2 * site + (column == CAPTURED_AFTER)
            planned = [request for request, mask in captures if mask[place]]
        if planned:
            return planned
        edited = [ids[number] for number in np.flatnonzero(self.edited).tolist()]
        return [*edited, *(request for request, _ in captures)]


class StepSizes(NamedTuple):
    """The relative sizes of one step's edits in one bank."""

    view: StepView
    edited: np.ndarray  # bool [requests of the step], whether their rows were edited
    sites: np.ndarray  # int64 [sites], their numbers
    # float32 [sites, rows of the step], as `kernels.plan.Buffers.sizes`; NaN: not edited
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class NonFiniteRow:
    """The first non-finite row of a request in one step."""

    id: str  # of the request in the engine
    step: int
    position: int
    site: RankSite | None  # None: after the last layer
    edited: bool = False  # the site's edits caused it; False: it was non-finite before them


class _Seen(NamedTuple):
    """Observations of one step's forward; None: not observed, or finite sums on the CPU."""

    counts: np.ndarray | None = None  # int32 [sites, COUNTS], of all steps so far
    # float32 [`Due.sites`, rows], as `kernels.plan.Buffers.sizes`; NaN: not edited
    sizes: np.ndarray | None = None
    sums: np.ndarray | None = None  # float32 [rows]


@dataclass(eq=False)
class _Finding:
    """The observations of a step, complete once `event` has occurred."""

    step: int
    view: StepView
    due: Due | None  # the work planned for its sites
    expected: np.ndarray  # the counts of all work planned up to this step
    # after the event, the observations one after the other, int32, in the shapes of `parts`
    record: torch.Tensor
    parts: Mapping[str, torch.Tensor]
    event: "torch.cuda.Event | None" = None
    sound: bool = True  # all rows are finite, once `read`
    _seen: _Seen | None = None

    def read(self) -> _Seen:
        """Return the observations. Waits for the event."""
        if self._seen is None:
            if self.event is not None:
                self.event.synchronize()
            values = dict[str, np.ndarray]()
            at = 0
            sound = True
            for name, part in self.parts.items():
                bits = self.record[at : at + part.numel()].numpy()
                values[name] = bits.view(_DTYPES[name]).reshape(part.shape)
                at = at + len(bits)
            if self.due is not None and self.due.edits:
                edited = values["sizes"][self.due.sites - self.due.span[0]]
                values["sizes"] = np.where(self.due.edited_rows, edited, np.nan)
                sound = not bool((np.abs(values["sizes"]) > LARGEST_SIZE).any())
            if "sums" in values:
                sound = sound and math.isfinite(float(values["sums"].sum(dtype=np.float64)))
            self.sound = sound
            self._seen = _Seen(**values)
        return self._seen

    def found(self, sites: Sequence[RankSite]) -> list[tuple[str, int]]:
        """Return (request, position) of the rows that are not finite. Waits for the event."""
        if self._seen is None:
            self.read()
        if self.sound:
            return []
        return [(item.id, item.position) for item in self.non_finite(sites)]

    def non_finite(self, sites: Sequence[RankSite]) -> list[NonFiniteRow]:
        """Return each request's first rows that are not finite, by position; at one position the
        row at a site precedes the row after the last layer. Waits for the event.
        """
        seen = self.read()
        found = list[NonFiniteRow]()
        if self.due is not None and seen.sizes is not None:
            bad = np.abs(seen.sizes) > LARGEST_SIZE
            for id_, row, position in self._first_bad(bad.any(axis=0)):
                place = int(bad[:, row].argmax())
                site = sites[self.due.sites[place]]
                edited = np.isinf(seen.sizes[place, row])
                found.append(NonFiniteRow(id_, self.step, position, site, bool(edited)))
        if seen.sums is not None:
            found += [
                NonFiniteRow(id_, self.step, position, None)
                for id_, _, position in self._first_bad(~np.isfinite(seen.sums))
            ]
        # By position, because a row that the unedited model made non-finite explains later ones.
        return sorted(found, key=lambda item: item.position)

    def _first_bad(self, bad: np.ndarray) -> Iterator[tuple[str, int, int]]:
        """Yield (request, row, position) of the first bad row of each request that has one."""
        for rows in self.view.requests:
            indices = np.flatnonzero(bad[rows.first_row : rows.first_row + rows.num_rows])
            if len(indices):
                first = int(indices[0])
                yield rows.id, rows.first_row + first, rows.first_position + first


class FiniteCheck:
    """The check of one bank: `take` observes a forward, `settle` returns what is known by then.

    On an accelerator a stream of its own collects the observations in one record and copies it
    before the next forward, which waits for that if it must: see `Banks.precede`.
    """

    def __init__(self, sites: Sequence[RankSite], buffers: Buffers, *, whole: bool = True) -> None:
        """`whole`: this rank holds whole rows; the sizes of parts of rows mean nothing."""
        self._sites = list(sites)
        self._counts = buffers.counts
        self._sizes = buffers.sizes
        self._whole = whole
        self._device = buffers.counts.device
        self._side = None if self._device.type == "cpu" else torch.cuda.Stream(self._device)
        #: Counts of all work that was planned, and by how much those that were read differ from it.
        self._expected = np.zeros(tuple(buffers.counts.shape), dtype=np.int32)
        self._off = np.zeros_like(self._expected)
        self.over: torch.cuda.Event | None = None  # the end of the last step's observation
        #: Observations that are not settled yet, and those of the last step.
        self.pending: deque[_Finding] = deque()
        self.last: _Finding | None = None

    def take(
        self,
        step: int,
        view: StepView | None,
        due: Due | None,
        hidden: torch.Tensor | None,
        *,
        again: bool = False,
    ) -> None:
        """Observe the forward of `view`, which just ran. `due`: the work planned for its sites.
        `hidden`: output of the last layer, `[rows or more, hidden_size]`. `again`: positions were
        computed again, whose sizes are no longer what they were.
        """
        self.last = None
        parts = dict[str, torch.Tensor]()
        if due is not None:
            # first: an observation that fails must not have later steps blamed
            self._expected = self._expected + due.counts
            parts["counts"] = self._counts
        if view is None or (due is None and hidden is None and not again):
            return
        if due is not None and due.edits:
            first, last = due.span
            parts["sizes"] = self._sizes[first:last, : view.num_rows]
        elif again:
            parts["sizes"] = self._sizes[:0, : view.num_rows]
        if hidden is not None:
            hidden = hidden[: view.num_rows]
        if self._side is not None:
            record, event = self._copied(self._side, parts, hidden)
        else:
            # A value that is not finite stays so along the stream: the last layer's output shows
            # those of every layer.
            if hidden is not None and not all_finite(hidden):
                parts["sums"] = hidden.sum(dim=-1, dtype=torch.float32)
            if not parts:
                return
            record = _flat(parts).clone()
            event = None
        self.last = _Finding(
            step=step,
            view=view,
            due=due,
            expected=self._expected,
            record=record,
            parts=parts,
            event=event,
        )
        self.pending.append(self.last)

    def _copied(
        self, side: torch.cuda.Stream, parts: dict[str, torch.Tensor], hidden: torch.Tensor | None
    ) -> "tuple[torch.Tensor, torch.cuda.Event]":
        """Have the observations copied; return the record of them and its end. Adds to `parts` what
        `hidden` gives.
        """
        # Each step copies its own record: a request ends while a later step is under way, and what
        # is copied only then could be read only after that step.
        self.over = event = torch.cuda.Event(blocking=True)
        side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(side):
                if hidden is not None:
                    hidden.record_stream(side)  # vLLM may drop it before the sum is computed
                    parts["sums"] = hidden.sum(dim=-1, dtype=torch.float32)
                flat = _flat(parts)
                record = locked_like(flat)
                record.copy_(flat, non_blocking=True)
        finally:
            event.record(side)
        return record, event

    def settle(
        self, needed: Mapping[str, int] | None = None
    ) -> list[NonFiniteRow | Miscount | StepSizes]:
        """Return the findings of the steps that are over, each once and in their order.

        `needed`: request → number of its rows: waits for the steps that computed them.
        """
        findings = list[NonFiniteRow | Miscount | StepSizes]()
        last = -1
        for request, rows in (needed or {}).items():
            for number, item in enumerate(self.pending):
                if number > last and item.view.first_of(request) < rows:
                    last = number
        while self.pending:
            event = self.pending[0].event
            if last < 0 and event is not None and not event.query():
                break
            findings += self._found_in(self.pending.popleft())
            last -= 1
        return findings

    def _found_in(self, item: _Finding) -> list[NonFiniteRow | Miscount | StepSizes]:
        """Return what a step's observations show; they are read in the order of the steps."""
        seen = item.read()
        due = item.due
        found: list[NonFiniteRow | Miscount | StepSizes] = []
        if due is not None and seen.counts is not None:
            # Counts are never set back, so a difference stays in all later sums; later steps are
            # judged by what is added to it.
            off = seen.counts - item.expected
            if not np.array_equal(off, self._off):
                found += due.miscounts(item.step, due.counts + (off - self._off), self._sites)
                self._off = off
        if not item.sound:
            found += item.non_finite(self._sites)
        if seen.sizes is not None and self._whole:
            sizes = seen.sizes if item.sound else seen.sizes.clip(-LARGEST_SIZE, LARGEST_SIZE)
            if due is None:
                edited = np.zeros(len(item.view.ids), dtype=bool)
                found.append(StepSizes(item.view, edited, _NO_SITES, sizes))
            else:
                found.append(StepSizes(item.view, due.edited, due.sites, sizes))
        return found


def _flat(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the bits of the parts one after the other, int32."""
    flats = list[torch.Tensor]()
    for part in parts.values():
        flats.append(part.view(torch.int32).reshape(-1))
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def all_finite(rows: torch.Tensor) -> bool:
    """Return whether CPU rows are finite, in one pass: the extrema are NaN if a value is."""
    return not rows.numel() or all(math.isfinite(float(item)) for item in torch.aminmax(rows))


def reason(spec: RankSpec, result: NonFiniteRow) -> str:
    """Return why a request fails: the row that is not finite, and the edits that caused it, where
    they are known.
    """
    if result.site is None:
        return (
            f"the stream after the last layer is not finite at position {result.position}, "
            "after the edits of this request"
        )
    where = f"{result.site.hook} of layer {result.site.layer}, position {result.position}"
    if not result.edited:
        return f"the stream is not finite at {where}, after earlier edits of this request"
    ops = [
        FAMILY[entry.family].written
        for entry in spec.steering
        if entry.hook == result.site.hook and result.site.layer in entry.layers
        if select(entry.positions, result.position, result.position + 1, spec.prompt_tokens)
    ]
    return (
        f"{' and '.join(dict.fromkeys(ops)) or 'an edit'} produced a non-finite row at "
        f"{where}: its values are too large"
    )
