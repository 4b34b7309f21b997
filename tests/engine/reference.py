"""What does transformers say the rows at each hook point are, and what becomes of an edit there?

The same checkpoint, run token by token position in one plain forward, with forward hooks on
transformers' own modules. It shares nothing with our table of architectures: where a hook point is
in transformers' layer is written down here again.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

HOOKS = ("pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block")


class Edit(NamedTuple):
    """At `hook` of `layer`, in the rows of `positions` (None: all), what `FORMULAS` says of
    `op`.
    """

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
        return self._replace(
            **{
                name: torch.tensor(np.asarray(values)).to(dtype).float().numpy()
                for name, values in held.items()
            }
        )


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
    """A module below transformers' layer (`""`: the layer) and the side of it where the tensor
    is.
    """

    path: str
    side: str


Points = Mapping[str, Point]
#: Names of a layer's children in transformers, by what they do.
ATTENTION = (
    "self_attn",
    "self_attention",
    "attention",
    "attn",
    "linear_attn",
    "mamba",
    "mixer",
    "conv",
    "temporal_block",
    "self_att",
    "multi_head_attention",
    "norm_attn_norm.attn",
)
MLP = (
    "mlp",
    "feed_forward",
    "ffn",
    "block_sparse_moe",
    "moe",
    "shared_mlp",
    "mlp_block",
    "ff",
    "fc2",
)
#: Of those that are a part of the layer itself: what reads the norm.
LAST_OF_MLP = ("fc2",)
#: Names of the list of decoder layers, below the decoder.
LISTS = ("layers", "h", "blocks")
ENCODERS = ("vision", "visual", "audio", "encoder.")
#: Fields of the config that say how many experts there are.
ROUTED = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: What a branch is multiplied with before it is added to the stream, by the config.
SCALES: tuple[Callable[[Any], float | None], ...] = (
    lambda config: getattr(config, "residual_multiplier", None),
    lambda config: (
        config.scale_depth / config.num_hidden_layers**0.5
        if hasattr(config, "scale_depth")
        else None
    ),
)
#: Sums of the same fp32 numbers in another order; what is no sum of them is off by more than a
#: hundredth.
LAW = 1e-4


class UnknownLayerError(Exception):
    """transformers' layer is of no shape that is known here: it says nothing about the rows."""


class _Call(NamedTuple):
    """One child's part in a layer's forward."""

    path: str
    given: torch.Tensor
    gives: torch.Tensor


def _points(
    calls: list[_Call], before: torch.Tensor, after: torch.Tensor, scale: float
) -> dict[str, Point]:
    """Where the hook points are, found by what the layer computed: which sums are read, by whom,
    and what they are sums of.

    `before`, `after`: the stream that enters and that leaves the layer; `scale`: what branches are
    multiplied with. Raises UnknownLayerError.
    """
    found = {"pre_attn": Point("", "input"), "post_block": Point("", "output")}
    attention = [place for place, call in enumerate(calls) if call.path in ATTENTION]
    mlp = [place for place, call in enumerate(calls) if call.path in MLP]
    branch = _normed(calls, attention[0]) if len(attention) == 1 else None
    if not mlp:
        return found | _mixer_only(branch, before, after, scale)
    first = calls[mlp[0]]
    last = _normed(calls, mlp[0])
    middle, reader = _middle(calls, mlp[0], before, after, scale)
    if middle is None:
        # A parallel residual has no sum of stream and attention alone.
        if branch is None or not _close(after, before + scale * (branch.gives + last.gives)):
            raise UnknownLayerError("the layer's output is not its input plus its branches")
        found |= {
            "attn_out": Point(branch.path, "output"),
            "mlp_in": Point(first.path, "input"),
            "mlp_out": Point(last.path, "output"),
        }
        return found
    assert reader is not None
    if attention and not _close(middle, before):
        found["post_attn"] = Point(reader.path, "input")
    if branch is not None and _close(middle, before + scale * branch.gives):
        found["attn_out"] = Point(branch.path, "output")
    end = middle + scale * last.gives
    if len(mlp) == 1 and (
        _proportional(after, end) or any(_close(call.given, end) for call in calls)
    ):
        found["mlp_out"] = Point(last.path, "output")
    elif len(mlp) == 1 and not _close(after, last.gives):
        raise UnknownLayerError("the layer's output is not the stream plus the MLP's output")
    if reader is not first:
        found["mlp_in"] = (
            Point(reader.path, "output")
            if first.path in LAST_OF_MLP
            else Point(first.path, "input")
        )
    return found


