"""Checks a request's output formats, JSON schemas and other constraints, and stores them as a job
keeps them.

They are bounded because the engine compiles them: a deeply nested schema would take seconds.
"""

import re
from typing import Any

import msgspec

from ....schemas.base.errors import Translated, invalid
from ....schemas.base.limits import MAX_NESTING, MAX_SCHEMA
from ....schemas.base.records import to_json
from ....schemas.jobs.jobs import StructuredRequest
from ....schemas.jobs.openai import (
    JsonObjectFormat,
    JsonSchemaFormat,
    OpenAIRequest,
    TextFormat,
)

_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)

#: Members of `structured_outputs` of which exactly one is given.
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def bounded_json(raw: msgspec.Raw | bytes, at: str, most: int = MAX_SCHEMA) -> Any:
    """Decode the JSON at `at`, of at most `most` bytes and `MAX_NESTING` levels.

    Raises a 400 that names the field.
    """
    data = bytes(raw)
    if len(data) > most:
        raise invalid(at, f"has {len(data)} bytes", allowed=f"at most {most}")
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        if match[0] in (b"{", b"["):
            depth += 1
        elif match[0] in (b"}", b"]"):
            depth -= 1
        if depth > MAX_NESTING:
            raise invalid(
                at,
                "is nested too deeply",
                allowed=f"at most {MAX_NESTING} levels of objects and arrays",
            )
    with Translated(
        (msgspec.DecodeError, UnicodeDecodeError),
        lambda error: invalid(at, f"is not JSON: {error}"),
        hidden=True,
    ):
        return msgspec.json.decode(data)


def _schema(raw: msgspec.Raw | bytes, at: str) -> str:
    """Return a JSON schema as the text that was sent, which is within its bound."""
    if not isinstance(bounded_json(raw, at), dict):
        raise invalid(at, "is not a JSON schema", allowed="an object")
    return bytes(raw).decode()


def structured(structured_request: StructuredRequest | None, at: str) -> StructuredRequest | None:
    """Return the constraint at `at`, its JSON schema as text. Raises a 400 unless it is exactly
    one.
    """
    if structured_request is None:
        return None
    given = [name for name in CONSTRAINTS if getattr(structured_request, name) is not None]
    if len(given) != 1:
        result = " and ".join(given) if given else "no constraint"
        raise invalid(at, f"has {result}", allowed=f"exactly one of {', '.join(CONSTRAINTS)}")
    if structured_request.structural_tag is not None:
        bounded_json(structured_request.structural_tag.encode(), f"{at}.structural_tag")
    if structured_request.grammar is not None and not structured_request.grammar.strip():
        raise invalid(f"{at}.grammar", "is empty")
    if structured_request.regex is not None and "\0" in structured_request.regex:
        raise invalid(f"{at}.regex", "contains a NUL character")
    schema = structured_request.json
    if schema is None:
        return structured_request
    raw = schema.encode() if isinstance(schema, str) else to_json(schema)
    return msgspec.structs.replace(structured_request, json=_schema(raw, f"{at}.json"))


def format_of(body: OpenAIRequest) -> StructuredRequest | None:
    """Return the constraint of `response_format` or `structured_outputs`.

    Raises a 400 if both have one.
    """
    response_format = body.response_format
    if response_format is None or isinstance(response_format, TextFormat):
        return structured(body.structured_outputs, "structured_outputs")
    if body.structured_outputs is not None:
        raise invalid(
            "structured_outputs", "is given with response_format", hint="give one of them"
        )
    if isinstance(response_format, JsonObjectFormat):
        return StructuredRequest(json_object=True)
    assert isinstance(response_format, JsonSchemaFormat)
    return StructuredRequest(
        json=_schema(response_format.json_schema.schema, "response_format.json_schema.schema")
    )
