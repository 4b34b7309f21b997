"""Adds the valid values to msgspec's validation errors, which name only the invalid one."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, get_args

import msgspec

from ..access.handling import Priority
from ..access.keys import SCOPES
from ..artifacts.probes import Action, Aggregation
from ..base.dtypes import RowDType
from ..base.errors import NO_FIELD, MidstreamError, invalid, misfit, shortened
from ..base.states import CallbackEvent
from ..jobs.sweeps import Ablation, Alignment, Axis, Direction, Metric
from ..prompts.selectors import ALIASES, EVERY, RequestedName
from ..prompts.sites import At
from ..readings.readings import FIELDS
from ..requests.interventions import SteeringOp
from ..requests.specs import Layout

#: Names of positions where nothing is generated.
PROMPT_POSITIONS = ("all_prompt", "last_prompt")
#: Field → the names that it takes, which msgspec's message does not list.
NAMES: dict[str, tuple[str, ...]] = {
    "capture.hook": EVERY,
    "capture.hooks": EVERY,
    "capture.positions": get_args(RequestedName),
    "capture.at": get_args(At),
    "capture.dtype": get_args(RowDType),
    "capture.layout": get_args(Layout),
    "steering.hook": EVERY,
    "steering.positions": get_args(RequestedName),
    "steering.op": get_args(SteeringOp),
    "patch.hook": EVERY,
    "patch.positions": get_args(RequestedName),
    "hooks": EVERY,
    **{f"{reading}.{field}": EVERY for reading in FIELDS for field in ("hook", "hooks")},
    **{f"{reading}.positions": get_args(RequestedName) for reading in FIELDS},
    **{f"{reading}.at": get_args(At) for reading in FIELDS},
    "probes.action": get_args(Action),
    "hook": EVERY,
    "at": get_args(At),
    "action": get_args(Action),
    "aggregation": get_args(Aggregation),
    "axis": get_args(Axis),
    "path.sender.hook": EVERY,
    "path.receivers.hook": EVERY,
    "metric": get_args(Metric),
    "scopes": SCOPES,
    "priority": get_args(Priority),
    "highest_priority": get_args(Priority),
    "callback_events": get_args(CallbackEvent),
    "direction": get_args(Direction),
    "ablation": get_args(Ablation),
    "alignment": get_args(Alignment),
    "pairs.alignment": get_args(Alignment),
    **dict.fromkeys(
        ("positions", "pairs.positions", "pairs.spans.clean", "pairs.spans.corrupt"),
        PROMPT_POSITIONS,
    ),
}

_INVALID_NAME = re.compile(r"^Invalid enum value '(?P<name>.*)'$", re.DOTALL)
#: msgspec quotes the whole pattern; `form` leaves out the anchors, and the lookahead that forbids a
#: line break at the end.
_PATTERN = re.compile(r"^Expected `str` matching regex '\^(?P<form>.*?)(?:\(\?!\\+n\))?\$'$")
_INDEX = re.compile(r"\[.*?\]")


def suggestion(word: str, names: Iterable[str]) -> str:
    """Return a `did you mean` hint with the closest name; empty if no name is close to `word`."""
    close_matches = get_close_matches(word[:100], list(names), n=1)
    return f"did you mean {close_matches[0]!r}?" if close_matches else ""


def unknown(word: str, names: Iterable[str]) -> str:
    """Return the message for an unknown field, with the name that was probably meant."""
    return "; ".join(part for part in ("unknown field", suggestion(word, names)) if part)


def refusal(
    error: msgspec.ValidationError, prefix: str = "", whole: str | None = None, kind: Any = None
) -> MidstreamError:
    """Convert msgspec's error to one that names the field, below `prefix`, and its valid values.

    `whole`: the field to name if msgspec names none, by default the body. `kind`: the type of the
    value, for the names of its fields.
    """
    detail, path = misfit(error)
    dot = "." if prefix and path and not path.startswith("[") else ""
    field = f"{prefix}{dot}{path}" or whole
    if match := _PATTERN.match(detail):
        detail = f"does not match the pattern {match['form']}"
    if field is None:
        return MidstreamError("invalid_request", f"the body: {detail}")
    names: tuple[str, ...] = ()
    if match := _INVALID_NAME.match(detail):
        names = NAMES.get(_INDEX.sub("", field), ())
        suggested = suggestion(match["name"], (*names, *ALIASES) if names == EVERY else names)
        detail = "; ".join(part for part in (shortened(detail), suggested) if part)
    elif detail == NO_FIELD:
        names = fields_at(kind, path.rpartition(".")[0])
        detail = unknown(path.rpartition(".")[2], names)
    return invalid(field, detail, allowed=", ".join(names) or None)


def fields_at(kind: Any, path: str) -> tuple[str, ...]:
    """Return the names of the fields at a path inside a struct type, in msgspec's notation
    (`pairs[0].spans[...]`); none if the path leads to no struct.
    """
    if kind is None:
        return ()
    inners = structs_in(msgspec.inspect.type_info(kind))
    for step in _INDEX.sub("", path).split(".") if path else ():
        inners = [
            inner
            for item in inners
            for field in item.fields
            if field.name == step
            for inner in structs_in(field.type)
        ]
    return tuple(dict.fromkeys(field.name for item in inners for field in item.fields))


def structs_in(info: Any) -> list[msgspec.inspect.StructType]:
    """Return the struct types inside a type: itself, members of a union, or items of a list or
    mapping.
    """
    if isinstance(info, msgspec.inspect.StructType):
        return [info]
    if isinstance(info, msgspec.inspect.UnionType):
        return [result for item in info.types for result in structs_in(item)]
    inner = getattr(info, "item_type", None) or getattr(info, "value_type", None)
    return [] if inner is None else structs_in(inner)
