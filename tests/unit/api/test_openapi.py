"""Does the OpenAPI document say what the API does, and did nobody change the API without
noticing?
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from midstream.api.app import make_app
from midstream.api.openapi import document
from midstream.schemas.base.records import Published
from midstream.schemas.base.settings import Settings

KEPT = Path(__file__).resolve().parents[3] / "docs" / "openapi.json"

PATHS = {
    "/healthz": {"get"},
    "/v1/status": {"get"},
    "/readyz": {"get"},
    "/v1/policies": {"get"},
    "/v1/policies/{name}": {"delete", "get", "patch", "put"},
    "/v1/probes": {"get"},
    "/v1/probes/{name}": {"delete", "get", "put"},
    "/v1/attributions": {"post"},
    "/v1/attributions/plan": {"post"},
    "/v1/attributions/{job_id}": {"get"},
    "/v1/jacobians": {"get", "post"},
    "/v1/jacobians/{name}": {"delete", "get"},
    "/v1/captures": {"get"},
    "/v1/captures/{job_id}": {"delete", "get"},
    "/v1/captures/{job_id}/files/{name}": {"get"},
    "/v1/captures/{job_id}/safetensors": {"get"},
    "/v1/captures/{job_id}/norms": {"get"},
    "/v1/chat/completions": {"post"},
    "/v1/completions": {"post"},
    "/v1/harvests": {"get", "post"},
    "/v1/harvests/{harvest_id}": {"delete", "get"},
    "/v1/harvests/{harvest_id}/cancel": {"post"},
    "/v1/harvests/{harvest_id}/events": {"get"},
    "/v1/harvests/{harvest_id}/pause": {"post"},
    "/v1/harvests/{harvest_id}/resume": {"post"},
    "/v1/harvests/{harvest_id}/stream": {"get"},
    "/v1/harvests/{harvest_id}/stream/ack": {"post"},
    "/v1/harvests/{harvest_id}/surveys": {"post"},
    "/v1/harvests/{harvest_id}/surveys/{job_id}": {"get"},
    "/v1/doses": {"post"},
    "/v1/feed": {"get"},
    "/v1/jobs": {"get", "post"},
    "/v1/jobs/{job_id}": {"get"},
    "/v1/jobs/{job_id}/request": {"get"},
    "/v1/jobs/{job_id}/cancel": {"post"},
    "/v1/jobs/{job_id}/events": {"get"},
    "/v1/jobs/{job_id}/result": {"get"},
    "/v1/keys": {"get", "post"},
    "/v1/keys/{key_id}": {"delete"},
    "/v1/loras": {"get", "post"},
    "/v1/loras/{name}": {"delete", "get"},
    "/v1/lenses": {"get", "post"},
    "/v1/lenses/{name}": {"delete", "get"},
    "/v1/saes": {"get", "post"},
    "/v1/saes/{name}": {"delete", "get"},
    "/v1/models": {"get"},
    "/v1/models/{name}": {"get"},
    "/v1/tokenize": {"post"},
    "/v1/detokenize": {"post"},
    "/v1/runs": {"get"},
    "/v1/runs/{name}": {"delete", "get"},
    "/v1/steering/dynamic": {"get"},
    "/v1/steering/global": {"delete", "get", "put"},
    "/v1/steering/modules": {"get"},
    "/v1/steering/modules/{name}": {"delete", "get", "put"},
    "/v1/steering/modules/{name}/file": {"get"},
    "/v1/modules/fit": {"post"},
    "/v1/jacobians/fit": {"post"},
    "/v1/sweeps": {"post"},
    "/v1/sweeps/plan": {"post"},
    "/v1/sweeps/{job_id}": {"get"},
    "/v1/tenant": {"get"},
    "/v1/tenants": {"get"},
    "/v1/tenants/{name}": {"get", "put"},
    "/v1/webhooks/deliveries": {"get"},
    "/v1/webhooks/deliveries/{delivery_id}": {"get"},
    "/v1/webhooks/deliveries/{delivery_id}/redeliver": {"post"},
    "/v1/webhooks/disabled": {"delete", "get"},
    "/v1/webhooks/secrets": {"get", "post"},
}


@pytest.fixture(scope="module")
def raw() -> bytes:
    return document(make_app(Settings(redis_url="redis://127.0.0.1:1/0")))


@pytest.fixture(scope="module")
def spec(raw: bytes) -> dict[str, Any]:
    return dict(json.loads(raw))


def test_the_openapi_document_equals_the_committed_one(raw: bytes) -> None:
    assert raw == KEPT.read_bytes(), (
        "the API has changed: `python -m midstream.api --openapi > docs/openapi.json`, "
        "and review the difference"
    )


def test_the_document_describes_every_route_with_its_problems(spec: dict[str, Any]) -> None:
    assert {path: set(methods) for path, methods in spec["paths"].items()} == PATHS
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
