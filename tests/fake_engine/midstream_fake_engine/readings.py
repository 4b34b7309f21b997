"""Readings of the engine without a model: numbers that follow from token, layer and position
alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.readings.features import FeaturesPart, StoredFeatures
from midstream.schemas.readings.installed import StoredReader
from midstream.schemas.readings.lens import LensPart, StoredLens
from midstream.schemas.settings.settings import Settings
from midstream.workers.runner.base.extensions import ExtensionError, named, trusted
from midstream.workers.runner.files.finished_rows import (
    FinishedCapture,
    Outcome,
    ReadingError,
)
from midstream.workers.runner.readings.installed_readers import (
    InstalledReaders,
    LoadedReader,
    load_readers,
)

from .model import HIDDEN_SIZE, NUM_LAYERS, VOCABULARY


def loaded(settings: Settings) -> dict[str, LoadedReader]:
    """Installed readers, as a rank loads them. Raises MidstreamError."""
    try:
        return load_readers(trusted(named(settings.extensions)), HIDDEN_SIZE, NUM_LAYERS, HOOKS)
    except ExtensionError as error:
        raise MidstreamError("engine_failed", str(error)) from error


class FakeReadings:
    """The consumer of captures that are read: installed readers read the fake rows."""

    def __init__(self, installed: Mapping[str, LoadedReader]) -> None:
        self._installed = InstalledReaders(installed)

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        return [self._read(capture) for capture in captures]

    def _read(self, capture: FinishedCapture) -> Outcome:
        if isinstance(capture.capture.reading, StoredReader):
            try:
                return Outcome(
                    rows=to_msgpack(
                        self._installed(capture, capture.spec.captures.index(capture.capture))
                    )
                )
            except ReadingError as error:
                return Outcome(error=str(error))
        reading = capture.capture.reading
        if isinstance(reading, StoredFeatures):
            return Outcome(rows=to_msgpack(_features(capture, reading)))
        assert isinstance(reading, StoredLens)
        ((hook, layers),) = capture.sites.items()
        tokens = np.array(capture.token_ids, dtype=np.int64)
        first = (tokens[None] + np.array(layers)[:, None] + 1) % VOCABULARY
        places = np.arange(reading.top_k)
        part = LensPart(
            capture=capture.spec.captures.index(capture.capture),
            shard=0,
            shards=1,
            hook=hook,  # type: ignore[arg-type]
            layers=layers,
            positions=capture.positions,
            token_ids=capture.token_ids,
            named=reading.tokens,
            top=((first[..., None] + places) % VOCABULARY).astype("<i4").tobytes(),
            logits=np.broadcast_to(-places.astype("<f4"), (*first.shape, reading.top_k)).tobytes(),
            total=np.zeros(first.shape, dtype="<f4").tobytes(),
            named_logits=np.full((*first.shape, len(reading.tokens)), -5.0, dtype="<f4").tobytes(),
            above=np.full((*first.shape, len(reading.tokens)), 4, dtype="<i4").tobytes(),
        )
        return Outcome(rows=to_msgpack(part))


def _features(capture: FinishedCapture, stored_features: StoredFeatures) -> FeaturesPart:
    """Feature n + i of token n has the activation 1 / (i + 1); all but the first half of what was
    asked for are inactive.
    """
    ((hook, (layer,)),) = capture.sites.items()
    places = np.arange(stored_features.top_k)
    count = len(capture.positions)
    present = places < -(-stored_features.top_k // 2)
    tokens = np.array(capture.token_ids, dtype="<i4").reshape(count, 1)
    return FeaturesPart(
        capture=capture.spec.captures.index(capture.capture),
        sae=stored_features.sae.name,
        digest=stored_features.sae.digest,
        hook=hook,  # type: ignore[arg-type]
        layer=layer,
        positions=capture.positions,
        token_ids=capture.token_ids,
        indices=np.where(present, tokens + places, -1).astype("<i4").tobytes(),
        activations=np.broadcast_to(
            np.where(present, 1 / (places + 1), 0).astype("<f4"), (count, stored_features.top_k)
        ).tobytes(),
        active=np.full(count, present.sum(), dtype="<i4").tobytes(),
        errors=np.full(count, 0.25, dtype="<f4").tobytes(),
    )
