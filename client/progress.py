"""Shows how far a sweep is: a bar of tqdm's on a terminal or in a notebook, nothing where nobody watches."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..schemas.sweeps import SweepCell, SweepStart
from .notebook import in_notebook
from .sweeps import Progress, Told


@contextmanager
def bar(title: str = "sweep") -> Iterator[Progress | None]:
    """What a sweep's events move; None, and nothing is drawn, where standard error is no terminal and there is no notebook."""
    if not (sys.stderr.isatty() or in_notebook()):
        yield None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without ipywidgets: the bar is text there
        from tqdm.auto import tqdm
    with tqdm(desc=title, unit="cell", leave=in_notebook()) as drawn:
        yield _Cells(drawn)


class _Cells:
    """Counts each cell once, also when a sweep goes on after its worker died."""

    def __init__(self, drawn: Any):
        self._drawn = drawn
        self._seen: set[tuple[int, str, int, int]] = set()

    def __call__(self, told: Told) -> None:
        before = len(self._seen)
        if isinstance(told, SweepStart):
            self._seen |= {(each.pair, each.hook, layer, each.column) for each in told.skipped for layer in each.layers}
            self._drawn.total = told.total
            self._drawn.refresh()
        elif isinstance(told, SweepCell):
            self._seen.add((told.pair, told.hook, told.layer, told.column))
        self._drawn.update(len(self._seen) - before)
