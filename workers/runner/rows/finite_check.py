"""Finds rows that are not finite, sites that did not do their part, and the sizes of edits, without
making a step wait for the device.

Four things are observed: the marks that sites set for rows that they edit
(`kernels.plan.Planned.broken`), the sites' counts of their work (`Planned.counts`, judged in
`execution_check`), the relative sizes of edits (`Planned.sizes`), and the sum of each row that
leaves the last layer, which is not finite if a value of the row is not. On an accelerator they are
copied to pinned memory and read when the step is over; on the CPU they are read immediately.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....kernels.plan import EDITED
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


class _Finding:
    """Observations of one step's forward, with the event that makes them available."""

    def __init__(
        self,
        step: int,
        view: StepView,
        broken: torch.Tensor | None,
        sums: torch.Tensor | None,
        counts: torch.Tensor | None,
        due: Due | None,
        sizes: tuple[int, torch.Tensor] | None,
        event: "torch.cuda.Event | None",
    ) -> None:
        """`broken`, `sums`: `[rows]`, `counts`: `[sites, COUNTS]`, `sizes`: the first site and
        `[sites, rows]`, all on the CPU; None: not observed. `event`: recorded after their copies;
        None: there were none.
        """
        self.step, self.view = step, view
        self._broken, self._sums, self._counts, self._due, self._event = (
            broken,
            sums,
            counts,
            due,
            event,
        )
        self._sizes = sizes

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def miscounts(self, sites: Sequence[Site]) -> list[Miscount]:
        """Return what sites did not do. Waits for the copies."""
        if self._event is not None:
            self._event.synchronize()
        if self._due is None or self._counts is None:
            return []
        return list(self._due.miscounts(self.step, self._counts.numpy(), sites))

    def sizes(self) -> list[StepSizes]:
        """Return the sizes of the step's edits, if there were any. Waits for the copies."""
        if self._event is not None:
            self._event.synchronize()
        if self._sizes is None or self._due is None:
            return []
        edited = frozenset(request for request, _ in self._due.edits)
        first, values = self._sizes
        return [StepSizes(self.step, self.view, edited, first, values.numpy())]

    def read(self, sites: Sequence[Site]) -> list[NonFinite]:
        """Return each request's first rows that are not finite, by position; at one position the
        row at a site precedes the row after the last layer. Waits for the copies.
        """
        if self._event is not None:
            self._event.synchronize()
        non_finites: list[NonFinite] = []
        if self._broken is not None and (marks := self._broken.numpy()).any():
            for id_, place, position in self._first(marks != 0):
                mark = int(marks[place])
                non_finites.append(
                    NonFinite(id_, self.step, position, sites[abs(mark) - 1], mark > 0)
                )
        if self._sums is not None and (bad := ~np.isfinite(self._sums.numpy())).any():
            non_finites += [
                NonFinite(id_, self.step, position, None) for id_, _, position in self._first(bad)
            ]
        # By position, because a row that the unedited model made non-finite explains later ones.
        return sorted(non_finites, key=lambda item: item.position)

    def _first(self, bad: np.ndarray) -> Iterator[tuple[str, int, int]]:
        """Yield (request, row, position) of the first bad row of each request that has one."""
        for rows in self.view.requests:
            indices = np.flatnonzero(bad[rows.first_row : rows.first_row + rows.num_rows])
            if len(indices):
                yield (
                    rows.id,
                    rows.first_row + int(indices[0]),
                    rows.first_position + int(indices[0]),
                )


class FiniteCheck:
    """The check of one bank: `take` observes a forward, `settle` returns what is known by then."""

    def __init__(self, sites: Sequence[Site], buffers: Buffers, *, whole: bool = True) -> None:
        """`whole`: this rank holds whole rows; the sizes of parts of rows mean nothing."""
        self._sites, self._broken, self._counts = list(sites), buffers.broken, buffers.counts
        self._sizes, self._whole = buffers.sizes, whole
        self._on_cpu = buffers.broken.device.type == "cpu"
        self._pending: deque[_Finding] = deque()
        self.last: _Finding | None = None  # observations of the last step

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
        try:
            self._observe(step, view, due, edits, hidden)
        except Exception:
            self._broken.zero_()  # else the next step would be blamed
            self._counts.zero_()
            self._sizes.fill_(math.nan)
            raise

    def _observe(
        self, step: int, view: StepView, due: Due | None, edits: bool, hidden: torch.Tensor | None
    ) -> None:
        rows = view.num_rows
        broken, counts = (
            self._broken[:rows] if edits else None,
            self._counts if due is not None else None,
        )
        at = np.zeros(0, dtype=np.int64)
        if edits and due is not None and self._whole:
            at = np.flatnonzero(due.counts[:, EDITED])
        sizes = self._sizes[at[0] : at[-1] + 1, :rows] if len(at) else None
        if self._on_cpu:
            broken = None if broken is None or not bool(broken.any()) else broken.clone()
            hidden = None if hidden is None or all_finite(hidden[:rows]) else hidden
            if due is not None:
                counts = (
                    None
                    if np.array_equal(self._counts.numpy(), due.counts)
                    else self._counts.clone()
                )
                self._counts.zero_()
            if broken is None and hidden is None and counts is None and sizes is None:
                return
            read = None if sizes is None else sizes.clone()
        sums, event = (
            None if hidden is None else hidden[:rows].sum(dim=-1, dtype=torch.float32),
            None,
        )
        if not self._on_cpu:
            broken, sums, counts, read = (
                None if item is None else _copy_to_host(item)
                for item in (broken, sums, counts, sizes)
            )
            event = torch.cuda.Event(blocking=True)
            event.record()
            if counts is not None:
                self._counts.zero_()
        if broken is not None:
            self._broken.zero_()
        if sizes is not None:
            sizes.fill_(math.nan)
        of_sites = None if read is None else (int(at[0]), read)
        self.last = _Finding(step, view, broken, sums, counts, due, of_sites, event)
        self._pending.append(self.last)

    def settle(
        self, needed: Mapping[str, int] | None = None
    ) -> list[NonFinite | Miscount | StepSizes]:
        """Return the findings of the steps that are over, each once and in their order.

        `needed`: request → number of its rows: waits for the steps that computed them.
        """
        findings: list[NonFinite | Miscount | StepSizes] = []
        last = max(
            (
                number
                for number, item in enumerate(self._pending)
                if _computed(item.view, needed or {})
            ),
            default=-1,
        )
        while self._pending and (last >= 0 or self._pending[0].done()):
            finding = self._pending.popleft()
            findings += [
                *finding.miscounts(self._sites),
                *finding.read(self._sites),
                *finding.sizes(),
            ]
            last -= 1
        return findings

    def of(self, finding: _Finding) -> list[tuple[str, int]]:
        """Return (request, position) of the non-finite rows of one step.

        May be called from another thread; waits for the step.
        """
        return [(item.id, item.position) for item in finding.read(self._sites)]


def all_finite(rows: torch.Tensor) -> bool:
    """Return whether CPU rows are finite, in one pass: the extrema are NaN if a value is."""
    return not rows.numel() or all(math.isfinite(float(item)) for item in torch.aminmax(rows))


def _copy_to_host(values: torch.Tensor) -> torch.Tensor:
    on_host = locked_like(values)
    on_host.copy_(values, non_blocking=True)
    return on_host


def _computed(view: StepView, needed: Mapping[str, int]) -> bool:
    return any(rows.first_position < needed.get(rows.id, 0) for rows in view.requests)


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
