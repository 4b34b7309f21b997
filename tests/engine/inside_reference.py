"""What do transformers' own modules compute inside attention and MLP, and what becomes of an edit
there?

Forward hooks on its projections, and its eager attention with the queries, keys and values that it
gets. Shares nothing with `workers.runner.inside`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from reference import FORMULAS, Edit
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

#: Names of modules in transformers, by what they do.
LISTS = ("layers", "h", "decoder.layers", "model.layers")
ATTENTION = ("self_attn", "attn", "attention")
OUTPUT = ("o_proj", "out_proj", "c_proj", "dense")
DOWN = ("mlp.down_proj", "mlp.c_proj", "fc2", "mlp.dense_4h_to_h", "feed_forward.down_proj")
GATES = ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "feed_forward.router")


def _unscaled(attention: Any) -> float:
    return 1.0


#: Kind of model → what transformers multiplies queries with before its attention; vLLM does so in
#: it.
SCALED_BEFORE: Mapping[str, Callable[[Any], float]] = {"opt": lambda attention: attention.scaling}

#: Kinds of models whose queries and keys vLLM has in another order of each head's dimensions: the
#: even ones, then the odd ones.
REORDERED = {"llama4", "llama4_text"}


def _child(module: nn.Module, paths: Sequence[str]) -> Any:
    for path in paths:
        try:
            return module.get_submodule(path)
        except AttributeError:
            continue
    return None


class InsideReference:
    """`rows(tokens)`: (hook, layer) → `[tokens, width]` float32; at `pattern` `[heads, query,
    key]`.
    """

    def __init__(self, path: Path):
        config = AutoConfig.from_pretrained(path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", config=config
        ).eval()
        decoder = (
            self.model.get_decoder()
            if hasattr(self.model, "get_decoder")
            else self.model.base_model
        )
        self.layers = next(
            layers for path in LISTS if (layers := _child(decoder, (path,))) is not None
        )
        self._edits: Sequence[Edit] = ()
        self._found: dict[tuple[str, int], np.ndarray] = {}

    def rows(self, tokens: Sequence[int], *edits: Edit) -> dict[tuple[str, int], np.ndarray]:
        """Of one forward with these edits; also `post_block` of each layer, and `logits` as layer
        −1.
        """
        self._edits = edits
        self._found = {}
        attentions = {
            id(_child(layer, ATTENTION)): number for number, layer in enumerate(self.layers)
        }
        source = sys.modules[type(_child(self.layers[0], ATTENTION)).__module__]
        eager = source.eager_attention_forward

        def attend(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            number = attentions[id(module)]
            kind = self.model.config.model_type
            before = SCALED_BEFORE.get(kind, _unscaled)(module)
            query = self._heads("q", number, query / before, reordered=kind in REORDERED) * before
            parts = [
                query,
                self._heads("k", number, key, reordered=kind in REORDERED),
                self._heads("v", number, value),
            ]
            output, weights = eager(module, *parts, *args, **kwargs)
            self._found["pattern", number] = weights[0].numpy()
            return output, weights

        with ExitStack() as stack, torch.no_grad():
            stack.enter_context(mock.patch.object(source, "eager_attention_forward", attend))
            for number, layer in enumerate(self.layers):
                if (gate := _child(layer, GATES)) is not None:
                    stack.enter_context(
                        mock.patch.object(gate, "forward", self._routed(number, gate.forward))
                    )
                for handle in self._hooks(number, layer):
                    stack.callback(handle.remove)
            logits = self.model(torch.tensor([list(tokens)])).logits[0]
        return {**self._found, ("logits", -1): logits.numpy()}

    def _routed(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A gate's forward, which chooses experts by the edited logits: it computes them by one
        matrix product.
        """
        linear = nn.functional.linear

        def edited(*args: Any) -> torch.Tensor:
            return self._seen("router", number, linear(*args))

        def routed(*args: Any) -> Any:
            with mock.patch.object(nn.functional, "linear", edited):
                output = forward(*args)
            if isinstance(output, tuple):
                self._found["experts", number] = output[1:]
            return output

        return routed

    def _hooks(self, number: int, layer: nn.Module) -> list[Any]:
        attention = _child(layer, ATTENTION)

        def entering(hook: str) -> Any:
            return lambda _, args: (self._seen(hook, number, args[0]), *args[1:])

        def leaving(hook: str, columns: Any = slice(None)) -> Any:
            def after(_: nn.Module, args: Any, output: Any) -> Any:
                rows = output[0] if isinstance(output, tuple) else output
                edited = rows.clone()
                edited[..., columns] = self._seen(hook, number, rows[..., columns])
                return (edited, *output[1:]) if isinstance(output, tuple) else edited

            return after

        handles = [
            _child(attention, OUTPUT).register_forward_pre_hook(entering("z")),
            layer.register_forward_hook(leaving("post_block")),
        ]
        if (down := _child(layer, DOWN)) is not None:
            handles.append(down.register_forward_pre_hook(entering("mlp_act")))
        for projection, columns in self._projections(attention).items():
            for hook, where in columns.items():
                handles.append(projection.register_forward_hook(leaving(hook, where)))
        return handles

    def _projections(self, attention: nn.Module) -> dict[nn.Module, dict[str, Any]]:
        """What gives queries and keys → the columns of what it gives; none where transformers has
        other projections.
        """
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        width = (
            getattr(attention, "head_dim", None)
            or getattr(attention, "head_size", None)
            or config.hidden_size // heads
        )
        if (fused := _child(attention, ("c_attn", "qkv_proj"))) is not None:
            size = heads * width
            keys = (getattr(config, "num_key_value_heads", None) or heads) * width
            return {fused: {"q_proj": slice(0, size), "k_proj": slice(size, size + keys)}}
        if (
            fused := _child(attention, ("query_key_value",))
        ) is not None:  # of each head in turn its query, key and value
            columns = torch.arange(heads * 3 * width).view(heads, 3, width)
            return {fused: {"q_proj": columns[:, 0].flatten(), "k_proj": columns[:, 1].flatten()}}
        return {
            module: {hook: slice(None)}
            for hook in ("q_proj", "k_proj")
            if (module := _child(attention, (hook,))) is not None
        }

    def _heads(
        self, hook: str, number: int, rows: torch.Tensor, *, reordered: bool = False
    ) -> torch.Tensor:
        """`[1, heads, tokens, width]`."""
        count = rows.shape[-1]
        order = (
            torch.cat([torch.arange(0, count, 2), torch.arange(1, count, 2)])
            if reordered
            else torch.arange(count)
        )
        return (
            self._seen(hook, number, rows[..., order].transpose(1, 2).flatten(2))
            .view(rows.transpose(1, 2).shape)
            .transpose(1, 2)[..., torch.argsort(order)]
        )

    def _seen(self, hook: str, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows of any shape with one token after the other, edited, and noted as they were
        before.
        """
        flat = rows.reshape(-1, rows.shape[-1]).clone()
        self._found[hook, number] = flat.numpy().copy()
        for edit in self._edits:
            if (edit.hook, edit.layer) == (hook, number):
                chosen = slice(None) if edit.positions is None else edit.positions
                flat[chosen] = FORMULAS[edit.op](flat[chosen], edit)
        return flat.view(rows.shape)
