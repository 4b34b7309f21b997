"""Affine maps of tuned lenses on a rank, read from their files layer by layer.

A file that changed since it was registered fails the reading.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ....schemas.artifacts.tuned_lenses import StoredTuned
from ....schemas.base.errors import MidstreamError, Translated
from ....storage.formats.lens_files import LensFiles, map_of
from ....storage.formats.tensor_files import TensorFile, TensorFileError
from ..files.finished_rows import ReadingError

#: (rows `[positions, hidden]`, layer) → mapped rows, float32.
RowMap = Callable[[torch.Tensor, int], torch.Tensor]


class TunedMaps:
    """Tuned lenses of one rank. Called from writer threads."""

    def __init__(self, root: str) -> None:
        """`root`: the folder of lenses."""
        self._files = LensFiles(root)

    @contextmanager
    def of(self, tuned: StoredTuned | None) -> Iterator[RowMap]:
        """Yield the maps of a tuned lens; without one, the identity. Raises ReadingError."""
        if tuned is None:
            yield lambda rows, _: rows
            return
        with (
            Translated(
                (TensorFileError, MidstreamError),
                lambda error: ReadingError(
                    f"tuned lens {tuned.name!r} ({tuned.digest[:12]}): {error}"
                ),
            ),
            self._files.reading(tuned) as file,
        ):
            yield lambda rows, layer: _mapped(rows, file, layer, residual=tuned.residual)


def _mapped(rows: torch.Tensor, file: TensorFile, layer: int, *, residual: bool) -> torch.Tensor:
    """Return W h + b in float32, or with `residual` h + W h + b."""
    weight, bias = (
        torch.from_numpy(values.copy()).to(rows.device) for values in map_of(file, layer)
    )
    wide = rows.float()
    product = wide @ weight.T + bias
    return wide + product if residual else product
