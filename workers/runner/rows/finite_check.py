"""Finds rows that are not finite, sites that did not do their part, and the sizes of edits, without
making a step wait for the device.

Four things are observed: the marks that sites set for rows that they edit
(`kernels.plan.Planned.broken`), the sites' counts of their work (`Planned.counts`, judged in
`execution_check`), the relative sizes of edits (`Planned.sizes`), and the sum of each row that
leaves the last layer, which is not finite if a value of the row is not. On an accelerator they are
copied to pinned memory and read when that is over; on the CPU they are read immediately.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ....schemas.prompts.selectors import FORWARD, select
from ....schemas.requests.interventions import FAMILY
from ....schemas.requests.specs import RankSpec, StoredSteering
from ..base.engine_step import StepView
from ..base.host_memory import locked_like
from ..hooks.sites import Buffers, Site
from .edit_sizes import StepSizes
from .execution_check import Due, Miscount

_ORDER: dict[str, int] = {hook: place for place, hook in enumerate(FORWARD)}


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first non-finite row of a request in one step."""

    id: str  # of the request in the engine
    step: int
    position: int
    site: Site | None  # None: after the last layer
    edited: bool = False  # the site's edits caused it; False: it was non-finite before them


class _Seen(NamedTuple):
    """Observations of one step's forward; None: not observed, or on the CPU as they should be."""

    broken: np.ndarray | None = None  # int32 [rows]
    sums: np.ndarray | None = None  # float32 [rows]
    counts: np.ndarray | None = None  # int32 [sites, COUNTS]
    sizes: np.ndarray | None = None  # float32 [edited sites and those between them, rows]


_DTYPES = {"broken": np.int32, "sums": np.float32, "counts": np.int32, "sizes": np.float32}


