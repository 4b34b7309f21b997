"""Features of a sparse autoencoder: what a request gives, what a job stores, one rank's part, and
the result.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from ..artifacts.registered import NamedArtifact
from ..artifacts.saes import SAES, StoredSae
from ..base.limits import MAX_FEATURE_SPECS, MAX_FEATURE_TOP, Reference
from ..base.records import Record, Wire, fields_of
from ..prompts.selectors import Hook, RequestedPositions
from ..prompts.sites import At
from .stored import ReadingKind, StoredReading


class FeatureSpec(Record):
    """Encode the rows that a registered sparse autoencoder reads, at `positions`: the `top_k` most
    active features of each token.
    """

    sae: Reference
    positions: RequestedPositions = "all_prompt"
    top_k: Annotated[int, msgspec.Meta(ge=1, le=MAX_FEATURE_TOP)] = 10
    at: At = "after"  # before or after steering at the same site

    @property
    def references(self) -> list[NamedArtifact]:
        """The registered artifacts that it names."""
        return [(SAES, self.sae)]


#: The entries of one request: usually one autoencoder per layer.
FeatureList = Annotated[list[FeatureSpec], msgspec.Meta(max_length=MAX_FEATURE_SPECS)]


class StoredFeatures(StoredReading, tag="features", omit_defaults=True):
    """Features of a sparse autoencoder after validation: the most active ones of each row."""

    sae: StoredSae
    top_k: int

    @property
    def artifact(self) -> StoredSae:
        return self.sae

    def row_size(self) -> int:
        return 8 + 8 * self.top_k


class FeaturesPart(Wire, tag="features"):
    """The features of a prompt's rows. Arrays are little-endian, in C order, `[positions, …]`."""

    capture: int  # index in `RankSpec.captures`
    sae: str
    digest: str
    hook: Hook
    layer: int
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    indices: bytes  # int32 `[positions, k]`: most active first; −1: no more are active
    activations: bytes  # float32 `[positions, k]`
    active: bytes  # int32 `[positions]`: how many features are active
    errors: bytes  # float32 `[positions]`: ‖row − reconstruction‖ / ‖row‖

    @staticmethod
    def joined(request: int, parts: Sequence["FeaturesPart"]) -> "FeaturesReading":
        """Return the reading of the only part: one rank computes all features of a layer."""
        part = parts[0]
        count = len(part.positions)
        indices = (
            np.frombuffer(part.indices, "<i4").reshape(count, -1)
            if count
            else np.zeros((0, 0), "<i4")
        )
        activations = np.frombuffer(part.activations, "<f4").reshape(indices.shape)
        rows = [(own >= 0, own, values) for own, values in zip(indices, activations, strict=True)]
        arrays = {
            "features": [own[present].tolist() for present, own, _ in rows],
            "activations": [values[present].tolist() for present, _, values in rows],
            "active": np.frombuffer(part.active, "<i4").tolist(),
            "errors": np.frombuffer(part.errors, "<f4").tolist(),
        }
        return FeaturesReading(request=request, **fields_of(part, FeaturesReading) | arrays)


class FeaturesReading(Record):
    """The features of one prompt.

    Lists of two levels are positions × features, most active first; inactive ones are left out.
    """

    request: int  # index of the prompt
    sae: str
    digest: str  # of the autoencoder's files
    hook: Hook
    layer: int
    positions: list[int]  # absolute token positions
    token_ids: list[int]  # the token at each position
    features: list[list[int]]
    activations: list[list[float]]
    active: list[int]  # how many features are active, of all
    errors: list[float]  # ‖row − reconstruction‖ / ‖row‖, of all active features


FEATURES = ReadingKind(FeatureList, [], StoredFeatures, FeaturesPart)
