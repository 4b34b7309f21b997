"""Single heads of hooks that have some: what a request means by `heads`, as columns of the hook's
rows.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ....schemas.base.tensors import Tensor, from_numpy, to_numpy
from ....schemas.jobs.models import ModelInfo
from ....schemas.model.banks import BANK, OF_HEADS, RowShape
from ....schemas.prompts.selectors import (
    HeadSelector,
    Hook,
    SelectorError,
    resolve_hook,
    resolve_layers,
)
from ....schemas.requests.interventions import TENSORS, Intervention
from ....schemas.requests.specs import SteeringSpec

#: Ops whose tensors act along one direction of the row: what several heads are to have is a matter
#: of one entry for each.
_ALONG = frozenset({"ablate", "clamp", "lowrank"})


def heads_of(selector: HeadSelector | None, hooks: Sequence[str], model: ModelInfo) -> list[int]:
    """Ascending heads; empty for whole rows.

    Raises SelectorError for a hook without heads, and for heads that it does not have.
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
    """The columns of these heads."""
    return [head * shape.width + place for head in heads for place in range(shape.width)]


def within_one_rank(spec: SteeringSpec, family: Intervention, model: ModelInfo) -> None:
    """Raises ValueError where an op would have to add up columns that several tensor-parallel ranks
    hold.
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
        parts = f"{width // shape.width} heads" if BANK[hook] in OF_HEADS else f"{width} columns"
        raise ValueError(
            f"spans {len(ranks)} tensor-parallel ranks, and op {family.op!r} adds up what "
            "one holds: its tensors must lie within "
            f"{parts}, from a multiple of that (heads narrows them to one)"
        )


def of_spec(spec: SteeringSpec, model: ModelInfo) -> list[int]:
    """The heads that an entry edits; empty: whole rows. Raises SelectorError."""
    heads = heads_of(spec.heads, [resolve_hook(spec.hook or "post_block")], model)
    if len(heads) > 1 and spec.op in _ALONG:
        raise SelectorError(
            f"op {spec.op!r} acts along directions of one head: give an entry for each of "
            f"the {len(heads)} heads"
        )
    return heads


def widened(spec: SteeringSpec, heads: Sequence[int], model: ModelInfo) -> SteeringSpec:
    """The entry with tensors of whole rows, 0 elsewhere.

    What is as wide as one head is taken for each of them.
    """
    shape = model.inside[resolve_hook(spec.hook or "post_block")]
    wide = {
        name: tensor
        for name in TENSORS
        if TENSORS[name].wide and (tensor := getattr(spec, name, None)) is not None
    }
    return msgspec.structs.replace(
        spec, heads=None, **{name: _whole(tensor, heads, shape) for name, tensor in wide.items()}
    )


def whole_vector(vector: Tensor, heads: Sequence[int], hook: Hook, model: ModelInfo) -> Tensor:
    """`[width]` or `[heads × width]` as a vector of the whole row."""
    return _whole(vector, heads, model.inside[hook])


def _whole(tensor: Tensor, heads: Sequence[int], shape: RowShape) -> Tensor:
    if not tensor.shape or tensor.shape[-1] not in (shape.width, shape.size):
        return tensor  # refused for its shape
    values: Any = to_numpy(tensor)
    columns = dimensions(heads, shape)
    result = np.zeros((*values.shape[:-1], shape.size), np.float32)
    result[..., columns] = (
        values[..., columns] if values.shape[-1] == shape.size else np.tile(values, len(heads))
    )
    return from_numpy(result)
