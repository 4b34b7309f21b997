"""Estimates what the hook sites add to one step on a GPU: launches, bytes and time, from the
model's shape alone.

`midstream doctor --plan` shows them, and `benchmarks/site_costs.py` compares designs by them.
Nothing in here was measured on a GPU: every assumption is a field of `Machine`. Launches and bytes
follow from the table of architectures and from what the kernel reads and writes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ....schemas.prompts.selectors import HOOKS, Hook
from .architectures import Variant, neighbours


@dataclass(frozen=True)
class Machine:
    """Assumptions about a GPU. The defaults: an H200."""

    idle_launch_us: float = 2.1  # what a launch that does nothing adds to a replayed graph
    busy_launch_us: float = (
        3.2  # a launch that does something: the same, and the latency of one row
    )
    bytes_per_s: float = 4.8e12  # of its memory
    share: float = 0.85  # of that, which a site reaches with many rows
    weights_share: float = 0.7  # of that, at which a step reads the weights
    all_reduce_us: float = 8.0  # two for each layer, with more than one rank
    # what fusing an all-reduce with the norm behind it saves; a site between the two prevents it
    fusion_us: float = 4.0


_MACHINE = Machine()


@dataclass(frozen=True)
class Shape:
    """A model as one rank holds it."""

    name: str
    variant: Variant
    layers: int  # that the rank holds
    hidden_size: int
    parameters: float  # of those layers, over all ranks of the stage
    tp: int = 1
    item_bytes: int = 2
    weight_bytes: float = 0.0  # of a parameter, where they are quantised; 0: as `item_bytes`

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.item_bytes

    def step_s(self) -> float:
        """A decode step of stock vLLM, without attention and sampling: weights are read once, two
        all-reduces for each layer.
        """
        read = (
            self.parameters
            * (self.weight_bytes or self.item_bytes)
            / self.tp
            / (_MACHINE.bytes_per_s * _MACHINE.weights_share)
        )
        return read + (2 * self.layers * _MACHINE.all_reduce_us / 1e6 if self.tp > 1 else 0.0)


@dataclass(frozen=True)
class StepCost:
    """Cost that the sites add to one step of one rank."""

    launches: int
    bytes: int  # of the GPU's memory, read and written
    host_bytes: int  # captured rows that leave for the host
    seconds: float  # added to the step
    # also lost where vLLM fuses all-reduces with norms (TP > 1, Hopper, flashinfer)
    unfused_seconds: float


def launches(variant: Variant, hooks: Collection[Hook], layers: int) -> Sequence[tuple[Hook, ...]]:
    """The launches of one forward of a captured graph, in order; neighbouring sites share one."""
    groups = neighbours(variant, hooks, next_layer=True)
    first: list[tuple[Hook, ...]] = [HOOKS[:1]] if groups and HOOKS[0] in groups[-1] else []
    last = tuple(hook for hook in groups[-1] if hook != HOOKS[0]) if groups else ()
    return [*first, *groups * (layers - 1), *groups[:-1], *([last] if last else [])]


def step_cost(
    shape: Shape,
    hooks: Collection[Hook] = HOOKS,
    *,
    rows: int = 64,
    edited: Collection[Hook] = (),
    captured: Collection[Hook] = (),
    configurations: int = 1,
    groups: Sequence[tuple[Hook, ...]] | None = None,
) -> StepCost:
    """Return what one step of `rows` token rows costs in a captured graph, where all rows are
    edited and captured at all layers.

    `hooks`: those that are installed. `edited`: an addition of one vector, `configurations`
    different ones in the step. `groups`: the launches, of another design than today's, in which an
    idle step replays graphs without sites.
    """
    busy_hooks = {*edited, *captured}
    if groups is None:
        is_busy = bool(busy_hooks & set(hooks))
        groups = launches(shape.variant, hooks, shape.layers) if is_busy else []
    seconds, moved, host, unfused = 0.0, 0, 0, 0
    for group in groups:
        busy = [hook for hook in group if hook in busy_hooks]
        local = _row_transfers(shape.variant, group, edited, captured) * rows if busy else 0
        local += sum(
            min(configurations, rows) for hook in group if hook in edited
        )  # the vectors, read once
        moved += local * shape.row_bytes
        host += sum(rows for hook in group if hook in captured) * shape.row_bytes
        launch_us = _MACHINE.busy_launch_us if busy else _MACHINE.idle_launch_us
        rate = _MACHINE.bytes_per_s * _MACHINE.share
        seconds += launch_us / 1e6 + local * shape.row_bytes / rate
    if shape.tp > 1:  # between an all-reduce and the norm behind it
        unfused = (
            sum(_between(shape.variant, hooks, branch) for branch in ("attn_out", "mlp_out"))
            * shape.layers
            if groups
            else 0
        )
    return StepCost(len(groups), moved, host, seconds, unfused * _MACHINE.fusion_us / 1e6)


def _row_transfers(
    variant: Variant, group: Sequence[Hook], edited: Collection[Hook], captured: Collection[Hook]
) -> int:
    """Rows of one token that cross the memory at a busy launch: what it reads once, what it
    writes.
    """
    pair = any(variant.taps[hook].kind == "pair" for hook in group)
    return (2 if pair else 1) + sum((hook in edited) + (hook in captured) for hook in group)


def _between(variant: Variant, hooks: Collection[Hook], branch: Hook) -> bool:
    """Return whether a site lies where vLLM would fuse: behind this branch, which ends with an
    all-reduce, before the next norm.
    """
    behind = (
        ("attn_out", "post_attn") if branch == "attn_out" else ("mlp_out", "post_block", "pre_attn")
    )
    return any(hook in hooks and hook in variant.taps for hook in behind)


#: What a step does → (edited, captured).
CASES: dict[str, tuple[tuple[Hook, ...], tuple[Hook, ...]]] = {
    "idle": ((), ()),
    "steered": (("post_block",), ()),
    "captured": ((), ("post_block",)),
    "both": (("post_block",), ("post_block",)),
    "all six captured": ((), HOOKS),
}
