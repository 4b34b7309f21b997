"""Hook points inside attention and MLP: finds them in the loaded layers, by the classes of modules
rather than by names where possible, and installs them.

vLLM fuses the projections of queries, keys and values, and shares one rotary embedding among
layers. Therefore `q`, `k` and `v` are inputs of a layer's attention, `q_proj` and `k_proj` are
columns of the fused projection's output, `z` and `mlp_act` are inputs of the output projection and
the down projection, and `router` is the output of the experts' gate.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from ....schemas.model.banks import BANK, BANKS, RowShape
from ....schemas.prompts.selectors import INSIDE, Hook
from ..files.finished_rows import BankColumns
from ..hooks.architectures import Adapter
from ..hooks.sites import LaunchVisit, RankSite, Sizes, buffers_of, held_layers, visit_of
from ..rows.banks import BankPart

#: Where a hook's rows are: the index of an argument of the module's forward, or "output": columns
#: of what it returns.
InsideSide = int | Literal["output"]
_ATTENTION = re.compile(r"attn|attention")
#: Names of projections, where their classes do not distinguish them.
_OUTPUT = re.compile(r"^(o_proj|out_proj|c_proj|dense|wo|o)$")
_DOWN = re.compile(r"^(down_proj|fc2|c_proj|dense_4h_to_h|w2|fc_out)$")


@dataclass(frozen=True)
class Inner:
    """Location of one hook of one layer."""

    module: nn.Module
    side: InsideSide
    columns: BankColumns
    first: int = 0  # the tensor's column at which the rows begin


class MissingHookError(ValueError):
    """A layer does not have a hook; the message is the reason."""


@dataclass(frozen=True)
class Group:
    """This rank among the ranks of its stage, and the model's hidden size."""

    rank: int
    size: int
    hidden_size: int


class _Linear(NamedTuple):
    """A linear module of a layer."""

    name: str  # in the module that has it
    module: nn.Module  # as the layer calls it: LoRA's wrapper, if it has one
    base: Any  # without that wrapper


