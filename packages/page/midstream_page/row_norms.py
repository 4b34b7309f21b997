"""Computes norms of captured rows, and their cosines to vectors, in float32 and a block of rows at
a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from midstream.api.responses.packed import OpenBlob, blocks, join
from midstream.broker.artifacts.headers import must_be_there
from midstream.schemas.base.dtypes import DTYPE_OF_FILE, DTYPES, widened
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.jobs.captures import Manifest
from midstream.storage.store import ArtifactStore

#: Significant decimal digits that name a float32 uniquely.
DIGITS = 9
Values = list[float | None]


@dataclass(frozen=True)
class Measured:
    """`norms`, `cosines`: for each layer, a value for each row; see
    `records.CaptureNorms`.
    """

    manifest: Manifest
    width: int
    norms: list[Values]
    cosines: list[Values | None]


def measured(
    store: ArtifactStore,
    blobs: Sequence[OpenBlob],
    hook: str,
    layers: Sequence[int],
    rows: Callable[[Manifest], range],
    vectors: Mapping[int, np.ndarray],
) -> Measured:
    """Measure one request's blobs.

    `rows`: selects the rows to measure; `vectors`: layer → `[width]` float32.

    Raises MidstreamError: like `packed.join`; `capture_failed` if the files cannot be read; `gone`
    when the captures were deleted meanwhile; 400 for a vector of another width.
    """
    joined = join(blobs, {hook: list(layers)})
    chosen = rows(blobs[0].header.manifest)
    norms: list[Values] = []
    cosines: list[Values | None] = []
    width = 0
    for layer, part in zip(
        layers, joined.parts, strict=False
    ):  # `parts` ends with positions and token ids
        width = sum(tensor.shape[1] for _, tensor in part)
        dtype = DTYPE_OF_FILE[part[0][1].dtype]
        vector = vectors.get(layer)
        if vector is not None and vector.shape != (width,):
            detail = (
                f"has a vector of {vector.shape[-1]} elements at layer {layer}, but rows of "
                f"{hook} have {width}"
            )
            raise invalid("module", detail)
        result: tuple[Values, Values] = ([], [])
        try:
            for block in blocks(part, chosen.start, len(chosen)):
                numbers = np.asarray(
                    widened(block.view(np.dtype(DTYPES[dtype].raw)), dtype), np.float32
                )
                for values, more in zip(result, of_rows(numbers, vector), strict=True):
                    values += more
        except (OSError, EOFError) as error:
            raise MidstreamError(
                "capture_failed", f"the rows of {hook}.{layer} cannot be read: {error}"
            ) from error
        norms.append(result[0])
        cosines.append(result[1] if vector is not None else None)
    must_be_there(store, blobs[0].place.job)
    return Measured(blobs[0].header.manifest, width, norms, cosines)


def of_rows(rows: np.ndarray, vector: np.ndarray | None) -> tuple[Values, Values]:
    """Return the norms of float32 rows `[n, width]`, and their cosines to `vector`, float32
    `[width]`.
    """
    with np.errstate(all="ignore"):  # non-finite values are answered as null
        norms = np.linalg.norm(rows, axis=1)
        cosines = (
            np.empty(0, np.float32)
            if vector is None
            else (rows * vector).sum(axis=1) / (norms * np.linalg.norm(vector))
        )
    return _values(norms), _values(cosines)


def _values(numbers: np.ndarray) -> Values:
    """Round values to `DIGITS` digits, which name the same float32; None if not finite."""
    return [
        float(f"{number:.{DIGITS}g}") if finite else None
        for number, finite in zip(numbers, np.isfinite(numbers), strict=True)
    ]
