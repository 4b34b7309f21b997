"""Hook points of a transformers model: rows, with gradients if requested, and their replacement.

`workers.runner.hooks.architectures` has the architectures and the taps of vLLM's layers; this
module adds where transformers' own layers differ. A hook point's tensor is the one that all its
readers share, so its gradient is that of a patch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from ...schemas.prompts.selectors import FORWARD, HOOKS, Hook
from ..runner.hooks.architectures import (
    BACKEND_PRE_NORM,
    PRE_NORM,
    SANDWICH,
    UnsupportedArchitectureError,
    describe,
)
from ..runner.hooks.taps import Tap, Taps
from . import attention

#: (hook, layer of the model)
Site = tuple[Hook, int]
#: Receives a site and its rows `[batch, tokens, width]`; returns the rows with which the model
#: continues.
Edit = Callable[[Site, torch.Tensor], torch.Tensor]

#: Taps of vLLM's layers whose norms fuse additions → taps of transformers' layers. All other
#: layouts agree.
_UNFUSED: tuple[tuple[Taps, Taps], ...] = (
    (PRE_NORM, BACKEND_PRE_NORM),
    (
        SANDWICH,
        {
            "pre_attn": Tap("", "input"),
            "attn_out": Tap("post_attention_layernorm", "output"),
            "post_attn": Tap("pre_feedforward_layernorm", "input"),
            "mlp_in": Tap("pre_feedforward_layernorm", "output"),
            "mlp_out": Tap("post_feedforward_layernorm", "output"),
            "post_block": Tap("", "output"),
        },
    ),
)
#: Names of a layer's parts in transformers.
_ATTENTION = ("self_attn", "attn", "attention")
_OUTPUT = ("o_proj", "out_proj", "c_proj", "dense")
_DOWN = ("mlp.down_proj", "mlp.c_proj", "fc2", "mlp.dense_4h_to_h")
_INPUT_NORM = ("input_layernorm", "ln_1", "self_attn_layer_norm")
#: Projections of queries, keys and values one after the other in a row; by head, alternately.
_FUSED, _INTERLEAVED = ("c_attn", "qkv_proj"), "query_key_value"
_PART: Mapping[str, int] = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
_LISTS = ("layers", "h")


class Projection(NamedTuple):
    """Queries, keys or values, as `columns` of the output of the module at `path` below a layer."""

    path: str
    columns: torch.Tensor


@dataclass
class Run:
    """One forward pass. `rows` and `logits` have a graph if gradients were requested."""

    logits: torch.Tensor  # [batch, kept positions, vocabulary]
    raw: dict[Site, torch.Tensor] = field(default_factory=dict)  # as the model has them
    attended: dict[int, attention.Attended] = field(default_factory=dict)  # layers with `q`
    views: dict[Site, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)

    def rows(self, site: Site) -> torch.Tensor:
        """Return the rows of a site, `[batch, tokens, width]`, without a graph."""
        return self.views[site](self.raw[site].detach())

    def gradients(self, scalar: torch.Tensor) -> dict[Site, torch.Tensor]:
        """Return site → d scalar / d rows, `[batch, tokens, width]` in the model's dtype; frees the
        graph.
        """
        gradients = torch.autograd.grad(scalar, list(self.raw.values()), allow_unused=True)
        return {
            site: self.views[site](torch.zeros_like(raw) if gradient is None else gradient)
            for (site, raw), gradient in zip(self.raw.items(), gradients, strict=True)
        }


def load(
    folder: Path | str,
    dtype: torch.dtype,
    device: Any = "cpu",
    *,
    config: Any = None,
    model_class: Any = None,
    revision: str | None = None,
) -> Any:
    """Load the checkpoint in `folder` for gradients with respect to rows; its weights have none.

    `device`: a device, or one of accelerate's device maps. `config` and `model_class` replace those
    that the checkpoint names. Raises UnsupportedArchitectureError if weights are missing.
    """
    if config is None:
        config = transformers.AutoConfig.from_pretrained(folder)
    if model_class is None:
        named = (config.architectures or [""])[0]
        model_class = getattr(transformers, named, transformers.AutoModelForCausalLM)
    model, report = model_class.from_pretrained(
        folder,
        config=config,
        revision=revision or "main",
        dtype=dtype,
        device_map=None if device == "cpu" else device,
        attn_implementation=attention.NAME,
        output_loading_info=True,
    )
    missing = sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])})
    if missing:
        raise UnsupportedArchitectureError(
            f"transformers' {type(model).__name__} has weights that the checkpoint does not: "
            f"{missing[0]}"
        )
    return model.eval().requires_grad_(False)


def _part(module: nn.Module, paths: Sequence[str]) -> str | None:
    """Return the first of `paths` that exists below a module."""
    for path in paths:
        try:
            module.get_submodule(path)
        except AttributeError:
            continue
        return path
    return None


class Points:
    """The hook points of one loaded model, see `load`."""

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedArchitectureError, with the architecture's name and the reason."""
        config = model.config
        self.model, self.architecture = model, type(model).__name__
        adapter = describe(self.architecture, config)
        if not adapter.variant.known:
            raise UnsupportedArchitectureError(
                f"{self.architecture}: no gradients, because its layers are not in the table of "
                "architectures"
            )
        self.hidden_size, self.num_layers = adapter.hidden_size, adapter.num_layers
        decoder = model.get_decoder()
        self.layers = next(
            getattr(inner, name)
            for inner in (decoder, getattr(decoder, "decoder", None))
            for name in _LISTS
            if hasattr(inner, name)
        )
        taps = adapter.variant.taps
        self.taps: Taps = next((ours for theirs, ours in _UNFUSED if theirs == taps), taps)
        text = config.get_text_config()
        self._heads: int = text.num_attention_heads
        self._key_heads: int = getattr(text, "num_key_value_heads", None) or self._heads
        self.head_size: int = getattr(text, "head_dim", None) or self.hidden_size // self._heads
        layer = self.layers[0]
        block, down = _part(layer, _ATTENTION), _part(layer, _DOWN)
        output = _part(layer, [f"{block}.{name}" for name in _OUTPUT])
        assert block is not None
        assert output is not None
        self.attention_path, self.output_path = block, output
        #: The norm before attention; null: attention reads the stream.
        self.input_norm = _part(layer, _INPUT_NORM)
        self.projections = {name: self._projection(layer, name) for name in _PART}
        self.absent: dict[Hook, str] = dict(adapter.variant.absent)
        self.absent["router"] = "gradients do not pass through the choice of experts"
        self._inside: Taps = {"z": Tap(output, "input")}
        if down is None:
            self.absent["mlp_act"] = "the neurons of its experts are in one fused kernel"
        else:
            self._inside["mlp_act"] = Tap(down, "input")
            self._neurons: int = weight_of(layer.get_submodule(down)).shape[0]
        for name in ("q_proj", "k_proj"):
            self._inside[name] = Tap(self.projections[name].path, "output")
        present = {*self.taps, *self._inside, "q", "k", "v"}
        self.hooks = tuple(hook for hook in FORWARD if hook in present)

    @property
    def device(self) -> torch.device:
        """The device of the embeddings, where token ids belong."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def heads(self, hook: Hook) -> int:
        """Return the number of a row's heads; 1 for hooks without heads."""
        return {
            **dict.fromkeys(("q_proj", "q", "z"), self._heads),
            **dict.fromkeys(("k_proj", "k", "v"), self._key_heads),
        }.get(hook, 1)

    def width(self, hook: Hook) -> int:
        """Return the number of elements of a row."""
        if hook in HOOKS:
            return self.hidden_size
        return self._neurons if hook == "mlp_act" else self.heads(hook) * self.head_size

    def require(self, hooks: Collection[Hook]) -> None:
        """Raises UnsupportedArchitectureError for a hook point that the model lacks."""
        for hook in hooks:
            if hook not in self.hooks:
                why = self.absent.get(hook, "it does not exist")
                raise UnsupportedArchitectureError(
                    f"{self.architecture} has no gradients at {hook}: {why}; it has "
                    f"{', '.join(self.hooks)}"
                )

    def _projection(self, layer: nn.Module, name: str) -> Projection:
        size, keys, part = (
            self._heads * self.head_size,
            self._key_heads * self.head_size,
            _PART[name],
        )
        fused = _part(layer, [f"{self.attention_path}.{path}" for path in _FUSED])
        if fused is not None:
            bounds = (0, size, size + keys, size + 2 * keys)
            return Projection(fused, torch.arange(bounds[part], bounds[part + 1]))
        mixed = _part(layer, [f"{self.attention_path}.{_INTERLEAVED}"])
        if mixed is not None:
            columns = torch.arange(3 * size).view(self._heads, 3, self.head_size)
            return Projection(mixed, columns[:, part].flatten())
        path = f"{self.attention_path}.{name}"
        layer.get_submodule(path)
        return Projection(path, torch.arange(size if part == 0 else keys))

    def batch(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return token ids `[batch, longest]`, padded at the end: no earlier token sees that."""
        longest = max(map(len, prompts))
        rows = [[*tokens, *[tokens[-1]] * (longest - len(tokens))] for tokens in prompts]
        return torch.tensor(rows, device=self.device)

    def run(
        self,
        tokens: torch.Tensor,
        sites: Collection[Site] = (),
        *,
        keep: Sequence[int] = (),
        edit: Edit | None = None,
        grad: bool = False,
    ) -> Run:
        """Run the model on `tokens`, `[batch, tokens]`.

        `sites`: whose rows are kept, and passed to `edit`; `keep`: positions whose logits are
        computed, by default the last; `grad`: rows and logits have a graph, from the first site on.
        Raises UnsupportedArchitectureError for a hook point that the model lacks.
        """
        self.require({hook for hook, _ in sites})
        run = Run(torch.empty(0))
        kept = torch.tensor(list(keep) or [tokens.shape[1] - 1], device=tokens.device)
        with torch.set_grad_enabled(grad), self._hooked(run, sites, tokens.shape, edit, grad):
            run.logits = self.model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
        return run

    @contextmanager
    def _hooked(
        self, run: Run, sites: Collection[Site], shape: torch.Size, edit: Edit | None, grad: bool
    ) -> Iterator[None]:
        def visit(site: Site, raw: torch.Tensor) -> torch.Tensor:
            view = _View(self, site[0], shape)
            if edit is not None:
                rows = view(raw)
                edited = edit(site, rows)
                if edited is not rows:
                    raw = view.inverse(edited, raw)
            if grad and not raw.requires_grad:
                raw.requires_grad_()  # a leaf, because nothing before it needs gradients
            run.raw[site], run.views[site] = raw, view
            return raw

        by_layer: dict[int, list[Hook]] = {}
        for hook in FORWARD:
            for layer in sorted(layer for named, layer in sites if named == hook):
                by_layer.setdefault(layer, []).append(hook)
        with ExitStack() as stack:
            for number, hooks in by_layer.items():
                layer = self.layers[number]
                watched = [hook for hook in hooks if hook in ("q", "k", "v")]
                if watched:
                    module = layer.get_submodule(self.attention_path)
                    attention.WATCHERS[module] = _watcher(run, number, watched, visit)
                    stack.callback(attention.WATCHERS.pop, module)
                for hook in hooks:
                    if hook in watched:
                        continue
                    tap = {**self.taps, **self._inside}[hook]
                    handle = _register(layer.get_submodule(tap.path), tap, (hook, number), visit)
                    stack.callback(handle.remove)
            yield


class _View:
    """The rows of a site in the tensor that the model has, and the reverse."""

    def __init__(self, points: Points, hook: Hook, shape: torch.Size) -> None:
        self._hook, self._shape = hook, (*shape, points.width(hook))
        columns = points.projections[hook].columns if hook in ("q_proj", "k_proj") else None
        self._columns = columns

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        if self._hook in ("q", "k", "v"):
            raw = raw.transpose(1, 2)
        elif self._columns is not None and len(self._columns) < raw.shape[-1]:
            raw = raw[..., self._columns.to(raw.device)]
        return raw.reshape(self._shape)

    def inverse(self, rows: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        """Return `raw` with these rows."""
        if self._hook in ("q", "k", "v"):
            batch, heads, tokens, width = raw.shape
            return rows.view(batch, tokens, heads, width).transpose(1, 2)
        if self._columns is not None and len(self._columns) < raw.shape[-1]:
            return raw.index_copy(
                -1, self._columns.to(raw.device), rows.reshape(*raw.shape[:-1], -1)
            )
        return rows.reshape(raw.shape)


_Visit = Callable[[Site, torch.Tensor], torch.Tensor]


def _watcher(run: Run, layer: int, hooks: Sequence[Hook], visit: _Visit) -> attention.Watcher:
    def watch(name: str, tensor: torch.Tensor, attended: attention.Attended) -> torch.Tensor:
        run.attended[layer] = attended
        return next((visit((hook, layer), tensor) for hook in hooks if hook == name), tensor)

    return watch


def _register(module: nn.Module, tap: Tap, site: Site, visit: _Visit) -> Any:
    """Register a hook that passes a site's tensor to `visit`."""

    def entering(_: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        given = args[0] if args else named["hidden_states"]
        raw = visit(site, given)
        if raw is given:
            return None
        if site[0] == "post_attn":
            # The layer keeps this tensor as its residual, which a returned copy would not reach.
            given.copy_(raw)
            return None
        return ((raw, *args[1:]), named) if args else (args, {**named, "hidden_states": raw})

    def leaving(_: nn.Module, args: Any, output: Any) -> Any:
        given = output[0] if isinstance(output, tuple) else output
        raw = visit(site, given)
        if raw is given:
            return None
        return (raw, *output[1:]) if isinstance(output, tuple) else raw

    if tap.side == "input":
        return module.register_forward_pre_hook(entering, with_kwargs=True)
    return module.register_forward_hook(leaving)


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the weight of a linear module or a Conv1D, `[inputs, outputs]`."""
    weight: torch.Tensor = module.weight
    return weight.T if isinstance(module, nn.Linear) else weight
