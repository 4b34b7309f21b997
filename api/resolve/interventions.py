"""What does one entry of a body's steering come to on this model, and which of its fields is wrong?

Which fields an op takes is a table in `schemas.specs`; what must hold of a field is a row in `RULES`, as in `rules.py`.
What all entries come to, named modules among them, is `steered.py`'s.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import msgspec
import numpy as np

from ...schemas.base import to_msgpack
from ...schemas.selectors import STREAM_HOOKS, Hook, PositionSelector, resolve_layers
from ...schemas.specs import MAX_RANK, STEERING_FIELDS, Family, SteeringSpec
from ...schemas.steering import SteeringTemplate
from ...schemas.tensors import Tensor, content_hash, to_numpy
from .captures import Bounds, apply_rules, one_hook, positions_of_each

#: Largest finite value of each dtype that a model may run in; bfloat16 has float32's exponent.
LARGEST: dict[str, float] = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38}
#: The largest float32: as a limit of a component it is none. (Infinity has no place in JSON.)
NO_LIMIT = float(np.finfo(np.float32).max)

#: Families whose vector is a direction: only where it points matters.
DIRECTIONS: frozenset[Family] = frozenset({"add_matched", "ablate", "clamp"})
#: Families that take the vector times `scale`.
SCALED: frozenset[Family] = frozenset({"replace", "replace_masked", "add"})
#: Family → the fields that are its numbers, in the order in which the ranks take them.
NUMBERS: dict[Family, tuple[str, ...]] = {
    "replace": ("alpha",),
    "replace_masked": ("alpha",),
    "lowrank": ("strength",),
    "add": (),
    "add_matched": ("scale",),
    "ablate": ("strength",),
    "clamp": ("strength", "low", "high"),
}
#: Family → field → its largest absolute value. What is in units of the row itself needs no large numbers: 100 times a row or a
#: component leaves nothing else of it. What is in units of the stream may be as large as streams get. `alpha` is 0 to 1 by schema.
LIMITS: dict[Family, dict[str, float]] = {
    "replace": {"scale": 1e6},
    "replace_masked": {"scale": 1e6},
    "lowrank": {"strength": 100.0},
    "add": {"scale": 1e6},
    "add_matched": {"scale": 100.0},
    "ablate": {"strength": 100.0},
    "clamp": {"strength": 100.0, "low": 1e6, "high": 1e6},
}
#: What a field that is left out means.
DEFAULTS = {"scale": 1.0, "alpha": 1.0, "strength": 1.0, "low": -NO_LIMIT, "high": NO_LIMIT}


def _filled_in(spec: SteeringSpec) -> SteeringSpec:
    """With what is meant where nothing is said."""
    return msgspec.structs.replace(
        spec,
        op=spec.op or "add",
        hook=spec.hook or "post_block",
        positions="all" if spec.positions is None else spec.positions,
    )


def family_of(spec: SteeringSpec) -> Family:
    """Of a filled-in spec."""
    return "add_matched" if spec.norm_match else spec.op or "add"


def _layers(spec: SteeringSpec, bounds: Bounds) -> list[int]:
    if spec.layers is None:
        raise ValueError("is required: name the layers to edit")
    return resolve_layers(spec.layers, bounds.model.num_layers)


# --- Which fields -----------------------------------------------------------------------------------------------------


def _taken(field: str, spec: SteeringSpec, bounds: Bounds) -> None:
    """A field is there when the op needs it, and only if the op takes it."""
    takes, given = STEERING_FIELDS[spec.op or "add"], getattr(spec, field) is not None
    if given and field not in (*takes.tensors, *takes.options):
        raise ValueError(f"is not of op {spec.op!r}, which takes {', '.join((*takes.tensors, *takes.options))}")
    if not given and field in takes.tensors:
        raise ValueError(f"is required: op {spec.op!r} takes {' and '.join(takes.tensors)}")


def _norm_match(spec: SteeringSpec, bounds: Bounds) -> None:
    hook = one_hook(spec.hook or "post_block", bounds)
    if spec.norm_match and hook not in STREAM_HOOKS:
        streams = ", ".join(name for name in get_args(Hook) if name in STREAM_HOOKS)
        raise ValueError(
            f"measures the residual stream, and {hook} is a branch beside it, whose length says nothing of the stream's: "
            f"steer at {streams}, or leave norm_match out"
        )


# --- Tensors ----------------------------------------------------------------------------------------------------------


def _shape(field: str, spec: SteeringSpec, bounds: Bounds) -> None:
    tensor, width = getattr(spec, field), bounds.model.hidden_size
    if tensor is None:
        return
    if field == "vector":
        if tensor.shape != [width]:
            raise ValueError(f"{tensor.shape} is not the shape of a vector in this model: it is [{width}]")
        return
    rank = spec.rotation.shape[0] if spec.rotation is not None and spec.rotation.shape else 0
    if field == "rotation" and not (tensor.shape == [rank, width] and 1 <= rank <= MAX_RANK):
        raise ValueError(f"{tensor.shape} is not [rank, {width}] with a rank of 1 to {MAX_RANK}")
    wanted = [rank] if field == "bias" else [rank, width]
    if tensor.shape != wanted:
        raise ValueError(f"{tensor.shape} is not {wanted}: rotation is {[rank, width]}")


def _data(field: str, spec: SteeringSpec, bounds: Bounds) -> None:
    tensor = getattr(spec, field)
    if tensor is None:
        return
    values = to_numpy(tensor)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(f"element {bad[0]} is not finite ({len(bad)} of {values.size} are not)")
    if field == "vector" and family_of(spec) in DIRECTIONS and not values.any():
        raise ValueError(f"is 0 everywhere: {'norm_match' if spec.op == 'add' else spec.op} needs a direction")
    if field in ("rotation", "weight") and (largest := _largest(tensor)) > limit_of(bounds):
        raise ValueError(f"reaches {largest:.3g}, beyond {bounds.model.dtype}'s {limit_of(bounds):.3g}")


def _largest(tensor: Tensor) -> float:
    return float(np.max(np.abs(to_numpy(tensor)).astype(np.float64), initial=0.0))


def limit_of(bounds: Bounds) -> float:
    """The largest number in the model's dtype."""
    return LARGEST.get(bounds.model.dtype, LARGEST["float32"])


