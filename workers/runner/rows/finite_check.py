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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class _Seen(NamedTuple):
    """Observations of one step's forward; None: not observed."""

    broken: np.ndarray | None = None  # int32 [rows]
    sums: np.ndarray | None = None  # float32 [rows]
    counts: np.ndarray | None = None  # int32 [sites, COUNTS]
    sizes: np.ndarray | None = None  # float32 [edited sites and those between them, rows]


class _Finding:
    """The observations of a step, complete once `event` has occurred."""

    def __init__(
        self,
        step: int,
        view: StepView,
        due: Due | None,
        first: int,
        seen: Callable[[], _Seen],
        event: "torch.cuda.Event | None",
    ) -> None:
        """`due`: the work planned for its sites. `first`: number of the first site in the sizes.
        `seen()`: called after the event; None: there is nothing to wait for.
        """
        self.step, self.view = step, view
        self._due, self._first, self._seen, self._event = due, first, seen, event

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def _read(self) -> _Seen:
        if self._event is not None:
            self._event.synchronize()
        return self._seen()

    def items(self, sites: Sequence[Site]) -> "list[NonFinite | Miscount | StepSizes]":
        """Return what is to be settled of the step. Waits for the event."""
        seen, due = self._read(), self._due
        found: list[NonFinite | Miscount | StepSizes] = []
        if due is not None and seen.counts is not None:
            found += due.miscounts(self.step, seen.counts, sites)
        found += self._non_finite(seen, sites)
        if due is not None and seen.sizes is not None:
            found.append(StepSizes(self.step, self.view, due, self._first, seen.sizes))
        return found

    def non_finite(self, sites: Sequence[Site]) -> list[NonFinite]:
        """Return each request's first rows that are not finite, by position; at one position the
        row at a site precedes the row after the last layer. Waits for the event.
        """
        return self._non_finite(self._read(), sites)

    def _non_finite(self, seen: _Seen, sites: Sequence[Site]) -> list[NonFinite]:
        found: list[NonFinite] = []
        if (marks := seen.broken) is not None and marks.any():
            for id_, place, position in self._first_bad(marks != 0):
                mark = int(marks[place])
                found.append(NonFinite(id_, self.step, position, sites[abs(mark) - 1], mark > 0))
        if seen.sums is not None and not math.isfinite(float(seen.sums.sum(dtype=np.float64))):
            bad = ~np.isfinite(seen.sums)
            found += [
                NonFinite(id_, self.step, position, None)
                for id_, _, position in self._first_bad(bad)
            ]
        # By position, because a row that the unedited model made non-finite explains later ones.
        return sorted(found, key=lambda item: item.position)

    def _first_bad(self, bad: np.ndarray) -> Iterator[tuple[str, int, int]]:
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
        self._over: torch.cuda.Event | None = None  # the end of the last step's observation
        self._pending: deque[_Finding] = deque()
        self.last: _Finding | None = None  # observations of the last step

    @property
    def settled(self) -> bool:
        return not self._pending

    def precede(self) -> None:
        """Have the next forward wait until the last one's observations are over."""
        over, self._over = self._over, None
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
        at = np.zeros(0, dtype=np.int64)
        if edits and due is not None and self._whole:
            at = np.flatnonzero(due.counts[:, EDITED])
        rows, first = view.num_rows, int(at[0]) if len(at) else 0
        watched = _Watched(
            self._broken[:rows] if edits else None,
            None if hidden is None else hidden[:rows],
            self._counts if due is not None else None,
            self._sizes[first : at[-1] + 1, :rows] if len(at) else None,
        )
        try:
            seen, event = self._observe(watched, due)
        except Exception:
            watched.reset()  # else the next step would be blamed
            raise
        if seen is not None:
            self.last = _Finding(step, view, due, first, seen, event)
            self._pending.append(self.last)

    def _observe(
        self, watched: "_Watched", due: Due | None
    ) -> "tuple[Callable[[], _Seen] | None, torch.cuda.Event | None]":
        """Return what reads the observations, or None if there are none, and when."""
        if self._side is None:
            return _seen_here(watched, due), None
        return self._copied(self._side, watched)

    def _copied(
        self, side: torch.cuda.Stream, watched: "_Watched"
    ) -> "tuple[Callable[[], _Seen], torch.cuda.Event]":
        """Have the observations copied and set back; return what reads the copies, and when."""
        self._over = event = torch.cuda.Event(blocking=True)
        side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(side):
                if watched.hidden is not None:
                    watched.hidden.record_stream(
                        side
                    )  # vLLM may drop it before the sum is computed
                parts = watched.parts()
                flat = [part.view(torch.int32).reshape(-1) for part in parts.values()]
                record = _copy_to_host(torch.cat(flat))
                watched.reset()
        finally:
            event.record(side)

        def seen() -> _Seen:
            ends = np.cumsum([len(part) for part in flat])[:-1]
            values = np.split(record.numpy(), ends)
            return _Seen(
                **{
                    name: value.view(_DTYPES[name]).reshape(part.shape)
                    for (name, part), value in zip(parts.items(), values, strict=True)
                }
            )

        return seen, event

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
                for number, item in enumerate(self._pending if needed else ())
                if any(
                    rows.first_position < (needed or {}).get(rows.id, 0)
                    for rows in item.view.requests
                )
            ),
            default=-1,
        )
        while self._pending and (last >= 0 or self._pending[0].done()):
            findings += self._pending.popleft().items(self._sites)
            last -= 1
        return findings

    def of(self, finding: _Finding) -> list[tuple[str, int]]:
        """Return (request, position) of the non-finite rows of one step.

        May be called from another thread; waits for the step.
        """
        return [(item.id, item.position) for item in finding.non_finite(self._sites)]


