"""Gates: the generated tokens of a request at which its probes let steering be applied.

The gate of a generated position p is open if an aggregate of the probe, over the positions up to p
− 1, is at or above its threshold. It is decided when the first step that computes p is planned,
from the scores that exist then, and kept: a preempted request that is computed again gets the same
edits, even if its scores round differently then. Gated steering never edits prompt tokens.
"""

import zlib
from collections.abc import Iterable, Sequence

import msgspec

from ....schemas.artifacts.probes import ProbeScore
from ....schemas.base.limits import MAX_GATE_RUNS
from ....schemas.requests.specs import RankSpec
from .watches import Watch


class Gates:
    """Gates of one request on this rank."""

    def __init__(self, watch: Watch | None, probes: Iterable[str], prompt_tokens: int) -> None:
        """`probes`: values of `StoredProbe.gate`. Raises LookupError for one that this rank does
        not score.
        """
        local = (
            {probe.gate: number for number, probe in enumerate(watch.probes)}
            if watch is not None
            else {}
        )
        lack = sorted(set(probes) - local.keys())
        if watch is None or lack:
            raise LookupError(
                f"its steering is gated by the probe {lack[0][:12]}, which this rank does not score"
            )
        self._watch, self._first = watch, prompt_tokens
        self._numbers = {digest: local[digest] for digest in sorted(set(probes))}
        # probe → a byte for each decided position, from the first generated one: 1 if open
        self._open = {digest: bytearray() for digest in self._numbers}

    def decide(self, stop: int) -> None:
        """Decide the gates of all positions below `stop`.

        Raises ProbeError if a needed score is missing or not finite.
        """
        for position in range(self._first + min(map(len, self._open.values())), stop):
            decided = {
                digest: self._watch.above(number, position - 1)
                for digest, number in self._numbers.items()
            }
            for digest, is_open in decided.items():
                self._open[digest].append(is_open)

    def decided(self, position: int) -> list[bytes]:
        """Return what was decided about the gates of a position, to compare it with others."""
        at = position - self._first
        return [bytes(flags[at : at + 1]) for flags in self._open.values() if at >= 0]

    def among(self, digest: str, positions: Sequence[int]) -> list[int]:
        """Return the positions, out of ascending `positions`, at which the gate is open.

        Undecided gates are closed.
        """
        flags = self._open.get(digest, b"")
        return [
            position
            for position in positions
            if 0 <= position - self._first < len(flags) and flags[position - self._first]
        ]

    def shown(self, score: ProbeScore, stop: int) -> ProbeScore:
        """Return `score` with the positions below `stop` at which its gate was open; unchanged if
        its probe gates nothing.
        """
        if score.action != "steer":
            return score
        gate = score.digest if score.policy is None else score.name
        positions = self.among(gate, range(self._first, stop))
        runs: list[tuple[int, int]] = []
        for position in positions:
            if runs and runs[-1][1] == position - 1:
                runs[-1] = runs[-1][0], position
            else:
                runs.append((position, position))
        return msgspec.structs.replace(score, gate=runs[:MAX_GATE_RUNS], gated=len(positions))

    def checksum(self, stop: int, before: int) -> int:
        """Return the CRC32 of the decisions about positions below `stop`, continuing `before`."""
        for flags in self._open.values():
            before = zlib.crc32(flags[: max(0, stop - self._first)], before)
        return before


def gates_of(spec: RankSpec, watch: Watch | None) -> Gates | None:
    """Return the gates of a request; None if no probe gates its steering.

    Raises LookupError for a gate's probe that this rank does not score.
    """
    probes = [entry.gate for entry in spec.steering if entry.gate]
    return Gates(watch, probes, spec.prompt_tokens) if probes else None
