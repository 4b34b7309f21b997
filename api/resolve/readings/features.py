"""Resolution of features of a sparse autoencoder."""

from functools import partial

from ....schemas.artifacts.saes import Sae
from ....schemas.prompts.selectors import PositionSelector, SelectorError, Sites
from ....schemas.readings.features import FeatureSpec, StoredFeatures
from ..positions.captures import Bounds, apply_rules, recorded_of_each
from .saes import named_sae


def _top_k(sae: Sae, spec: FeatureSpec, bounds: Bounds) -> int:
    if spec.top_k > sae.form.d_sae:
        raise SelectorError(f"{spec.top_k} exceeds the {sae.form.d_sae} features of {sae.name!r}")
    return spec.top_k


def resolve_features(
    spec: FeatureSpec, bounds: Bounds, at: str
) -> tuple[StoredFeatures, Sites, list[PositionSelector]]:
    """Return what `readings.RULES` says. Raises a 400 naming the field below `at`."""
    sae = named_sae(spec.sae, f"{at}.sae", bounds.model, bounds.found)
    rules = (("positions", recorded_of_each), ("top_k", partial(_top_k, sae)))
    made = apply_rules(rules, spec, bounds, at)
    reading = StoredFeatures(sae=sae.stored(), top_k=made["top_k"])
    return reading, {sae.hook: [sae.layer]}, made["positions"]
