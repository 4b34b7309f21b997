"""Tests only: which faults is this rank told to have? `name` or `name:rank=1`, several separated by commas."""

import time

#: What can be made to fail, and what then happens.
KNOWN = {
    "put_vectors": "registering vectors fails on this rank",
    "admit": "applying a request's steering fails on this rank",
    "skip_action": "one kind of action is applied but not accounted for",
    "write": "writing a capture raises OSError",
    "slow_write": "writing a group of captures takes a second longer",
    "plan": "planning a step raises",
    "rpc": "faults may be switched while the engine runs",
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
            raise RuntimeError("this rank was not started for fault tests")
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

    def of_write(self) -> bool:
        """Asked in a writer thread before it writes a group: does that fail?"""
        if "slow_write" in self:
            time.sleep(_SLOW_S)
        return "write" in self
