"""Stacked weights of probes: one batched product scores all rows that alike probes read."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ....schemas.artifacts.probes import StoredProbe
from ....schemas.base.recent import Recent
from ....schemas.base.records import by_key
from ....schemas.prompts.sites import At
from ..edits.steering_tables import VectorStore
from .kinds import ProbeGroup, shape_of

#: Plans that are kept at most; traffic uses few sets of probes at a time.
_KEPT = 64


@dataclass(eq=False)
class StackShape:
    """What stacks have in common whose rows are scored together."""

    ports: int
    width: int
    # indices of the scores among the `ports × width` results, in the order of `columns`
    flat: np.ndarray
    columns: np.ndarray  # of the watch, ascending
    kind: ProbeGroup  # of the watches
    last: bool  # of the stacks of a plan


@dataclass(eq=False)
class WeightStack:
    """Weights for the rows of all recordings that have the same probes at the same ports."""

    ports: np.ndarray
    weight: torch.Tensor  # `[ports, hidden_size, width]`
    bias: torch.Tensor  # `[ports, 1, width]`
    shape: StackShape


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
        # those of live plans
        self._kinds = weakref.WeakValueDictionary[Hashable, ProbeGroup]()
        self._shapes = weakref.WeakValueDictionary[Hashable, StackShape]()

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
        chosen = [probes[number] for number in numbers]
        kind = self._kinds.setdefault(shape_of(chosen), ProbeGroup(chosen))
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
            last = side is sides[-1]
            stacks.append(self._stack(list(ports), parts, columns, kind, last=last))
        return ScorePlan(numbers, kind, stacks)

    def _stack(
        self,
        ports: Sequence[int],
        probes: Sequence[Sequence[StoredProbe]],
        columns: Sequence[int],
        kind: ProbeGroup,
        *,
        last: bool,
    ) -> WeightStack:
        """Stack the weights of `probes`, given for each port. `columns`: the watch's column for
        each score, ordered by port, then probe, then label. `last`: see `StackShape`.
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
        made = StackShape(
            len(parts), max(widths), flat[order], np.array(columns)[order], kind, last
        )
        key = kind, last, made.ports, made.width, made.flat.tobytes(), made.columns.tobytes()
        shape = self._shapes.setdefault(key, made)
        return WeightStack(np.array(ports), weight.transpose(1, 2).contiguous(), bias, shape)

    def _weights(self, probe: StoredProbe) -> tuple[torch.Tensor, torch.Tensor]:
        labels = len(probe.content.labels)
        weight, bias = probe.content.tensors
        return self._vectors.get(weight, [labels, self._hidden_size]), self._vectors.get(
            bias, [labels]
        )
