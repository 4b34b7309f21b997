"""Consumers of captured rows: built in, or offered by other packages under an entry point.

A package offers a consumer by an entry point of the group `midstream.capture_consumers`, which has
the consumer's name. The entry point's object is a class or function that is called without
arguments, once per process, and returns a `Consumer`. See `docs/capture.md`.
"""

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

import numpy as np

from ....schemas.base.dtypes import DTYPES, widened
from ....schemas.packages import offered
from ....schemas.readings.stored import READER
from ....schemas.requests.specs import memory_bytes
from ..base.helper_threads import HelperThread, LateError
from .finished_rows import Consumer, FinishedCapture, Outcome
from .layouts import blob_of

logger = logging.getLogger(__name__)
#: The logger of the consumer `logging`.
lines = logging.getLogger("midstream.captures")

ENTRY_POINTS = "midstream.capture_consumers"
#: Entry points of consumers that no request may name: a package's own jobs do, with a place for the
#: rows (`StoredCapture.place`). They may return files, and a failure fails the capture.
PLACING = "midstream.placing_consumers"
BUILT_IN = ("filesystem", "memory", "logging")  # built-in consumers that requests may name
#: Seconds that an installed consumer may take for a group; then the writer continues without it.
PATIENCE_S = 10.0


@dataclasses.dataclass(eq=False)
class MemoryConsumer:
    """The consumer `memory`: returns the rows in the receipt, as a safetensors blob, and writes
    nothing.
    """

    _limit: int  # bytes of one capture, counted by `memory_bytes` as at its admission

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
                f"({self._limit >> 10} KiB, tuning.memory_limit_kib)"
            )
        )


class Logging:
    """The consumer `logging`: logs one line per capture, with the norms of its first and last row
    at every site.
    """

    def __init__(self) -> None:
        if not lines.hasHandlers():  # vLLM's rank processes only configure vLLM's own loggers
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
    """Return `post_block.3 |first| … |last|` for each site."""
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
    """Return one site's rows as a new array `[positions, hidden_size]`; bfloat16 is widened to
    float32.
    """
    held = b"".join(capture.rows(hook, layer)) if capture.positions else b""
    rows = widened(np.frombuffer(held, dtype=DTYPES[capture.dtype].raw), capture.dtype)
    return rows.reshape(len(capture.positions), capture.hidden_size)


class Installed:
    """An installed consumer, called in its own thread, so that neither its exceptions nor its
    duration can stop the writers.
    """

    def __init__(self, name: str, consumer: Consumer, patience_s: float = PATIENCE_S) -> None:
        self._consumer = consumer
        self.thread = HelperThread(f"capture consumer {name}", self._call, patience_s)

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """Pass copies of the captures to the consumer. Raises what the consumer raises, and
        TypeError if it does not return one outcome per capture.
        """
        try:
            return self.thread.ask([_copy(capture) for capture in captures])
        except LateError as error:
            return [Outcome(error=str(error))] * len(captures)

    def _call(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        outcomes = list(self._consumer.consume(captures))
        if len(outcomes) != len(captures) or not all(
            isinstance(outcome, Outcome) for outcome in outcomes
        ):
            raise TypeError(
                f"consume() must return one Outcome per capture: {len(outcomes)} returned for "
                f"{len(captures)}"
            )
        # only built-in consumers may return files and rows
        return [Outcome(error=outcome.error) for outcome in outcomes]


def _copy(capture: FinishedCapture) -> FinishedCapture:
    """Return a copy with separate lists and specs, so that a consumer's changes have no effect
    elsewhere, and read-only rows.
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
    """Return the consumers of other packages by name, created once per process.

    A consumer that cannot be loaded or created is logged and skipped.
    """
    consumers: dict[str, Installed] = {}
    reserved = (*BUILT_IN, *placing(), READER)
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name in reserved or entry.name in consumers:
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


def placing() -> list[str]:
    """Return the names of the consumers that only packages' jobs may use."""
    return offered(PLACING)


def available() -> list[str]:
    """Return the names of the consumers that captures may use in this process."""
    return [*BUILT_IN, *sorted(installed())]
