"""Estimate of the memory of a run with gradients, before it starts.

What autograd keeps is measured, not derived: three short runs give its bytes as a quadratic
polynomial in the number of tokens, which holds for any architecture, dtype and attention kernel.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch

from .points import Points, SiteKey

#: Lengths of the runs that are measured, in tokens.
_LENGTHS = (8, 16, 24)
#: Layers' worth of kept tensors that a pass holds beside them: the temporaries of the layer that it
#: computes, and their gradients.
_WORKING_LAYERS = 3
#: Bytes of a logit: in the model's dtype, in float64, its logarithm and their gradients.
_PER_LOGIT = 48
#: What the allocator and the libraries may take beyond this, once.
SLACK_BYTES = 64 << 20


class PassMemory(NamedTuple):
    """Bytes of one pass forward and back."""

    parameters: int
    activations: int  # that autograd keeps
    gradients: int  # of the rows of sites, and these rows in the source run
    working: int  # temporaries, logits, slack

    @property
    def total(self) -> int:
        return sum(self)


class Footprint:
    """The memory of a loaded model's runs. `memory` is an upper bound of the peak, and at most
    about twice as much for runs whose kept tensors exceed `SLACK_BYTES`.
    """

    def __init__(self, points: Points) -> None:
        """Run the model three times on short prompts."""
        self.points = points
        self._owned = {*points.model.parameters(), *points.model.buffers()}
        self._parameters = sum(part.nbytes for part in self._owned)
        self._curve = np.polyfit(_LENGTHS, [self._kept(length) for length in _LENGTHS], 2)

    def _kept(self, length: int) -> int:
        """Return the bytes that autograd keeps for a prompt, beside the model's own tensors."""
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = self.points.batch([[0] * length])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run = self.points.run(tokens, [("pre_attn", 0)], grad=True)
        del run
        owned = {tensor.untyped_storage().data_ptr() for tensor in self._owned}
        return sum(size for place, size in seen.items() if place not in owned)

    def memory(
        self, tokens: int, batch: int = 1, sites: Collection[SiteKey] = (), kept: int = 1
    ) -> PassMemory:
        """Return the memory of a run of `batch` prompts of `tokens` tokens.

        `sites`: whose gradients are computed; `kept`: positions whose logits are computed.
        """
        points = self.points
        activations = batch * max(float(np.polyval(self._curve, tokens)), 0.0)
        rows = sum(points.width(hook) for hook, _ in sites) * tokens * batch
        logits = batch * kept * points.model.config.get_text_config().vocab_size * _PER_LOGIT
        return PassMemory(
            self._parameters,
            int(activations),
            2 * rows * points.model.dtype.itemsize,
            int(_WORKING_LAYERS * activations / points.num_layers) + logits + SLACK_BYTES,
        )
