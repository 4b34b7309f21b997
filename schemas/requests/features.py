"""Features of a sparse autoencoder as users request them."""

from typing import Annotated

import msgspec

from ..base.limits import MAX_FEATURE_SPECS, MAX_FEATURE_TOP, Reference
from ..base.records import Record
from ..prompts.selectors import RequestedPositions
from .specs import At


class FeatureSpec(Record):
    """Encode the rows that a registered sparse autoencoder reads, at `positions`: the `top_k` most
    active features of each token.
    """

    sae: Reference
    positions: RequestedPositions = "all_prompt"
    top_k: Annotated[int, msgspec.Meta(ge=1, le=MAX_FEATURE_TOP)] = 10
    at: At = "after"  # before or after steering at the same site


#: The entries of one request: usually one autoencoder per layer.
FeatureList = Annotated[list[FeatureSpec], msgspec.Meta(max_length=MAX_FEATURE_SPECS)]