def _mixer_only(
    branch: _Call | None, before: torch.Tensor, after: torch.Tensor, scale: float
) -> dict[str, Point]:
    """Of a layer that is one branch."""
    if branch is None or not _close(after, before + scale * branch.gives):
        raise UnknownLayerError(
            "the layer has no MLP, and its output is not its input plus one mixer"
        )
    return {"attn_out": Point(branch.path, "output")}


def _middle(
    calls: list[_Call], mlp: int, before: torch.Tensor, after: torch.Tensor, scale: float
) -> tuple[torch.Tensor | None, _Call | None]:
    """The stream before the MLP's branch, and who reads it: the MLP, or the norm before it."""
    sums = [call.given for call in calls] + [after]
    for call in calls[: mlp + 1][::-1]:
        end = (
            call.given + scale * _normed(calls, mlp).gives
            if call.given.shape == before.shape
            else None
        )
        shared = len([1 for other in calls if other.path in MLP]) > 1 and "norm" in call.path
        if call is not calls[mlp] and _close(
            after, calls[mlp].gives
        ):  # the branches are given with the stream
            return call.given, call
        if end is not None and (
            shared or _proportional(after, end) or any(_close(each, end) for each in sums)
        ):
            return call.given, call
    return None, None


def _normed(order: list[_Call], place: int) -> _Call:
    """The norm of what the branch gives, where it has one, else the branch."""
    for call in order[place + 1 :]:
        if "norm" in call.path and _same(call.given, order[place].gives):
            return call
    return order[place]


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and float((left - right).norm() / right.norm()) < LAW


def _proportional(left: torch.Tensor, right: torch.Tensor) -> bool:
    """A layer may multiply what it gives with a number."""
    return left.shape == right.shape and _close(
        left, right * ((left * right).sum() / (right * right).sum())
    )


