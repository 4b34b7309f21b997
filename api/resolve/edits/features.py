"""Resolves steering by features of sparse autoencoders: a spec with `sae` becomes the vectors and
numbers that the kernels take.

The vectors are read from the registered files and travel with the request, like vectors that a user
supplies. So modules and Global steering take features as well, and the digest of the interventions
names the very numbers.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ....schemas.artifacts.saes import Sae, SaeForm
from ....schemas.base.dtypes import narrowed, widened
from ....schemas.base.errors import Excluded, MidstreamError, Translated, check_excluded, invalid
from ....schemas.base.limits import MAX_FEATURES
from ....schemas.base.recent import Recent
from ....schemas.base.tensors import PackedTensors, Tensor, from_numpy
from ....schemas.jobs.models import ModelInfo
from ....schemas.requests.interventions import FAMILY, NORMS
from ....schemas.requests.specs import SteeringSpec
from ....schemas.requests.steering import SteeringTemplate
from ....storage.formats.sae_files import (
    SaeError,
    ThresholdFeature,
    check_ruled,
    decoder_row,
    feature_of,
    folder_of,
    reading,
    tensors_of,
)
from ..positions.captures import Bounds, at_field, positions_of_each
from .interventions import Placed, check_limit, check_together, check_without, keep, limit_of

#: Ops that are valid with `sae` → whether the op takes a value.
OPS: dict[str, bool] = {"clamp": True, "ablate": False, "add": True}
#: Fields that are valid together with `sae`.
FIELDS = ("sae", "feature", "op", "value", "positions")
_TARGET = next(number for number in FAMILY["feature"].numbers if number.name == "target")
#: Features that an API process caches.
_REMEMBERED = 1024


class FeatureVectors(NamedTuple):
    """The vectors of a feature that steering uses."""

    # float32 [d_in]: what one unit of activation adds to the row, as the SAE normalises it
    decoder: np.ndarray
    rule: ThresholdFeature | None  # None if other features decide about its activation (topk)


class NamedFeatures(NamedTuple):
    """The autoencoders that a request's steering names, the features of each that it steers, and
    what its directions of tokens stand for.
    """

    saes: Mapping[str, Sae] = {}
    rows: Mapping[tuple[str, int], FeatureVectors] = {}  # (name, feature)
    # place of a spec with `jacobian` in the body → the specs that it stands for
    directions: Mapping[str, list[SteeringSpec]] = {}


NONE = NamedFeatures()


class FeatureFiles:
    """Reads features of registered autoencoders, and caches those loaded last, by digest.

    Call it off the event loop, one call at a time.
    """

    def __init__(self, root: str) -> None:
        """`root`: the folder of autoencoders."""
        self._root = root
        self._known = Recent[tuple[str, int], FeatureVectors](_REMEMBERED)

    def read(self, sae: Sae, features: Collection[int]) -> dict[int, FeatureVectors]:
        """Raises a 400 when the files are not what was registered."""
        keys = [(sae.digest, feature) for feature in features]
        rows = self._known.all_of(keys, partial(self._from_files, sae, features))
        return {feature: rows[sae.digest, feature] for feature in features}

    def _from_files(
        self, sae: Sae, features: Iterable[int]
    ) -> dict[tuple[str, int], FeatureVectors]:
        with (
            Translated(
                (SaeError, MidstreamError),
                lambda error: invalid("sae", f"{sae.name!r} ({sae.digest[:12]}): {error}"),
            ),
            reading(folder_of(self._root, sae.path)) as (content, file),
        ):
            if content.digest != sae.digest:
                raise SaeError(
                    "its files have changed since it was registered (now "
                    f"{content.digest[:12]}): "
                    "register it again"
                )
            tensors = tensors_of(sae.form, file)
        return {
            (sae.digest, feature): FeatureVectors(
                decoder_row(sae.form, tensors, feature), _rule(sae.form, tensors, feature)
            )
            for feature in features
        }


def _rule(
    form: SaeForm, tensors: Mapping[str, np.ndarray], feature: int
) -> ThresholdFeature | None:
    try:
        return feature_of(form, tensors, feature)
    except SaeError:
        return None


def check_specs(specs: Iterable[SteeringSpec], saes: Mapping[str, Sae]) -> dict[str, set[int]]:
    """Return the steered features of each autoencoder.

    Raises a 400 naming the field of the first spec that is invalid.
    """
    result: dict[str, set[int]] = {}
    for index, spec in enumerate(specs):
        if spec.sae is None:
            check_without(spec, f"steering[{index}]", "sae", ("feature", "value"))
            continue
        _check(spec, saes[spec.sae], f"steering[{index}]")
        result.setdefault(spec.sae, set()).add(spec.feature or 0)
    if (count := sum(map(len, result.values()))) > MAX_FEATURES:
        raise invalid(
            "steering", f"names {count} features", allowed=f"at most {MAX_FEATURES} different ones"
        )
    return result


def _check(spec: SteeringSpec, sae: Sae, at: str) -> None:
    op = spec.op or "add"
    check_together(spec, at, "sae", FIELDS)
    takes = OPS.get(op, False)
    valid = f"0 to {sae.form.d_sae - 1}"
    check_excluded(
        [
            Excluded(
                f"{at}.op", op not in OPS, f"{op!r} is not valid with sae", allowed=", ".join(OPS)
            ),
            Excluded(f"{at}.feature", spec.feature is None, "is required with sae", allowed=valid),
            Excluded(
                f"{at}.feature",
                (spec.feature or 0) >= sae.form.d_sae,
                f"{sae.name!r} has no feature {spec.feature}",
                allowed=valid,
            ),
            Excluded(
                f"{at}.value",
                takes and spec.value is None,
                f"is required for op {op!r}",
                allowed="a number, in units of the feature's activation",
            ),
            Excluded(
                f"{at}.value",
                not takes and spec.value is not None,
                f"is not valid for op {op!r}, which sets the activation to 0",
                hint="omit it",
            ),
        ]
    )
    try:
        if op != "add":
            check_ruled(sae.form)
        if spec.value is not None:
            check_limit(FAMILY["feature"], _TARGET, spec.value)
    except SaeError as error:
        raise invalid(f"{at}.sae", f"op {op!r} needs another autoencoder: {error}") from error
    except ValueError as error:
        raise invalid(f"{at}.value", str(error)) from error


def plain_spec(spec: SteeringSpec, named: NamedFeatures) -> SteeringSpec:
    """Return a spec of op `add` as plain steering by `value` times the decoder row.

    Other specs are returned unchanged; so is `add` for an SAE that normalises rows, where the added
    vector depends on the row.
    """
    if (
        spec.sae is None
        or (spec.op or "add") != "add"
        or named.saes[spec.sae].form.normalize_activations != "none"
    ):
        return spec
    sae = named.saes[spec.sae]
    return SteeringSpec(
        layers=sae.layer,
        hook=sae.hook,
        positions=spec.positions,
        op="add",
        vector=from_numpy(named.rows[spec.sae, spec.feature or 0].decoder),
        scale=spec.value,
    )


def resolve_feature(
    spec: SteeringSpec, bounds: Bounds, at: str, blobs: PackedTensors, named: NamedFeatures
) -> Placed:
    """Return the entry for a spec whose edit depends on the row; add its tensors to `blobs`. Raises
    a 400 naming the field.
    """
    assert spec.sae is not None
    sae = named.saes[spec.sae]
    rows = named.rows[spec.sae, spec.feature or 0]
    rule = (
        rows.rule
        if spec.op in ("clamp", "ablate")
        # One that always reads 0: setting it to `value` adds `value` units, as `add` requires,
        # whatever the real feature's activation.
        else ThresholdFeature(np.zeros_like(rows.decoder), rows.decoder, 0.0, 0.0)
    )
    assert rule is not None, "checked"
    with at_field(f"{at}.positions"):
        positions = positions_of_each(spec, bounds)
    tensors = [*_parts(rule.encoder, bounds.model), from_numpy(rule.decoder)]
    entry = SteeringTemplate(
        layers=[sae.layer],
        hook=sae.hook,
        positions=spec.positions or "all",
        family="feature",
        tensors=[keep(tensor, blobs) for tensor in tensors],
        numbers=[
            1.0,
            spec.value or 0.0,
            rule.bias,
            rule.threshold,
            float(NORMS.index(sae.form.normalize_activations)),
        ],
    )
    return Placed(entry, positions)


def _parts(encoder: np.ndarray, model: ModelInfo) -> list[Tensor]:
    """Return three parts in the model's dtype that add up to the float32 encoder; exactly, if the
    dtype has float32's range. With one bfloat16 part, activations would differ from those that are
    read by up to 2⁻⁹.
    """
    result = []
    remaining = encoder.astype(np.float32)
    for _ in range(3):
        part = widened(narrowed(remaining, model.dtype), model.dtype).astype(np.float32)
        result.append(from_numpy(part))
        remaining = remaining - part
    return result


def check_range(sae: Sae, model: ModelInfo, rows: Mapping[int, FeatureVectors]) -> None:
    """Raises a 400 for vectors beyond the range of the model's dtype."""
    limit = limit_of(model)
    for feature, value in rows.items():
        vectors: list[Any] = (
            [value.decoder]
            if value.rule is None
            else [value.decoder, value.rule.encoder, value.rule.bias]
        )
        largest = max(float(np.max(np.abs(vector))) for vector in vectors)
        if not largest <= limit:
            raise invalid(
                "sae",
                (
                    f"feature {feature} of {sae.name!r} has a number of magnitude {largest:.3g}: "
                    f"{model.dtype} allows {limit:.3g}"
                ),
            )
