"""Gates: the generated tokens of a request at which its probes let steering be applied.

The gate of a generated position p is open if an aggregate of the probe, over the positions up to p
− 1, is at or above its threshold. It is decided when the first step that computes p is planned,
from the scores that exist then, and kept: a preempted request that is computed again gets the same
edits, even if its scores round differently then. Gated steering never edits prompt tokens.
"""

import zlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ....schemas.artifacts.probes import ProbeScore
from ....schemas.base.limits import MAX_GATE_RUNS
from ....schemas.requests.specs import RankSpec
from ..files.extents import contiguous
from .watches import ProbeError, Watch


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
        self.watch, self._first = watch, prompt_tokens
        #: Value of `StoredProbe.gate` → number of the probe.
        self.numbers = {digest: local[digest] for digest in sorted(set(probes))}
        watch.table.reserve(watch.slot, prompt_tokens + 1)
        watch.table.of["decided"][watch.slot] = prompt_tokens

    def decide(self, stop: int) -> None:
        """Decide the gates of all positions below `stop`.

        Raises ProbeError if a needed score is missing or not finite.
        """
        table, slot, numbers = self.watch.table, self.watch.slot, list(self.numbers.values())
        with table.lock:
            for position in range(int(table.of["decided"][slot]), stop):
                is_open = [self.watch.above(number, position - 1) for number in numbers]
                table.rows["open"][table.of["first"][slot] + position, numbers] = is_open
                table.of["decided"][slot] = position + 1

    def _flags(self, digest: str) -> np.ndarray:
        """Return whether the gate is open at each decided position, from the first token on."""
        first, *_, decided = self.watch.table.of[self.watch.slot].item()
        of_probe: np.ndarray = self.watch.table.rows["open"][:, self.numbers[digest]]
        return of_probe[first : first + decided]

    def among(self, digest: str, positions: Sequence[int]) -> list[int]:
        """Return the positions, out of ascending `positions`, at which the gate is open.

        Undecided gates are closed.
        """
        flags = self._flags(digest).tolist() if digest in self.numbers else []
        return [position for position in positions if position < len(flags) and flags[position]]

    def shown(self, score: ProbeScore, stop: int) -> ProbeScore:
        """Return `score` with the positions below `stop` at which its gate was open; unchanged if
        its probe gates nothing.
        """
        if score.action != "steer":
            return score
        gate = score.digest if score.policy is None else score.name
        positions = self.among(gate, range(self._first, stop))
        runs = contiguous(np.array(positions))[:MAX_GATE_RUNS] if positions else []
        found = [(positions[at], positions[at] + count - 1) for at, count in runs]
        return msgspec.structs.replace(score, gate=found, gated=len(positions))

    def checksum(self, stop: int, before: int) -> int:
        """Return the CRC32 of the decisions about positions below `stop`, continuing `before`."""
        for digest in self.numbers:
            before = zlib.crc32(self._flags(digest)[self._first : stop].tobytes(), before)
        return before


class Together:
    """The gates of requests of a step with the same probes, which are decided together."""

    def __init__(
        self, members: Sequence[tuple[int, Gates]], of_tokens: np.ndarray, *, decides: bool
    ) -> None:
        """`members`: with the number of each request in the step; `of_tokens`: these numbers of all
        tokens. `decides`: the requests have not failed.
        """
        self._gates, self.decides = members, decides
        self.kind = members[0][1].watch.kind
        self._table, self._numbers = members[0][1].watch.table, [*members[0][1].numbers.values()]
        self._columns = np.concatenate([self.kind.columns[number] for number in self._numbers])
        self._members = np.array([number for number, _ in members])
        self._slots = np.array([gates.watch.slot for _, gates in members])
        self._tokens = np.flatnonzero(np.isin(of_tokens, self._members))
        self._of = self._slots[np.searchsorted(self._members, of_tokens[self._tokens])]

    def decide(
        self, stops: np.ndarray, positions: np.ndarray, closed: np.ndarray
    ) -> list[tuple[int, str]]:
        """Decide the gates of the requests' positions below `stops` `[requests]`; set whether those
        of the tokens at `positions` are `closed` `[tokens, 1 + gates]`.

        Returns (number, reason) of requests that cannot be decided.
        """
        kind, table, failed = self.kind, self._table, list[tuple[int, str]]()
        with table.lock:
            stops, of, first = stops[self._members], table.of, table.of["first"]
            new = np.flatnonzero((stops > of["decided"][self._slots]) & self.decides)
            slots, stops = self._slots[new], stops[new]
            at = first[slots] + np.minimum(stops - 2, of["reached"][slots])
            values = table.rows["aggregates"][at]
            quick = (of["decided"][slots] == stops - 1) & (of["filled"][slots] >= stops - 1)
            quick &= np.isfinite(values[:, self._columns]).all(axis=1) & (kind.rules is None)
            above = np.logical_or.reduceat(values >= kind.thresholds, kind.begins, axis=1)
            table.rows["open"][at[quick, None] + 1, self._numbers] = above[quick][:, self._numbers]
            of["decided"][slots[quick]] = stops[quick]
            for item in np.flatnonzero(~quick).tolist():
                number, gates = self._gates[new[item]]
                try:
                    gates.decide(int(stops[item]))
                except ProbeError as error:
                    failed.append((number, str(error)))
            at = first[self._of] + np.minimum(positions[self._tokens], of["decided"][self._of])
            shut = ~table.rows["open"][at[:, None], self._numbers]
            closed[self._tokens, 1 : 1 + len(self._numbers)] = shut
        return failed


def gates_of(spec: RankSpec, watch: Watch | None) -> Gates | None:
    """Return the gates of a request; None if no probe gates its steering.

    Raises LookupError for a gate's probe that this rank does not score.
    """
    probes = [entry.gate for entry in spec.steering if entry.gate]
    return Gates(watch, probes, spec.prompt_tokens) if probes else None
