"""Output head of a loaded model, callable outside its forward passes: final norm, output matrix,
scale and soft cap, without collectives.

It is a copy of the model's own modules that shares their weights. If the vocabulary is sharded over
ranks, it computes this rank's shard of the logits.
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

#: Names of the norm after the last layer: a sibling of the layers, or of a module that holds them.
FINAL_NORM = re.compile(r"^(norm|norm_f|ln_f|final_norm|final_layer_?norm)$")


class NoHeadError(Exception):
    """The model has no output head that can be called alone; the message has the reason."""


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of the vocabulary: token ids `[start, stop)`, the `number`th of `count`."""

    start: int
    stop: int
    number: int
    count: int


class OutputHead:
    """Map from a row of the residual stream to logits of the next token, on this rank."""

    def __init__(
        self, model: nn.Module, adapter: "Adapter", dtype: torch.dtype, device: torch.device
    ) -> None:
        """`dtype`: of the rows. Raises NoHeadError."""
        root: Any = language_model(model)
        self._norm = final_norm(root, decoder(model, adapter), adapter.hidden_size)
        self.dtype = dtype
        self.device = device
        self._top, processor = _separate(root)
        lm_heads: list[Any] = []
        apply_head = processor._apply_head

        def recorded_head(lm_head: Any, *args: Any) -> torch.Tensor:
            lm_heads.append(lm_head)
            return apply_head(lm_head, *args)

        _replace_head(processor, recorded_head)
        self._product(torch.zeros(1, adapter.hidden_size, dtype=dtype, device=device))
        at = getattr(lm_heads[0], "shard_indices", None) if lm_heads else None
        if at is None or at.num_added_elements:
            raise NoHeadError(
                "its logits do not come from one of vLLM's output matrices"
                if at is None
                else "its vocabulary was extended"
            )
        lm_head = lm_heads[0]
        processor._apply_head = apply_head
        if device.type == "cpu":
            # vLLM's own product uses buffers that a concurrent forward pass uses too
            if "Unquantized" not in type(lm_head.quant_method).__name__:
                raise NoHeadError("its output matrix is quantised, and the engine runs on a CPU")
            _replace_head(processor, partial(_linear, processor.head_dtype or dtype))
        self._lm_head = lm_head
        first = at.org_vocab_start_index
        self.shard = VocabularyShard(
            first,
            at.org_vocab_end_index,
            first // lm_head.num_embeddings_per_partition,
            lm_head.tp_size,
        )

    def norm(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows` `[rows, hidden]` after the final norm. `rows` may be overwritten."""
        normed: torch.Tensor | tuple[torch.Tensor, ...] = self._norm(rows)
        return normed[0] if isinstance(normed, tuple) else normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits of this shard's tokens, in their order: float32 `[rows, shard]`."""
        return self._product(normed)[:, : self.shard.stop - self.shard.start].float()

    def for_tokens(
        self, tokens: Sequence[int], reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> "OutputHead":
        """Return a head for `tokens` alone, gathered from all shards: its `logits` are
        `[rows, tokens]`.

        `reduce`: sums over all ranks of the stage, all of which must call this method. Raises
        NoHeadError, on all of them alike.
        """
        weight = getattr(self._lm_head, "weight", None)
        bias = getattr(self._lm_head, "bias", None)
        if weight is None or "Unquantized" not in type(self._lm_head.quant_method).__name__:
            raise NoHeadError(
                "its output matrix is quantised and split over ranks, so no rank can collect the "
                "rows of single tokens"
            )
        places = torch.tensor(tokens, device=self.device) - self.shard.start
        in_shard = (places >= 0) & (places < self.shard.stop - self.shard.start)
        rows = weight[places.where(in_shard, 0)] * in_shard[:, None]
        shift = None if bias is None else reduce(bias[places.where(in_shard, 0)] * in_shard)
        only = SimpleNamespace(weight=reduce(rows), tp_size=1)
        if self.device.type == "cuda":
            # the rows will be read on another stream
            torch.cuda.current_stream(self.device).synchronize()
        head: OutputHead = copy.copy(self)
        top, processor = _separate(self._top)
        _replace_head(
            processor,
            lambda _, given, __: _linear(processor.head_dtype or self.dtype, only, given, shift),
        )
        head._top = top
        head.shard = VocabularyShard(0, len(tokens), 0, 1)
        return head

    def _product(self, normed: torch.Tensor) -> torch.Tensor:
        return type(self._top).compute_logits(self._top, normed)


def final_norm(root: nn.Module, layers: nn.Module, hidden_size: int) -> nn.Module:
    """Return the norm after the last layer.

    `layers`: the module that holds the layers. Raises NoHeadError unless there is exactly one norm.
    """
    norms = norms_near(root, layers, hidden_size, FINAL_NORM)
    if len(norms) != 1:
        raise NoHeadError(f"{len(norms) or 'no'} final norms were found next to the decoder layers")
    return norms[0]


def norms_near(
    root: nn.Module, layers: nn.Module, hidden_size: int, names: re.Pattern[str]
) -> list[nn.Module]:
    """Return the norms of rows that are siblings of the layers, or of a module that holds them, and
    have such a name.
    """
    path = next(name for name, module in root.named_modules() if module is layers).split(".")
    holders = [root.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    norms = dict.fromkeys(
        child for holder in holders for name, child in holder.named_children() if names.search(name)
    )
    return [
        norm
        for norm in norms
        if all(parameter.shape[-1] == hidden_size for parameter in norm.parameters())
    ]


def _separate(root: Any) -> tuple[nn.Module, Any]:
    """Return a shallow copy of the model whose `compute_logits` calls no other rank, and the copy's
    logits processor.
    """
    processor = getattr(root, "logits_processor", None)
    # LoRA wraps the processor; adapters that change the output matrix are refused
    processor = getattr(processor, "base_layer", processor)
    if not hasattr(processor, "_apply_head") or not hasattr(processor, "_gather_logits"):
        raise NoHeadError("it has none of vLLM's logits processors")
    top = _copied(root)
    processor = _copied(processor)
    processor._gather_logits = _gather_logits
    top.__dict__.pop("compute_logits", None)  # wrappers of grading and certification
    top._modules["logits_processor"] = processor
    return top, processor


def _gather_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return this rank's logits alone, in place of vLLM's collective."""
    return logits


def _replace_head(processor: Any, product: Callable[..., torch.Tensor]) -> None:
    """Make the logits processor multiply with `product(lm_head, rows, bias)`."""

    def _apply_head(
        lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor:
        return product(lm_head, hidden_states, embedding_bias)

    processor._apply_head = _apply_head


def _linear(
    head_dtype: torch.dtype, lm_head: Any, rows: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the product of rows with an output matrix that is not quantised."""
    return functional.linear(
        rows.to(head_dtype),
        lm_head.weight.to(head_dtype),
        bias.to(head_dtype) if bias is not None else None,
    )


def _copied(module: Any) -> Any:
    """Return a copy of the module that shares its parameters, buffers and children."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin
