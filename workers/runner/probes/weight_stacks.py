"""Stacked weights of probes, so that one batched product scores all rows that the same probes
read.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ....schemas.artifacts.probes import StoredProbe
from ....schemas.prompts.sites import At
from ..edits.steering_tables import VectorStore
from .watches import Kind

#: Sets of probes that are kept, least recently used first: traffic uses few at a time.
_KEPT = 64


@dataclass(eq=False)
class Stack:
    """Computation on the rows of all recordings that have the same probes at the same ports."""

    ports: np.ndarray
    weight: torch.Tensor  # `[ports, hidden_size, width]`
    bias: torch.Tensor  # `[ports, 1, width]`
    flat: (
        np.ndarray
    )  # which of `ports × width` results are scores, in the order of the watch's columns
    columns: slice | np.ndarray  # of the watch, ascending


class Side(NamedTuple):
    """A recording's rows that probes read."""

    at: At
    ports: dict[tuple[str, int], int]  # (hook, layer) → port
    wants: bytes  # names them


@dataclass(frozen=True, slots=True)
class Plan:
    """How this rank scores the rows of requests with the same probes."""

    here: list[int]  # which of the request's probes read rows of this rank
    kind: Kind
    stacks: list[Stack]  # of each recording of their rows


class Stacks:
    """One per rank. A plan that is no longer kept continues serving the recordings that have it."""

    def __init__(self, vectors: VectorStore, hidden_size: int) -> None:
        self._vectors, self._hidden_size = vectors, hidden_size
        self._kept: OrderedDict[Any, Plan | None] = OrderedDict()

    def plan(self, probes: Sequence[StoredProbe], sides: Sequence[Side]) -> Plan | None:
        """`sides`: of the recordings of their rows. None: no probe reads rows of this rank.

        Raises LookupError and ValueError for weights that are not here or of another shape.
        """
        named = tuple([(probe.digest, probe.name, probe.action) for probe in probes])
        key = named, tuple([(side.at, side.wants) for side in sides])
        if key not in self._kept:
            self._kept[key] = self._planned(probes, sides)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _planned(self, probes: Sequence[StoredProbe], sides: Sequence[Side]) -> Plan | None:
        reads = [(probe.content.at, probe.content.hook, probe.content.layer) for probe in probes]
        sites = {(side.at, *site) for side in sides for site in side.ports}
        numbers = [number for number, read in enumerate(reads) if read in sites]
        if not numbers:
            return None
        kind = Kind([probes[number] for number in numbers])
        stacks = []
        for side in sides:
            ports: dict[int, list[int]] = {}  # port → which of the probes here
            for place, number in enumerate(numbers):
                at, hook, layer = reads[number]
                if at == side.at:
                    ports.setdefault(side.ports[hook, layer], []).append(place)
            parts = [[probes[numbers[place]] for place in places] for places in ports.values()]
            columns = [
                column
                for places in ports.values()
                for place in places
                for column in kind.columns[place]
            ]
            stacks.append(self._stack(list(ports), parts, columns))
        return Plan(numbers, kind, stacks)

    def _stack(
        self, ports: Sequence[int], probes: Sequence[Sequence[StoredProbe]], columns: Sequence[int]
    ) -> Stack:
        """`probes`: of each port; `columns`: of the watch, where their scores go, port after port,
        probe after probe, label after label.
        """
        parts = [[self._weights(probe) for probe in of_port] for of_port in probes]
        widths = [sum(len(bias) for _, bias in part) for part in parts]
        weight = torch.zeros(len(parts), max(widths), self._hidden_size)
        bias = torch.zeros(len(parts), 1, max(widths))
        for number, part in enumerate(parts):
            weight[number, : widths[number]] = torch.cat([item for item, _ in part])
            bias[number, 0, : widths[number]] = torch.cat([item for _, item in part])
        flat = np.concatenate(
            [number * max(widths) + np.arange(width) for number, width in enumerate(widths)]
        )
        order = np.argsort(columns)
        of_watch = np.array(columns)[order]
        first, count = int(of_watch[0]), len(of_watch)
        together = (
            slice(first, first + count) if int(of_watch[-1]) == first + count - 1 else of_watch
        )  # a slice is much quicker
        return Stack(
            np.array(ports), weight.transpose(1, 2).contiguous(), bias, flat[order], together
        )

    def _weights(self, probe: StoredProbe) -> tuple[torch.Tensor, torch.Tensor]:
        labels = len(probe.content.labels)
        weight, bias = probe.content.tensors
        return self._vectors.get(weight, [labels, self._hidden_size]), self._vectors.get(
            bias, [labels]
        )
