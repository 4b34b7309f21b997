"""A request's `features` with the autoencoder that they name."""

from typing import NamedTuple

from ...schemas.features import FeatureSpec
from ...schemas.saes import Sae
from ...schemas.selectors import RequestedPositions


class FeatureWish(NamedTuple):
    spec: FeatureSpec
    sae: Sae

    @property
    def positions(self) -> RequestedPositions:
        return self.spec.positions