class Reference:
    """transformers on a checkpoint, in `dtype`.

    Raises UnknownLayerError where its layers are of no shape known here.
    """

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32):
        self._model = load(path, dtype)
        text = self._model.config.get_text_config()
        self._layers = _layer_list(self._model, text.num_hidden_layers)
        scale = next((found for of in SCALES if (found := of(text)) is not None), 1.0)
        if dtype == torch.float32:
            self._points = self._find(scale)
        else:  # rounding hides the sums
            self._points = Reference(path)._points
        self.hooks = tuple(hook for hook in HOOKS if all(hook in points for points in self._points))
        #: Experts are chosen per token: where two are almost equally good, rounding decides.
        self.has_router = any(getattr(text, name, None) for name in ROUTED)

    def _find(self, scale: float) -> list[dict[str, Point]]:
        """Of each layer: hook → where it is."""
        calls: list[list[_Call]] = [[] for _ in self._layers]
        ends: list[tuple[torch.Tensor, torch.Tensor]] = []
        handles = []
        for number, layer in enumerate(self._layers):
            for path, child in layer.named_modules():
                if path and (path.count(".") == 0 or path in ATTENTION):
                    handles.append(
                        child.register_forward_hook(
                            _recorder(path, calls[number]), with_kwargs=True
                        )
                    )
            handles.append(layer.register_forward_hook(_ends(ends), with_kwargs=True))
        self._plain(torch.arange(20, 44), handles)
        if len(ends) != len(self._layers):
            raise UnknownLayerError(f"{len(ends)} layers run, of {len(self._layers)}")
        return [_points(made, *end, scale) for made, end in zip(calls, ends, strict=True)]

    def _plain(
        self, token_ids: torch.Tensor, handles: list[Any], images: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            with torch.no_grad():
                return self._model(input_ids=token_ids[None], use_cache=False, **(images or {}))
        finally:
            for handle in handles:
                handle.remove()

    def rows(
        self,
        token_ids: list[int],
        edits: Iterable[Edit] = (),
        at: str = "before",
        images: Mapping[str, Any] | None = None,
    ) -> dict[tuple[str, int], np.ndarray]:
        """(hook, layer) → rows `[tokens, hidden]` float32, `before` or `after` the edits of that
        place.

        `images`: what transformers' processor makes of a prompt's images, beside the token ids.

        `self.logits` are those of the run, `[tokens, vocabulary]` float32.
        """
        found: dict[tuple[str, int], np.ndarray] = {}
        edits = [Edit(*edit) for edit in edits]
        handles = []
        for number, layer in enumerate(self._layers):
            for hook in (hook for hook in HOOKS if hook in self._points[number]):
                point = self._points[number][hook]
                mine = [edit for edit in edits if (edit.hook, edit.layer) == (hook, number)]
                look = _look(found, (hook, number), mine, at)
                module = layer.get_submodule(point.path)
                # Hooks of one module run in the order in which they are registered: that of
                # `HOOKS`.
                if point.side == "input":
                    handles.append(
                        module.register_forward_pre_hook(_on_input(look), with_kwargs=True)
                    )
                else:
                    handles.append(module.register_forward_hook(_on_output(look)))
        self.logits = (
            self._plain(torch.tensor(token_ids), handles, images).logits[0].float().numpy()
        )
        return found

    def post_block(
        self, token_ids: list[int], edits: Iterable[Edit | tuple[Any, ...]] = ()
    ) -> dict[int, np.ndarray]:
        """Layer → stream leaving the block `[tokens, hidden]` float32, before this layer's own
        edits.
        """
        rows = self.rows(token_ids, [Edit(*edit) for edit in edits])
        return {layer: values for (hook, layer), values in rows.items() if hook == "post_block"}

    def hidden_states(self, token_ids: list[int]) -> list[np.ndarray]:
        """transformers' own `hidden_states`: what enters each layer, and what leaves the last after
        the final norm.
        """
        with torch.no_grad():
            states = self._model(
                input_ids=torch.tensor([token_ids]), output_hidden_states=True, use_cache=False
            ).hidden_states
        return [state[0].float().numpy() for state in states]


def load(path: Path, dtype: torch.dtype) -> Any:
    """transformers' model of the class that the checkpoint names."""
    config = AutoConfig.from_pretrained(path)
    kind = getattr(transformers, config.architectures[0], AutoModelForCausalLM)
    return kind.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def _layer_list(model: torch.nn.Module, number: int) -> torch.nn.ModuleList:
    """The decoder layers: the longest path that ends in one of `LISTS`, outside any encoder."""
    found = [
        module
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and path.rpartition(".")[2] in LISTS
        and len(module) == number
        and not any(word in path for word in ENCODERS)
    ]
    if len(found) != 1:
        raise UnknownLayerError(f"{len(found)} lists of {number} layers")
    return found[0]


def _first(values: Any, named: Mapping[str, Any]) -> torch.Tensor | None:
    """What a module was given, or gives."""
    if isinstance(values, torch.Tensor):
        return values
    first = values[0] if values else named.get("hidden_states")
    return first if isinstance(first, torch.Tensor) else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1]).clone()


def _recorder(path: str, into: list[_Call]) -> Callable[..., None]:
    def record(_module: Any, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        given = _first(inputs, named)
        gives = _first(output, {})
        if given is not None and gives is not None:
            into.append(_Call(path, _flat(given), _flat(gives)))

    return record


def _ends(into: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., None]:
    def record(_module: Any, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        given = _first(inputs, named)
        gives = _first(output, {})
        assert given is not None
        assert gives is not None
        into.append((_flat(given), _flat(gives)))

    return record


def _look(
    found: dict[tuple[str, int], np.ndarray], place: tuple[str, int], edits: list[Edit], at: str
) -> Callable[[torch.Tensor], None]:
    """Reads the rows and edits them in place: the layer keeps the same tensor as its residual."""

    def look(tensor: torch.Tensor) -> None:
        rows = tensor.reshape(-1, tensor.shape[-1])
        assert rows.data_ptr() == tensor.data_ptr(), "a copy would not reach the model"
        if at == "before":
            found[place] = rows.float().numpy().copy()
        for edit in edits:
            where: Any = slice(None) if edit.positions is None else edit.positions
            rows[where] = FORMULAS[edit.op](rows[where].float(), edit.rounded(rows.dtype)).to(
                rows.dtype
            )
        if at == "after":
            found[place] = rows.float().numpy().copy()

    return look


def _on_input(look: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    return lambda _module, inputs, named: look(inputs[0] if inputs else named["hidden_states"])


def _on_output(look: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    return lambda _module, _inputs, output: look(output[0] if isinstance(output, tuple) else output)