# --- Numbers ----------------------------------------------------------------------------------------------------------


def _number(field: str, spec: SteeringSpec, bounds: Bounds) -> float:
    """As the ranks hold it, in float32."""
    given = getattr(spec, field)
    if given is None:
        return DEFAULTS[field]
    value: float = given
    check_limit(family_of(spec), field, value)
    return value


def check_limit(family: Family, field: str, value: float) -> None:
    """Raises ValueError for a number that is larger than `LIMITS` has it."""
    limit = LIMITS[family].get(field, NO_LIMIT)
    if not abs(value) <= limit:
        op = {"add_matched": "add with norm_match", "replace_masked": "replace"}.get(family, family)
        raise ValueError(f"{value:.3g} is beyond the limit of op {op!r}: {-limit:g} to {limit:g}")


def _scale(spec: SteeringSpec, bounds: Bounds) -> float:
    scale = _number("scale", spec, bounds)
    if spec.vector is not None and family_of(spec) in SCALED:
        largest = _largest(spec.vector) * abs(scale)
        if not largest <= limit_of(bounds):
            raise ValueError(f"scale times vector reaches {largest:.3g}, beyond {bounds.model.dtype}'s {limit_of(bounds):.3g}")
    return scale


def _low(spec: SteeringSpec, bounds: Bounds) -> float:
    if spec.op == "clamp" and spec.low is None and spec.high is None:
        raise ValueError("is required, or high is: clamp limits a component from below, from above, or both")
    return _number("low", spec, bounds)


def _high(spec: SteeringSpec, bounds: Bounds) -> float:
    high = _number("high", spec, bounds)
    if spec.low is not None and spec.low > high:
        raise ValueError(f"{high:g} is below low, which is {spec.low:g}")
    return high


# --- All of them ------------------------------------------------------------------------------------------------------

Rule = tuple[str, Callable[[SteeringSpec, Bounds], Any]]

TENSORS = tuple(dict.fromkeys(field for takes in STEERING_FIELDS.values() for field in takes.tensors))
OPTIONS = tuple(dict.fromkeys(field for takes in STEERING_FIELDS.values() for field in takes.options))

RULES: tuple[Rule, ...] = (
    ("hook", lambda spec, bounds: one_hook(spec.hook or "post_block", bounds)),
    ("layers", _layers),
    ("positions", positions_of_each),
    *((field, partial(_taken, field)) for field in (*TENSORS, *OPTIONS)),
    *((f"{field}.shape", partial(_shape, field)) for field in TENSORS),
    *((f"{field}.data", partial(_data, field)) for field in TENSORS),
    ("norm_match", _norm_match),
    ("scale", _scale),
    ("alpha", partial(_number, "alpha")),
    ("strength", partial(_number, "strength")),
    ("low", _low),
    ("high", _high),
)


def resolve_entry(spec: SteeringSpec, bounds: Bounds, at: str, blobs: dict[str, bytes]) -> tuple[SteeringTemplate, list[PositionSelector]]:
    """An entry that is no module, and its positions in each of the prompts; its tensors are added to `blobs`, by content hash.

    Raises a 400 naming the field below `at`.
    """
    spec = _filled_in(spec)
    made = apply_rules(RULES, spec, bounds, at)
    family = family_of(spec)
    entry = SteeringTemplate(
        layers=made["layers"],
        hook=made["hook"],
        positions=spec.positions or "all",
        family=family,
        tensors=[_keep(getattr(spec, field), blobs) for field in STEERING_FIELDS[spec.op or "add"].tensors],
        scale=made["scale"] if family in SCALED else 1.0,
        numbers=[made[number] for number in NUMBERS[family]],
        rank=spec.bias.shape[0] if spec.bias is not None else 0,
    )
    return entry, made["positions"]


def reach_of(spec: SteeringSpec) -> float:
    """The largest coordinate of scale · v where the vector is scaled; 0 for other families. Of a spec that the rules have passed."""
    scaled = spec.vector is not None and family_of(_filled_in(spec)) in SCALED
    return _largest(spec.vector) * abs(DEFAULTS["scale"] if spec.scale is None else spec.scale) if scaled and spec.vector else 0.0


def _keep(tensor: Tensor, blobs: dict[str, bytes]) -> str:
    name = content_hash(tensor)
    if name not in blobs:
        blobs[name] = to_msgpack(tensor)
    return name