_DTYPES = {"broken": np.int32, "sums": np.float32, "counts": np.int32, "sizes": np.float32}


class _Watched(NamedTuple):
    """The observations of a forward, where the forward left them; None: there are none."""

    broken: torch.Tensor | None  # int32 [rows]
    hidden: torch.Tensor | None  # [rows, hidden_size]
    counts: torch.Tensor | None  # int32 [sites, COUNTS]
    sizes: torch.Tensor | None  # float32 [sites, rows]

    def parts(self) -> dict[str, torch.Tensor]:
        """Return what `_Seen` has, by name."""
        hidden = self.hidden
        sums = None if hidden is None else hidden.sum(dim=-1, dtype=torch.float32)
        parts = {"broken": self.broken, "sums": sums, "counts": self.counts, "sizes": self.sizes}
        return {name: part for name, part in parts.items() if part is not None}

    def reset(self) -> None:
        """Set back what sites only add to."""
        for part in (self.broken, self.counts):
            if part is not None:
                part.zero_()
        if self.sizes is not None:
            self.sizes.fill_(math.nan)


def _seen_here(watched: _Watched, due: Due | None) -> Callable[[], _Seen] | None:
    """Read observations on the CPU, and set them back; None: there is nothing to report."""
    parts = watched._replace(
        broken=watched.broken if watched.broken is not None and watched.broken.any() else None,
        hidden=None if watched.hidden is None or all_finite(watched.hidden) else watched.hidden,
        counts=None
        if watched.counts is None
        or (due is not None and np.array_equal(watched.counts.numpy(), due.counts))
        else watched.counts,
    ).parts()
    seen = _Seen(**{name: part.clone().numpy() for name, part in parts.items()})
    watched.reset()
    return (lambda: seen) if parts else None


def all_finite(rows: torch.Tensor) -> bool:
    """Return whether CPU rows are finite, in one pass: the extrema are NaN if a value is."""
    return not rows.numel() or all(math.isfinite(float(item)) for item in torch.aminmax(rows))


def _copy_to_host(values: torch.Tensor) -> torch.Tensor:
    on_host = locked_like(values)
    on_host.copy_(values, non_blocking=True)
    return on_host


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
