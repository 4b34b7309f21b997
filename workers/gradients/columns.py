"""Columns of a sweep's grids: from the effect of every element of the replaced rows to cells."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...schemas.jobs.sweep_units import Units
from ...schemas.jobs.sweeps import StoredSweep
from ...schemas.prompts.selectors import resolve_layers


class Part(NamedTuple):
    """Columns whose cells write the same dimensions of a row."""

    columns: list[int]
    dims: torch.Tensor | slice  # indices, or bool [width]


class Columns:
    """The columns of one pair.

    A place is (position in the patched prompt, position in the source). `member[c, u]`: whether
    column `c`, with the sweep's window around it, writes place `u`; skipped columns write none.
    """

    def __init__(self, sweep: StoredSweep, pair: int, mask: torch.Tensor | None = None) -> None:
        """`mask`: the dimensions that `sweep.mask` writes, bool `[width]`."""
        self._sweep, self._columns = sweep, sweep.pairs[pair].columns
        self.dims: torch.Tensor | slice = slice(None) if mask is None else mask
        self._units = Units(sweep)
        self._cell = next(self._units.cells(pair))
        written = [
            self._units.patched(self._cell._replace(column=number))[1]
            for number in range(len(self._columns))
        ]
        places = sorted({place for column in written for place in column})
        self.base = [base for base, _ in places]
        self.source = [source for _, source in places]
        self.skipped = [number for number, column in enumerate(written) if not column]
        index = {place: number for number, place in enumerate(places)}
        self.member = torch.zeros(len(written), len(places), dtype=torch.float64)
        for number, column in enumerate(written):
            self.member[number, [index[place] for place in column]] = 1.0

    def parts(self, differences: torch.Tensor) -> list[Part]:
        """Return the columns that are not skipped, by the dimensions that they write.

        `differences`: patched − unpatched row of each place, `[places, width]`, which order
        dimensions by rank.
        """
        grouped: dict[tuple[str, tuple[int, int] | None], list[int]] = {}
        for number, column in enumerate(self._columns):
            if number not in self.skipped:
                grouped.setdefault((column.dims, column.ranks), []).append(number)
        result, order = [], None
        for (dims, ranks), numbers in grouped.items():
            chosen = self.dims
            if dims:
                chosen = torch.tensor(resolve_layers(dims.replace(" ", ""), differences.shape[1]))
            if ranks is not None:
                if order is None:
                    moved = differences[self.member[numbers[0]].bool()].double()
                    order = moved.abs().sum(0).argsort(descending=True, stable=True)
                chosen = order[slice(*ranks)]
            result.append(Part(numbers, chosen))
        return result

    def sums(self, product: torch.Tensor, parts: Sequence[Part]) -> np.ndarray:
        """Return the cells of one layer, float64 `[columns]`; NaN for skipped columns.

        `product`: effect of each element of the rows, `[places, width]`; `parts`: of its layer.
        """
        result = np.full(len(self._columns), np.nan)
        for part in parts:
            vector = product[:, part.dims].double().sum(1).cpu()
            result[part.columns] = (self.member[part.columns] @ vector).numpy()
        return result

    def over_window(self, layers: np.ndarray) -> np.ndarray:
        """Return cells that are sums over the window of layers around each, `[layers, columns]`."""
        number = {layer: index for index, layer in enumerate(self._sweep.layers)}
        windows = (
            self._units.patched(self._cell._replace(layer=index))[0] for index in range(len(layers))
        )
        return np.stack([layers[[number[at] for at in window]].sum(0) for window in windows])


def rows_at(rows: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Return the rows at `positions`, `[positions, width]` float32. `rows`: `[tokens, width]`."""
    return rows[list(positions)].float()
