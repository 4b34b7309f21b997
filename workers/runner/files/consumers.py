"""Consumers of captured rows: built in, or offered by other packages under an entry point.

A package offers one by an entry point of the group `midstream.capture_consumers`: its name is the
consumer's, its object a class or function that is called without arguments, once per process, and
gives a `Consumer`. See `docs/capture.md`.
"""

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

import numpy as np

from ....schemas.base.dtypes import DTYPES, widened
from ....schemas.readings.stored import READER
from ....schemas.requests.harvest_work import HARVEST
from ....schemas.requests.specs import memory_bytes
from ..base.helper_threads import Apart, LateError
from .finished_rows import Consumer, FinishedCapture, Outcome
from .layouts import blob_of

logger = logging.getLogger(__name__)
#: What the consumer `logging` writes to.
lines = logging.getLogger("midstream.captures")

ENTRY_POINTS = "midstream.capture_consumers"
BUILT_IN = ("filesystem", "memory", "logging")  # that requests may name
#: Seconds that an installed consumer may take for a group; the writer then continues without it.
PATIENCE_S = 10.0


class Memory:
    """The consumer `memory`: the rows come back in the receipt, as a safetensors blob.

    Nothing is written.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of one capture, counted as at its admission (`memory_bytes`)."""
        self._limit = limit

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        return [self._consume(capture) for capture in captures]

    def _consume(self, capture: FinishedCapture) -> Outcome:
        size = memory_bytes(
            len(capture.positions),
            sum(map(len, capture.sites.values())),
            capture.hidden_size,
            capture.dtype,
        )
        if size <= self._limit:
            return Outcome(rows=b"".join(blob_of(capture, capture.sites).buffers))
        return Outcome(
            error=(
                f"{size} bytes of rows exceed the response limit of {self._limit} "
                f"({self._limit >> 10} KiB, memory_limit_kib)"
            )
        )


class Logging:
    """The consumer `logging`: one line per capture, with the length of its first and last row at
    every site.
    """

    def __init__(self) -> None:
        if not lines.hasHandlers():  # vLLM's rank processes set up their own loggers only
            handler = logging.StreamHandler()
            handler.setFormatter(
                logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
            )
            lines.addHandler(handler)
            lines.setLevel(logging.INFO)

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        for capture in captures:
            lines.info(
                "captured job=%s request=%d tag=%s pp=%d positions=%d hidden=%d dtype=%s: %s",
                capture.spec.job,
                capture.spec.request,
                capture.capture.tag,
                capture.pp,
                len(capture.positions),
                capture.hidden_size,
                capture.dtype,
                _norms(capture),
            )
        return [Outcome()] * len(captures)


def _norms(capture: FinishedCapture) -> str:
    """`post_block.3 |first| … |last|` for each site."""
    norms = []
    for hook, layers in capture.sites.items():
        for layer in layers:
            rows = rows_of(capture, hook, layer)
            lengths = (
                [f"{np.linalg.norm(rows[place]):.4g}" for place in (0, -1)]
                if len(rows)
                else ["-", "-"]
            )
            norms.append(f"{hook}.{layer} {' … '.join(lengths)}")
    return ", ".join(norms)


def rows_of(capture: FinishedCapture, hook: str, layer: int) -> np.ndarray:
    """`[positions, hidden_size]` of one site as its own array; bfloat16 is widened to
    float32.
    """
    held = b"".join(capture.rows(hook, layer)) if capture.positions else b""
    rows = widened(np.frombuffer(held, dtype=DTYPES[capture.dtype].raw), capture.dtype)
    return rows.reshape(len(capture.positions), capture.hidden_size)


class Installed:
    """An installed consumer, called in its own thread: neither its exceptions nor its duration hold
    up the writers.
    """

    def __init__(self, name: str, consumer: Consumer, patience_s: float = PATIENCE_S) -> None:
        self._consumer = consumer
        self.apart = Apart(f"capture consumer {name}", self._call, patience_s)

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """Raises what the consumer raises, and TypeError for an answer that is not one outcome per
        capture.
        """
        try:
            return self.apart.ask([_copy(capture) for capture in captures])
        except LateError as error:
            return [Outcome(error=str(error))] * len(captures)

    def _call(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        report = list(self._consumer.consume(captures))
        if len(report) != len(captures) or not all(
            isinstance(outcome, Outcome) for outcome in report
        ):
            raise TypeError(
                f"consume() must return one Outcome per capture: {len(report)} returned for "
                f"{len(captures)}"
            )
        # files and rows are for those built in
        return [Outcome(error=outcome.error) for outcome in report]


def _copy(capture: FinishedCapture) -> FinishedCapture:
    """A copy with separate lists and specs, so that a consumer's changes have no effect elsewhere.

    The rows are read-only anyway.
    """
    return dataclasses.replace(
        capture,
        spec=copy.deepcopy(capture.spec),
        capture=copy.deepcopy(capture.capture),
        sites={hook: list(layers) for hook, layers in capture.sites.items()},
        positions=list(capture.positions),
        token_ids=list(capture.token_ids),
        rows=lambda hook, layer: [buffer.toreadonly() for buffer in capture.rows(hook, layer)],
    )


@functools.cache
def installed() -> dict[str, Installed]:
    """The consumers of other packages by name, made once per process.

    One that cannot be loaded or made is logged and left out.
    """
    consumers: dict[str, Installed] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name in (*BUILT_IN, HARVEST, READER) or entry.name in consumers:
            logger.error(
                "capture consumer %s of %s skipped: the name is already in use",
                entry.name,
                entry.value,
            )
            continue
        try:
            make: Callable[[], Consumer] = entry.load()
            consumers[entry.name] = Installed(entry.name, make())
        except KeyboardInterrupt:
            raise
        except BaseException:  # a module that calls sys.exit() must not end the rank
            logger.exception(
                "capture consumer %s (%s) skipped: it cannot be loaded", entry.name, entry.value
            )
    return consumers


def available() -> list[str]:
    """The names that a capture may give its rows to, in this process."""
    return [*BUILT_IN, *sorted(installed())]
