"""Affine maps of tuned lenses on a rank, read from their files layer by layer.

A file that changed since it was registered fails the reading: its digest is compared whenever the
file's state differs from the last check.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ....schemas.artifacts.tuned_lenses import StoredTuned
from ....schemas.base.errors import MidstreamError, Translated
from ....storage.formats.lens_files import folder_of, map_of, reading
from ....storage.formats.tensor_files import TensorFile, TensorFileError
from ..files.finished_rows import ReadingError

#: (rows `[positions, hidden]`, layer) → mapped rows, float32.
RowMap = Callable[[torch.Tensor, int], torch.Tensor]


class TunedMaps:
    """Tuned lenses of one rank. Called from writer threads."""

    def __init__(self, root: str) -> None:
        """`root`: the folder of lenses."""
        self._root = root
        self._known: dict[str, tuple[int, int, int]] = {}  # digest → state of the checked file

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
            reading(folder_of(self._root, tuned.path)) as file,
        ):
            self._check(tuned, file)
            yield lambda rows, layer: _mapped(rows, file, layer, residual=tuned.residual)

    def _check(self, tuned: StoredTuned, file: TensorFile) -> None:
        if self._known.get(tuned.digest) == file.state:
            return
        if (result := file.digest().hex()) != tuned.digest:
            raise TensorFileError(
                f"its file has changed since it was registered (now {result[:12]}): register it "
                "again"
            )
        self._known[tuned.digest] = file.state


def _mapped(rows: torch.Tensor, file: TensorFile, layer: int, *, residual: bool) -> torch.Tensor:
    """Return W h + b in float32, or with `residual` h + W h + b."""
    weight, bias = (
        torch.from_numpy(values.copy()).to(rows.device) for values in map_of(file, layer)
    )
    wide = rows.float()
    product = wide @ weight.T + bias
    return wide + product if residual else product
