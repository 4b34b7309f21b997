"""Re-entry: starts a step's forward above the first layer, with rows of a source run.

Only forwards that run as Python can. Reasons, design and gain:
`docs/decisions/0006-reentry-and-grading.md`.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from ....schemas.base.records import by_key
from ....schemas.requests.specs import RankSpec
from ..base.engine_step import RequestRows, StepView
from ..base.host_memory import locked_copy
from ..edits.source_runs import RunStore
from ..hooks.architectures import ARCHITECTURES, Adapter
from ..hooks.sites import held_layers, places
from ..rows.finite_check import all_finite
from ..rows.planner import Tracked
from .requests import Requests
from .step_parts import RanStep, StepBatch, StepPart

#: A tracked request and its rows of the step.
_Member = tuple[Tracked, RequestRows]


@dataclass(eq=False)
class ReentryGate:
    """The entry layer of the rank's next forward; layers below it only return their input."""

    layers: Sequence[int]  # absolute numbers of the layers that the rank holds, ascending
    begin: int = 0  # absolute number of the first computed layer; 0: all are computed
    # the stream that enters this layer, `[rows of the step, hidden_size]`, if the rank holds it
    stream: torch.Tensor | None = None

    def open(self, begin: int) -> int:
        """Have the next forward begin at a layer; return how many of the rank's layers it skips."""
        self.begin = begin
        return sum(layer < begin for layer in self.layers)

    def close(self) -> None:
        """Have the next forward begin at the first layer again."""
        self.begin = 0
        self.stream = None

    def entering(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with the stream that enters the first computed layer, in the shape of
        `hidden` (`[…, rows, hidden_size]`, perhaps padded).

        Missing rows are zeros; their requests have failed.
        """
        stream = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        if self.stream is not None:
            stream.view(-1, hidden.shape[-1])[: len(self.stream)] = self.stream
        return stream


def enters_above(adapter: Adapter) -> bool:
    """Return whether a forward may begin above the first layer: the table of architectures has the
    model, so that its layers are known to pass on the stream and nothing else.

    False for models with layers of several kinds, since recurrent layers keep their own state.
    """
    return adapter.architecture in ARCHITECTURES and not adapter.kinds


def install_gate(model: nn.Module, adapter: Adapter) -> ReentryGate:
    """Wrap the decoder layers that this rank holds.

    Called after `sites.install`, because the sites of a skipped layer must not run.
    """
    held = held_layers(model, adapter)
    gate = ReentryGate([number for number, _ in held])
    for number, layer in held:
        _wrap(gate, number, layer, pair=adapter.tap("pre_attn", 1).kind == "pair")
    return gate


def _wrap(gate: ReentryGate, number: int, layer: nn.Module, *, pair: bool) -> None:
    """Wrap a layer's forward. `pair`: the layer takes and returns `(hidden, residual)`, whose sum
    is the stream; else one tensor.
    """
    forward = layer.forward
    bare = type(layer).forward.__get__(layer)
    signature = inspect.signature(bare)
    hidden_name = [*signature.parameters][places(bare)[0]]

    def with_gate(*args: Any, **kwargs: Any) -> Any:
        if number > gate.begin or not gate.begin:
            return forward(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        hidden = call.arguments[hidden_name]
        if number < gate.begin:
            # A later stage expects two tensors, although nothing is computed here.
            return (hidden, hidden) if pair else hidden
        stream = gate.entering(hidden)
        # −0 + x is x, bit for bit, even if x is a zero; a replaced row is stored the same way.
        call.arguments[hidden_name] = torch.full_like(hidden, -0.0) if pair else stream
        if pair:
            call.arguments["residual"] = stream
        return forward(*call.args, **call.kwargs)

    layer.forward = with_gate


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
    # Part of a prompt is computed in full, because the rest of it may have to be.
    if spec.captures or rows.first_position + rows.num_rows != spec.prompt_tokens:
        return False
    # Cache blocks that end before the first edited position may serve other requests.
    if rows.first_position < max(spec.first_affected, 0) // block_size * block_size:
        return False
    return all(layer >= spec.entry.layer for entry in spec.steering for layer in entry.layers)


@dataclass(eq=False)
class Reentry(StepPart):
    """Step part for re-entry: opens the gate before the forward, closes it after."""

    _requests: Requests
    _gate: ReentryGate
    _runs: RunStore
    _hidden_size: int  # of the stream, as its dtype and device
    _dtype: torch.dtype
    _device: torch.device
    block_size: int = 1  # tokens of a KV cache block; set once it is known
    skipped: int = 0  # (token row, layer of this rank) pairs that were not computed

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
            self.skipped += self._gate.open(begin) * view.num_rows
            if begin in self._gate.layers:  # ranks of other stages need no rows
                self._gate.stream = self._stream(begin, tracked_rows, view.num_rows)

    def drain(self, step: RanStep) -> None:
        if self._gate.begin:
            self._gate.close()

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
