"""Resolves one entry of a body's `steering` on this model, or raises a 400 naming the invalid
field.

The tables of `schemas.requests.interventions` list what each op takes; each check of a field is a
row in `RULES`, as in `captures.py`. `steering.py` resolves all entries, including named modules.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, get_args

import msgspec
import numpy as np

from ....schemas.base.dtypes import DTYPES
from ....schemas.base.errors import invalid
from ....schemas.base.records import to_msgpack
from ....schemas.base.tensors import PackedTensors, Tensor, content_hash, from_numpy, to_numpy
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import (
    STREAM_HOOKS,
    Hook,
    PositionSelector,
    resolve_hook,
    resolve_layers,
)
from ....schemas.requests.interventions import (
    FAMILY,
    MAX_RANK,
    PLAIN,
    STEERING_FIELDS,
    TENSORS,
    VARIANTS,
    Intervention,
    Number,
)
from ....schemas.requests.specs import SteeringSpec
from ....schemas.requests.steering import SteeringTemplate
from ..positions.captures import Bounds, Rules, apply_rules, one_hook, positions_of_each
from ..positions.heads import dimensions, of_spec, widened, within_one_rank


def _filled_in(spec: SteeringSpec) -> SteeringSpec:
    """Return the spec with its defaults filled in."""
    return msgspec.structs.replace(
        spec,
        op=spec.op or "add",
        hook=spec.hook or "post_block",
    )


def family_of(spec: SteeringSpec) -> Intervention:
    """Return the family of a filled-in spec: its op, or the variant whose flag it sets."""
    first, *rest = VARIANTS[spec.op or "add"]
    return next((family for family in rest if getattr(spec, family.flag, None)), first)


def edited_layers(spec: SteeringSpec, bounds: Bounds) -> list[int]:
    if spec.layers is None:
        raise ValueError("is required: the layers to edit")
    return resolve_layers(spec.layers, bounds.model.num_layers)


# --- Which fields

#: Fields that are valid together with all others.
BESIDE_ALL = ("limit", "trigger")


def check_together(spec: SteeringSpec, at: str, key: str, valid: Sequence[str]) -> None:
    """Raises a 400 for a field that is not valid together with `key`."""
    for field in SteeringSpec.__struct_fields__:
        if field not in (*valid, *BESIDE_ALL) and getattr(spec, field) is not None:
            raise invalid(
                f"{at}.{field}",
                f"is not valid together with {key}; valid fields: "
                f"{', '.join((*valid, *BESIDE_ALL))}",
            )


def check_without(spec: SteeringSpec, at: str, key: str, fields: Sequence[str]) -> None:
    """Raises a 400 for a field that is valid together with `key` only."""
    for field in fields:
        if getattr(spec, field) is not None:
            raise invalid(f"{at}.{field}", f"is not valid without `{key}`, which it belongs to")


def _valid_for_op(field: str, spec: SteeringSpec, bounds: Bounds) -> None:
    """Raises ValueError for a field that the op requires and lacks, or that is not valid for it."""
    takes = STEERING_FIELDS[spec.op or "add"]
    given = getattr(spec, field) is not None
    if given and field not in (*takes.tensors, *takes.options):
        raise ValueError(
            f"is not valid for op {spec.op!r}; valid fields: "
            f"{', '.join((*takes.tensors, *takes.options))}"
        )
    if not given and field in takes.tensors:
        raise ValueError(
            f"is required for op {spec.op!r}, which takes {' and '.join(takes.tensors)}"
        )


def _norm_match(spec: SteeringSpec, bounds: Bounds) -> None:
    hook = resolve_hook(spec.hook or "post_block")
    if spec.norm_match and hook not in STREAM_HOOKS:
        streams = ", ".join(name for name in get_args(Hook) if name in STREAM_HOOKS)
        raise ValueError(
            f"scales by the norm of the residual stream, but {hook} is a branch: steer at "
            f"{streams}, or omit norm_match"
        )


# --- Tensors


def _shape(family: Intervention, field: str, spec: SteeringSpec, bounds: Bounds) -> None:
    tensor = getattr(spec, field)
    width = bounds.model.row_size(resolve_hook(spec.hook or "post_block"))
    if tensor is None:
        return
    if not TENSORS[field].ranked:
        if tensor.shape != [width]:
            raise ValueError(f"has shape {tensor.shape}: it must be [{width}]")
        return
    first = family.tensors[0]
    rank = _rank(family, spec)
    if field == first and not (tensor.shape == [rank, width] and 1 <= rank <= MAX_RANK):
        raise ValueError(
            f"has shape {tensor.shape}: it must be [rank, {width}] with rank 1 to {MAX_RANK}"
        )
    needed = [rank, width] if TENSORS[field].wide else [rank]
    if tensor.shape != needed:
        raise ValueError(
            f"has shape {tensor.shape}: it must be {needed}, because {first} is {[rank, width]}"
        )


def _within_one_rank(family: Intervention, spec: SteeringSpec, bounds: Bounds) -> None:
    within_one_rank(spec, family, bounds.model)


def _rank(family: Intervention, spec: SteeringSpec) -> int:
    """Return the rank of the family's first tensor; 0 if it is not a matrix."""
    tensor: Tensor | None = getattr(spec, family.tensors[0])
    return tensor.shape[0] if tensor is not None and tensor.shape else 0


