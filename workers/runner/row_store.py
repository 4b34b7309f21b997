"""Where does a rank keep captured rows of cached prompts? Under the numbers that the scheduler gives, see `row_index`."""

from collections.abc import Sequence

import numpy as np
import torch

from .capture import Recording, Run, StepRows, contiguous, stretches


class RowStore:
    """Copies of captured rows, on the CPU. What is kept and dropped is the scheduler's decision."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Run]] = {}
        self.held = 0  # bytes

    def keep(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Copy the recorded rows of positions `first … stop`; those that were not recorded are not kept."""
        owners = recording.owners(stop)
        positions = sorted(position for position in owners if position >= first)
        if not positions:
            return
        order = np.fromiter(recording.ports.values(), dtype=np.int64, count=len(recording.ports))
        parts = []
        for stretch in stretches(owners, positions):
            stretch.run.step.landed()
            rows = stretch.run.first_rows(order)[:, None] + stretch.offset + np.arange(stretch.count)
            parts.append(stretch.run.step.slab[torch.from_numpy(rows)])
        copied = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # [ports, positions, hidden_size]
        base = np.zeros(len(recording.mask), dtype=np.int64)
        base[order] = np.arange(len(order)) * len(positions)
        step = StepRows(copied.flatten(0, 1), base, np.zeros(len(recording.mask), dtype=np.int64), _nothing)
        self._kept[number] = [Run(step, np.array([at]), positions[at], count) for at, count in contiguous(np.array(positions))]
        self.held += step.slab.nbytes

    def serve(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Give a recording the kept rows. Raises LookupError when they are not there."""
        if number not in self._kept:
            raise LookupError(f"the rows of positions {first} to {stop - 1}, which the prefix cache serves, are no longer kept")
        recording.reused += self._kept[number]

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            runs = self._kept.pop(number, None)
            if runs:
                self.held -= runs[0].step.slab.nbytes


def _nothing() -> None:
    pass