class _Layer:
    """One loaded layer."""

    def __init__(self, layer: nn.Module, group: Group) -> None:
        self._layer = layer
        self._group = group
        self._parts = dict(layer.named_modules())
        self._latent: Any = next(
            (part for part in self._parts.values() if isinstance(part, MLAAttention)), None
        )
        self._attention = {
            path: part for path, part in self._parts.items() if isinstance(part, Attention)
        }

    # --- Hooks

    def q(self) -> Inner:
        return Inner(self._only_attention(), 0, self._query(self._only_attention().head_size))

    def k(self) -> Inner:
        return Inner(self._own_cache(), 1, self._keys(self._only_attention().head_size))

    def v(self) -> Inner:
        return Inner(self._own_cache(), 2, self._keys(self._only_attention().head_size_v))

    def q_proj(self) -> Inner:
        columns = self._query(self._only_attention().head_size)
        return Inner(self._projection("q").module, "output", columns)

    def k_proj(self) -> Inner:
        linear = self._projection("k")
        width = self._only_attention().head_size
        first = self._query(width).size if isinstance(linear.base, QKVParallelLinear) else 0
        return Inner(linear.module, "output", self._keys(width), first)

    def z(self) -> Inner:
        columns = self._query(
            self._only_attention().head_size_v if self._latent is None else self._latent.v_head_dim
        )
        fitting = [
            each
            for each in self._linears(attention=True)
            if each.base.output_size == self._group.hidden_size
            and each.base.input_size == columns.row.size
        ]
        linear = _only(fitting, _OUTPUT, "output projection")
        self._check_split(linear)
        return Inner(linear.module, 0, columns)

    def mlp_act(self) -> Inner:
        if self._experts():
            raise MissingHookError("its experts are fused")
        linears = [
            each
            for each in self._linears(attention=False)
            if each.base.output_size == self._group.hidden_size
        ]
        if len(linears) > 1:  # a square matrix among others is no down projection
            linears = [each for each in linears if each.base.input_size != each.base.output_size]
        linear = _only(linears, _DOWN, "down projection")
        self._check_split(linear)
        if (
            fused_act_quant._FUSED_ACT_QUANT
            and fused_act_quant.get_input_quant_key(linear.base) is not None
        ):
            raise MissingHookError(
                "one kernel computes and quantises what enters its down projection"
            )
        width = linear.base.input_size
        size = width // (self._group.size if isinstance(linear.base, RowParallelLinear) else 1)
        first = self._group.rank * size if size < width else 0
        return Inner(
            linear.module,
            0,
            BankColumns(
                RowShape(heads=1, width=width),
                first,
                first + size,
                size < width or self._group.rank == 0,
            ),
        )

    def router(self) -> Inner:
        if not (experts := self._experts()):
            raise MissingHookError("it has no experts")
        gates = [
            each
            for each in self._linears(attention=False)
            if isinstance(each.base, ReplicatedLinear) and each.base.output_size in experts
        ]
        if len(gates) != 1:
            raise MissingHookError(f"{len(gates)} modules could be its router")
        gate = gates[0].base
        if (dtype := getattr(gate, "out_dtype", None)) not in (None, gate.params_dtype):
            raise MissingHookError(f"its router returns {dtype}, not the model's dtype")
        width = gate.output_size
        return Inner(
            gates[0].module,
            "output",
            BankColumns(RowShape(heads=1, width=width), 0, width, self._group.rank == 0),
        )

    # --- Modules and columns

    def _only_attention(self) -> Any:
        if self._latent is not None:
            raise MissingHookError("its keys and values are latent (MLA)")
        if len(self._attention) != 1:
            raise MissingHookError(
                "it has no attention"
                if not self._attention
                else f"it has {len(self._attention)} attentions"
            )
        return next(iter(self._attention.values()))

    def _own_cache(self) -> Any:
        attention = self._only_attention()
        if getattr(attention, "kv_sharing_target_layer_name", None) is not None:
            raise MissingHookError("it uses the keys and values of another layer")
        return attention

    def _query(self, width: int) -> BankColumns:
        heads = (self._only_attention() if self._latent is None else self._latent).num_heads
        group = self._group
        return BankColumns(
            RowShape(heads=heads * group.size, width=width),
            group.rank * heads * width,
            (group.rank + 1) * heads * width,
        )

    def _keys(self, width: int) -> BankColumns:
        heads = self._only_attention().num_kv_heads
        group = self._group
        fused = self._fused()
        total = fused[0].base.total_num_kv_heads if fused else heads * group.size
        replicas = max(1, heads * group.size // total)
        first = group.rank // replicas * heads * width
        return BankColumns(
            RowShape(heads=total, width=width),
            first,
            first + heads * width,
            group.rank % replicas == 0,
        )

    def _fused(self) -> list[_Linear]:
        """Return the projections of queries, keys and values together."""
        linears = self._linears(attention=True)
        return [each for each in linears if isinstance(each.base, QKVParallelLinear)]

    def _projection(self, letter: str) -> _Linear:
        attention = self._only_attention()
        fused = self._fused()
        if len(fused) == 1:
            size = attention.num_heads * attention.head_size + attention.num_kv_heads * (
                attention.head_size + attention.head_size_v
            )
            if sum(fused[0].base.output_partition_sizes) != size:
                raise MissingHookError("its projection gives more than queries, keys and values")
            return fused[0]
        heads = attention.num_heads if letter == "q" else attention.num_kv_heads
        width = heads * attention.head_size * self._group.size
        named = [
            each
            for each in self._linears(attention=True)
            if each.name in (f"{letter}_proj", letter, f"w{letter}")
        ]
        if len(named) != 1 or named[0].base.output_size != width:
            raise MissingHookError("no separate projections compute its queries and keys")
        return named[0]

    def _linears(self, *, attention: bool) -> list[_Linear]:
        """Return the linear modules in the layer's attention, or outside of it."""
        within = {path.partition(".")[0] for path in self._attention if "." in path}
        within |= {
            name
            for name, _ in self._layer.named_children()
            if not within and _ATTENTION.search(name)
        }
        found = list[_Linear]()
        for path, part in self._parts.items():
            # LoRA wraps a linear module, and the layer calls the wrapper
            base = getattr(part, "base_layer", part)
            here = (path.partition(".")[0] in within) == attention
            if isinstance(base, LinearBase) and here and not path.endswith(".base_layer"):
                found.append(_Linear(path.rpartition(".")[2], part, base))
        return found

    def _experts(self) -> set[int]:
        """Return the number of experts of each mixture-of-experts module in the layer."""
        configs = (getattr(part, "moe_config", None) for part in self._parts.values())
        numbers = {config.num_logical_experts for config in configs if config is not None}
        return {number for number in numbers if isinstance(number, int)}

    def _check_split(self, linear: _Linear) -> None:
        """Raises MissingHookError unless each rank calls the module with its part of the input."""
        if self._group.size > 1 and not (
            isinstance(linear.base, RowParallelLinear) and linear.base.input_is_parallel
        ):
            raise MissingHookError("the ranks do not split the module's input before the hook")


def _only(linears: Sequence[_Linear], names: re.Pattern[str], role: str) -> _Linear:
    """Return the only row-parallel module, else the only one with a name in `names`.

    Raises MissingHookError.
    """
    rows = [each for each in linears if isinstance(each.base, RowParallelLinear)]
    named = [each for each in linears if names.search(each.name)]
    for candidates in (rows, named):
        if len(candidates) == 1:
            return candidates[0]
    raise MissingHookError(f"{len(rows) or len(named)} modules could be its {role}")


def find(
    layers: Sequence[tuple[int, nn.Module]], hooks: Sequence[Hook], group: Group
) -> tuple[dict[Hook, list[Inner]], dict[str, str]]:
    """Return hook → its location in each of `layers`, and hook → why it does not exist.

    A hook must be in every layer, with rows of one shape; all rows of a bank must have one shape.
    """
    by_hook: dict[Hook, list[Inner]] = {}
    absent: dict[str, str] = {}
    shapes: dict[str, tuple[Hook, BankColumns]] = {}
    # `z` comes first and sets the shape of its bank: where values and keys differ in width, as in
    # latent attention, `z` is the hook that is served.
    for hook in sorted((hook for hook in INSIDE if hook in hooks), key=lambda hook: hook != "z"):
        inners: list[Inner] = []
        try:
            for number, layer in layers:
                try:
                    inners.append(getattr(_Layer(layer, group), hook)())
                except MissingHookError as error:
                    raise MissingHookError(f"layer {number}: {error}") from error
                if inners[-1].columns != inners[0].columns:
                    raise MissingHookError(
                        f"layer {number} has rows of another width than layer {layers[0][0]}"
                    )
            other, columns = shapes.setdefault(BANK[hook], (hook, inners[0].columns))
            if inners[0].columns != columns:
                raise MissingHookError(f"its heads have another width than those of {other}")
        except MissingHookError as error:
            absent[hook] = str(error)
            continue
        by_hook[hook] = inners
    return {hook: by_hook[hook] for hook in INSIDE if hook in by_hook}, absent


def install_inside(
    model: nn.Module,
    adapter: Adapter,
    hooks: Sequence[Hook],
    group: Group,
    sizes: Callable[[int], Sizes],
    *,
    dtype: torch.dtype,
    device: torch.device,
    always: bool,
) -> tuple[list[BankPart], dict[Hook, list[Inner]], dict[str, str]]:
    """Install those of `hooks` that the layers held by this rank have.

    Returns one part for each bank, hook → its location in each layer, and hook → why it does not
    exist. `sizes`: number of sites → sizes of their buffers; `always`: as for `sites.install`.
    """
    layers = held_layers(model, adapter)
    by_hook, absent = find(layers, hooks, group)
    parts = []
    wrapped: dict[nn.Module, list[tuple[Inner, LaunchVisit, RankSite]]] = {}
    for bank, of_bank in BANKS.items():
        if not (installed := [hook for hook in of_bank if hook in by_hook]):
            continue
        columns = by_hook[installed[0]][0].columns
        places = [
            (hook, number, by_hook[hook][place])
            for place, (number, _) in enumerate(layers)
            for hook in installed
        ]
        sites = [RankSite(hook, number, "single") for hook, number, _ in places]
        buffers = buffers_of(len(sites), sizes(len(sites)), columns.size, dtype, device)
        for first, (site, (_, _, inner)) in enumerate(zip(sites, places, strict=True)):
            visit = visit_of(inner.module, [site], first, buffers, always, bank)
            wrapped.setdefault(inner.module, []).append((inner, visit, site))
        parts.append(BankPart(bank, sites, buffers, columns))
    for module, visits in wrapped.items():
        _wrap(module, visits, always)
    return parts, by_hook, absent


def _wrap(
    module: nn.Module, visits: Sequence[tuple[Inner, LaunchVisit, RankSite]], always: bool
) -> None:
    """Have `module.forward` visit these sites: edited rows replace its arguments, or are written
    into its output.
    """
    forward = module.forward
    names = tuple(inspect.signature(getattr(forward, "bare", forward)).parameters)
    inputs = tuple(
        (inner.side, inner.columns.size, visit, site)
        for inner, visit, site in visits
        if inner.side != "output"
    )
    outputs = tuple(
        (inner.first, inner.columns.size, visit, site)
        for inner, visit, site in visits
        if inner.side == "output"
    )

    def with_sites(*args: Any, **kwargs: Any) -> Any:
        for side, width, visit, site in inputs:
            if torch.compiler.is_compiling() or always or site.busy:
                if side < len(args):
                    args = (*args[:side], _visited(visit, args[side], width), *args[side + 1 :])
                else:
                    kwargs = {**kwargs, names[side]: _visited(visit, kwargs[names[side]], width)}
        result = forward(*args, **kwargs)
        for first, width, visit, site in outputs:
            if torch.compiler.is_compiling() or always or site.busy:
                rows = result[0] if isinstance(result, tuple) else result
                _visit_columns(visit, rows, first, width)
        return result

    with_sites.bare = getattr(forward, "bare", forward)  # type: ignore[attr-defined]
    module.forward = with_sites


def _visited(visit: LaunchVisit, rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return `rows`, of any shape with `width` numbers for each token, after the site's visit.

    Views of a larger tensor are copied, in a traced forward in every step: a copy within the op,
    only when it has work, gave rows of NaN (v1, compiled, CPU).
    """
    flat = rows.reshape(-1, width).contiguous()
    visit(flat, None)
    return flat.view(rows.shape)


def _visit_columns(visit: LaunchVisit, rows: torch.Tensor, first: int, width: int) -> None:
    """Have the site visit `width` columns of `rows` `[tokens, …]` in place, from `first` on."""
    flat = rows.view(-1, rows.shape[-1])
    if flat.shape[1] == width:
        visit(flat, None)
        return
    part = flat[:, first : first + width].contiguous()
    visit(part, None)
    flat[:, first : first + width] = part