def _data(family: Intervention, field: str, spec: SteeringSpec, bounds: Bounds) -> None:
    tensor = getattr(spec, field)
    if tensor is None:
        return
    values = to_numpy(tensor)
    check_finite(values)
    if field == "vector" and family.unit and not values.any():
        raise ValueError(f"is all zeros: {family.flag or family.op} needs a direction")
    if TENSORS[field].ranked and TENSORS[field].wide:
        check_magnitude(largest(tensor), bounds)


def check_finite(values: np.ndarray) -> None:
    """Raises ValueError for an element that is not finite."""
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(
            f"element {bad[0]} is not finite (non-finite elements: {len(bad)} of {values.size})"
        )


def check_vector(spec: SteeringSpec, bounds: Bounds) -> None:
    """Raises ValueError for a vector of the wrong size, with a non-finite element, or beyond the
    range of the model's dtype.
    """
    _shape(FAMILY["add"], "vector", spec, bounds)
    _data(FAMILY["add"], "vector", spec, bounds)
    if spec.vector is not None:
        check_magnitude(largest(spec.vector), bounds)


def largest(tensor: Tensor) -> float:
    return float(np.max(np.abs(to_numpy(tensor)).astype(np.float64), initial=0.0))


def limit_of(model: ModelInfo) -> float:
    """Return the largest number of the model's dtype."""
    return DTYPES.get(model.dtype, DTYPES["float32"]).largest


def check_magnitude(largest: float, bounds: Bounds, what: str = "") -> None:
    """Raises ValueError for a number beyond the range of the model's dtype. `what`: has it."""
    limit = limit_of(bounds.model)
    if not largest <= limit:
        raise ValueError(
            f"{what}has an element of magnitude {largest:.3g}: {bounds.model.dtype} allows at "
            f"most {limit:.3g}"
        )


# --- Numbers


def _number(family: Intervention, number: Number, spec: SteeringSpec, bounds: Bounds) -> float:
    """Return the number or its default."""
    given = getattr(spec, number.name)
    value: float = number.default if given is None else given
    if given is not None:
        check_limit(family, number, value)
    if number is family.scale and spec.vector is not None:
        check_magnitude(largest(spec.vector) * abs(value), bounds, "scale times vector ")
    if family.limits is not None and number.name in family.limits:
        _check_range(number.name, value, spec, family.limits)
    return value


def _check_range(field: str, value: float, spec: SteeringSpec, limits: tuple[str, str]) -> None:
    """Raises ValueError unless a limit is given, and the lower one is not above the upper one."""
    low, high = (getattr(spec, name) for name in limits)
    if field == limits[0] and low is None and high is None:
        raise ValueError(
            f"is required unless {limits[1]} is given: {spec.op} limits a component from "
            "below, from above, or both"
        )
    if field == limits[1] and low is not None and low > value:
        raise ValueError(f"{value:g} is less than {limits[0]}, {low:g}")


def numbers_of(family: Intervention) -> dict[str, Number]:
    """Return all numbers that users give for a family, by name."""
    return {number.name: number for number in (family.scale, *family.numbers) if number is not None}


