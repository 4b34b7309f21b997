"""Makes columns of a sweep's grid on axes other than tokens: heads, heads at positions, neurons.

Positions and spans become columns in `plan.py`; here they are joined, and
combined with the parts of a row that a cell writes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from midstream.api.resolve.positions.captures import at_field
from midstream.schemas.base.errors import Excluded, check_excluded, invalid
from midstream.schemas.base.limits import MAX_NEURONS
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.model.banks import BANKS
from midstream.schemas.prompts.selectors import (
    DimensionSelector,
    Hook,
    as_ranges,
    resolve_layers,
)

from ..records.sweeps import HEAD_AXES, Column, Neurons, PatchWindow, SweepRequest

#: Why `neurons.top` and `neurons.each` are not valid for an ablation.
NEEDS_TWO = "compares the rows of two prompts, but an ablation has only one"
#: Hooks whose rows consist of heads.
OF_HEADS = (*BANKS["query"], *BANKS["key"])
#: The label of a column of all positions.
TOGETHER = "all positions"


class ColumnPart(NamedTuple):
    """The part of a row that a column writes, in the column's own fields."""

    label: str = ""
    head: int = -1
    dims: str = ""
    ranks: tuple[int, int] | None = None


def parts_of(request: SweepRequest, hooks: Sequence[Hook], model: ModelInfo) -> list[ColumnPart]:
    """Return the parts of a row that the columns of the request's axis write; a single unlimited
    part for axes of whole rows. Raises a 400.
    """
    _check_fields(request)
    if request.axis in HEAD_AXES:
        return _heads(request, hooks, model)
    if request.neurons is not None:
        return _neurons(request, request.neurons, hooks, model)
    return [ColumnPart()]


def columns_on(
    request: SweepRequest, columns: list[Column], parts: Sequence[ColumnPart]
) -> list[Column]:
    """Return the columns of the grid. `columns`: one for each requested position or span."""
    if request.axis == "position":
        return columns
    if request.axis == "head_position":
        at_position = request.pairs[0].spans is None
        return [
            _part_of(column, part, _placed(column, at_position))
            for part in parts
            for column in columns
        ]
    places = sorted({place for column in columns for place in column.places})
    reason = "" if places else next((column.reason for column in columns if column.reason), "")
    joined = Column(label=TOGETHER, places=places, reason=reason)
    return [_part_of(joined, part) for part in parts]


def _placed(column: Column, at_position: bool) -> str:
    """Return a column's label with the token's position: a word may occur twice in a prompt."""
    return (
        f"{column.label.strip()} {column.places[0][0]}"
        if at_position and column.places
        else column.label
    )


def _part_of(column: Column, part: ColumnPart, where: str = "") -> Column:
    return Column(
        label=", ".join(filter(None, (part.label, where))) or column.label,
        places=column.places,
        reason=column.reason,
        head=part.head,
        dims=part.dims,
        ranks=part.ranks,
    )


# --- Fields


def _check_fields(request: SweepRequest) -> None:
    axis = request.axis
    inside = request.axis in (*HEAD_AXES, "neuron")
    wrong = f"is not valid with axis {axis!r}"
    check_excluded(
        [
            Excluded(
                "heads",
                request.heads is not None and axis not in HEAD_AXES,
                wrong,
                allowed="axis head or head_position",
            ),
            Excluded(
                "neurons",
                request.neurons is not None and axis != "neuron",
                wrong,
                allowed="axis neuron",
            ),
            Excluded(
                "neurons",
                request.neurons is None and axis == "neuron",
                "is required on axis 'neuron'",
                allowed="top, each or sets",
            ),
            Excluded(
                "mask",
                inside and request.mask is not None,
                f"{wrong}, whose columns name the dimensions that are written: omit it",
            ),
            Excluded(
                "window.positions",
                axis != "position" and request.window.positions > 1,
                f"{wrong}: a window applies to columns that are positions",
                allowed="1",
            ),
            Excluded(
                "window.layers",
                inside and request.window != PatchWindow(),
                f"{wrong}: heads and neurons of two layers have nothing in common",
                allowed="1",
            ),
        ]
    )


def _heads(request: SweepRequest, hooks: Sequence[Hook], model: ModelInfo) -> list[ColumnPart]:
    sizes = [_heads_at(f"hooks[{index}]", hook, model) for index, hook in enumerate(hooks)]
    for index, size in enumerate(sizes):
        if size != sizes[0]:
            raise invalid(
                f"hooks[{index}]",
                (
                    f"{hooks[index]} has {size[0]} heads of {size[1]}, but {hooks[0]} has "
                    f"{sizes[0][0]} of {sizes[0][1]}"
                ),
                allowed="hooks with the same heads in one sweep",
            )
    count, width = sizes[0]
    with at_field("heads"):
        chosen = resolve_layers("all" if request.heads is None else request.heads, count, "head")
    return [ColumnPart(f"head {head}", head, _dims(head, width)) for head in chosen]


# Masks are named by their dimensions, so that thousands of cells store and send no tensors.
def _dims(head: int, width: int) -> str:
    return f"{head * width}-{(head + 1) * width - 1}"


def dims_of_head(field: str, hook: Hook, index: int, model: ModelInfo) -> tuple[int, str]:
    """Return a head's number, from 0, and its dimensions. Raises a 400 naming the field."""
    count, width = _heads_at(field, hook, model)
    with at_field(field):
        (head,) = resolve_layers(index, count, "head")
    return head, _dims(head, width)


def _heads_at(field: str, hook: Hook, model: ModelInfo) -> tuple[int, int]:
    """Return number and width of the heads at a hook. Raises a 400 naming the field."""
    if hook not in model.inside or hook not in OF_HEADS:
        served = [item for item in model.hooks if item in model.inside and item in OF_HEADS]
        raise invalid(
            field,
            f"{hook} has no heads",
            allowed=", ".join(served) or None,
            hint=None
            if served
            else "start the worker with hooks inside attention, such as `--set hooks=all,inside`",
        )
    return model.inside[hook].heads, model.inside[hook].width


def _neurons(
    request: SweepRequest, neurons: Neurons, hooks: Sequence[Hook], model: ModelInfo
) -> list[ColumnPart]:
    least = min(model.row_size(hook) for hook in hooks)
    if neurons.sets is not None:
        return list(_sets(neurons.sets, least))
    name = "neurons.top" if neurons.top is not None else "neurons.each"
    if request.ablation is not None:
        raise invalid(name, NEEDS_TWO, allowed="neurons.sets", hint="omit ablation")
    if neurons.each is not None:
        if neurons.each > least:
            raise invalid(
                name, f"{neurons.each} exceeds the dimensions of a row", allowed=f"1 to {least}"
            )
        return [
            ColumnPart(f"neuron #{rank + 1}", ranks=(rank, rank + 1))
            for rank in range(neurons.each)
        ]
    parts = []
    for index, count in enumerate(neurons.top or []):
        if count > least:
            raise invalid(
                f"{name}[{index}]",
                f"{count} exceeds the dimensions of a row",
                allowed=f"1 to {min(least, MAX_NEURONS)}",
            )
        parts.append(ColumnPart(f"top {count}", ranks=(0, count)))
    return parts


def _sets(sets: Sequence[DimensionSelector], width: int) -> Iterator[ColumnPart]:
    for index, chosen in enumerate(sets):
        with at_field(f"neurons.sets[{index}]"):
            dims = resolve_layers(chosen, width, "neuron")
        yield ColumnPart(
            f"neurons {as_ranges(dims, 2)}" if len(dims) > 1 else f"neuron {dims[0]}",
            dims=as_ranges(dims),
        )
