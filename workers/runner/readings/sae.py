"""Sparse autoencoders in float32: features of rows, as sae-lens computes them.

Sources of the architectures: Bricken et al. 2023 (Towards Monosemanticity); gated, Rajamanoharan et
al. 2024, arXiv:2404.16014; JumpReLU, Rajamanoharan et al. 2024, arXiv:2407.14435; top-k, Gao et al.
2024, arXiv:2406.04093.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from ....schemas.artifacts.saes import SaeForm, StoredSae
from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.requests.interventions import LAYER_NORM_EPS
from ....storage.formats.sae_files import SaeError, folder_of, reading, tensors_of

#: Bytes of dense activations at a time: rows are encoded in chunks of about this size.
CHUNK_BYTES = 32 << 20


class Scaled(NamedTuple):
    """Normalised rows. Their reconstruction, times `scale` plus `shift`, reconstructs the original
    rows.
    """

    rows: torch.Tensor
    scale: torch.Tensor | float
    shift: torch.Tensor | float


def _layer_norm(rows: torch.Tensor) -> Scaled:
    mean = rows.mean(1, keepdim=True)
    centred = rows - mean
    deviation = centred.std(1, keepdim=True)  # with n − 1, as in sae-lens
    return Scaled(centred / (deviation + LAYER_NORM_EPS), deviation, mean)


def _constant_norm(rows: torch.Tensor) -> Scaled:
    factor = rows.shape[1] ** 0.5 / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return Scaled(rows * factor, 1 / factor, 0.0)


NORMALISATIONS: dict[str, Callable[[torch.Tensor], Scaled]] = {
    "none": lambda rows: Scaled(rows, 1.0, 0.0),
    "layer_norm": _layer_norm,
    "constant_norm_rescale": _constant_norm,
}


class TopFeatures(NamedTuple):
    """The `k` most active features of n rows, most active first, padded with index −1 and
    activation 0 where fewer are active.
    """

    indices: np.ndarray  # int32 [n, k]
    activations: np.ndarray  # float32 [n, k]
    active: np.ndarray  # int32 [n]: how many features are active
    errors: np.ndarray  # float32 [n]: ‖row − reconstruction‖ / ‖row‖, of all active features


class Exchange(NamedTuple):
    """A replacement of n rows, in parts: a new row is the old one, plus for each feature
    `change` · `scale` · its decoder row, plus `error`.
    """

    change: torch.Tensor  # [n, d_sae]: of the activations
    scale: torch.Tensor | float  # of the old rows, as `Scaled.scale`
    error: torch.Tensor  # [n, d_in]: the rest


class Autoencoder:
    """One autoencoder. Its tensors are float32, with sae-lens' names and shapes."""

    def __init__(self, form: SaeForm, tensors: Mapping[str, torch.Tensor]) -> None:
        self.form = form
        self._tensors = tensors
        self._bias = tensors["b_dec"] if form.apply_b_dec_to_input else None
        self._lengths = (
            torch.linalg.vector_norm(tensors["W_dec"], dim=1)
            if form.rescale_acts_by_decoder_norm
            else None
        )
        self._opening = tensors["r_mag"].exp() if form.architecture == "gated" else None

    @property
    def device(self) -> torch.device:
        return self._tensors["b_dec"].device

    def to(self, device: torch.device) -> "Autoencoder":
        return Autoencoder(
            self.form, {name: tensor.to(device) for name, tensor in self._tensors.items()}
        )

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows `[n, d_in]` float32 to activations `[n, d_sae]` float32, without chunks."""
        return self._encode(NORMALISATIONS[self.form.normalize_activations](rows).rows)

    def exchange(
        self, rows: torch.Tensor, source: torch.Tensor | None, mean: torch.Tensor | None = None
    ) -> Exchange:
        """Return the parts of replacing rows `[n, d_in]` float32 by `source`, in units of the
        rows' own normalisation.

        `source` None: activations and error become zero, and the biases stay. `mean` `[d_sae]`: the
        new activations, instead of those of `source`.
        """
        scaled = NORMALISATIONS[self.form.normalize_activations](rows)
        active = self._encode(scaled.rows)
        if source is None:
            change = -active
            source = self._tensors["b_dec"] * scaled.scale + scaled.shift
        else:
            change = (self.encode(source) if mean is None else mean) - active
        moved = change if self._lengths is None else change / self._lengths
        error = source - rows - moved @ self._tensors["W_dec"] * scaled.scale
        return Exchange(change, scaled.scale, error)

    def exchanged(self, rows: torch.Tensor, parts: Exchange, feature: int) -> torch.Tensor:
        """Return the rows after one part of their replacement: `feature`'s, or −1 the error."""
        if feature < 0:
            return rows + parts.error
        return rows + parts.change[:, feature, None] * parts.scale * self._direction(feature)

    def _direction(self, feature: int) -> torch.Tensor:
        row = self._tensors["W_dec"][feature]
        return row if self._lengths is None else row / self._lengths[feature]

    def gains(self, slopes: torch.Tensor) -> torch.Tensor:
        """Return `slopes` `[n, d_in]` along the direction of each feature, `[n, d_sae]`."""
        products = slopes @ self._tensors["W_dec"].T
        return products if self._lengths is None else products / self._lengths

    def top(self, rows: torch.Tensor, k: int) -> TopFeatures:
        """Return the most active features of rows `[n, d_in]` of any dtype, encoded in chunks of
        `CHUNK_BYTES`.
        """
        chunks = rows.split(max(1, CHUNK_BYTES // (4 * self.form.d_sae)))
        parts = [self._top(chunk.float(), min(k, self.form.d_sae)) for chunk in chunks]
        indices, activations, active, errors = (
            torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)
        )
        return TopFeatures(indices, activations, active, errors)

    def _top(self, rows: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
        scaled = NORMALISATIONS[self.form.normalize_activations](rows)
        activations = self._encode(scaled.rows)
        values, indices = activations.topk(k, dim=1)
        reconstructed = self.decode(activations) * scaled.scale + scaled.shift
        errors = torch.linalg.vector_norm(rows - reconstructed, dim=1) / torch.linalg.vector_norm(
            rows, dim=1
        )
        return (
            indices.masked_fill(values == 0, -1).int(),
            values,
            activations.count_nonzero(1).int(),
            errors,
        )

    def decode(self, activations: torch.Tensor) -> torch.Tensor:
        """Decode activations `[n, d_sae]` float32 to reconstructions `[n, d_in]` of the normalised
        rows, from the active features alone, which are few.
        """
        rows, features = activations.nonzero(as_tuple=True)
        values = activations[rows, features]
        if self._lengths is not None:
            values = values / self._lengths[features]
        starts = torch.searchsorted(rows, torch.arange(len(activations), device=rows.device))
        return self._tensors["b_dec"] + embedding_bag(
            features, self._tensors["W_dec"], starts, mode="sum", per_sample_weights=values
        )

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode normalised rows."""
        tensors = self._tensors
        if self._bias is not None:
            rows = rows - self._bias
        products = rows @ tensors["W_enc"]
        if self._opening is not None:
            gate = products + tensors["b_gate"] > 0
            return products.mul_(self._opening).add_(tensors["b_mag"]).relu_().mul_(gate)
        products += tensors["b_enc"]
        match self.form.architecture:
            case "topk":
                if self._lengths is not None:
                    products *= self._lengths
                values, indices = products.topk(self.form.k, dim=1, sorted=False)
                return torch.zeros_like(products).scatter_(1, indices, values.relu_())
            case "jumprelu":
                over = products > tensors["threshold"]
                return products.relu_().mul_(over)
            case _:
                return products.relu_()


def load(folder: Path, digest: str) -> Autoencoder:
    """Load the SAE in `folder`. Raises SaeError, also if its content has another digest."""
    with reading(folder) as (content, file):
        if content.digest != digest:
            detail = (
                f"its files have changed since it was registered (now {content.digest[:12]} "
                f"instead of {digest[:12]})"
            )
            raise SaeError(f"{detail}: register it again")
        tensors = {
            name: torch.from_numpy(np.array(tensor))
            for name, tensor in tensors_of(content.form, file).items()
        }
    return Autoencoder(content.form, tensors)


def load_registered(sae: StoredSae, root: str, most: int) -> Autoencoder:
    """Load a registered autoencoder of at most `most` bytes, outside of the ranks' cache.

    `root`: the folder that contains the autoencoders' folders. Raises MidstreamError: it is larger,
    its folder is missing, or its files have changed.
    """
    if sae.bytes > most:
        detail = (
            f"{sae.name!r} has {sae.bytes} bytes of weights, more than {most} "
            "(tuning.sae_cache_mib)"
        )
        raise MidstreamError("intervention_failed", detail)
    with Translated(
        SaeError, lambda error: MidstreamError("intervention_failed", f"{sae.name!r}: {error}")
    ):
        return load(folder_of(root, sae.path), sae.digest)
