"""Stacked weights of probes, so that one batched product scores all rows that the same probes read."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...schemas.probes import StoredProbe
from .steering_tables import VectorStore

#: That are kept, least recently used first: traffic uses few sets of probes at a time.
_STACKS = 64
#: Ports, the digests of each port's probes, and columns.
_Key = tuple[tuple[int, ...], tuple[tuple[str, ...], ...], tuple[int, ...]]


@dataclass(eq=False)
class Stack:
    """What is computed of the rows of all recordings that have the same probes at the same ports."""

    ports: np.ndarray
    weight: torch.Tensor  # `[ports, hidden_size, width]`
    bias: torch.Tensor  # `[ports, 1, width]`
    flat: np.ndarray  # which of `ports × width` results are scores, in the order of the watch's columns
    columns: slice | np.ndarray  # of the watch, ascending


class Stacks:
    """One per rank. A stack that is no longer kept goes on serving the recordings that have it."""

    def __init__(self, vectors: VectorStore, hidden_size: int) -> None:
        self._vectors, self._hidden_size = vectors, hidden_size
        self._kept: OrderedDict[_Key, Stack] = OrderedDict()

    def get(self, ports: tuple[int, ...], probes: Sequence[Sequence[StoredProbe]], columns: tuple[int, ...]) -> Stack:
        """`probes`: of each port; `columns`: of the watch, where their scores go, port after port, probe after probe, label after label.

        Raises LookupError and ValueError for weights that are not here or of another shape.
        """
        key = ports, tuple(tuple(probe.digest for probe in of_port) for of_port in probes), columns
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return found
        parts = [[self._weights(probe) for probe in of_port] for of_port in probes]
        widths = [sum(len(bias) for _, bias in part) for part in parts]
        weight = torch.zeros(len(parts), max(widths), self._hidden_size)
        bias = torch.zeros(len(parts), 1, max(widths))
        for number, part in enumerate(parts):
            weight[number, : widths[number]] = torch.cat([each for each, _ in part])
            bias[number, 0, : widths[number]] = torch.cat([each for _, each in part])
        flat = np.concatenate([number * max(widths) + np.arange(width) for number, width in enumerate(widths)])
        order = np.argsort(columns)
        of_watch = np.array(columns)[order]
        first, count = int(of_watch[0]), len(of_watch)
        together = slice(first, first + count) if int(of_watch[-1]) == first + count - 1 else of_watch  # a slice is much quicker
        made = self._kept[key] = Stack(np.array(ports), weight.transpose(1, 2).contiguous(), bias, flat[order], together)
        while len(self._kept) > _STACKS:
            self._kept.popitem(last=False)
        return made

    def _weights(self, probe: StoredProbe) -> tuple[torch.Tensor, torch.Tensor]:
        labels = len(probe.content.labels)
        weight, bias = probe.content.tensors
        return self._vectors.get(weight, [labels, self._hidden_size]), self._vectors.get(bias, [labels])
