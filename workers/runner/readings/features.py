"""Features of captured rows on a rank: the autoencoders that it holds, and the reader that encodes
with them.

Autoencoders are in float32 in host memory, and encode on the CPU, in the writer threads.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from ....schemas.readings.features import FeaturesPart, StoredFeatures
from ..files.finished_rows import FinishedCapture, ReadingError
from .readings import array, rows_of
from .sae import Autoencoder, load


class Features:
    """The reader of `StoredFeatures`. One per rank."""

    def __init__(self, sites: Collection[tuple[str, int]]) -> None:
        """`sites`: (hook, layer) of which this rank reads rows; autoencoders of others are not
        loaded.
        """
        self._sites = frozenset(sites)
        self._loaded: dict[str, Autoencoder] = {}

    def put(self, digest: str, hook: str, layer: int, folder: str) -> None:
        """Load the autoencoder in `folder`, which must have this content, if this rank reads rows
        for it. Raises SaeError.
        """
        if (hook, layer) in self._sites:
            self._loaded[digest] = load(Path(folder), digest)

    def drop(self, digests: Sequence[str]) -> None:
        """Requests that have begun keep theirs."""
        for digest in digests:
            self._loaded.pop(digest, None)

    def prepare(self, reading: StoredFeatures) -> Autoencoder | None:
        """Kept for the request from its beginning; None on ranks that read no rows for it."""
        return self._loaded.get(reading.sae.digest)

    def __call__(self, capture: FinishedCapture, number: int) -> FeaturesPart:
        """Encodes every row of the capture. `number`: its place among the request's captures."""
        reading, sae = capture.capture.reading, capture.prepared
        assert isinstance(reading, StoredFeatures)
        if sae is None:
            raise ReadingError(
                f"the sparse autoencoder {reading.sae.name!r} ({reading.sae.digest[:12]}) is not "
                "loaded"
            )
        ((hook, (layer,)),) = capture.sites.items()
        top = sae.top(rows_of(capture, hook, layer), reading.top_k)
        return FeaturesPart(
            capture=number,
            sae=reading.sae.name,
            digest=reading.sae.digest,
            hook=hook,  # type: ignore[arg-type]
            layer=layer,
            positions=capture.positions,
            token_ids=capture.token_ids,
            indices=array(torch.from_numpy(top.indices), torch.int32),
            activations=array(torch.from_numpy(top.activations), torch.float32),
            active=array(torch.from_numpy(top.active), torch.int32),
            errors=array(torch.from_numpy(top.errors), torch.float32),
        )
