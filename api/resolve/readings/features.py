"""Resolution of features of a sparse autoencoder."""

from collections.abc import Callable
from typing import Any

import msgspec

from ....broker.ledger.named.registry import Lookup
from ....schemas.artifacts.saes import Sae
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import SelectorError
from ....schemas.readings.features import FeatureSpec, StoredFeatures
from ....schemas.requests.specs import StoredCapture
from ..positions.captures import Bounds, apply_rules, positions_of_each
from .reading_captures import reading_captures
from .saes import named_sae


class FeaturesOfSae(FeatureSpec, kw_only=True):
    """Features whose autoencoder is looked up."""

    found: Sae


def with_sae(
    spec: FeatureSpec, field: str, model: ModelInfo, found: Lookup
) -> tuple[FeatureSpec, str]:
    """Return the features with the autoencoder that they name, and its digest.

    Raises a 400 naming `sae` below `field`.
    """
    sae = named_sae(spec.sae, f"{field}.sae", model, found)
    return FeaturesOfSae(**msgspec.structs.asdict(spec), found=sae), sae.digest


def _top_features(spec: FeaturesOfSae, bounds: Bounds) -> int:
    if spec.top_k > spec.found.form.d_sae:
        raise SelectorError(
            f"{spec.top_k} exceeds the {spec.found.form.d_sae} features of {spec.found.name!r}"
        )
    return spec.top_k


FEATURE_RULES: tuple[tuple[str, Callable[[Any, Bounds], Any]], ...] = (
    ("positions", positions_of_each),
    ("top_k", _top_features),
)


def resolve_features(spec: FeaturesOfSae, bounds: Bounds, at: str) -> list[StoredCapture]:
    """Return one capture per prompt. Raises a 400 naming the field below `at`."""
    made = apply_rules(FEATURE_RULES, spec, bounds, at)
    sae = spec.found
    reading = StoredFeatures(sae=sae.stored(), top_k=made["top_k"])
    return reading_captures(reading, {sae.hook: [sae.layer]}, made["positions"], spec.at)
