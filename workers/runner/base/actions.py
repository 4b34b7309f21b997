"""Action ledger of a rank: a running checksum over every action that it applied.

Ranks of one pipeline stage see the same schedule, so they must reach the same checksum after the
same actions. The fold is splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195) over
CRC32 digests, so it is sensitive to content, order and step, and stable across hosts and runs.
"""

import zlib
from typing import Literal

import msgspec

ActionKind = Literal[
    "row_admit",
    "row_release",
    "steer",
    "lora",
    "gradient",
]

#: Kind of action → the values that are folded into the checksum. Rejected actions are not folded.
KINDS: dict[ActionKind, tuple[str, ...]] = {
    "row_admit": ("key", "crc32 of the bytes written"),
    "row_release": ("key",),
    "steer": ("job", "request", "attempt", "digest"),
    "lora": ("job", "request", "attempt", "digest of the adapter that its rows were computed with"),
    "gradient": ("job", "request", "attempt", "crc32 of what was computed"),
}

_MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """Return the splitmix64 generator's output for a u64 `state`."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class ActionLedger:
    """Count and checksum of the actions applied on this rank since its epoch began."""

    def __init__(self) -> None:
        self.count = 0
        self.epoch = 0  # number of restarts
        self.state = 0

    def fold(self, step: int, kind: ActionKind, *content: str | int) -> None:
        """Account for one applied action in engine step `step`.

        Raises ValueError when `content` does not match `KINDS`.
        """
        if kind not in KINDS or len(content) != len(KINDS[kind]):
            raise ValueError(f"{kind!r} with {len(content)} values is not an action")
        digest = zlib.crc32(msgspec.msgpack.encode((step, kind, content)))
        self.state = splitmix64(self.state ^ ((self.count & 0xFFFFFFFF) << 32 | digest))
        self.count += 1

    def restart(self) -> None:
        """Begin the next epoch from zero."""
        self.count = self.state = 0
        self.epoch += 1

    @property
    def checksum(self) -> str:
        """Return the u64 as 16 hex digits."""
        return sealed(self.state, 0)


def sealed(state: int, results: int) -> str:
    """Return the checksum of a ledger in `state` with the CRC32 of a request's results, 0 for none.

    They are no part of the ledger: a request that fails on one rank has them on the others.
    """
    return f"{splitmix64(state ^ results) if results else state:016x}"
