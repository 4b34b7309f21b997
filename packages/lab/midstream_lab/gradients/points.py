"""Hook points of a transformers model: rows, with gradients if requested, and their replacement.

`workers.runner.hooks.architectures` has the architectures and the taps of vLLM's layers; this
module adds where transformers' own layers differ. A hook point's tensor is the one that all its
readers share, so its gradient is that of a patch. Attention is transformers' own, with queries,
keys and values open to a watcher.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask

from midstream.schemas.prompts.selectors import FORWARD, Hook
from midstream.workers.runner.hooks.architectures import (
    BACKEND_PRE_NORM,
    BACKEND_SANDWICH,
    PRE_NORM,
    SANDWICH,
    Tap,
    Taps,
    UnsupportedArchitectureError,
    describe,
)

from ..records.sweep_paths import SiteKey as SiteKey

#: The name under which models use the attention of this module.
ATTENTION = "midstream_gradients"
_WATCHED: tuple[Hook, ...] = ("q", "k", "v")
#: Site → its rows, or what has their shape.
RowsBySite = dict[SiteKey, torch.Tensor]
#: Receives a site and its rows `[batch, tokens, width]`; returns the rows with which the model
#: continues.
SiteEdit = Callable[[SiteKey, torch.Tensor], torch.Tensor]
#: Some columns of a tensor.
ColumnIndex: TypeAlias = torch.Tensor | slice

#: Taps of vLLM's layers whose norms fuse additions → taps of transformers' layers. All other
#: layouts agree.
_UNFUSED = ((PRE_NORM, BACKEND_PRE_NORM), (SANDWICH, BACKEND_SANDWICH))
#: Names of a layer's parts in transformers.
_ATTENTION = ("self_attn", "attn", "attention")
_OUTPUT = ("o_proj", "out_proj", "c_proj", "dense")
_DOWN = ("mlp.down_proj", "mlp.c_proj", "fc2", "mlp.dense_4h_to_h")
_INPUT_NORM = ("input_layernorm", "ln_1", "self_attn_layer_norm")
#: Projections of queries, keys and values one after the other in a row.
_FUSED = ("c_attn", "qkv_proj")
#: The same by head, alternately.
_INTERLEAVED = ("query_key_value",)


class Attended(NamedTuple):
    """How a layer turns queries and keys into scores."""

    scale: float
    softcap: float  # 0: none
    mask: torch.Tensor  # [batch, 1, queries, keys]: added to the scores


#: Receives `q`, `k` or `v` and its tensor `[batch, heads, tokens, head size]`; returns what the
#: model goes on with.
AttentionWatcher = Callable[[Hook, torch.Tensor, Attended], torch.Tensor]
WATCHERS: WeakKeyDictionary[nn.Module, AttentionWatcher] = WeakKeyDictionary()


def scores(query: torch.Tensor, key: torch.Tensor, attended: Attended) -> torch.Tensor:
    """Return the scores before the softmax. `query`, `key`: `[batch, heads, tokens, head size]`,
    with as many heads of each.
    """
    result = query @ key.transpose(-1, -2) * attended.scale
    if attended.softcap:
        result = torch.tanh(result / attended.softcap) * attended.softcap
    return result + attended.mask.to(result.dtype)


def repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return key heads `[batch, key heads, …]`, repeated for the query heads that share them."""
    return repeat_kv(tensor, heads // tensor.shape[1])


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if s_aux is not None:
        raise NotImplementedError(f"{type(module).__name__} has attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    watch = WATCHERS.get(module)
    own = getattr(module, "scaling", scale)
    if watch is not None and scale == 1.0 != own:  # OPT multiplies its queries by the scale before
        query = query / own
        scale = own
    attended = Attended(scale, softcap or 0.0, attention_mask)
    if watch is not None:
        query, key, value = map(watch, _WATCHED, (query, key, value), [attended] * 3)
    if not softcap:
        found = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale)
        return found[0], None
    key, value = (repeated(tensor, query.shape[1]) for tensor in (key, value))
    pattern = scores(query, key, attended).softmax(-1, dtype=torch.float32)
    return (pattern.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, eager_mask)


class HookPoint(NamedTuple):
    """A hook point of every layer: columns of the tensor at `tap`, or without a tap, the queries,
    keys or values inside attention, `[batch, heads, tokens, head size]`.
    """

    width: int
    tap: Tap | None
    columns: ColumnIndex = slice(None)
    heads: int = 1

    def rows(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the rows in a tensor of the model: `[batch, tokens, width]`, or `[batch · tokens,
        width]` where the model has them so.
        """
        return raw.transpose(1, 2).flatten(2) if self.tap is None else raw[..., self.columns]

    def with_rows(self, raw: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the model with these rows."""
        if self.tap is None:
            return rows.unflatten(2, (self.heads, -1)).transpose(1, 2)
        edited = raw.clone()
        edited[..., self.columns] = rows.reshape(*raw.shape[:-1], self.width)
        return edited


@dataclass
class ForwardPass:
    """One forward pass. Tensors have a graph if gradients were requested."""

    places: dict[Hook, HookPoint]
    shape: torch.Size  # [batch, tokens]
    logits: torch.Tensor = field(init=False)  # [batch, kept positions, vocabulary]
    raw: RowsBySite = field(default_factory=dict)  # as the model has them
    attended: dict[int, Attended] = field(default_factory=dict)  # by layer

    def rows(self, site: SiteKey) -> torch.Tensor:
        """Return the rows of a site, `[batch, tokens, width]`, without a graph."""
        return self.view(site, self.raw[site].detach())

    def view(self, site: SiteKey, raw: torch.Tensor) -> torch.Tensor:
        """Return the rows of a site in a tensor like `raw[site]`, `[batch, tokens, width]`."""
        return self.places[site[0]].rows(raw).reshape(*self.shape, -1)

    def gradients(self, scalar: torch.Tensor) -> RowsBySite:
        """Return site → d scalar / d rows, `[batch, tokens, width]` in the model's dtype; frees the
        graph.
        """
        gradients = torch.autograd.grad(scalar, list(self.raw.values()), materialize_grads=True)
        return {
            site: self.view(site, gradient)
            for site, gradient in zip(self.raw, gradients, strict=True)
        }


def _part(module: nn.Module, *paths: str) -> str | None:
    """Return the first of `paths` that exists below a module."""
    names = {name for name, _ in module.named_modules()}
    return next((path for path in paths if path in names), None)


class Points:
    """The hook points of one loaded model, whose weights take no gradients from now on."""

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedArchitectureError, with the architecture's name and the reason."""
        self.model = model.eval().requires_grad_(False)
        self.architecture = type(model).__name__
        adapter = describe(self.architecture, model.config)
        if not adapter.variant.known:
            raise UnsupportedArchitectureError(
                f"{self.architecture}: no gradients, because its layers are not in the table of "
                "architectures"
            )
        hidden = adapter.hidden_size
        self.num_layers = adapter.num_layers
        decoder = model.get_decoder()
        decoder = getattr(decoder, "decoder", decoder)
        self.layers = decoder.layers if hasattr(decoder, "layers") else decoder.h
        taps = adapter.variant.taps
        self.taps: Taps = next((ours for theirs, ours in _UNFUSED if theirs == taps), taps)
        text = model.config.get_text_config()
        heads: int = text.num_attention_heads
        key_heads: int = getattr(text, "num_key_value_heads", None) or heads
        self.hidden_size = hidden
        self.head_size: int = getattr(text, "head_dim", None) or hidden // heads
        queries = heads * self.head_size
        keys = key_heads * self.head_size
        layer = self.layers[0]
        block = _part(layer, *_ATTENTION)
        down = _part(layer, *_DOWN)
        output = _part(layer, *(f"{block}.{name}" for name in _OUTPUT))
        assert block is not None
        assert output is not None
        self.attention_path = block
        self.output_path = output
        #: The norm before attention; null: attention reads the stream.
        self.input_norm = _part(layer, *_INPUT_NORM)
        #: Queries, keys and values: a module below a layer, and columns of its output.
        self.projections = _projections(layer, block, heads, queries, keys)
        self.absent: dict[Hook, str] = dict(adapter.variant.absent)
        self.absent["router"] = "gradients do not pass through the choice of experts"
        (query, in_query), (key, in_key), _ = self.projections
        self.places: dict[Hook, HookPoint] = {
            **{hook: HookPoint(hidden, tap) for hook, tap in self.taps.items()},
            "z": HookPoint(queries, Tap(output, "input"), heads=heads),
            "q_proj": HookPoint(queries, Tap(query, "output"), in_query, heads),
            "k_proj": HookPoint(keys, Tap(key, "output"), in_key, key_heads),
            "q": HookPoint(queries, None, heads=heads),
            "k": HookPoint(keys, None, heads=key_heads),
            "v": HookPoint(keys, None, heads=key_heads),
        }
        if down is None:
            self.absent["mlp_act"] = "the neurons of its experts are in one fused kernel"
        else:
            neurons = weight_of(layer.get_submodule(down)).shape[0]
            self.places["mlp_act"] = HookPoint(neurons, Tap(down, "input"))
        self.hooks = tuple(hook for hook in FORWARD if hook in self.places)

    @property
    def device(self) -> torch.device:
        """The device of the embeddings, where token ids belong."""
        return self.model.get_input_embeddings().weight.device

    def heads(self, hook: Hook) -> int:
        """Return the number of a row's heads; 1 for hooks without heads."""
        return self.place(hook).heads

    def width(self, hook: Hook) -> int:
        """Return the number of elements of a row."""
        return self.place(hook).width

    def place(self, hook: Hook) -> HookPoint:
        """Raises UnsupportedArchitectureError for a hook point that the model lacks."""
        if hook not in self.places:
            raise UnsupportedArchitectureError(
                f"{self.architecture} has no gradients at {hook}: "
                f"{self.absent.get(hook, 'it does not exist')}; it has {', '.join(self.hooks)}"
            )
        return self.places[hook]

    def batch(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return token ids `[batch, longest]`, padded at the end: no earlier token sees that."""
        longest = max(map(len, prompts))
        rows = [[*tokens, *[tokens[-1]] * (longest - len(tokens))] for tokens in prompts]
        return torch.tensor(rows, device=self.device)

    def run(
        self,
        tokens: torch.Tensor,
        sites: Collection[SiteKey] = (),
        *,
        keep: Sequence[int] = (),
        edit: SiteEdit | None = None,
        grad: bool = False,
    ) -> ForwardPass:
        """Run the model on `tokens`, `[batch, tokens]`.

        `sites`: whose rows are kept, and passed to `edit`; `keep`: positions whose logits are
        computed, by default the last; `grad`: rows and logits have a graph, from the first site on.
        Raises UnsupportedArchitectureError for a hook point that the model lacks.
        """
        run = ForwardPass(self.places, tokens.shape)

        def visit(site: SiteKey, raw: torch.Tensor) -> torch.Tensor:
            if grad and site[0] == "pre_attn":
                # another tensor: what read `post_block` of the layer below read it before
                raw = raw.view_as(raw)
            if edit is not None:
                rows = run.view(site, raw)
                edited = edit(site, rows)
                if edited is not rows:
                    raw = self.places[site[0]].with_rows(raw, edited)
            if grad and not raw.requires_grad:
                raw.requires_grad_()  # a leaf, because nothing before it needs gradients
            run.raw[site] = raw
            return raw

        def watch(layer: int, hook: Hook, raw: torch.Tensor, attended: Attended) -> torch.Tensor:
            run.attended[layer] = attended
            return visit((hook, layer), raw) if (hook, layer) in sites else raw

        kept = torch.tensor(list(keep) or [tokens.shape[1] - 1], device=tokens.device)
        with ExitStack() as stack:
            # hooks of one module are called in the order of their registration
            for hook, layer in sorted({*sites}, key=lambda site: FORWARD.index(site[0])):
                tap = self.place(hook).tap
                path = self.attention_path if tap is None else tap.path
                module = self.layers[layer].get_submodule(path)
                if tap is None:
                    WATCHERS[module] = partial(watch, layer)
                    stack.callback(WATCHERS.pop, module, None)
                else:
                    stack.callback(_register(module, tap, (hook, layer), visit).remove)
            stack.enter_context(torch.set_grad_enabled(grad))
            run.logits = self.model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
        return run


def _projections(
    layer: nn.Module, block: str, heads: int, queries: int, keys: int
) -> list[tuple[str, ColumnIndex]]:
    """Return module and columns of queries, keys and values. `queries`, `keys`: their sizes."""
    if path := _part(layer, *(f"{block}.{name}" for name in _FUSED)):
        starts = (0, queries, queries + keys, queries + 2 * keys)
        return [(path, slice(*bounds)) for bounds in pairwise(starts)]
    if path := _part(layer, *(f"{block}.{name}" for name in _INTERLEAVED)):
        columns = torch.arange(3 * queries).view(heads, 3, -1)
        return [(path, columns[:, part].flatten()) for part in range(3)]
    return [(f"{block}.{name}_proj", slice(None)) for name in "qkv"]


def _register(
    module: nn.Module,
    tap: Tap,
    site: SiteKey,
    visit: SiteEdit,
) -> Any:
    """Register a hook that passes a site's tensor to `visit`."""

    def entering(_: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        given = args[0] if args else named["hidden_states"]
        raw = visit(site, given)
        if site[0] == "post_attn" and raw is not given:
            # The layer keeps this tensor as its residual, which a returned copy would not reach.
            raw = given.copy_(raw)
        return ((raw, *args[1:]), named) if args else (args, {**named, "hidden_states": raw})

    def leaving(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (visit(site, output[0]), *output[1:])
        return visit(site, output)

    if tap.side == "input":
        return module.register_forward_pre_hook(entering, with_kwargs=True)
    return module.register_forward_hook(leaving)


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the weight of a linear module or a Conv1D, `[inputs, outputs]`."""
    weight: torch.Tensor = module.weight
    return weight.T if isinstance(module, nn.Linear) else weight
