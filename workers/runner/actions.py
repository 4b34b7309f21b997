"""Did every rank do the same? A running checksum over every action that a rank applied.

Ranks of one pipeline stage see the same schedule, so they must reach the same checksum after the same actions.
The fold is splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195) over CRC32 digests, so it is sensitive
to content, order and step, and stable across hosts and runs.
"""

import zlib

import msgspec

_MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One output of the splitmix64 generator for a u64 `state`."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class ActionLedger:
    """Count and checksum of the actions applied on this rank. Rejected actions are not folded; rollbacks are."""

    def __init__(self) -> None:
        self.count = 0
        self._state = 0

    def fold(self, step: int, kind: str, *content: str | int | float | bytes) -> None:
        """Account for one applied action in engine step `step`."""
        digest = zlib.crc32(msgspec.msgpack.encode((step, kind, content)))
        self._state = splitmix64(self._state ^ ((self.count & 0xFFFFFFFF) << 32 | digest))
        self.count += 1

    @property
    def checksum(self) -> str:
        """The u64 as 16 hex digits."""
        return f"{self._state:016x}"
