"""Stacked weights of probes: one batched product scores all rows that the same probes read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ....schemas.artifacts.probes import StoredProbe
from ....schemas.base.recent import Recent
from ....schemas.base.records import by_key
from ....schemas.prompts.sites import At
from ..edits.steering_tables import VectorStore
from .kinds import ProbeGroup

#: Plans that are kept at most; traffic uses few sets of probes at a time.
_KEPT = 64


@dataclass(eq=False)
class WeightStack:
    """Weights for the rows of all recordings that have the same probes at the same ports."""

    ports: np.ndarray
    weight: torch.Tensor  # `[ports, hidden_size, width]`
    bias: torch.Tensor  # `[ports, 1, width]`
    # indices of the scores among the `ports × width` results, in the order of `columns`
    flat: np.ndarray
    columns: np.ndarray  # of the watch, ascending
    kind: ProbeGroup  # of the watches
    last: bool = False  # of those of a plan


class ProbedRows(NamedTuple):
    """The rows of a recording that probes read."""

    at: At
    ports: dict[tuple[str, int], int]  # (hook, layer) → port
    wants: bytes  # identifies `ports`


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """A rank's plan to score the rows of requests with the same probes."""

    numbers: list[int]  # indices of the request's probes that read rows of this rank
    kind: ProbeGroup
    stacks: list[WeightStack]  # one for each side


class Stacks:
    """Plans of one rank. Recordings continue to use a plan that is no longer kept."""

    def __init__(self, vectors: VectorStore, hidden_size: int) -> None:
        self._vectors = vectors
        self._hidden_size = hidden_size
        self._kept = Recent[Any, ScorePlan | None](_KEPT)

    def plan(self, probes: Sequence[StoredProbe], sides: Sequence[ProbedRows]) -> ScorePlan | None:
        """Return the plan for a request's probes and recordings; None if no probe reads rows of
        this rank.

        Raises LookupError for weights that this rank does not have, ValueError for weights of
        another shape.
        """
        named = tuple(
            [
                (
                    probe.digest,
                    probe.name,
                    *probe.actions,
                    probe.policy and probe.policy.digest,
                )
                for probe in probes
            ]
        )
        key = named, tuple([(side.at, side.wants) for side in sides])
        if key not in self._kept:
            self._kept[key] = self._planned(probes, sides)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _planned(
        self, probes: Sequence[StoredProbe], sides: Sequence[ProbedRows]
    ) -> ScorePlan | None:
        reads = [(probe.content.at, probe.content.hook, probe.content.layer) for probe in probes]
        sites = {(side.at, *site) for side in sides for site in side.ports}
        if not (numbers := [number for number, read in enumerate(reads) if read in sites]):
            return None
        kind = ProbeGroup([probes[number] for number in numbers])
        stacks = []
        for side in sides:
            ports = by_key(  # port → indices in `numbers`
                (side.ports[hook, layer], place)
                for place, (at, hook, layer) in enumerate(map(reads.__getitem__, numbers))
                if at == side.at
            )
            parts = [[probes[numbers[place]] for place in places] for places in ports.values()]
            columns = [
                column
                for places in ports.values()
                for place in places
                for column in kind.columns[place]
            ]
            stacks.append(self._stack(list(ports), parts, columns, kind))
        stacks[-1].last = True
        return ScorePlan(numbers, kind, stacks)

    def _stack(
        self,
        ports: Sequence[int],
        probes: Sequence[Sequence[StoredProbe]],
        columns: Sequence[int],
        kind: ProbeGroup,
    ) -> WeightStack:
        """Stack the weights of `probes`, given for each port. `columns`: the watch's column for
        each score, ordered by port, then probe, then label.
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
        return WeightStack(
            np.array(ports),
            weight.transpose(1, 2).contiguous(),
            bias,
            flat[order],
            of_watch,
            kind,
        )

    def _weights(self, probe: StoredProbe) -> tuple[torch.Tensor, torch.Tensor]:
        labels = len(probe.content.labels)
        weight, bias = probe.content.tensors
        return self._vectors.get(weight, [labels, self._hidden_size]), self._vectors.get(
            bias, [labels]
        )
