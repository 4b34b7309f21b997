"""Estimates what the hook sites add to one step on a GPU: launches, bytes and time, from the
model's shape alone.

`step_cost` is the function for tables and for `midstream doctor --plan`. Nothing in here was
measured on a GPU: every assumption is a field of `Machine`. Launches and bytes follow from the
table of architectures and from what the kernel reads and writes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ....schemas.prompts.selectors import HOOKS, Hook
from .architectures import ARCHITECTURES, Variant, neighbours


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
    host_bytes_per_s: float = 5e10  # of the link that captured rows leave by, next to the next step


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

    def step_s(self, machine: Machine) -> float:
        """A decode step of stock vLLM, without attention and sampling: weights are read once, two
        all-reduces for each layer.
        """
        read = (
            self.parameters
            * (self.weight_bytes or self.item_bytes)
            / self.tp
            / (machine.bytes_per_s * machine.weights_share)
        )
        return read + (2 * self.layers * machine.all_reduce_us / 1e6 if self.tp > 1 else 0.0)


_LLAMA = ARCHITECTURES["LlamaForCausalLM"][0]
#: The shapes of the tables in `docs/kernels.md`.
SHAPES: tuple[Shape, ...] = (
    Shape("Llama-3.1-8B, TP=1", _LLAMA, 32, 4096, 8.03e9),
    Shape("Llama-3.1-8B, TP=4", _LLAMA, 32, 4096, 8.03e9, tp=4),
    Shape("Llama-3.3-70B, TP=4", _LLAMA, 80, 8192, 70.6e9, tp=4),
)


@dataclass(frozen=True)
class StepCost:
    """Cost that the sites add to one step of one rank."""

    launches: int
    bytes: int  # of the GPU's memory, read and written
    host_bytes: int  # captured rows that leave for the host
    seconds: float  # added to the step
    unfused_seconds: (
        # also lost where vLLM fuses all-reduces with norms (TP > 1, Hopper, flashinfer)
        float
    )


def launches(
    variant: Variant, hooks: Collection[Hook], layers: int, *, merged: bool = True
) -> Sequence[tuple[Hook, ...]]:
    """The launches of one forward of a captured graph, in order.

    `merged`: neighbouring sites share one.
    """
    if not merged:
        return [(hook,) for hook in HOOKS if hook in hooks and hook in variant.taps] * layers
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
    merged: bool = True,
    idle_graphs: bool = True,
    machine: Machine | None = None,
) -> StepCost:
    """Return what one step of `rows` token rows costs in a captured graph, where all rows are
    edited and captured at all layers.

    `hooks`: those that are installed. `edited`: an addition of one vector, `configurations`
    different ones in the step.
    `merged`, `idle_graphs`: false for the design before: a launch for each site, and one family of
    graphs, that holds them all.
    """
    machine = machine or Machine()
    groups = launches(shape.variant, hooks, shape.layers, merged=merged)
    busy_hooks = {*edited, *captured}
    if idle_graphs and not busy_hooks & set(hooks):
        groups = []
    seconds, moved, host, unfused = 0.0, 0, 0, 0
    for group in groups:
        busy = [hook for hook in group if hook in busy_hooks]
        local = _row_transfers(shape.variant, group, edited, captured) * rows if busy else 0
        local += sum(
            min(configurations, rows) for hook in group if hook in edited
        )  # the vectors, read once
        moved += local * shape.row_bytes
        host += sum(rows for hook in group if hook in captured) * shape.row_bytes
        launch_us = machine.busy_launch_us if busy else machine.idle_launch_us
        seconds += launch_us / 1e6 + local * shape.row_bytes / (machine.bytes_per_s * machine.share)
    if shape.tp > 1:  # between an all-reduce and the norm behind it
        unfused = (
            sum(_between(shape.variant, hooks, branch) for branch in ("attn_out", "mlp_out"))
            * shape.layers
            if groups
            else 0
        )
    return StepCost(len(groups), moved, host, seconds, unfused * machine.fusion_us / 1e6)


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
#: The design → `merged` and `idle_graphs` of `step_cost`.
DESIGNS: dict[str, tuple[bool, bool]] = {
    "a launch per site, one family": (False, False),
    "merged, one family": (True, False),
    "merged, two families": (True, True),
}


def table(machine: Machine | None = None, *, rows: int = 64) -> str:
    """The costs of `SHAPES`, `CASES` and `DESIGNS` as Markdown; each edited row adds a vector of
    its own.
    """
    lines = [
        "| model | hooks | step | " + " | ".join(DESIGNS) + " |",
        "|" + "---|" * (3 + len(DESIGNS)),
    ]
    for shape in SHAPES:
        for hooks, named in ((HOOKS, "six"), (("post_block",), "`post_block`")):
            for case, (edited, captured) in CASES.items():
                if {*edited, *captured} <= {*hooks}:
                    cells = [
                        _cell(
                            step_cost(
                                shape,
                                hooks,
                                rows=rows,
                                edited=edited,
                                captured=captured,
                                configurations=rows,
                                merged=merged,
                                idle_graphs=idle_graphs,
                                machine=machine,
                            ),
                            shape.step_s(machine or Machine()),
                        )
                        for merged, idle_graphs in DESIGNS.values()
                    ]
                    lines.append(f"| {shape.name} | {named} | {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(cost: StepCost, step_s: float) -> str:
    if not cost.launches:
        return "0"
    return (
        f"{cost.launches}, {cost.bytes / 1e6:,.0f} MB, {cost.seconds * 1e3:.2f} ms "
        f"({cost.seconds / step_s:.1%})"
    )


if __name__ == "__main__":
    print(table())
