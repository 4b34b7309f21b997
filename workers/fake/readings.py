"""Readings of the engine without a model: numbers that follow from token, layer and position alone."""

from collections.abc import Sequence

import numpy as np

from ...schemas.base import to_msgpack
from ...schemas.readings import LensPart, StoredLens
from ..runner.finished import FinishedCapture, Outcome
from .model import VOCABULARY


class FakeReadings:
    """The consumer of captures that are read."""

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        return [self._read(capture) for capture in captures]

    def _read(self, capture: FinishedCapture) -> Outcome:
        wanted = capture.capture.reading
        assert isinstance(wanted, StoredLens)
        ((hook, layers),) = capture.sites.items()
        tokens = np.array(capture.token_ids, dtype=np.int64)
        first = (tokens[None] + np.array(layers)[:, None] + 1) % VOCABULARY
        places = np.arange(wanted.top_k)
        part = LensPart(
            capture=capture.spec.captures.index(capture.capture),
            shard=0,
            shards=1,
            hook=hook,  # type: ignore[arg-type]
            layers=layers,
            positions=capture.positions,
            token_ids=capture.token_ids,
            named=wanted.tokens,
            top=((first[..., None] + places) % VOCABULARY).astype("<i4").tobytes(),
            logits=np.broadcast_to(-places.astype("<f4"), (*first.shape, wanted.top_k)).tobytes(),
            total=np.zeros(first.shape, dtype="<f4").tobytes(),
            named_logits=np.full((*first.shape, len(wanted.tokens)), -5.0, dtype="<f4").tobytes(),
            above=np.full((*first.shape, len(wanted.tokens)), 4, dtype="<i4").tobytes(),
        )
        return Outcome(rows=to_msgpack(part))
