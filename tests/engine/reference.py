"""What does transformers say the rows at each hook point are, and what becomes of an edit there?

The same checkpoint, run token by token position in one plain forward, with forward hooks on transformers' own modules. It
shares nothing with our table of architectures: where a hook point is in transformers' layer is written down here again.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HOOKS = ("pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block")


class Edit(NamedTuple):
    """At `hook` of `layer`, in the rows of `positions` (None: all), what `FORMULAS` says of `op`."""

    layer: int
    vector: np.ndarray | None = None  # `[hidden]`
    positions: list[int] | None = None
    hook: str = "post_block"
    op: str = "add"
    alpha: float = 1.0
    scale: float = 1.0
    norm_match: bool = False
    strength: float = 1.0
    low: float | None = None
    high: float | None = None
    rotation: np.ndarray | None = None  # `[rank, hidden]`
    weight: np.ndarray | None = None
    bias: np.ndarray | None = None  # `[rank]`
    mask: np.ndarray | None = None  # `[hidden]`, of `replace`: true where it writes

    def rounded(self, dtype: torch.dtype) -> "Edit":
        """With its tensors as a model of this dtype holds them."""
        held = {name: values for name in TENSORS if (values := getattr(self, name)) is not None}
        return self._replace(**{name: torch.tensor(np.asarray(values)).to(dtype).float().numpy() for name, values in held.items()})


TENSORS = ("vector", "rotation", "weight")


def _add(rows: torch.Tensor, edit: Edit) -> torch.Tensor:
    if edit.norm_match:
        return rows + edit.scale * rows.norm(dim=1)[:, None] * _direction(edit)
    return rows + edit.scale * _float(edit.vector)


def _direction(edit: Edit) -> torch.Tensor:
    return _float(edit.vector) / _float(edit.vector).norm()


def _component(rows: torch.Tensor, edit: Edit) -> tuple[torch.Tensor, torch.Tensor]:
    """Along the edit's vector: `[tokens, 1]`, and the vector with length 1."""
    return (rows @ _direction(edit))[:, None], _direction(edit)


def _ablate(rows: torch.Tensor, edit: Edit) -> torch.Tensor:
    component, direction = _component(rows, edit)
    return rows - edit.strength * component * direction


def _clamp(rows: torch.Tensor, edit: Edit) -> torch.Tensor:
    component, direction = _component(rows, edit)
    return rows + edit.strength * (component.clamp(edit.low, edit.high) - component) * direction


def _lowrank(rows: torch.Tensor, edit: Edit) -> torch.Tensor:
    rotation = _float(edit.rotation)
    wanted = rows @ _float(edit.weight).T + _float(edit.bias)
    return rows + edit.strength * (wanted - rows @ rotation.T) @ rotation


def _replace(rows: torch.Tensor, edit: Edit) -> torch.Tensor:
    mixed = (1 - edit.alpha) * rows + edit.alpha * edit.scale * _float(edit.vector)
    return mixed if edit.mask is None else torch.where(torch.from_numpy(edit.mask), mixed, rows)


#: Rows `[tokens, hidden]` float32 → rows, written down from the papers and not from our code.
FORMULAS: dict[str, Callable[[torch.Tensor, Edit], torch.Tensor]] = {
    "add": _add,
    "replace": _replace,
    "ablate": _ablate,
    "clamp": _clamp,
    "lowrank": _lowrank,
}


def _float(values: np.ndarray | None) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


class Point(NamedTuple):
    """A module below transformers' layer (`""`: the layer) and the side of it where the tensor is."""

    path: str
    side: str


class Layout(NamedTuple):
    layers: str
    points: Mapping[str, Point]


def _pre_norm(attention: str = "self_attn", norm: str = "post_attention_layernorm", mlp: str = "mlp") -> dict[str, Point]:
    return {
        "pre_attn": Point("", "input"),
        "attn_out": Point(attention, "output"),
        "post_attn": Point(norm, "input"),
        "mlp_in": Point(norm, "output"),
        "mlp_out": Point(mlp, "output"),
        "post_block": Point("", "output"),
    }


