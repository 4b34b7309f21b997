"""Faults of a rank, for tests only: `name` or `name:rank=1`, several separated by commas."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ....schemas.prompts.selectors import HOOKS, Hook
from ..edits.actions import Content as ActionContent
from ..edits.vector_pool import Content as RowContent

if TYPE_CHECKING:  # the fake engine's worker has no torch
    from ..hooks.architectures import Adapter, Variant
    from ..hooks.sites import Site

#: Calls of the worker; under its name each can be made to fail on a rank, before it does anything.
CALLS = (
    "put_vectors",
    "drop_vectors",
    "put_run",
    "drop_runs",
    "put_lora",
    "drop_loras",
    "put_sae",
    "drop_saes",
    "prepare_global",
    "commit_global",
    "rollback_global",
    "set_module",
    "rollback_module",
    "restart_ledger",
    "cleanse",
)

#: What can be made to fail, and what then happens.
KNOWN = {
    **dict.fromkeys(CALLS, "the call fails on this rank"),
    "admit": "applying a request's steering fails on this rank",
    "skip_action": (
        "the next action, and only that one, is left out on this rank: a row stays "
        "empty, and the action is not recorded"
    ),
    "alter_action": (
        "the next action, and only that one, is replaced on this rank: a row gets other vectors"
    ),
    "lose_run": "the next look-up of a source run's row finds nothing on this rank",
    "write": "writing a capture raises OSError",
    "reading": "computing a reading of captured rows fails",
    "slow_write": "writing a group of captures takes a second longer",
    "swap_lora": "the next step's rows are taken for another adapter's",
    "alter_score": (
        "the probes' scores of the next step in which there are any are wrong on this rank"
    ),
    "lose_score": "scoring a step's rows raises",
    "plan": "planning a step raises",
    "skip_site": (
        "in the next step in which a site has something to do, the last such site does "
        "not run on this rank"
    ),
    "commit": "putting a step's plan where the forward pass reads it raises",
    "settle": "reading which rows are not finite raises",
    "crash": "the process dies at a crash point: `schemas.faults`",
    "rpc": "faults may be switched while the engine runs",
}


#: Wrong adapters, of one hook each: what the certification run must refuse.
KNOWN |= {
    f"{wrong}_{hook}": what
    for hook in HOOKS
    for wrong, what in {
        "shift": "the hook's rows of each layer are called those of the next",
        "branch": "the hook reads the branch that was added last, not the stream",
        "half": "the hook reads one tensor of the pair whose sum it is",
    }.items()
}
#: What is read instead: the first that the layer has.
_ADDED: dict[Hook, tuple[Hook, ...]] = {
    "pre_attn": ("mlp_in", "attn_out"),
    "post_attn": ("attn_out",),
    "post_block": ("mlp_out", "attn_out"),
}
_SLOW_S = 1.0


class Faults:
    """Read from `MIDSTREAM_FAULT` at boot. Empty in production, where nothing can switch one on."""

    def __init__(self, text: str, rank: int) -> None:
        self._rank = rank
        self._active: set[str] = set()
        self._add(text)

    def switch(self, text: str) -> None:
        """Replace the active faults; raises RuntimeError unless booted with `rpc`."""
        if "rpc" not in self._active:
            raise RuntimeError("this rank was not started with fault injection")
        self._active = {"rpc"}
        self._add(text)

    def _add(self, text: str) -> None:
        for fault in filter(None, text.split(",")):
            name, _, condition = fault.partition(":")
            if name not in KNOWN:
                raise ValueError(f"unknown fault {name!r}; known: {', '.join(KNOWN)}")
            if condition in ("", f"rank={self._rank}"):
                self._active.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._active

    def _once(self, name: str) -> bool:
        """Return whether the fault is active; the call consumes it."""
        active = name in self._active
        self._active.discard(name)
        return active

    def of_write(self) -> bool:
        """Return whether writing a group fails; called in a writer thread before it writes."""
        if "slow_write" in self:
            time.sleep(_SLOW_S)
        return "write" in self

    def of_reading(self) -> bool:
        """Return whether computing a reading fails; called in a writer thread."""
        return "reading" in self

    def of_run(self) -> bool:
        """Return whether this look-up of a source run finds nothing."""
        return self._once("lose_run")

    def of_site(self) -> bool:
        """Return whether a site of this step does not run."""
        return self._once("skip_site")

    def of_lora(self) -> bool:
        """Return whether this step's rows are taken for another adapter's."""
        return self._once("swap_lora")

    def of_score(self) -> bool:
        """Return whether this step's scores are wrong.

        Raises RuntimeError where they cannot be computed.
        """
        if "lose_score" in self:
            raise RuntimeError("fault injected: lose_score")
        return self._once("alter_score")

    def of_row(self, content: RowContent) -> RowContent:
        """Return what is written to the table instead of a row's content."""
        if "skip_action" in self:  # `of_action`, called next, omits it from the ledger
            return {}
        if content and self._once("alter_action"):
            return {place: (-vectors, scalars) for place, (vectors, scalars) in content.items()}
        return content

    def of_action(self, content: ActionContent) -> ActionContent | None:
        """Return what is accounted for instead of an action's content; None: nothing."""
        if self._once("skip_action"):
            return None
        return (*content, "altered") if self._once("alter_action") else content


def misplaced(adapter: "Adapter", faults: Faults) -> "Adapter":
    """The adapter, with the taps that faults make wrong."""

    def wrong(variant: "Variant") -> "Variant":
        taps = dict(variant.taps)
        for hook, tap in variant.taps.items():
            if f"branch_{hook}" in faults and (
                branch := next((item for item in _ADDED[hook] if item in taps), None)
            ):
                taps[hook] = variant.taps[branch]
            elif f"half_{hook}" in faults:
                taps[hook] = replace(tap, kind="single")
        return replace(variant, taps=taps, stated=variant.laws)

    if not any(f"{name}_{hook}" in faults for name in ("branch", "half") for hook in HOOKS):
        return adapter
    return replace(
        adapter,
        variant=wrong(adapter.variant),
        kinds={layer: wrong(kind) for layer, kind in adapter.kinds.items()},
    )


def mislabelled(sites: "Sequence[Site]", num_layers: int, faults: Faults) -> None:
    """Call the rows of a hook, where a fault says so, those of the next layer."""
    for site in sites:
        if f"shift_{site.hook}" in faults:
            site.layer = (site.layer + 1) % num_layers


def answer(faults: Faults, call: str, action: Callable[[], None]) -> tuple[bool, str]:
    """Return how a rank answers a call of the worker: (ok, why not).

    A refused call has changed nothing on this rank.
    """
    try:
        if call in faults:
            raise RuntimeError(f"fault injected: {call}")
        action()
    except (LookupError, ValueError, RuntimeError) as error:
        return False, str(error)
    return True, ""
