"""Does the OpenAPI document say what the API does, and did nobody change the API without
noticing?
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from routes import operations

from midstream.api.app import make_app
from midstream.api.openapi import document
from midstream.schemas.base.records import Published
from midstream.schemas.settings.settings import Settings

KEPT = Path(__file__).resolve().parents[3] / "docs" / "routes.txt"


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return dict(json.loads(document(make_app(Settings(redis_url="redis://127.0.0.1:1/0")))))


def test_the_list_of_operations_equals_the_committed_one(spec: dict[str, Any]) -> None:
    assert operations(spec) == KEPT.read_text(), (
        "the API has changed: `python tools/routes.py > docs/routes.txt`, and review the difference"
    )


def test_the_document_describes_every_route_with_its_problems(spec: dict[str, Any]) -> None:
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            if path not in ("/healthz", "/readyz"):
                problems = [
                    answer for status, answer in operation["responses"].items() if status >= "4"
                ]
                assert problems, f"{method} {path}"
                assert all(
                    "application/problem+json" in answer["content"] for answer in problems
                ), f"{method} {path}"


def test_every_type_refuses_unknown_fields_but_what_processes_say_of_themselves(
    spec: dict[str, Any],
) -> None:
    objects = {
        name: schema
        for name, schema in spec["components"]["schemas"].items()
        if schema.get("type") == "object"
    }
    assert len(objects) > 30
    kinds, lenient = [Published], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if not kind.__struct_config__.forbid_unknown_fields:
            lenient.add(kind.__name__)
    assert {
        name for name, schema in objects.items() if schema.get("additionalProperties") is not False
    } - lenient == set()


def test_every_reference_resolves_and_defaults_are_there(spec: dict[str, Any]) -> None:
    found = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                found.add(node["$ref"].removeprefix("#/components/schemas/"))
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(spec)
    assert found <= set(spec["components"]["schemas"])
    assert spec["components"]["schemas"]["JobRequest"]["properties"]["steering"]["default"] == []
    assert (
        spec["components"]["schemas"]["CompletionRequest"]["properties"]["temperature"]["default"]
        == 1.0
    )


@pytest.mark.parametrize(
    ("body", "good"),
    [
        (
            {
                "model": "m",
                "prompts": ["a", [1, 2]],
                "capture": {"layers": "0-3", "positions": [-1]},
            },
            True,
        ),
        ({"model": "m", "prompts": ["a"], "sampling": {"max_tokens": 0}}, False),
        ({"model": "m", "prompts": []}, False),
        ({"model": "m", "prompts": ["a"], "capture": {"tag": "../x"}}, False),
        ({"model": "m", "prompts": ["a"], "unknown": 1}, False),
    ],
)
def test_jsonschema_with_the_document_agrees_with_the_api(
    spec: dict[str, Any], body: dict[str, Any], good: bool
) -> None:
    schema = {"$ref": "#/components/schemas/JobRequest", "components": spec["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is good
