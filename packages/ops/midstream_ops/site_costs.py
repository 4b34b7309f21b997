"""Estimates what the hook sites add to one step on a GPU: launches, bytes and time, from the
model's shape alone.

`midstream doctor --plan` prints the estimates; `tools/pages/kernel_costs.py` compares designs
with them. Nothing here was measured on a GPU: the assumptions are constants, for an H200. Launches
and bytes follow from the table of architectures and from what the kernel reads and writes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.workers.runner.hooks.architectures import Variant, launch_groups, stream_group

#: Time that an idle launch adds to a replayed graph.
IDLE_LAUNCH_US = 2.1
#: Time of a busy launch: an idle one plus the latency of one row.
BUSY_LAUNCH_US = 3.2
#: Memory bandwidth.
BYTES_PER_S = 4.8e12
#: Share of the bandwidth that a site with many rows reaches.
SHARE = 0.85
#: Share of the bandwidth at which a step reads the weights.
WEIGHTS_SHARE = 0.7
#: Time of an all-reduce; a layer has two with more than one rank.
ALL_REDUCE_US = 8.0


@dataclass(frozen=True)
class RankShape:
    """A model as one rank holds it."""

    name: str
    variant: Variant
    layers: int  # layers that the rank holds
    hidden_size: int
    parameters: float  # parameters of those layers, over all ranks of the stage
    tp: int = 1
    item_bytes: int = 2
    weight_bytes: float = 0.0  # bytes of a quantised parameter; 0: `item_bytes`

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.item_bytes

    def step_s(self) -> float:
        """Return the seconds of stock vLLM's decode step, without attention and sampling: it reads
        the weights once and has two all-reduces in each layer.
        """
        read = (
            self.parameters
            * (self.weight_bytes or self.item_bytes)
            / self.tp
            / (BYTES_PER_S * WEIGHTS_SHARE)
        )
        return read + (2 * self.layers * ALL_REDUCE_US / 1e6 if self.tp > 1 else 0.0)


@dataclass(frozen=True)
class StepCost:
    """Cost that the sites add to one step of one rank."""

    launches: int
    bytes: int  # bytes of GPU memory read and written
    host_bytes: int  # bytes of captured rows that are copied to the host
    seconds: float  # time added to the step


def launches(variant: Variant, hooks: Collection[Hook], layers: int) -> Sequence[tuple[Hook, ...]]:
    """Return the launches of one forward pass in a CUDA graph, in order; neighbouring sites share
    one, also across a layer boundary.
    """
    groups = launch_groups(variant, hooks, next_layer=True)
    first: list[tuple[Hook, ...]] = [HOOKS[:1]] if groups and HOOKS[0] in groups[-1] else []
    last = tuple(hook for hook in groups[-1] if hook != HOOKS[0]) if groups else ()
    return [*first, *groups * (layers - 1), *groups[:-1], *([last] if last else [])]


def step_cost(
    shape: RankShape,
    hooks: Collection[Hook] = HOOKS,
    *,
    rows: int = 64,
    edited: Collection[Hook] = (),
    captured: Collection[Hook] = (),
    configurations: int = 1,
    groups: Sequence[tuple[Hook, ...]] | None = None,
) -> StepCost:
    """Return the cost of a step of `rows` token rows in a CUDA graph. In all layers, all rows are
    edited at the hooks `edited` and captured at the hooks `captured`.

    `hooks`: the installed hooks. `configurations`: distinct vectors that the step's edits add.
    `groups`: launches of another design; by default those of the current design, in which a step
    replays a graph of the family that it needs.
    """
    busy_hooks = {*edited, *captured}
    if groups is None:
        is_busy = bool(busy_hooks & set(hooks))
        groups = launches(shape.variant, hooks, shape.layers) if is_busy else []
        if busy_hooks <= (stream := stream_group(groups)):
            groups = [group for group in groups if not stream.isdisjoint(group)]
    seconds = 0.0
    moved = 0
    host = 0
    for group in groups:
        busy = [hook for hook in group if hook in busy_hooks]
        transfers = _row_transfers(shape.variant, group, edited, captured) * rows if busy else 0
        # each vector is read once
        transfers += sum(min(configurations, rows) for hook in group if hook in edited)
        moved += transfers * shape.row_bytes
        host += sum(rows for hook in group if hook in captured) * shape.row_bytes
        launch_us = BUSY_LAUNCH_US if busy else IDLE_LAUNCH_US
        rate = BYTES_PER_S * SHARE
        seconds += launch_us / 1e6 + transfers * shape.row_bytes / rate
    return StepCost(len(groups), moved, host, seconds)


def _row_transfers(
    variant: Variant, group: Sequence[Hook], edited: Collection[Hook], captured: Collection[Hook]
) -> int:
    """Return the rows that a busy launch reads or writes for one token: it reads the stream once,
    and writes one row for each edit and capture.
    """
    pair = any(variant.taps[hook].kind == "pair" for hook in group)
    written = [hook for hook in group for users in (edited, captured) if hook in users]
    return (2 if pair else 1) + len(written)


#: Kind of step → (edited, captured).
CASES: dict[str, tuple[tuple[Hook, ...], tuple[Hook, ...]]] = {
    "idle": ((), ()),
    "steered": (("post_block",), ()),
    "captured": ((), ("post_block",)),
    "both": (("post_block",), ("post_block",)),
    "all six captured": ((), HOOKS),
}
