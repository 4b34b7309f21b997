"""A request's `features` with the autoencoder that they name."""

from typing import NamedTuple

from ....schemas.artifacts.saes import Sae
from ....schemas.prompts.selectors import RequestedPositions
from ....schemas.requests.features import FeatureSpec


class FeatureWish(NamedTuple):
    spec: FeatureSpec
    sae: Sae

    @property
    def positions(self) -> RequestedPositions:
        return self.spec.positions
