"""Joins what ranks computed of captured rows (`schemas.readings`) into results, prompt by
prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....schemas.base.records import by_key
from ....schemas.jobs.receipts import Receipt
from ....schemas.readings.features import FeaturesPart, FeaturesReading
from ....schemas.readings.installed import ReaderPart, ReaderReading, ReaderResult
from ....schemas.readings.lens import LensPart, LensReading
from ....schemas.readings.readings import part_decoder
from ....schemas.readings.stored import READER


def readings(ticket: Sequence[Receipt]) -> dict[str, list[Any]]:
    """Return field of a result → its complete readings, whose parts have all arrived, by prompt."""
    of_one: dict[tuple[int, int, type], list[Any]] = by_key(
        ((receipt.request, part.capture, type(part)), part)
        for receipt in ticket
        for made in receipt.consumed
        if made.name == READER and made.ok
        for part in [part_decoder.decode(made.rows)]
    )
    result: dict[str, list[Any]] = {}
    for request, capture, kind in sorted(of_one, key=lambda key: key[:2]):
        field, join = JOINS[kind]
        parts = of_one[request, capture, kind]
        if (joined := join(request, parts)) is not None:
            result.setdefault(field, []).append(joined)
    return result


def join_lens(request: int, parts: Sequence[LensPart]) -> LensReading | None:
    """Return the reading over all shards of the vocabulary; None while a shard is missing."""
    if {part.shard for part in parts} != set(range(parts[0].shards)):
        return None
    first = parts[0]
    shape = len(first.layers), len(first.positions)
    total = np.logaddexp.reduce(
        [_array(part.total, "<f4", shape).astype(np.float64) for part in parts]
    )
    ids = np.concatenate([_array(part.top, "<i4", (*shape, -1)) for part in parts], axis=-1)
    logits = np.concatenate([_array(part.logits, "<f4", (*shape, -1)) for part in parts], axis=-1)
    most = max((len(part.top) for part in parts), default=0) // (4 * max(1, shape[0] * shape[1]))
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :most]
    named = (*shape, len(first.named))
    own = _array(first.named_logits, "<f4", named)
    return LensReading(
        **_same(first, "hook", "layers", "positions", "token_ids"),
        request=request,
        top_tokens=np.take_along_axis(ids, order, axis=-1).tolist(),
        top_logprobs=(np.take_along_axis(logits, order, axis=-1) - total[..., None])
        .astype(np.float32)
        .tolist(),
        named_tokens=first.named,
        named_ranks=np.sum([_array(part.above, "<i4", named) for part in parts], axis=0).tolist()
        if first.named
        else [],
        named_logprobs=(own - total[..., None]).astype(np.float32).tolist() if first.named else [],
    )


def join_reader(request: int, parts: Sequence[ReaderPart]) -> ReaderReading | None:
    """Return the stages' parts in the order of their layers; None while a part is missing."""
    if sum(len(layers) for part in parts for layers in part.sites.values()) < parts[0].of:
        return None
    first = parts[0]
    ordered = sorted(parts, key=lambda part: min(layers[0] for layers in part.sites.values()))
    return ReaderReading(
        **_same(first, "name", "package", "version", "digest", "options"),
        request=request,
        parts=[
            ReaderResult(**_same(part, "sites", "positions", "token_ids", "arrays"))
            for part in ordered
        ],
    )


def join_features(request: int, parts: Sequence[FeaturesPart]) -> FeaturesReading:
    """Return the reading of the only part: one rank computes all features of a layer."""
    part = parts[0]
    count = len(part.positions)
    indices = (
        np.frombuffer(part.indices, "<i4").reshape(count, -1) if count else np.zeros((0, 0), "<i4")
    )
    activations = np.frombuffer(part.activations, "<f4").reshape(indices.shape)
    rows = [(own >= 0, own, values) for own, values in zip(indices, activations, strict=True)]
    return FeaturesReading(
        **_same(part, "sae", "digest", "hook", "layer", "positions", "token_ids"),
        request=request,
        features=[own[present].tolist() for present, own, _ in rows],
        activations=[values[present].tolist() for present, _, values in rows],
        active=np.frombuffer(part.active, "<i4").tolist(),
        errors=np.frombuffer(part.errors, "<f4").tolist(),
    )


def _same(part: Any, *names: str) -> dict[str, Any]:
    """Return the fields that a reading copies from its part."""
    return {name: getattr(part, name) for name in names}


def _array(raw: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if shape[-1] == -1:
        rows = shape[0] * shape[1]
        shape = (*shape[:-1], len(raw) // (4 * rows) if rows else 0)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


#: Type of a part → the result's field, and how the parts of one reading are joined.
JOINS: dict[type, tuple[str, Callable[[int, Sequence[Any]], Any]]] = {
    LensPart: ("lens", join_lens),
    FeaturesPart: ("features", join_features),
    ReaderPart: ("readers", join_reader),
}