class _Finding:
    """The observations of a step, complete once `event` has occurred."""

    def __init__(
        self,
        step: int,
        view: StepView,
        due: Due | None,
        first: int,
        seen: "_Seen | tuple[torch.Tensor, dict[str, torch.Size]]",
        event: "torch.cuda.Event | None" = None,
    ) -> None:
        """`due`: the work planned for its sites. `first`: number of the first site in the sizes.
        `seen`: the observations, or after the event a record of them and their shapes.
        """
        self.step, self.view, self.event = step, view, event
        self._due, self._first, self._seen = due, first, seen
        self._sound: bool | None = None  # all rows are finite; None: that is not known yet

    def read(self) -> _Seen:
        """Return the observations. Waits for the event."""
        seen = self._seen
        if not isinstance(seen, _Seen):
            if self.event is not None:
                self.event.synchronize()
            (record, shapes), values, at = seen, {}, 0
            for name, shape in shapes.items():
                part = record[at : at + shape.numel()].numpy()
                values[name], at = part.view(_DTYPES[name]).reshape(shape), at + len(part)
            self._seen = seen = _Seen(**values)
        if self._sound is None:
            self._sound = (seen.broken is None or not seen.broken.any()) and (
                seen.sums is None or math.isfinite(float(seen.sums.sum(dtype=np.float64)))
            )
        return seen

    def items(self, sites: Sequence[Site]) -> "list[NonFinite | Miscount | StepSizes]":
        """Return what is to be settled of the step. Waits for the event."""
        seen, due = self.read(), self._due
        found: list[NonFinite | Miscount | StepSizes] = []
        counts = None if due is None else seen.counts
        if due is not None and counts is not None and not np.array_equal(counts, due.counts):
            found += due.miscounts(self.step, counts, sites)
        if not self._sound:
            found += self.non_finite(sites)
        if due is not None and seen.sizes is not None:
            found.append(StepSizes(self.step, self.view, due, self._first, seen.sizes))
        return found

    def found(self, sites: Sequence[Site]) -> list[tuple[str, int]]:
        """Return (request, position) of the rows that are not finite. Waits for the event."""
        if self._sound is None:
            self.read()
        if self._sound:
            return []
        return [(item.id, item.position) for item in self.non_finite(sites)]

    def non_finite(self, sites: Sequence[Site]) -> list[NonFinite]:
        """Return each request's first rows that are not finite, by position; at one position the
        row at a site precedes the row after the last layer.
        """
        seen, found = self.read(), list[NonFinite]()
        if (marks := seen.broken) is not None:
            for id_, place, position in self._first_bad(marks != 0):
                mark = int(marks[place])
                found.append(NonFinite(id_, self.step, position, sites[abs(mark) - 1], mark > 0))
        if seen.sums is not None:
            found += [
                NonFinite(id_, self.step, position, None)
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

    On an accelerator a stream of its own collects the observations in one record, copies it, and
    sets everything back for the next forward, which waits for that if it must: see `precede`.
    """

    def __init__(self, sites: Sequence[Site], buffers: Buffers, *, whole: bool = True) -> None:
        """`whole`: this rank holds whole rows; the sizes of parts of rows mean nothing."""
        self._sites, self._broken, self._counts = list(sites), buffers.broken, buffers.counts
        self._sizes, self._whole = buffers.sizes, whole
        self._device = buffers.broken.device
        self._side = None if self._device.type == "cpu" else torch.cuda.Stream(self._device)
        self.over: torch.cuda.Event | None = None  # the end of the last step's observation
        #: Observations that are not settled yet, and those of the last step.
        self.pending: deque[_Finding] = deque()
        self.last: _Finding | None = None

    def precede(self) -> None:
        """Have the next forward wait until the last one's observations are over."""
        over, self.over = self.over, None
        if over is not None and not over.query():
            torch.cuda.current_stream(self._device).wait_event(over)

    def take(
        self,
        step: int,
        view: StepView | None,
        due: Due | None,
        edits: bool,
        hidden: torch.Tensor | None,
    ) -> None:
        """Observe the forward of `view`, which just ran. `due`: the work planned for its sites.
        `edits`: whether it edited rows. `hidden`: output of the last layer, `[rows or more,
        hidden_size]`.
        """
        self.last = None
        if view is None or (due is None and hidden is None):
            return
        rows, parts, first = view.num_rows, dict[str, torch.Tensor](), 0
        if edits:
            parts["broken"] = self._broken[:rows]
        if due is not None:
            parts["counts"] = self._counts
            if edits and self._whole:
                first, last = due.span
                parts["sizes"] = self._sizes[first:last, :rows]
        try:
            if self._side is not None:
                self.last = self._copied(self._side, step, view, due, first, parts, hidden)
            elif seen := _seen_here(parts, due, None if hidden is None else hidden[:rows]):
                self.last = _Finding(step, view, due, first, _Seen(**seen))
        finally:
            if self._side is None:
                _reset(parts)
        if self.last is not None:
            self.pending.append(self.last)

    def _copied(
        self,
        side: torch.cuda.Stream,
        step: int,
        view: StepView,
        due: Due | None,
        first: int,
        parts: dict[str, torch.Tensor],
        hidden: torch.Tensor | None,
    ) -> _Finding:
        """Have the observations copied and set back; return what reads them then."""
        self.over = event = torch.cuda.Event(blocking=True)
        side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(side):
                seen = dict(parts)
                try:
                    if hidden is not None:
                        hidden.record_stream(side)  # vLLM may drop it before the sum is computed
                        seen["sums"] = hidden[: view.num_rows].sum(dim=-1, dtype=torch.float32)
                    flats, shapes = list[torch.Tensor](), dict[str, torch.Size]()
                    for name, part in seen.items():
                        flats.append(part.view(torch.int32).reshape(-1))
                        shapes[name] = part.shape
                    flat = torch.cat(flats)
                    record = locked_like(flat)
                    record.copy_(flat, non_blocking=True)
                finally:
                    _reset(parts)  # else the next step would be blamed
        finally:
            event.record(side)
        return _Finding(step, view, due, first, (record, shapes), event)

    def settle(
        self, needed: Mapping[str, int] | None = None
    ) -> list[NonFinite | Miscount | StepSizes]:
        """Return the findings of the steps that are over, each once and in their order.

        `needed`: request → number of its rows: waits for the steps that computed them.
        """
        findings, last = list[NonFinite | Miscount | StepSizes](), -1
        for number, item in enumerate(self.pending if needed else ()):
            places = zip(item.view.ids, item.view.positions.tolist(), strict=True)
            if any(first < (needed or {}).get(request, 0) for request, first in places):
                last = number
        while self.pending:
            event = self.pending[0].event
            if last < 0 and event is not None and not event.query():
                break
            findings += self.pending.popleft().items(self._sites)
            last -= 1
        return findings


def _reset(parts: Mapping[str, torch.Tensor]) -> None:
    """Set back what sites only add to."""
    for name, part in parts.items():
        part.fill_(math.nan if name == "sizes" else 0)


def _seen_here(
    parts: Mapping[str, torch.Tensor], due: Due | None, hidden: torch.Tensor | None
) -> dict[str, np.ndarray]:
    """Return observations on the CPU that are to be reported."""
    seen = {name: part.numpy() for name, part in parts.items()}
    if "broken" in seen and not seen["broken"].any():
        del seen["broken"]
    if due is not None and np.array_equal(seen["counts"], due.counts):
        del seen["counts"]
    if hidden is not None and not all_finite(hidden):
        seen["sums"] = hidden.sum(dim=-1, dtype=torch.float32).numpy()
    return {name: part.copy() for name, part in seen.items()}


def all_finite(rows: torch.Tensor) -> bool:
    """Return whether CPU rows are finite, in one pass: the extrema are NaN if a value is."""
    return not rows.numel() or all(math.isfinite(float(item)) for item in torch.aminmax(rows))


# --- Attribution


def entries_of(spec: RankSpec) -> list[StoredSteering]:
    """Return all steering entries of a request, global ones first."""
    return [*spec.global_steering, *spec.steering]


def precedes_edits(
    spec: RankSpec, position: int, place: tuple[str, int] | None, *, after: bool
) -> bool:
    """Return whether no edit of the request could reach this row, so that the unedited model
    computed it.

    `place`: (hook, layer), whose row is taken before its edits or `after` them; None: after the
    last layer.
    """
    entries = entries_of(spec)
    if not entries or spec.first_affected < 0 or position < spec.first_affected:
        return True
    if position > spec.first_affected or place is None:
        return False
    hook, layer = place
    lowest = min((number, _ORDER[entry.hook]) for entry in entries for number in entry.layers)
    site = layer, _ORDER[hook]
    return site < lowest or (site == lowest and not after)


def reason(spec: RankSpec, result: NonFinite) -> str:
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
        for entry in entries_of(spec)
        if entry.hook == result.site.hook and result.site.layer in entry.layers
        if select(entry.positions, result.position, result.position + 1, spec.prompt_tokens)
    ]
    return (
        f"{' and '.join(dict.fromkeys(ops)) or 'an edit'} produced a non-finite row at "
        f"{where}: its values are too large"
    )
