"""Gates: the generated tokens of a request at which its probes let steering be applied. The gate of
position p is open if the probe is on at p − 1. A state is decided once: a preempted request that is
computed again gets the same edits, even if its scores round differently then. Gated steering never
edits prompt tokens.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from ....schemas.artifacts.probes import ProbeScore
from ....schemas.base.limits import MAX_GATE_RUNS
from ....schemas.requests.specs import RankSpec
from ..files.recorded import contiguous
from .watches import ProbeError, Watch


def gates_of(spec: RankSpec, watch: Watch | None) -> list[str]:
    """Return the names of the probes that gate a request's steering, each once.

    Raises LookupError for one that this rank does not score.
    """
    probes = sorted({row.gate for row in spec.rows} - {""})
    scored = [] if watch is None else [probe.name for probe in watch.probes]
    for probe in probes:
        if probe not in scored:
            raise LookupError(
                f"its steering is gated by the probe {probe!r}, which this rank does not score"
            )
    return probes


def open_among(watch: Watch, probe: str, positions: Sequence[int]) -> list[int]:
    """Return the positions, out of ascending `positions`, at which the gate of a probe is open.

    Undecided gates are closed.
    """
    decided = watch.decided
    first = watch.prompt_tokens
    on = watch.rows["on"][:decided, watch.number(probe)].tolist()
    return [place for place in positions if first <= place <= decided and on[place - 1]]


def shown(watch: Watch, score: ProbeScore, stop: int) -> ProbeScore:
    """Return the `score` of a gate's probe with the positions below `stop` at which it was open."""
    positions = open_among(watch, score.name, range(watch.prompt_tokens, stop))
    runs = contiguous(np.array(positions))[:MAX_GATE_RUNS] if positions else []
    found = [(positions[at], positions[at] + count - 1) for at, count in runs]
    return msgspec.structs.replace(score, gate=found, gated=len(positions))


class SharedGates:
    """The gates of requests of a step with alike probes, which are decided together."""

    def __init__(
        self,
        members: Sequence[tuple[int, Watch]],
        probes: Sequence[int],
        of_tokens: np.ndarray,
        *,
        decides: bool,
    ) -> None:
        """`members`: with the number of each request in the step; `probes`: the numbers of those
        that gate its steering; `of_tokens`: the numbers of all tokens. `decides`: the requests have
        not failed.
        """
        _, first = members[0]
        self._watches = members
        self.decides = decides
        self.kind = first.kind
        self._table = first.table
        self._numbers = list(probes)
        self._members = np.array([number for number, _ in members])
        self._slots = np.array([watch.slot for _, watch in members])
        self._tokens = np.flatnonzero(np.isin(of_tokens, self._members))
        self._of = self._slots[np.searchsorted(self._members, of_tokens[self._tokens])]

    def decide(
        self, stops: np.ndarray, positions: np.ndarray, closed: np.ndarray
    ) -> list[tuple[int, str]]:
        """Decide the gates of the requests' positions below `stops` `[requests]`; set whether those
        of the tokens at `positions` are `closed` `[tokens, 1 + gates]`.

        Returns (number, reason) of requests that cannot be decided.
        """
        failed = list[tuple[int, str]]()
        with self._table.lock:
            of = self._table.of
            stops = stops[self._members]
            places = positions[self._tokens]
            needed = np.where(stops > of["tokens"][self._slots], stops - 1, 0)
            late = np.flatnonzero((of["filled"][self._slots] < needed) & self.decides)
            for item in late.tolist():
                number, watch = self._watches[item]
                if watch.decide(int(needed[item])) < needed[item]:
                    try:
                        watch.check(int(needed[item]))
                    except ProbeError as error:
                        why = f"{error}, which decides the edits of the next position"
                        failed.append((number, why))
            of_token = of[self._of]
            at = np.minimum(places, of["filled"][self._of]) - 1
            on = self._table.rows["on"][(of_token["first"] + at)[:, None], self._numbers]
            known = (of_token["tokens"] <= places) & (places <= of_token["filled"])
            closed[self._tokens, 1 : 1 + len(self._numbers)] = ~(on & known[:, None])
        return failed
