"""Progress bars of sweeps, attributions and datasets, on a terminal or in a notebook."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from midstream.client.sdk.answers.progress import DELAY_S, drawn_bar

from ..records.attributions import EstimatedPair
from ..records.sweeps import SweepCell, SweepStart, SweepSummary

#: The events that only sweeps and attributions have.
SweepEvent = SweepStart | EstimatedPair | SweepCell | SweepSummary
OnSweepEvent = Callable[[SweepEvent], None]


@contextmanager
def bar(title: str = "sweep") -> Iterator[OnSweepEvent | None]:
    """Yield a bar to call with a sweep's events; None if standard error is not a terminal and this
    is not a notebook.
    """
    with drawn_bar(desc=title, unit="cell") as drawn:
        yield None if drawn is None else _Cells(drawn)


@contextmanager
def mapped_bar(total: int | None) -> Iterator[Callable[[], None] | None]:
    """Yield a bar to call once for each finished prompt of a dataset, or None as `drawn_bar` does.

    `total`: the number of prompts; None if unknown.
    """
    with drawn_bar(desc="prompts", unit="prompt", total=total, delay=DELAY_S) as drawn:
        yield None if drawn is None else lambda: drawn.update(1)


class _Cells:
    """Counts each cell once, also when a sweep continues after its worker died."""

    def __init__(self, drawn: Any):
        self._drawn = drawn
        self._seen: set[tuple[int, str, int, int, int | None]] = set()
        # of an attribution: pair → the number of its cells that are computed
        self._chosen: dict[int, int] = {}

    def __call__(self, event: SweepEvent) -> None:
        before = len(self._seen)
        if isinstance(event, EstimatedPair):
            if not self._chosen:
                self._seen.clear()  # skipped cells are none of the chosen ones
            self._chosen[event.pair] = len(event.attribution.checked)
            self._drawn.total = sum(self._chosen.values()) or None
        elif isinstance(event, SweepStart) and not self._chosen:
            self._seen |= {
                (item.pair, item.hook, layer, item.column, None)
                for item in event.skipped
                for layer in item.layers
            }
            self._drawn.total = event.total
            self._drawn.refresh()
        elif isinstance(event, SweepCell):
            self._seen.add((event.pair, event.hook, event.layer, event.column, event.feature))
        self._drawn.update(len(self._seen) - before)
