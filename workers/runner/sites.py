"""Where in a model is the residual stream? One table entry per architecture, and the wrapping that follows from it.

Sites are installed on layer instances after loading and before compilation or graph capture; model files stay as
they are. Issue-by-issue the table grows; an architecture that is not in it is refused at boot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...kernels import pair_site as kernel
from ...schemas.specs import MAX_STEERING_SELECTORS

#: Architecture (HF `architectures[0]`) → where its decoder layers are. Each layer returns the deferred pair
#: `(hidden_states, residual)`, whose sum is the stream leaving the block.
PAIR_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "model.layers",
    "MistralForCausalLM": "model.layers",
    "Qwen2ForCausalLM": "model.layers",
    "Qwen3ForCausalLM": "model.layers",
}
HOOKS = ("post_block",)


class UnsupportedArchitectureError(ValueError):
    """The model's architecture has no adapter."""


def layers_path(architecture: str) -> str:
    """Attribute path of the decoder layers; raises UnsupportedArchitectureError with the list of what is supported."""
    if architecture not in PAIR_ARCHITECTURES:
        supported = ", ".join(sorted(PAIR_ARCHITECTURES))
        raise UnsupportedArchitectureError(f"architecture {architecture} is not supported; supported: {supported}")
    return PAIR_ARCHITECTURES[architecture]


@dataclass
class Switch:
    """Read by forwards that run as Python; traced ones always call the op."""

    active: bool = False  # this step has something to do
    always: bool = False  # a graph is captured from this forward, so the op must be in it whatever the step


@dataclass
class SharedBuffers:
    """Filled before the forward, read by every site. int64, unused slots 0."""

    steer_tokens: torch.Tensor  # [MAX_STEERING_SELECTORS * capacity]
    steer_rows: torch.Tensor  # [MAX_STEERING_SELECTORS * capacity]
    capture_tokens: torch.Tensor  # [capacity]


@dataclass
class Site:
    """`post_block` of one layer held by this rank."""

    layer: int  # absolute layer number
    captured: torch.Tensor  # [capacity, hidden_size]
    counts: torch.Tensor  # int32 [4], see kernels.pair_site
    table: torch.Tensor  # [1 + steering_rows, hidden_size], row 0 zero


def install(
    model: nn.Module, architecture: str, switch: Switch, *, rows: int, capacity: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Site], SharedBuffers]:
    """Wrap the layers that this rank holds; returns their sites in layer order and the buffers they share."""
    layers: nn.ModuleList = model.get_submodule(layers_path(architecture))
    sizes = (MAX_STEERING_SELECTORS * capacity, MAX_STEERING_SELECTORS * capacity, capacity)
    shared = SharedBuffers(*(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes))
    sites = []
    for number, layer in enumerate(layers):
        hidden_size = _hidden_size(layer)
        if hidden_size is None:  # a placeholder: the layer is on another pipeline stage
            continue
        site = Site(
            layer=number,
            captured=torch.zeros(capacity, hidden_size, dtype=dtype, device=device),
            counts=torch.zeros(4, dtype=torch.int32, device=device),
            table=torch.zeros(1 + rows, hidden_size, dtype=dtype, device=device),
        )
        layer.forward = _wrap(layer, layer.forward, site, shared, switch)
        sites.append(site)
    return sites, shared


def _hidden_size(layer: nn.Module) -> int | None:
    norm = getattr(layer, "input_layernorm", None)
    return None if norm is None else int(norm.weight.shape[0])


def _wrap(layer: nn.Module, forward: Callable[..., Any], site: Site, shared: SharedBuffers, switch: Switch) -> Callable[..., Any]:
    # Buffers on the module become inputs of the traced graph, as weights do.
    for name in ("captured", "counts", "table"):
        layer.register_buffer(f"midstream_{name}", getattr(site, name), persistent=False)
    for name in ("steer_tokens", "steer_rows", "capture_tokens"):
        layer.register_buffer(f"midstream_{name}", getattr(shared, name), persistent=False)

    def with_site(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            kernel.pair_site(
                hidden,
                residual,
                layer.midstream_captured,
                layer.midstream_counts,
                layer.midstream_steer_tokens,
                layer.midstream_steer_rows,
                layer.midstream_table,
                layer.midstream_capture_tokens,
            )
        elif switch.active or switch.always:
            kernel.pair_site(
                hidden, residual, site.captured, site.counts, shared.steer_tokens, shared.steer_rows, site.table, shared.capture_tokens
            )
        return hidden, residual

    return with_site
