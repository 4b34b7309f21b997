"""Checks the options that the settings pass to vLLM: names and types against vLLM's own dataclass,
and against the options that are refused or proven.

The check runs before weights are loaded and before any process of the engine starts.
`workers/runner/support/denylist.py` checks the configuration that vLLM makes of the options.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, get_args

import vllm
from pydantic import (
    ConfigDict,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from vllm.engine.arg_utils import AsyncEngineArgs

from ....schemas.base.errors import Translated, suggestion
from ....schemas.jobs.certificates import UNPROVEN
from ....schemas.settings.settings import Settings, SettingsError
from ...runner.support.rules import is_one_of
from .option_lists import OURS, PROVEN, WRONG

#: Most characters of one value in an error or a caveat.
_SHOWN_CHARS = 120


@dataclass(frozen=True)
class AcceptedOptions:
    """Options for `AsyncEngineArgs`, and caveats that name the unproven ones."""

    options: dict[str, Any]
    caveats: list[str]


def accepted(settings: Settings) -> AcceptedOptions:
    """Returns the options that the settings pass to vLLM.

    Raises SettingsError that names every refused option with the reason.
    """
    wrong = []
    options = {}
    caveats = []
    types = {field.name: field.type for field in fields(AsyncEngineArgs)}
    for name, value in settings.engine_options.items():
        try:
            _require_allowed(name, types)
            options[name] = _converted(value, types[name])
        except SettingsError as error:
            wrong.append(f"[engine] {name}: {error}")
            continue
        # an enum's member is proven by its name, which is what users write
        named = options[name].name if isinstance(options[name], Enum) else value
        if doubt := unproven(name, named):
            caveats.append(UNPROVEN + doubt)
    if wrong:
        raise SettingsError("; ".join(wrong))
    return AcceptedOptions(options, caveats)


def _require_allowed(name: str, types: Mapping[str, Any]) -> None:
    if name in OURS:
        raise SettingsError(f"use the setting {OURS[name]}")
    if name in WRONG:
        raise SettingsError(f"refused: {WRONG[name]}")
    if name not in types:
        known = [item for item in types if item not in WRONG]
        suggested = suggestion(name, [*known, *OURS]) or "docs/reference/options.md lists all"
        raise SettingsError(f"not an option of vLLM {vllm.__version__}; {suggested}")


def unproven(name: str, value: Any) -> str:
    """Return what of an option is unproven; empty if it is proven with this value."""
    if (proven := PROVEN.get(name)) is None:
        return f"the engine option {name}={_shown(value)}"
    keys = value if isinstance(value, dict) else [value]
    if not proven or all(is_one_of(key, proven) for key in keys):
        return ""
    return f"the engine option {name}={_shown(value)}, proven: {', '.join(map(_shown, proven))}"


def _converted(value: Any, kind: Any) -> Any:
    """Returns the value with the type of vLLM's field. JSON is read strictly: a list may become a
    set and text an enum's member, but text never becomes a number.
    """
    value = _members(value, kind)
    if isinstance(value, Enum) or (adapter := _adapter(kind)) is None:
        return value
    with Translated(
        ValidationError,
        lambda error: SettingsError(
            f"{_shown(value)}: {'; '.join(dict.fromkeys(_problems(error, kind)))}"
        ),
    ):
        return adapter.validate_json(json.dumps(value, default=str), strict=True)


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    """Returns pydantic's adapter for a type, or None if it cannot read the type: then only vLLM
    checks the value.
    """
    if isinstance(kind, str):  # a forward reference that only type checkers resolve
        return None
    for config in (None, ConfigDict(arbitrary_types_allowed=True)):
        try:
            return TypeAdapter(kind, config=config)
        except (PydanticSchemaGenerationError, PydanticUserError):
            continue
    return None


def _members(value: Any, kind: Any) -> Any:
    """Returns the enum member that `value` names, or `value` if the type has no enum. Names are
    read, as on vLLM's command line, because the members' values may be import paths.
    """
    for item in (kind, *get_args(kind)):
        if isinstance(value, str) and isinstance(item, type) and issubclass(item, Enum):
            if value.upper() in item.__members__:
                return item[value.upper()]
            suggested = suggestion(value.upper(), item.__members__)
            raise SettingsError(
                _clauses(f"{_shown(value)} is none of {', '.join(item.__members__)}", suggested)
            )
    return value


def _clauses(problem: str, suggested: str | None) -> str:
    return f"{problem}; {suggested}" if suggested else problem


def _problems(error: ValidationError, kind: Any) -> Iterator[str]:
    for item in error.errors():
        where = ".".join(map(str, item["loc"]))
        text = item["msg"]
        if item["type"] == "unexpected_keyword_argument":
            text = _clauses("no such field", suggestion(str(item["loc"][-1]), _field_names(kind)))
        elif item["type"] == "string_type" and isinstance(item["input"], int | float):
            text += f": write '\"{item['input']}\"'"
        yield f"{where}: {text}" if where else text


def _field_names(kind: Any) -> Iterable[str]:
    return (
        field.name
        for item in (kind, *get_args(kind))
        if is_dataclass(item)
        for field in fields(item)
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
