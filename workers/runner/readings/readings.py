"""Readings: computes the results that requests want from captured rows, in threads of the writer
that do nothing else, with modules of the loaded model.

Captures handle chunks, preemption, kept rows, drafts and graphs; a reading in the forward pass
would need each case again, and would delay the step of all requests. Its answer is in the receipt,
so that one that fails cannot go unnoticed.

Readers run next to the engine's forward passes. They take part in no collective call: a reading
that needs every rank of a stage is computed in parts, which the host joins
(`StoredCapture.everywhere`).
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ....schemas.base.dtypes import DTYPES
from ....schemas.base.records import Wire, to_msgpack
from ....schemas.requests.specs import RankSpec
from ..files.finished_rows import FinishedCapture, Outcome, ReadingError

logger = logging.getLogger(__name__)
#: Bytes of a part that `size` does not count: names, layers, and MessagePack's framing.
HEADER_BYTES = 1 << 14
_OF_THREAD = threading.local()


#: (the capture, with its reading; its index in `RankSpec.captures`) → the rank's part. Raises
#: ReadingError, or any other exception.
Reader = Callable[[FinishedCapture, int], Wire]


@runtime_checkable
class Preparing(Protocol):
    """A reader that must prepare a request, for example because it needs data of other ranks."""

    def prepare(self, reading: Any) -> Any:
        """Return the value of `FinishedCapture.prepared`.

        Called when a request begins, by every rank of the stage in the same step, so that it may
        make collective calls; whether it raises must not depend on the rank.
        """


class ReadingConsumer:
    """Consumes captures that are read instead of stored. Called from writer threads."""

    def __init__(self, readers: Mapping[type, Reader], limit: int) -> None:
        """`readers`: by the type of `StoredCapture.reading`. `limit`: bytes of a part."""
        self._readers = dict(readers)
        self._limit = limit
        by_type: Mapping[type, object] = readers
        self._preparing = {
            kind: reader for kind, reader in by_type.items() if isinstance(reader, Preparing)
        }

    def prepare(self, spec: RankSpec) -> tuple[dict[int, Any], str]:
        """Return what the readers prepared, by the capture's number, and why that failed: the same
        reason on every rank, or empty.

        Called by every rank of the stage in the same step.
        """
        try:
            return {
                number: reader.prepare(capture.reading)
                for number, capture in enumerate(spec.captures)
                if (reader := self._preparing.get(type(capture.reading))) is not None
            }, ""
        except Exception as error:
            logger.exception("request %s: its reading cannot be prepared", spec.key)
            return {}, f"{type(error).__name__}: {error}"

    def reader(self, kind: type) -> Reader | None:
        """Return the reader of this type of `StoredCapture.reading`."""
        return self._readers.get(kind)

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """Return one outcome per capture: a failed reading fails only its own request."""
        return [self._consume(capture) for capture in captures]

    def _consume(self, capture: FinishedCapture) -> Outcome:
        try:
            return Outcome(rows=self._read(capture))
        except ReadingError as error:
            return Outcome(error=str(error))
        except Exception as error:
            return Outcome(error=f"{type(error).__name__}: {error}")

    def _read(self, capture: FinishedCapture) -> bytes:
        stored = capture.capture
        reader = self._readers.get(type(stored.reading))
        if reader is None or stored.reading is None:
            raise ReadingError(f"this rank has no reader for {type(stored.reading).__name__}")
        if capture.dropped:
            raise ReadingError(
                f"rows of {len(capture.dropped)} positions were dropped under overload"
            )
        if capture.unsound is not None:
            hook, layer, position = capture.unsound
            raise ReadingError(
                f"the row at {hook} of layer {layer}, position {position}, is not finite"
            )
        size = stored.reading.size(len(capture.positions), sum(map(len, capture.sites.values())))
        if size > self._limit:
            raise ReadingError(
                f"{size} bytes exceed the response limit of {self._limit} ({self._limit >> 10} "
                "KiB, tuning.memory_limit_kib)"
            )
        with torch.inference_mode():
            raw = to_msgpack(reader(capture, index_of(capture)))
        if len(raw) > size + HEADER_BYTES:
            raise ReadingError(f"the answer has {len(raw)} bytes, but at most {size} were admitted")
        return raw


def index_of(capture: FinishedCapture) -> int:
    """Return the capture's index in `RankSpec.captures`."""
    return capture.spec.captures.index(capture.capture)


def rows_of(capture: FinishedCapture, hook: str, layer: int, device: Any = "cpu") -> torch.Tensor:
    """Return a copy of a site's rows `[positions, hidden]` on `device`, in the capture's dtype."""
    raw = np.frombuffer(b"".join(capture.rows(hook, layer)), dtype=DTYPES[capture.dtype].raw).copy()
    held = (
        torch.from_numpy(raw)
        .view(getattr(torch, capture.dtype))
        .view(len(capture.positions), capture.hidden_size)
    )
    return held.to(device)


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Run the block on this thread's stream of an accelerator, so that the forward pass does not
    wait.

    cuBLAS keeps a workspace for each stream that it has seen, so a thread has only one.
    """
    if device.type != "cuda":
        return nullcontext()
    if not hasattr(_OF_THREAD, "stream"):
        _OF_THREAD.stream = torch.cuda.Stream(device)
    context: AbstractContextManager[Any] = torch.cuda.stream(_OF_THREAD.stream)
    return context


def array(values: torch.Tensor, dtype: torch.dtype) -> bytes:
    """Return the bytes of values as a part holds them: little-endian, in C order."""
    data: bytes = values.to(dtype).cpu().contiguous().numpy().tobytes()
    return data
