"""Banks: hook points whose rows have the same width. Everything that depends on the width exists
once for each bank.

The residual bank has rows of the model's hidden size. A row of another bank holds all heads
(neurons, experts) side by side: a head is a range of columns, so that kernels, planner, prefix
cache and kept rows know nothing of heads.

Banks are fixed by name, not by the model: API, worker, scheduler and ranks must agree on which
sites share a table and a file, and only the ranks know the loaded model.
"""

from collections.abc import Mapping

from ..base.records import Record
from ..prompts.selectors import FORWARD, HOOKS, INSIDE, Hook, Sites
from ..settings.settings import SettingsError

RESIDUAL = "residual"
#: Bank → its hooks. Keys and values have the model's key heads; queries and `z` have its query
#: heads.
BANKS: dict[str, tuple[Hook, ...]] = {
    RESIDUAL: HOOKS,
    "query": ("q_proj", "q", "z"),
    "key": ("k_proj", "k", "v"),
    "mlp_act": ("mlp_act",),
    "router": ("router",),
}
BANK: dict[Hook, str] = {hook: bank for bank, hooks in BANKS.items() for hook in hooks}
#: Banks whose rows are heads.
OF_HEADS = ("query", "key")
#: The value of the setting `hooks` for all hooks inside attention and MLP.
ALL_INSIDE = "inside"


class RowShape(Record):
    """The shape of a row at a hook inside attention or MLP: `[heads, width]`, head after head."""

    heads: int
    width: int

    @property
    def size(self) -> int:
        """The number of elements of a row."""
        return self.heads * self.width


def row_widths(
    hidden: int, *, heads: int, key_heads: int, head_size: int, neurons: int, experts: int
) -> dict[str, int]:
    """Return bank → number of elements of a whole row. `experts`: 0 if there is no router."""
    return {
        RESIDUAL: hidden,
        "query": heads * head_size,
        "key": key_heads * head_size,
        "mlp_act": neurons,
        "router": experts,
    }


def banks_of(sites: Mapping[Hook, list[int]]) -> dict[str, Sites]:
    """Return bank → its part of `sites`, in the order of `BANKS`."""
    parts = {
        bank: {hook: sites[hook] for hook in FORWARD if hook in hooks and hook in sites}
        for bank, hooks in BANKS.items()
    }
    return {bank: part for bank, part in parts.items() if part}


def asked_hooks(setting: str) -> tuple[list[str], list[str]]:
    """Parse the setting `hooks`; return (residual hooks, empty for all; hooks inside attention and
    MLP). Raises SettingsError.

    `all`: all hooks of the residual stream; `inside`: all others; or single names.
    """
    names = [name.strip() for name in setting.split(",")]
    valid = ("all", ALL_INSIDE, *HOOKS, *INSIDE)
    for name in names:
        if name not in valid:
            raise SettingsError(
                f"hooks: {name!r} is not a hook point: use any of {', '.join(valid)}"
            )
    residual: list[str] = [] if "all" in names else [hook for hook in HOOKS if hook in names]
    if not residual and "all" not in names:
        raise SettingsError(
            f"hooks: no hook point of the residual stream among {setting!r}: add `all`, or any of "
            f"{', '.join(HOOKS)}"
        )
    return residual, [hook for hook in INSIDE if hook in names or ALL_INSIDE in names]
