"""Decides which captures stream: rows of long captures leave as they land, so that a request holds
only a window of its rows in memory.
"""

from dataclasses import dataclass

from ....schemas.requests.specs import RankSpec
from .capture import SPAN, Recording
from .delivery import RowDelivery

#: Parts of the window: rows leave in parts of about this share of it. Smaller ones cost more than
#: they gain: parts of 128 KiB took four times the processor time of ones of 8 MiB.
_PARTS = 8


@dataclass(eq=False)
class Streams:
    """Prepares the recordings of one rank."""

    _window: int  # bytes of a capture's rows that may stay in memory
    _delivery: RowDelivery

    def prepare(
        self, spec: RankSpec, number: int, recording: Recording, max_tokens: int, block: int
    ) -> None:
        """Set in blocks of which size a recording records, and its stream.

        `number`: of the capture in the request. `max_tokens`: tokens generated at most; 0: unknown.
        `block`: tokens of a KV block, if rows of prompts are kept; else 1.
        """
        recording.work = spec.work
        part = max(1, self._window // _PARTS)
        row = recording.position_bytes
        recording.span = max(1, min(SPAN, part // row))
        recording.block = block if block > 1 else recording.span
        if max_tokens:
            recording.end = spec.prompt_tokens + max_tokens - 1
        late = spec.worker_reports_end
        if late:
            recording.ends_from = spec.prompt_tokens
        if not max_tokens or recording.capture.scored:
            return
        held = recording.capture.count_held(spec.prompt_tokens, max_tokens, ends_late=late)
        if held * row > self._window:
            recording.stream = self._delivery.stream(spec, number, recording, part)
