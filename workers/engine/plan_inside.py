"""Resources of the hook points inside attention and MLP; `engine.plan` has the residual
stream's.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...schemas.model.banks import BANK, BANKS, RESIDUAL, row_widths
from ...schemas.prompts.selectors import INSIDE, Hook


class Inside(NamedTuple):
    """Shape of attention and MLP in a checkpoint, from its config.json."""

    hooks: tuple[Hook, ...]
    widths: Mapping[str, int]  # bank → elements of a row, over all ranks
    ranks: Mapping[str, int]  # bank → tensor-parallel ranks that divide a row, at most

    def width(self, bank: str, ranks: int) -> int:
        """Elements of a row on one of `ranks`: key heads that do not suffice are on several, and
        the router is on each.
        """
        return self.widths[bank] // min(ranks, self.ranks[bank])

    def ring_width(self, request: Sequence[str]) -> int:
        """Elements that a ring row has in all banks together.

        All that were named count, as where the engine is started.
        """
        return sum(
            self.widths[bank]
            for bank in {RESIDUAL, *(BANK[hook] for hook in INSIDE if hook in request)}
        )

    def sites(self, request: Sequence[str], layers: int) -> dict[str, int]:
        """Bank → sites of that many layers, of the hooks that were named and exist."""
        counts = {
            bank: layers * sum(hook in request and hook in self.hooks for hook in hooks)
            for bank, hooks in BANKS.items()
        }
        return {bank: count for bank, count in counts.items() if count}


def inside_of(config: Mapping[str, Any], *, experts: int) -> Inside:
    """Read a config.json whose fields have the usual spellings. `experts`: 1 where there are none.

    Hooks that only the loaded layers can rule out are taken to exist: the plan is an upper bound.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    shared = int(config.get("num_key_value_heads") or heads)
    latent = bool(config.get("kv_lora_rank"))
    size = int(config["v_head_dim"] if latent else config.get("head_dim") or hidden // heads)
    neurons = int(config.get("intermediate_size") or 4 * hidden)
    absent: set[str] = {"mlp_act"} if experts > 1 else {"router"}
    absent |= {*BANKS["query"], *BANKS["key"]} - {"z"} if latent else set()
    return Inside(
        tuple(hook for hook in INSIDE if hook not in absent),
        row_widths(
            hidden,
            heads=heads,
            key_heads=shared,
            head_size=size,
            neurons=neurons,
            experts=experts if experts > 1 else 0,
        ),
        {RESIDUAL: 1, "query": heads, "key": shared, "mlp_act": neurons, "router": 1},
    )
