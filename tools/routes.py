"""Prints `docs/routes.txt`: a line for each operation of the API, so that reviews show changes of
what it offers: `python tools/routes.py > docs/routes.txt`.
"""

import json
import re
from typing import Any

from midstream.api.app import make_app
from midstream.api.openapi import document
from midstream.schemas.settings.settings import Settings


def operations(spec: dict[str, Any]) -> str:
    """Return a line for each operation of an OpenAPI document: method, path, operation id, scope,
    then each status of success with what it answers.
    """
    lines = [
        f"{method.upper()} {path} {operation['operationId']} [{_scope(operation)}]: "
        f"{', '.join(_answers(operation))}\n"
        for path, methods in sorted(spec["paths"].items())
        for method, operation in sorted(methods.items())
    ]
    return "".join(lines)


def _scope(operation: dict[str, Any]) -> str:
    found = re.search(r"Scope: `(.*)`", operation.get("description", ""))
    return found[1] if found else "public"


def _answers(operation: dict[str, Any]) -> list[str]:
    successes = sorted(item for item in operation["responses"].items() if item[0] < "4")
    return [
        " ".join([status, *map(_body, answer.get("content", {}).items())])
        for status, answer in successes
    ]


def _body(content: tuple[str, dict[str, Any]]) -> str:
    """Return the name of a body's type, or its media type."""
    media, body = content
    return str(body.get("schema", {}).get("$ref", media)).rpartition("schemas/")[2]


if __name__ == "__main__":
    print(operations(json.loads(document(make_app(Settings())))), end="")
