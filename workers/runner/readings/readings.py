"""Readings: computes what requests ask of captured rows, in the writer threads, with modules of the
loaded model.

Readers run next to the engine's forward passes. They take part in no collective call: a reading
that needs every rank of a stage is computed in parts, which the host joins
(`StoredCapture.everywhere`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ....schemas.base.dtypes import DTYPES
from ....schemas.base.records import to_msgpack
from ....schemas.readings.readings import Part
from ....schemas.requests.specs import RankSpec
from ..files.finished_rows import FinishedCapture, Outcome, ReadingError

logger = logging.getLogger(__name__)
#: Bytes of a part apart from what its `size` counts: names, layers, and what MessagePack adds.
HEADER_BYTES = 1 << 14


#: (the capture, with its reading; its index in `RankSpec.captures`) → the rank's part. Raises
#: ReadingError, or anything.
Reader = Callable[[FinishedCapture, int], Part]


@runtime_checkable
class Preparing(Protocol):
    """A reader that needs something of other ranks."""

    def prepare(self, reading: Any) -> Any:
        """Return what `FinishedCapture.prepared` should be.

        Called when a request begins, by every rank of the stage in the same step, so that it may
        make collective calls; whether it raises must not depend on the rank.
        """


class Readings:
    """The consumer of captures that are read instead of stored. Called from writer threads."""

    def __init__(self, readers: Mapping[type, Reader], limit: int) -> None:
        """`readers`: by the type of `StoredCapture.reading`. `limit`: bytes of a part."""
        self._readers, self._limit = dict(readers), limit
        item: Mapping[type, object] = readers
        self._preparing = {
            kind: reader for kind, reader in item.items() if isinstance(reader, Preparing)
        }

    def prepare(self, spec: RankSpec) -> tuple[dict[int, Any], str]:
        """Return what readers need of other ranks, by the capture's number; and why there is none,
        which is the same on every rank.

        Called by every rank of the stage in the same step.
        """
        made: dict[int, Any] = {}
        try:
            for number, capture in enumerate(spec.captures):
                if (reader := self._preparing.get(type(capture.reading))) is not None:
                    made[number] = reader.prepare(capture.reading)
        except Exception as error:
            logger.exception("request %s: its reading cannot be prepared", spec.key)
            return {}, f"{type(error).__name__}: {error}"
        return made, ""

    def reader(self, kind: type) -> Reader | None:
        """The reader of this type of `StoredCapture.reading`."""
        return self._readers.get(kind)

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """One outcome per capture: a reading that fails is its own request's affair."""
        return [self._consume(capture) for capture in captures]

    def _consume(self, capture: FinishedCapture) -> Outcome:
        try:
            return Outcome(rows=self._read(capture))
        except ReadingError as error:
            return Outcome(error=str(error))
        except Exception as error:
            return Outcome(error=f"{type(error).__name__}: {error}")

    def _read(self, capture: FinishedCapture) -> bytes:
        needed = capture.capture
        reader = self._readers.get(type(needed.reading))
        if reader is None or needed.reading is None:
            raise ReadingError(f"this rank has no reader for {type(needed.reading).__name__}")
        if capture.dropped:
            raise ReadingError(
                f"rows of {len(capture.dropped)} positions were dropped under overload"
            )
        if capture.unsound is not None:
            hook, layer, position = capture.unsound
            raise ReadingError(
                f"the row at {hook} of layer {layer}, position {position}, is not finite"
            )
        size = needed.reading.size(len(capture.positions), sum(map(len, capture.sites.values())))
        if size > self._limit:
            raise ReadingError(
                f"{size} bytes exceed the response limit of {self._limit} ({self._limit >> 10} "
                "KiB, memory_limit_kib)"
            )
        with torch.inference_mode():
            raw = to_msgpack(reader(capture, index_of(capture)))
        if len(raw) > size + HEADER_BYTES:
            raise ReadingError(f"the answer has {len(raw)} bytes, but at most {size} were admitted")
        return raw


def index_of(capture: FinishedCapture) -> int:
    """Its place among the request's captures."""
    return capture.spec.captures.index(capture.capture)


def rows_of(capture: FinishedCapture, hook: str, layer: int, device: Any = "cpu") -> torch.Tensor:
    """`[positions, hidden]` of one site in the dtype that they were captured in, in memory of their
    own, on `device`.
    """
    raw = np.frombuffer(b"".join(capture.rows(hook, layer)), dtype=DTYPES[capture.dtype].raw).copy()
    held = (
        torch.from_numpy(raw)
        .view(getattr(torch, capture.dtype))
        .view(len(capture.positions), capture.hidden_size)
    )
    return held.to(device)


def array(values: torch.Tensor, dtype: torch.dtype) -> bytes:
    """The values as a part holds them: little-endian, in C order."""
    raw: bytes = values.to(dtype).cpu().contiguous().numpy().tobytes()
    return raw
