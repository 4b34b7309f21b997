"""The gate of a rank's layers: a forward pass may begin above the first layer (re-entry), and end
below the last (early exit).

Only forwards that run as Python can. Reasons, design and gain:
`docs/decisions/0006-reentry-and-grading.md` and `docs/decisions/0051-early-exit.md`.
"""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..hooks.architectures import ARCHITECTURES, Adapter
from ..hooks.sites import held_layers, places

#: `LayerGate.end` of a forward that computes the last layer and the head.
WHOLE_FORWARD = sys.maxsize


@dataclass(eq=False)
class LayerGate:
    """The layers that the rank's next forward computes; the others only return their input."""

    layers: Sequence[int]  # absolute numbers of the layers that the rank holds, ascending
    enters: bool = True  # forwards may begin above the first layer
    begin: int = 0  # absolute number of the first computed layer
    # the stream that enters this layer, `[rows of the step, hidden_size]`, if the rank holds it
    stream: torch.Tensor | None = None
    end: int = WHOLE_FORWARD  # absolute number of the first layer above those computed
    skipped: int = 0  # (token row, layer of this rank) pairs that were not computed

    def begin_at_first(self) -> None:
        """Have the next forward begin at the first layer again."""
        self.begin = 0
        self.stream = None

    def count(self, rows: int) -> None:
        """Count what the next forward, of so many rows, does not compute."""
        self.skipped += rows * sum(not self.begin <= layer < self.end for layer in self.layers)

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


def exits_below(adapter: Adapter) -> bool:
    """Return whether a forward may end below the last layer: the table of architectures has the
    model, so that its layers are known to take the stream and to return it.
    """
    return adapter.architecture in ARCHITECTURES


def install_gate(model: nn.Module, adapter: Adapter, *, enters: bool = True) -> LayerGate:
    """Wrap the decoder layers that this rank holds, and the model's head.

    Called after `sites.install`, because the sites of a skipped layer must not run.
    """
    held = held_layers(model, adapter)
    gate = LayerGate([number for number, _ in held], enters)
    for number, layer in held:
        _wrap(gate, number, layer, pair=adapter.tap("pre_attn", 1).kind == "pair")
    if hasattr(model, "compute_logits"):
        _wrap_head(gate, model)
    return gate


def _wrap_head(gate: LayerGate, model: nn.Module) -> None:
    """Have the head return one zero for each row after a forward that ended early: the sampler
    takes token 0 of a vocabulary of one, which nobody reads.
    """
    compute_logits = model.compute_logits

    def with_gate(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if gate.end < WHOLE_FORWARD:
            return hidden.new_zeros(len(hidden), 1)
        return compute_logits(hidden, *args, **kwargs)

    model.compute_logits = with_gate


def _wrap(gate: LayerGate, number: int, layer: nn.Module, *, pair: bool) -> None:
    """Wrap a layer's forward. `pair`: the layer takes and returns `(hidden, residual)`, whose sum
    is the stream; else one tensor.
    """
    forward = layer.forward
    bare = type(layer).forward.__get__(layer)
    signature = inspect.signature(bare)
    hidden_name = [*signature.parameters][places(bare)[0]]

    def with_gate(*args: Any, **kwargs: Any) -> Any:
        if number < gate.end and (number > gate.begin or not gate.begin):
            return forward(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        hidden = call.arguments[hidden_name]
        if number >= gate.end:
            return (hidden, call.arguments["residual"]) if pair else hidden
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
