"""Features of captured rows on a rank: its loaded autoencoders, and the reader that encodes rows
with them.

Autoencoders are held in float32 where the model is, and encode in the writer threads. On an
accelerator an autoencoder for which there is no room is held in host memory, and encodes on the
CPU.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from ....schemas.readings.features import FeaturesPart, StoredFeatures
from ..files.finished_rows import FinishedCapture, ReadingError
from .readings import own_stream, rows_of
from .sae import CHUNK_BYTES, Autoencoder, load

_CPU = torch.device("cpu")
#: Bytes of an accelerator that autoencoders leave free: for encoding, which needs a few dense
#: chunks in each writer thread, and for what vLLM takes outside its own pool.
_ROOM_BYTES = 32 * CHUNK_BYTES


class FeatureReader:
    """The reader of `StoredFeatures`. One per rank."""

    def __init__(self, sites: Collection[tuple[str, int]], device: torch.device = _CPU) -> None:
        """`sites`: (hook, layer) whose rows this rank reads; autoencoders of other sites are not
        loaded. `device`: of the model.
        """
        self._sites = frozenset(sites)
        self._device = device
        self._loaded: dict[str, Autoencoder] = {}

    def put(self, digest: str, hook: str, layer: int, folder: str) -> None:
        """Load the autoencoder in `folder` if this rank reads rows for it. Raises SaeError, also if
        its content has another digest.
        """
        if (hook, layer) in self._sites:
            self._loaded[digest] = self._placed(load(Path(folder), digest))

    def _placed(self, sae: Autoencoder) -> Autoencoder:
        """Return the autoencoder on the device, if that leaves `_ROOM_BYTES` there."""
        if self._device.type != "cuda":
            return sae
        free, _ = torch.cuda.mem_get_info(self._device)
        if free >= sae.bytes + _ROOM_BYTES:
            sae = sae.to(self._device)
            # writers read it on their own streams
            torch.cuda.current_stream(self._device).synchronize()
        return sae

    def drop(self, digests: Sequence[str]) -> None:
        """Drop autoencoders; requests that have begun keep theirs."""
        for digest in digests:
            self._loaded.pop(digest, None)

    def prepare(self, reading: StoredFeatures) -> Autoencoder | None:
        """Return the autoencoder, which the request then keeps; None if it is not loaded here."""
        return self._loaded.get(reading.sae.digest)

    def __call__(self, capture: FinishedCapture, number: int) -> FeaturesPart:
        """Encode every row of the capture. `number`: index of the capture in the request."""
        reading = capture.capture.reading
        sae = capture.prepared
        assert isinstance(reading, StoredFeatures)
        if sae is None:
            raise ReadingError(
                f"the sparse autoencoder {reading.sae.name!r} ({reading.sae.digest[:12]}) is not "
                "loaded"
            )
        ((hook, (layer,)),) = capture.sites.items()
        with own_stream(sae.device):
            top = sae.top(rows_of(capture, hook, layer, sae.device), reading.top_k)
        return FeaturesPart(
            capture=number,
            sae=reading.sae.name,
            digest=reading.sae.digest,
            hook=hook,  # type: ignore[arg-type]
            layer=layer,
            positions=capture.positions,
            token_ids=capture.token_ids,
            indices=top.indices.tobytes(),
            activations=top.activations.tobytes(),
            active=top.active.tobytes(),
            errors=top.errors.tobytes(),
        )
