"""Gates: at which tokens of a request the steering is applied that its probes decide about.

The gate of a generated position p is open if an aggregate of the probe, over the positions up to p
− 1, is at or above its threshold. It is decided when the first step that computes p is planned,
from the scores that exist then, and kept: a preempted request that is computed again gets the
same edits, regardless of how its scores are rounded now. Prompt tokens are never edited.
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
        """`probes`: digests. Raises LookupError for one whose scores are not computed here."""
        local = (
            {probe.digest: number for number, probe in enumerate(watch.probes)}
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
        # of each generated position, from the first on: 1 where it is open
        self._open = {digest: bytearray() for digest in self._numbers}

    def decide(self, stop: int) -> None:
        """Decide about all positions below `stop`.

        Raises ProbeError where a score that decides is not there, or not finite.
        """
        for position in range(self._first + min(map(len, self._open.values())), stop):
            decided = {
                digest: self._watch.above(number, position - 1)
                for digest, number in self._numbers.items()
            }
            for digest, is_open in decided.items():
                self._open[digest].append(is_open)

    def among(self, digest: str, positions: Sequence[int]) -> list[int]:
        """Return those of `positions`, ascending, at which the gate is open.

        What is not decided is closed.
        """
        flags = self._open.get(digest, b"")
        return [
            position
            for position in positions
            if 0 <= position - self._first < len(flags) and flags[position - self._first]
        ]

    def shown(self, score: ProbeScore, stop: int) -> ProbeScore:
        """With the positions below `stop` at which its gate was open, where it has one."""
        if score.action != "steer":
            return score
        positions = self.among(score.digest, range(self._first, stop))
        runs: list[tuple[int, int]] = []
        for position in positions:
            if runs and runs[-1][1] == position - 1:
                runs[-1] = runs[-1][0], position
            else:
                runs.append((position, position))
        return msgspec.structs.replace(score, gate=runs[:MAX_GATE_RUNS], gated=len(positions))

    def checksum(self, stop: int, before: int) -> int:
        """CRC32 of the decisions about positions below `stop`, going on from `before`."""
        for flags in self._open.values():
            before = zlib.crc32(flags[: max(0, stop - self._first)], before)
        return before


def gates_of(spec: RankSpec, watch: Watch | None) -> Gates | None:
    """None if no probe decides about the request's steering.

    Raises LookupError if one does that this rank does not score.
    """
    probes = [entry.gate for entry in spec.steering if entry.gate]
    return Gates(watch, probes, spec.prompt_tokens) if probes else None
