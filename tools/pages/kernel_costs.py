"""What do the hook sites add to a decode step, on paper, in today's design and in those before it?

    python tools/pages/kernel_costs.py

Prints the table of `docs/reference/kernels.md`, from `packages/ops/midstream_ops/site_costs.py`.
Needs no GPU, and measures nothing.
"""

from collections.abc import Collection, Sequence

from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.workers.runner.hooks.architectures import ARCHITECTURES
from midstream_ops.site_costs import (
    CASES,
    RankShape,
    StepCost,
    launches,
    step_cost,
)

ROWS = 64
_LLAMA = ARCHITECTURES["LlamaForCausalLM"][0]
SHAPES: tuple[RankShape, ...] = (
    RankShape("Llama-3.1-8B, TP=1", _LLAMA, 32, 4096, 8.03e9),
    RankShape("Llama-3.1-8B, TP=4", _LLAMA, 32, 4096, 8.03e9, tp=4),
    RankShape("Llama-3.3-70B, TP=4", _LLAMA, 80, 8192, 70.6e9, tp=4),
)


def _single(shape: RankShape, hooks: Collection[Hook]) -> Sequence[tuple[Hook, ...]]:
    return [(hook,) for hook in HOOKS if hook in hooks and hook in shape.variant.taps] * (
        shape.layers
    )


def _merged(shape: RankShape, hooks: Collection[Hook]) -> Sequence[tuple[Hook, ...]]:
    return launches(shape.variant, hooks, shape.layers)


def _today(shape: RankShape, hooks: Collection[Hook]) -> None:
    return None


#: The design → its launches; None: today's.
DESIGNS = {
    "a launch per site, one family": _single,
    "merged, one family": _merged,
    "merged, three families": _today,
}


def cost(
    shape: RankShape,
    hooks: Collection[Hook],
    design: str,
    *,
    edited: Collection[Hook] = (),
    captured: Collection[Hook] = (),
) -> StepCost:
    """Return the cost of a step in which each edited row adds a vector of its own."""
    return step_cost(
        shape,
        hooks,
        rows=ROWS,
        edited=edited,
        captured=captured,
        configurations=ROWS,
        groups=DESIGNS[design](shape, hooks),
    )


def table() -> str:
    """The costs of `SHAPES`, `CASES` and `DESIGNS` as Markdown."""
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
                            cost(shape, hooks, design, edited=edited, captured=captured),
                            shape.step_s(),
                        )
                        for design in DESIGNS
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
