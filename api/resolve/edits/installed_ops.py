"""Resolves steering with an installed op: a spec with `extension` becomes the vector and numbers
that the sites on the ranks take.
"""

import numpy as np

from ....schemas.base.errors import invalid
from ....schemas.base.tensors import PackedTensors, from_numpy
from ....schemas.extensions import Extension, OpTerms, checked_options
from ....schemas.prompts.selectors import STREAM_HOOKS, Hook, SelectorError
from ....schemas.requests.interventions import INSTALLED
from ....schemas.requests.specs import SteeringSpec
from ....schemas.requests.steering import SteeringTemplate
from ..positions.captures import Bounds, Rules, apply_rules, one_hook, positions_of_each
from .interventions import (
    Placed,
    check_limit,
    check_together,
    check_vector,
    edited_layers,
    keep,
)

#: Fields that are valid together with `extension`.
FIELDS = ("extension", "layers", "hook", "positions", "vector", "strength", "options")
_STRENGTH = INSTALLED.numbers[0]


def check_not_installed(spec: SteeringSpec, at: str) -> None:
    """Raises a 400 for an installed op in a named module or global steering, which would outlive
    the op's version.
    """
    if spec.extension is not None:
        raise invalid(
            f"{at}.extension",
            (
                "installed ops are not valid in named modules and global steering: give them "
                "with each request"
            ),
        )


def _op(spec: SteeringSpec, bounds: Bounds) -> tuple[Extension, OpTerms]:
    extension = bounds.model.installed("op", spec.extension)
    if extension.refused:
        raise ValueError(f"op {spec.extension!r} is not served: {extension.refused}")
    assert extension.op is not None, "as of every op"
    return extension, extension.op


def _hook(spec: SteeringSpec, bounds: Bounds) -> Hook:
    hook = one_hook(spec.hook or "post_block", bounds)
    if bounds.model.row_size(hook) != bounds.model.hidden_size or hook in bounds.model.inside:
        raise SelectorError(
            f"installed ops edit rows of the residual stream, not those of {hook}; valid: "
            f"{', '.join(sorted(STREAM_HOOKS))}"
        )
    return hook


def _vector(spec: SteeringSpec, bounds: Bounds) -> None:
    _, terms = _op(spec, bounds)
    if (spec.vector is None) == terms.vector:
        raise ValueError(
            f"is {'required' if terms.vector else 'not valid'} for op {spec.extension!r}"
        )
    if spec.vector is not None:
        check_vector(spec, bounds)


def _strength(spec: SteeringSpec, bounds: Bounds) -> float:
    strength = _STRENGTH.default if spec.strength is None else spec.strength
    check_limit(INSTALLED, _STRENGTH, strength)
    return strength


def _options(spec: SteeringSpec, bounds: Bounds) -> list[float]:
    """Return the op's options in the op's order, padded with zeros to the most options that an op
    may have.
    """
    extension, terms = _op(spec, bounds)
    checked = checked_options(extension.name, terms.options, spec.options or {})
    values = [float(value) for value in checked.values()]
    return [*values, *[0.0] * (len(INSTALLED.numbers) - 2 - len(values))]


RULES: Rules = (
    ("extension", _op),
    ("layers", edited_layers),
    ("hook", _hook),
    ("positions", positions_of_each),
    ("vector", _vector),
    ("strength", _strength),
    ("options", _options),
)


def resolve_installed(spec: SteeringSpec, bounds: Bounds, at: str, blobs: PackedTensors) -> Placed:
    """Return the entry; add its vector to `blobs`. Raises a 400 naming the field."""
    check_together(spec, at, "extension", FIELDS)
    made = apply_rules(RULES, spec, bounds, at)
    vector = (
        from_numpy(np.zeros(bounds.model.hidden_size, dtype=np.float32))
        if spec.vector is None
        else spec.vector
    )
    entry = SteeringTemplate(
        layers=made["layers"],
        hook=made["hook"],
        positions=spec.positions or "all",
        family="installed",
        tensors=[keep(vector, blobs)],
        numbers=[made["strength"], *made["options"], float(made["extension"][0].code)],
    )
    return Placed(entry, made["positions"])
