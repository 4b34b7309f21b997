"""What would have been right where msgspec found something wrong? It says only that a name is another, or a pattern not matched."""

import re
from typing import get_args

import msgspec

from .errors import MidstreamError, invalid, misfit
from .handling import CallbackEvent, Priority
from .keys import SCOPES
from .selectors import HOOKS, PositionName
from .specs import At, Layout, RowDType, SteeringOp
from .sweeps import Ablation, Alignment, Direction, Metric

#: Names of positions where nothing is generated.
PROMPT_POSITIONS = ("all_prompt", "last_prompt")
#: Field → the names that it takes: msgspec says only that another one is wrong.
NAMES: dict[str, tuple[str, ...]] = {
    "capture.hook": HOOKS,
    "capture.hooks": HOOKS,
    "capture.positions": get_args(PositionName),
    "capture.at": get_args(At),
    "capture.dtype": get_args(RowDType),
    "capture.layout": get_args(Layout),
    "steering.hook": HOOKS,
    "steering.positions": get_args(PositionName),
    "steering.op": get_args(SteeringOp),
    "patch.hook": HOOKS,
    "patch.positions": get_args(PositionName),
    "hooks": HOOKS,
    "metric": get_args(Metric),
    "scopes": SCOPES,
    "priority": get_args(Priority),
    "highest_priority": get_args(Priority),
    "callback_events": get_args(CallbackEvent),
    "direction": get_args(Direction),
    "ablation": get_args(Ablation),
    "alignment": get_args(Alignment),
    "pairs.alignment": get_args(Alignment),
    **dict.fromkeys(("positions", "pairs.positions", "pairs.spans.clean", "pairs.spans.corrupt"), PROMPT_POSITIONS),
}

_ANOTHER_NAME = "Invalid enum value"
#: msgspec quotes the pattern as it is written, with what keeps a line break from following the end.
_PATTERN = re.compile(r"^Expected `str` matching regex '\^(?P<form>.*?)(?:\(\?!\\+n\))?\$'$")


def refusal(error: msgspec.ValidationError, prefix: str = "", whole: str | None = None) -> MidstreamError:
    """The error as one that names the field, below `prefix`, and what it takes. `whole` names what has no field, by default the body."""
    detail, path = misfit(error)
    field = ".".join(part for part in (prefix, path) if part) or whole
    names = NAMES.get(re.sub(r"\[.*?\]", "", field or ""), ()) if detail.startswith(_ANOTHER_NAME) else ()
    if found := _PATTERN.match(detail):
        detail = f"is not of the form {found['form']}"
    if field is None:
        return MidstreamError("invalid_request", f"the body: {detail}")
    return invalid(field, detail, allowed=", ".join(names) or None)