_SANDWICH = _pre_norm("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_NEOX = _pre_norm("attention")


def _layout(config: Any) -> Layout:
    """Where transformers has the hook points of this model."""
    text = config.get_text_config()
    if text is not config:
        below = "model.text_model.layers" if config.model_type in ("idefics3", "smolvlm") else "model.language_model.layers"
        return _layout(text)._replace(layers=below)
    match config.model_type:
        case "gpt2":
            return Layout("transformer.h", _pre_norm("attn", "ln_2"))
        case "opt":
            return Layout("model.decoder.layers", _pre_norm("self_attn", "final_layer_norm", "fc2"))
        case "gemma2" | "gemma3_text":
            return Layout("model.layers", _SANDWICH)
        case "gpt_neox" if config.use_parallel_residual:
            return Layout("gpt_neox.layers", {hook: point for hook, point in _NEOX.items() if hook != "post_attn"})
        case "gpt_neox":
            return Layout("gpt_neox.layers", _NEOX)
        case "olmo2":
            normed = _pre_norm("post_attention_layernorm", "mlp", "post_feedforward_layernorm")
            return Layout("model.layers", {hook: point for hook, point in normed.items() if hook != "mlp_in"})
        case _:
            return Layout("model.layers", _pre_norm())


class Reference:
    """transformers on a checkpoint, in `dtype`."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32):
        takes_images = hasattr(AutoConfig.from_pretrained(path), "vision_config")
        kind: Any = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
        self._model = kind.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        layout = _layout(self._model.config)
        self._points = layout.points
        self._layers = self._model.get_submodule(layout.layers)
        self.hooks = tuple(hook for hook in HOOKS if hook in layout.points)
        #: Experts are chosen per token: where two are almost equally good, rounding decides.
        self.has_router = any(getattr(self._model.config, name, None) for name in ("num_experts", "num_local_experts"))

    def rows(
        self, token_ids: list[int], edits: Iterable[Edit] = (), at: str = "before", images: Mapping[str, Any] | None = None
    ) -> dict[tuple[str, int], np.ndarray]:
        """(hook, layer) → rows `[tokens, hidden]` float32, `before` or `after` the edits of that place.

        `images`: what transformers' processor makes of a prompt's images, beside the token ids.

        `self.logits` are those of the run, `[tokens, vocabulary]` float32.
        """
        found: dict[tuple[str, int], np.ndarray] = {}
        edits = [Edit(*edit) for edit in edits]
        handles = []
        for number, layer in enumerate(self._layers):
            for hook in self.hooks:
                point = self._points[hook]
                mine = [edit for edit in edits if (edit.hook, edit.layer) == (hook, number)]
                look = _look(found, (hook, number), mine, at)
                module = layer.get_submodule(point.path)
                # Hooks of one module run in the order in which they are registered: that of `HOOKS`.
                if point.side == "input":
                    handles.append(module.register_forward_pre_hook(_on_input(look), with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(_on_output(look)))
        try:
            with torch.no_grad():
                output = self._model(input_ids=torch.tensor([token_ids]), use_cache=False, **(images or {}))
                self.logits = output.logits[0].float().numpy()
        finally:
            for handle in handles:
                handle.remove()
        return found

    def post_block(self, token_ids: list[int], edits: Iterable[Edit | tuple[Any, ...]] = ()) -> dict[int, np.ndarray]:
        """Layer → stream leaving the block `[tokens, hidden]` float32, before this layer's own edits."""
        rows = self.rows(token_ids, [Edit(*edit) for edit in edits])
        return {layer: values for (hook, layer), values in rows.items() if hook == "post_block"}

    def hidden_states(self, token_ids: list[int]) -> list[np.ndarray]:
        """transformers' own `hidden_states`: what enters each layer, and what leaves the last after the final norm."""
        with torch.no_grad():
            states = self._model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False).hidden_states
        return [state[0].float().numpy() for state in states]


def _look(found: dict[tuple[str, int], np.ndarray], place: tuple[str, int], edits: list[Edit], at: str) -> Callable[[torch.Tensor], None]:
    """Reads the rows and edits them in place: the layer keeps the same tensor as its residual."""

    def look(tensor: torch.Tensor) -> None:
        rows = tensor.reshape(-1, tensor.shape[-1])
        assert rows.data_ptr() == tensor.data_ptr(), "a copy would not reach the model"
        if at == "before":
            found[place] = rows.float().numpy().copy()
        for edit in edits:
            where: Any = slice(None) if edit.positions is None else edit.positions
            rows[where] = FORMULAS[edit.op](rows[where].float(), edit.rounded(rows.dtype)).to(rows.dtype)
        if at == "after":
            found[place] = rows.float().numpy().copy()

    return look


def _on_input(look: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    return lambda _module, inputs, named: look(inputs[0] if inputs else named["hidden_states"])


def _on_output(look: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    return lambda _module, _inputs, output: look(output[0] if isinstance(output, tuple) else output)
