"""Resolves a request's `heads` into columns of the rows at hooks that have heads."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ....schemas.base.tensors import Tensor, from_numpy, to_numpy
from ....schemas.jobs.models import ModelInfo
from ....schemas.model.banks import BANK, OF_HEADS, RowShape
from ....schemas.prompts.selectors import (
    HeadSelector,
    SelectorError,
    resolve_hook,
    resolve_layers,
)
from ....schemas.requests.interventions import TENSORS, Intervention
from ....schemas.requests.specs import SteeringSpec

#: Ops whose tensors act along a direction of the row: several heads need an entry each.
_ALONG = frozenset({"ablate", "clamp", "lowrank"})


def heads_of(selector: HeadSelector | None, hooks: Sequence[str], model: ModelInfo) -> list[int]:
    """Return the selected heads in ascending order; empty for whole rows.

    Raises SelectorError for a hook without heads, and for heads that the hook does not have.
    """
    if selector is None:
        return []
    chosen: list[int] = []
    for hook in hooks:
        shape = model.inside.get(hook)
        if shape is None or BANK[hook] not in OF_HEADS:  # type: ignore[index]
            raise SelectorError(
                f"{hook} has no heads: hooks with heads are q_proj, k_proj, q, k, v and z"
            )
        try:
            chosen = resolve_layers(selector, shape.heads, "head")
        except SelectorError as error:
            raise SelectorError(f"at {hook}, {error}") from error
    return chosen


def dimensions(heads: Sequence[int], shape: RowShape) -> list[int]:
    """Return the columns of these heads."""
    return [head * shape.width + place for head in heads for place in range(shape.width)]


def within_one_rank(spec: SteeringSpec, family: Intervention, model: ModelInfo) -> None:
    """Raises ValueError if an op would have to sum over columns that several tensor-parallel ranks
    hold: a collective inside a site would order the ranks' launches.
    """
    hook = resolve_hook(spec.hook or "post_block")
    if model.tp == 1 or not family.sums or hook not in model.inside or hook == "router":
        return
    shape = model.inside[hook]
    width = (
        shape.size // min(model.tp, shape.heads)
        if BANK[hook] in OF_HEADS
        else shape.size // model.tp
    )
    tensors = [
        to_numpy(tensor)
        for name in family.tensors
        if TENSORS[name].wide and (tensor := getattr(spec, name)) is not None
    ]
    ranks = {
        int(place) // width
        for tensor in tensors
        for place in np.flatnonzero(np.atleast_2d(tensor).any(axis=0))
    }
    if len(ranks) > 1:
        held, unit = (width // shape.width, "head") if BANK[hook] in OF_HEADS else (width, "column")
        raise ValueError(
            f"spans {len(ranks)} tensor-parallel ranks, but op {family.op!r} sums over columns, "
            "which must all be on one rank: its tensors may be non-zero only in one group of "
            f"{held} {unit}{'' if held == 1 else 's'}, from a multiple of {held} on (`heads` "
            "restricts an entry to some heads)"
        )


def of_spec(spec: SteeringSpec, model: ModelInfo) -> list[int]:
    """Return the heads that an entry edits; empty for whole rows. Raises SelectorError."""
    heads = heads_of(spec.heads, [resolve_hook(spec.hook or "post_block")], model)
    if len(heads) > 1 and spec.op in _ALONG:
        raise SelectorError(
            f"op {spec.op!r} acts along directions of one head: give an entry for each of "
            f"the {len(heads)} heads"
        )
    return heads


def widened(spec: SteeringSpec, heads: Sequence[int], model: ModelInfo) -> SteeringSpec:
    """Return the entry with its tensors as `whole_tensor` makes them."""
    shape = model.inside[resolve_hook(spec.hook or "post_block")]
    wide = {
        name: whole_tensor(tensor, heads, shape)
        for name in TENSORS
        if TENSORS[name].wide and (tensor := getattr(spec, name, None)) is not None
    }
    return msgspec.structs.replace(spec, heads=None, **wide)


def whole_tensor(tensor: Tensor, heads: Sequence[int], shape: RowShape) -> Tensor:
    """Return a tensor that is given for one head or for whole rows, as wide as these: 0 outside
    `heads`, and that of one head repeated for each.
    """
    if not tensor.shape or tensor.shape[-1] not in (shape.width, shape.size):
        return tensor  # rejected later for its shape
    values: Any = to_numpy(tensor)
    columns = dimensions(heads, shape)
    result = np.zeros((*values.shape[:-1], shape.size), np.float32)
    result[..., columns] = (
        values[..., columns] if values.shape[-1] == shape.size else np.tile(values, len(heads))
    )
    return from_numpy(result)