def check_limit(family: Intervention, number: Number, value: float) -> None:
    """Raises ValueError for a value beyond the number's limit."""
    if not abs(value) <= number.limit:
        raise ValueError(
            f"{value:.3g} is out of range for op {family.written!r}: {-number.limit:g} to "
            f"{number.limit:g}"
        )


# --- All of them

NUMBERS = tuple(dict.fromkeys(name for family in PLAIN for name in numbers_of(family)))
GIVEN = tuple(dict.fromkeys(field for takes in STEERING_FIELDS.values() for field in takes.tensors))
OPTIONS = tuple(
    dict.fromkeys(field for takes in STEERING_FIELDS.values() for field in takes.options)
)

#: Rules that decide to which rows and heads the tensors belong; the other rules check the tensors
#: after they are widened to these.
PLACE_RULES: Rules = (
    ("hook", lambda spec, bounds: one_hook(spec.hook or "post_block", bounds)),
    ("heads", lambda spec, bounds: of_spec(spec, bounds.model)),
)


def _rules(family: Intervention) -> Rules:
    """Return the rules of a family's entries that follow `PLACE_RULES`."""
    taken = STEERING_FIELDS[family.op].tensors
    given = [field for field in GIVEN if field in taken]
    numbers = numbers_of(family)
    return (
        ("layers", edited_layers),
        ("positions", positions_of_each),
        *((field, partial(_valid_for_op, field)) for field in (*GIVEN, *OPTIONS)),
        *((f"{field}.shape", partial(_shape, family, field)) for field in given),
        *((f"{field}.data", partial(_data, family, field)) for field in given),
        ("norm_match", _norm_match),
        (family.tensors[0], partial(_within_one_rank, family)),
        *((name, partial(_number, family, numbers[name])) for name in NUMBERS if name in numbers),
    )


RULES = {family.name: _rules(family) for family in PLAIN}


class Placed(NamedTuple):
    """An entry with its positions in each prompt."""

    entry: SteeringTemplate
    positions: list[PositionSelector]
    reach: float = 0.0  # see `Module.reach`


def resolve_entry(spec: SteeringSpec, bounds: Bounds, at: str, blobs: PackedTensors) -> Placed:
    """Return an entry other than a module; add its tensors to `blobs` by content hash.

    Raises a 400 naming the field below `at`.
    """
    spec = _filled_in(spec)
    place = apply_rules(PLACE_RULES, spec, bounds, at)
    hook = place["hook"]
    heads = place["heads"]
    family = family_of(spec)
    if heads:
        spec = widened(spec, heads, bounds.model)
    made = apply_rules(RULES[family.name], spec, bounds, at)
    masks = []
    if heads and family.name == "replace":  # other families keep columns that are 0
        family = FAMILY["replace_masked"]
        shape = bounds.model.inside[hook]
        masks = [mask_tensor(dimensions(heads, shape), shape.size, blobs)]
    entry = SteeringTemplate(
        layers=made["layers"],
        hook=hook,
        positions=spec.positions or "all",
        family=family.name,
        tensors=[keep(getattr(spec, field), blobs) for field in family.tensors if field != "mask"]
        + masks,
        scale=made["scale"] if family.scale is not None else 1.0,
        numbers=[made[number.name] for number in family.numbers],
        rank=_rank(family, spec) if family.ranked else 0,
    )
    if family.scale is None or spec.vector is None:
        return Placed(entry, made["positions"])
    return Placed(entry, made["positions"], largest(spec.vector) * abs(entry.scale))


def mask_tensor(dimensions: Sequence[int], size: int, blobs: PackedTensors) -> str:
    """Return the name of a mask, float32 `[size]`, 1 in `dimensions` and 0 elsewhere; add it to
    `blobs`.
    """
    values = np.zeros(size, np.float32)
    values[list(dimensions)] = 1
    return keep(from_numpy(values), blobs)


def keep(tensor: Tensor, blobs: PackedTensors) -> str:
    """Return the tensor's name; add the tensor to `blobs`."""
    name = content_hash(tensor)
    if name not in blobs:
        blobs[name] = to_msgpack(tensor)
    return name
