"""Writes the references as Markdown: Python from docstrings, the command line from its commands,
HTTP from its description.
"""

import json
import re
from importlib import import_module
from typing import Any

import comments
import typer
from typer.cli import get_docs_for_click

METHODS = ("get", "post", "put", "patch", "delete")
OR = " or "
#: A page of the documentation in a comment.
PAGE = re.compile(r"\bdocs/([\w/-]+\.md)(#[\w-]+)?")
#: A group's calls are shown below the heading that names it in a client.
GROUP = "    options:\n      show_root_heading: false\n      heading_level: 3"


def python() -> str:
    """Every public name of the package, for mkdocstrings, which reads its docstring without
    importing it.
    """
    parts = [
        "# Python",
        (
            "Every name of `midstream` and `midstream.lens`, and the groups of calls of a "
            "client; [the client's page](../client.md) shows their use."
        ),
    ]
    for package in map(import_module, ("midstream", "midstream.lens")):
        values = [getattr(package, name) for name in package.__all__ if not name.startswith("__")]
        parts += [f"::: {_home(value)}" for value in values]
    client = import_module("midstream").Client("127.0.0.1:1")  # it connects when it is called
    for name, group in vars(client).items():
        if not name.startswith("_") and not isinstance(group, str):
            parts += [f"## `client.{name}`", f"::: {_home(type(group))}\n{GROUP}"]
    return "\n\n".join(parts) + "\n"


def _home(value: Any) -> str:
    """Where a class, a function or a module is defined."""
    return (
        f"{value.__module__}.{value.__qualname__}"
        if hasattr(value, "__qualname__")
        else value.__name__
    )


def cli() -> str:
    """Every command with its arguments and options."""
    app = import_module("midstream.client.cli.main").app
    command = typer.main.get_command(app)
    written = get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="midstream", title="Command line"
    )
    return re.sub(r"(?<!`)\[(?=[^\]`]*\])", r"\\[", written)  # `HOOK[:LAYERS]` is no link


def openapi() -> bytes:
    """The OpenAPI document, as `python -m midstream.api --openapi` prints it."""
    settings = import_module("midstream.schemas.settings.settings").Settings()
    app = import_module("midstream.api.app").make_app(settings)
    return bytes(import_module("midstream.api.openapi").document(app))


def http() -> str:
    """Every endpoint of the OpenAPI document, then the shapes that they take and give."""
    document = json.loads(openapi())
    parts = [
        "# HTTP endpoints",
        (
            "[The HTTP page](../http.md) shows requests and responses; "
            "[openapi.json](../openapi.json) is the source of this one."
        ),
    ]
    for path, item in document["paths"].items():
        parts += [_operation(path, method, item[method]) for method in METHODS if method in item]
    parts.append("## Shapes")
    parts += [
        _shape(name, schema) for name, schema in sorted(document["components"]["schemas"].items())
    ]
    return "\n\n".join(parts) + "\n"


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [
        f"## `{method.upper()} {path}`",
        operation.get("summary", ""),
        operation.get("description", ""),
    ]
    rows = [
        (f"`{p['name']}`", p["in"], _type(p["schema"]), _cell(p.get("description", "")))
        for p in operation.get("parameters", ())
    ]
    parts.append(_table(("parameter", "in", "type", ""), rows))
    bodies = operation.get("requestBody", {}).get("content", {})
    parts += [f"Body (`{media}`): {_type(body['schema'])}" for media, body in bodies.items()]
    answers = [
        (
            status,
            _cell(answer.get("description", "")),
            OR.join(_type(body.get("schema", {})) for body in answer.get("content", {}).values()),
        )
        for status, answer in operation["responses"].items()
    ]
    parts.append(_table(("status", "meaning", "body"), answers))
    return "\n\n".join(part for part in parts if part)


def _shape(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    kind = _kinds(import_module("midstream.schemas.base.records").Record).get(name)
    meanings = comments.of_fields(kind) if kind else {}
    rows = [
        (
            f"`{field}`",
            _type(of),
            ""
            if field in required
            else f"`{json.dumps(of['default'])}`"
            if "default" in of
            else "optional",
            PAGE.sub(r"[\1](../\1\2)", _cell(meanings.get(field, ""))),
        )
        for field, of in schema.get("properties", {}).items()
    ]
    parts = [
        f"### {name}",
        schema.get("description", ""),
        _table(("field", "type", "default", ""), rows) or _type(schema),
    ]
    return "\n\n".join(part for part in parts if part)


def _kinds(base: type) -> dict[str, type]:
    """Return the records that extend `base`, by name."""
    found = {each.__name__: each for each in base.__subclasses__()}
    for each in list(found.values()):
        found |= _kinds(each)
    return found


def _type(schema: dict[str, Any]) -> str:
    """A schema in one line; named shapes are links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower().replace('.', '')})"
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return OR.join(dict.fromkeys(map(_type, schema[choice])))
    if "enum" in schema or "const" in schema:
        return OR.join(
            f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")])
        )
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {_type(schema.get('items') or {})}" + _bounds(schema)
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return (OR.join(kind) if isinstance(kind, list) else kind) + _bounds(schema)


#: Bound of a schema → how it is written.
BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} items",
    "maxItems": "≤ {} items",
}


def _bounds(schema: dict[str, Any]) -> str:
    found = [words.format(schema[name]) for name, words in BOUNDS.items() if name in schema]
    return f" ({', '.join(found)})" if found else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return (
        "\n".join(f"| {' | '.join(row)} |" for row in [head, ("---",) * len(head), *rows])
        if rows
        else ""
    )
