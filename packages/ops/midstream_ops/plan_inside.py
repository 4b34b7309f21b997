"""Resources of the hook points inside attention and MLP; those of the residual stream are in
`engine.plan`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from midstream.schemas.model.banks import BANK, BANKS, RESIDUAL, row_widths
from midstream.schemas.prompts.selectors import INSIDE, Hook


class Inside(NamedTuple):
    """Shape of attention and MLP in a checkpoint, from its config.json."""

    hooks: tuple[Hook, ...]
    widths: Mapping[str, int]  # bank → elements of a row, over all ranks
    ranks: Mapping[str, int]  # bank → most tensor-parallel ranks that a row is divided among

    def width(self, bank: str, ranks: int) -> int:
        """Returns the elements of a row on one of `ranks`. If there are fewer key heads than ranks,
        several ranks have the same key head; every rank has the whole router row.
        """
        return self.widths[bank] // min(ranks, self.ranks[bank])

    def ring_width(self, named: Sequence[str]) -> int:
        """Returns the elements of a ring row in all banks together.

        Every named hook counts, even if the model lacks it, as when the engine is started.
        """
        return sum(
            self.widths[bank]
            for bank in {RESIDUAL, *(BANK[hook] for hook in INSIDE if hook in named)}
        )

    def sites(self, named: Sequence[str], layers: int) -> dict[str, int]:
        """Returns bank → number of sites in `layers` layers, of the named hooks that exist."""
        counts = {
            bank: layers * sum(hook in named and hook in self.hooks for hook in hooks)
            for bank, hooks in BANKS.items()
        }
        return {bank: count for bank, count in counts.items() if count}


def inside_of(config: Mapping[str, Any], *, experts: int) -> Inside:
    """Reads a config.json whose fields have the usual spellings. `experts`: 1 for a dense model.

    Hooks that only the loaded layers can rule out are assumed to exist: the plan is an upper bound.
    """
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
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
