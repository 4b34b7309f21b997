"""The end of a loaded model, callable next to its forward passes: final norm, output matrix, scale
and soft cap, without collectives.

A copy of the model's own modules that shares their weights. With the vocabulary sharded over ranks
it gives this rank's shard.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from .sites import decoder, language_model

if TYPE_CHECKING:
    from .architectures import Adapter

#: Names of the norm behind the last layer, next to the layers or next to what holds them.
FINAL_NORM = re.compile(r"^(norm|norm_f|ln_f|final_norm|final_layer_?norm)$")


class NoHeadError(Exception):
    """The model has no end that can be called alone, with the reason."""


@dataclass(frozen=True)
class Shard:
    """This rank's part of the vocabulary: token ids `[start, stop)`, the `number`th of `count`."""

    start: int
    stop: int
    number: int
    count: int


class Head:
    """Map from a row of the residual stream to logits of the next token, on this rank."""

    def __init__(
        self, model: nn.Module, adapter: "Adapter", dtype: torch.dtype, device: torch.device
    ) -> None:
        """`dtype`: of the rows. Raises NoHeadError."""
        root: Any = language_model(model)
        self._norm = final_norm(root, decoder(model, adapter), adapter.hidden_size)
        self.dtype, self.device = dtype, device
        self._top, processor = _apart(root)
        visited: list[Any] = []
        apply_head = processor._apply_head

        def noted(lm_head: Any, *args: Any) -> torch.Tensor:
            visited.append(lm_head)
            product: torch.Tensor = apply_head(lm_head, *args)
            return product

        processor._apply_head = noted
        self._product(torch.zeros(1, adapter.hidden_size, dtype=dtype, device=device))
        at = getattr(visited[0], "shard_indices", None) if visited else None
        if at is None or at.num_added_elements:
            raise NoHeadError(
                "its logits do not come from one of vLLM's output matrices"
                if at is None
                else "its vocabulary was extended"
            )
        lm_head, processor._apply_head = visited[0], apply_head
        if device.type == "cpu":
            # vLLM's own product has buffers that the forward pass uses meanwhile
            if "Unquantized" not in type(lm_head.quant_method).__name__:
                raise NoHeadError("its output matrix is quantised, and the engine runs on a CPU")
            processor._apply_head = partial(_linear, processor.head_dtype or dtype)
        self._lm_head = lm_head
        first = at.org_vocab_start_index
        self.shard = Shard(
            first,
            at.org_vocab_end_index,
            first // lm_head.num_embeddings_per_partition,
            lm_head.tp_size,
        )

    def norm(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` as the output matrix reads them. `rows` may be written to."""
        normed: torch.Tensor | tuple[torch.Tensor, ...] = self._norm(rows)
        return normed[0] if isinstance(normed, tuple) else normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, shard]`: of this shard's tokens, in their order, without padding."""
        return self._product(normed)[:, : self.shard.stop - self.shard.start].float()

    def rows_of(
        self, tokens: Sequence[int], reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> "Head":
        """Return this head for these tokens alone, gathered from all shards: its `logits` are
        `[rows, tokens]`.

        `reduce`: the sum over all ranks of the stage, each of which calls this. Raises NoHeadError
        on all of them.
        """
        weight, bias = getattr(self._lm_head, "weight", None), getattr(self._lm_head, "bias", None)
        if weight is None or "Unquantized" not in type(self._lm_head.quant_method).__name__:
            raise NoHeadError(
                "named tokens need an output matrix that is not quantised, where ranks share it"
            )
        places = torch.tensor(tokens, device=self.device) - self.shard.start
        in_shard = (places >= 0) & (places < self.shard.stop - self.shard.start)
        rows = weight[places.where(in_shard, 0)] * in_shard[:, None]
        shift = None if bias is None else reduce(bias[places.where(in_shard, 0)] * in_shard)
        only = SimpleNamespace(weight=reduce(rows), tp_size=1)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # they are read on another stream
        head: Head = copy.copy(self)
        top, processor = _apart(self._top)
        processor._apply_head = lambda _, given, __: _linear(
            processor.head_dtype or self.dtype, only, given, shift
        )
        head._top, head.shard = top, Shard(0, len(tokens), 0, 1)
        return head

    def _product(self, normed: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = type(self._top).compute_logits(self._top, normed)
        return logits


def final_norm(root: nn.Module, layers: nn.Module, hidden_size: int) -> nn.Module:
    """The norm behind the last layer.

    `layers`: what holds them. Raises NoHeadError unless there is exactly one.
    """
    path = next(name for name, module in root.named_modules() if module is layers).split(".")
    holders = [root.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    norms = {
        id(child): child
        for holder in holders
        for name, child in holder.named_children()
        if FINAL_NORM.search(name)
    }
    fitting = [
        norm
        for norm in norms.values()
        if all(parameter.shape[-1] == hidden_size for parameter in norm.parameters())
    ]
    if len(fitting) != 1:
        raise NoHeadError(
            f"{len(fitting) or 'no'} final norms were found beside the decoder layers"
        )
    return fitting[0]


def _apart(root: Any) -> tuple[nn.Module, Any]:
    """A shallow copy of the model whose `compute_logits` calls no other rank, and the copy's logits
    processor.
    """
    processor = getattr(root, "logits_processor", None)
    # with adapters served: those that change the output matrix are refused
    processor = getattr(processor, "base_layer", processor)
    if not hasattr(processor, "_apply_head") or not hasattr(processor, "_gather_logits"):
        raise NoHeadError("it has no logits processor of vLLM's")
    top, processor = _copied(root), _copied(processor)
    processor._gather_logits = lambda logits: logits
    top.__dict__.pop("compute_logits", None)  # what grading and certification put there
    top._modules["logits_processor"] = processor
    return top, processor


def _linear(
    head_dtype: torch.dtype, lm_head: Any, rows: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product with an output matrix that is not quantised."""
    return functional.linear(
        rows.to(head_dtype),
        lm_head.weight.to(head_dtype),
        bias.to(head_dtype) if bias is not None else None,
    )


def _copied(module: Any) -> Any:
    """Its own module with the same parameters, buffers and children."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin
