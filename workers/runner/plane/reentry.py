"""Re-entry: starts a step's forward above the first layer, with rows of a source run.

Reasons, design and gain: `docs/decisions/0006-reentry-and-grading.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ....schemas.base.records import by_key
from ....schemas.requests.specs import RankSpec, captured_layers
from ..base.engine_step import RequestRows, StepView
from ..base.host_memory import locked_copy
from ..edits.source_runs import RunStore
from ..rows.finite_check import all_finite
from ..rows.planner import Tracked
from .layer_gate import LayerGate
from .requests import Requests
from .step_parts import RanStep, StepBatch, StepPart

#: A tracked request and its rows of the step.
_Member = tuple[Tracked, RequestRows]


def first_layer(step: Sequence[tuple[RankSpec | None, RequestRows]], block_size: int) -> int:
    """Return the layer at which the forward of these requests begins, the same on every rank; 0:
    the first layer, as without re-entry.

    A request without a spec has None. `block_size`: tokens in a block of the KV cache. Facts that
    only this rank knows, such as whether it has the rows, must not matter: ranks that skip
    different layers would wait for each other.
    """
    jobs: dict[str, list[int]] = {}  # job of the source runs → entry layers of its requests
    for spec, rows in step:
        if spec is None or spec.entry is None or not _may_enter(spec, rows, block_size):
            return 0
        jobs.setdefault(spec.entry.run.split(".", 1)[0], []).append(spec.entry.layer)
    lowest = min(chain.from_iterable(jobs.values()), default=0)
    # The runs of a job have rows of every layer at which one of its requests enters.
    return lowest if all(lowest in of_job for of_job in jobs.values()) else 0


def _may_enter(spec: RankSpec, rows: RequestRows, block_size: int) -> bool:
    """Return whether nothing needs the results of the layers below the entry for these rows."""
    assert spec.entry is not None
    if any(layer < spec.entry.layer for layer in captured_layers(spec.captures)):
        return False
    # Part of a prompt is computed in full, because the rest of it may have to be.
    if rows.first_position + rows.num_rows != spec.prompt_tokens:
        return False
    # Cache blocks that end before the first edited position may serve other requests.
    if rows.first_position < max(spec.first_affected, 0) // block_size * block_size:
        return False
    return all(layer >= spec.entry.layer for entry in spec.steering for layer in entry.layers)


@dataclass(eq=False)
class Reentry(StepPart):
    """Step part for re-entry: opens the gate before the forward, closes it after."""

    _requests: Requests
    _gate: LayerGate
    _runs: RunStore
    _hidden_size: int  # of the stream, as its dtype and device
    _dtype: torch.dtype
    _device: torch.device
    block_size: int = 1  # tokens of a KV cache block; set once it is known

    def plan(self, batch: StepBatch, view: StepView) -> None:
        """Open the gate; fail the requests whose rows this rank lacks."""
        entered = [item for _, item in batch.special if item.spec.entry]
        if not entered:
            return
        tracked_rows = [(item, view.requests[number]) for number, item in batch.members]
        with self._requests.guard(entered, "intervention_failed"):
            specs = {rows.id: tracked.spec for tracked, rows in tracked_rows}
            step = [(specs.get(rows.id), rows) for rows in view.requests]
            if not (begin := first_layer(step, self.block_size)):
                return
            self._gate.begin = begin
            if begin in self._gate.layers:  # ranks of other stages need no rows
                self._gate.stream = self._stream(begin, tracked_rows, view.num_rows)

    def drain(self, step: RanStep) -> None:
        if self._gate.begin:
            self._gate.begin_at_first()

    def _stream(self, layer: int, tracked_rows: Sequence[_Member], num_rows: int) -> torch.Tensor:
        """Return the stream that enters `layer`: `[num_rows, hidden_size]`."""
        by_run = by_key(
            (tracked.spec.entry.run, (tracked, rows))
            for tracked, rows in tracked_rows
            if tracked.spec.entry is not None
        )
        stream = torch.zeros(num_rows, self._hidden_size, dtype=self._dtype)
        for key, members in by_run.items():
            groups = [members]
            for group in groups:
                try:
                    self._fill(stream, key, layer, group)
                except LookupError as error:
                    if len(group) == 1:
                        self._requests.fail(group[0][0], str(error), "intervention_failed")
                    else:  # find the requests whose rows are missing
                        groups += [[member] for member in group]
        return (stream if self._device.type == "cpu" else locked_copy(stream)).to(
            self._device, non_blocking=True
        )

    def _fill(self, stream: torch.Tensor, key: str, layer: int, members: Sequence[_Member]) -> None:
        """Copy these requests' rows from a run into `stream`. Raises LookupError when the run is
        not on this rank, or lacks one of the rows.
        """
        positions = [
            position
            for _, rows in members
            for position in range(rows.first_position, rows.first_position + rows.num_rows)
        ]
        held = self._runs.rows(key, "pre_attn", layer, positions)
        if not all_finite(held):
            raise LookupError(
                f"source run {key}: its rows of pre_attn of layer {layer} are not all finite"
            )
        if len(positions) == len(stream):
            stream.copy_(held)
        else:
            tokens = [
                token
                for _, rows in members
                for token in range(rows.first_row, rows.first_row + rows.num_rows)
            ]
            stream[torch.tensor(tokens)] = held.to(self._dtype)
