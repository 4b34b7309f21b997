"""Does the OpenAPI document say what the API does, did nobody change the API without noticing, and
is everything that a request may hold bounded, each bound documented?
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, strategies as st
from routes import operations

from midstream.api.app import make_app
from midstream.api.openapi import document
from midstream.api.web import problems
from midstream.schemas.base import json_bounds, limits
from midstream.schemas.base.errors import Problem
from midstream.schemas.base.json_bounds import TooManyValues, check_json
from midstream.schemas.base.records import Published, from_json
from midstream.schemas.jobs.jobs import Job, JobRequest, Sampling
from midstream.schemas.jobs.openai import ONLY
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
    kinds = [Published]
    lenient = {"JobResult"}  # those of kinds that are not installed here have further fields
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
        ({"model": "m", "prompts": ["a"], "sampling": {"max_tokens": -1}}, False),
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


DOCS = Path(__file__).resolve().parents[3] / "docs"

#: JSON has no infinity, and their limits depend on the op and the model:
#: `api/resolve/edits/interventions.py`.
LIMITED_BY_OP = {f"SteeringSpec.{name}" for name in ("scale", "strength", "low", "high")}
#: Kept as they came and refused by name: `api/resolve/prompts/request_parsing.py`.
UNSERVED = {f"{kind}.{name}" for kind in ("CompletionRequest", "ChatRequest") for name in ONLY}
#: JSON schemas and the like, whose size and depth `api/resolve/prompts/formats.py` bounds.
BOUNDED_LATER = {
    "ChatRequest.chat_template_kwargs",
    "FunctionDefinition.parameters",
    "JsonSchema.schema",
    "StructuredRequest.json",
}


def unbounded(
    node: dict[str, Any], at: str, components: dict[str, Any], met: set[str]
) -> Iterator[str]:
    """The places below `node`, a JSON schema, that allow any number of anything."""
    if at in BOUNDED_LATER:
        return
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name not in met:
            met.add(name)
            yield from unbounded(components[name], name, components, met)
        return
    if "enum" in node or "const" in node:
        return
    for choice in node.get("anyOf", node.get("oneOf", [])):
        # The framework writes the bounds of an optional parameter beside its types.
        yield from unbounded(
            {name: value for name, value in node.items() if name not in ("anyOf", "oneOf")}
            | choice,
            at,
            components,
            met,
        )
    if "anyOf" in node or "oneOf" in node:
        return
    kind = node.get("type")
    if kind == "string" and "maxLength" not in node and node.get("format") != "binary":
        yield f"{at}: maxLength"
    elif kind == "integer" or (kind == "number" and at not in LIMITED_BY_OP):
        if not {"maximum", "exclusiveMaximum"} & node.keys():
            yield f"{at}: maximum"
        if kind == "integer" and not {"minimum", "exclusiveMinimum"} & node.keys():
            yield f"{at}: minimum"
    elif kind == "array":
        if "maxItems" not in node:
            yield f"{at}: maxItems"
        for index, item in enumerate(
            [*node.get("prefixItems", []), *([node["items"]] if node.get("items") else [])]
        ):
            yield from unbounded(item, f"{at}[{index}]", components, met)
    elif kind == "object" and "properties" in node:
        if node.get("additionalProperties") is not False:
            yield f"{at}: other fields"
        for name, field in node["properties"].items():
            yield from unbounded(field, f"{at}.{name}", components, met)
    elif kind == "object":
        if "maxProperties" not in node:
            yield f"{at}: maxProperties"
        for name in ("additionalProperties", "propertyNames"):
            if name in node:
                yield from unbounded(
                    {"type": "string"} | node[name], f"{at}.{name}", components, met
                )
    elif kind is None and at not in UNSERVED:
        yield f"{at}: any value"


def test_everything_in_bodies_and_parameters_is_bounded(spec: dict[str, Any]) -> None:
    found = []
    met = set[str]()
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            for kind, media in operation.get("requestBody", {}).get("content", {}).items():
                found += unbounded(
                    media["schema"], f"{method} {path} {kind}", spec["components"]["schemas"], met
                )
    assert found == []
    assert {
        "JobRequest",
        "CompletionRequest",
        "ChatRequest",
        "SweepRequest",
        "ModuleRequest",
        "GlobalRequest",
        "Limits",
        "Tensor",
    } <= met
    parameters = [
        (f"{method} {path} {parameter['name']}", parameter["schema"])
        for path, methods in spec["paths"].items()
        for method, operation in methods.items()
        for parameter in operation.get("parameters", [])
    ]
    assert len(parameters) > 50
    assert [
        what
        for at, schema in parameters
        for what in unbounded(schema, at, spec["components"]["schemas"], set())
    ] == []


# --- The table in the documentation
# --------------------------------------------------------------------------------------


def test_the_documented_limits_are_those_of_the_code() -> None:
    table = (DOCS / "reference" / "limits.md").read_text()
    rows = re.findall(r"^\| .*? \| ([\d,]+)[^|]*\| `(MAX_\w+)` \|$", table, re.MULTILINE)
    assert {name: float(number.replace(",", "")) for number, name in rows} == {
        name: float(value) for name, value in vars(limits).items() if name.startswith("MAX_")
    }


# --- Whole documents
# --------------------------------------------------------------------------------------------------

FULL = b"[" + b"0," * (limits.MAX_JSON_VALUES - 1) + b"0]"


@pytest.mark.parametrize(
    "raw",
    [
        FULL,
        b'{"a": "' + b"," * limits.MAX_JSON_VALUES + b'"}',
        b'{"a": "' + b'\\",{[' * limits.MAX_JSON_VALUES + b'\\\\"}',
        b"[" + b"{}," * (limits.MAX_JSON_CONTAINERS - 2) + b"{}]",
        b'"',
        b"",
    ],
)
def test_documents_within_the_limits_are_decoded(raw: bytes) -> None:
    check_json(raw)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"[0," + FULL[1:], f"more than {limits.MAX_JSON_VALUES} values"),
        (b'["' + b"," * 9 + b'\\"","' + b'",0,"' * limits.MAX_JSON_VALUES + b'"]', "values"),
        (b"[" + b"{}," * limits.MAX_JSON_CONTAINERS + b"{}]", "objects and arrays"),
        (b"[" * (limits.MAX_JSON_CONTAINERS + 1), "objects and arrays"),
        (b"[" + b'",":"",' * (1 << 20) + b"]", "values"),
        (b"[" + b'"":"",' * (1 << 20) + b"]", "values"),
    ],
)
def test_documents_beyond_them_are_refused_before_decoding(raw: bytes, why: str) -> None:
    with pytest.raises(TooManyValues, match=why):
        check_json(raw)


TEXTS = st.text('a",{[\\é', max_size=5)
DOCUMENTS = st.recursive(
    TEXTS | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
)


def size_of(value: Any) -> tuple[int, int]:
    """(Commas between values, containers) of a document."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = [size_of(item) for item in (value.values() if isinstance(value, dict) else value)]
    return max(len(value) - 1, 0) + sum(commas for commas, _ in inner), 1 + sum(
        containers for _, containers in inner
    )


@given(DOCUMENTS, st.integers(1, 9))
def test_json_limits_count_values_outside_strings(value: Any, piece: int) -> None:
    commas, containers = size_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "PIECE", piece)
        patch.setattr(json_bounds, "MAX_JSON_VALUES", 5)
        patch.setattr(json_bounds, "MAX_JSON_CONTAINERS", 4)
        if commas >= 5 or containers > 4:
            with pytest.raises(TooManyValues):
                check_json(json.dumps(value).encode())
        else:
            check_json(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"model": "\\ud800"}', "not JSON"),
        (b'{"model": "m", "tools": ' + b"[" * 60_000, "too deeply"),
    ],
)
def test_undecodable_json_is_a_problem(raw: bytes, says: str) -> None:
    with pytest.raises(problems.UNREADABLE) as refused:
        msgspec.json.decode(raw, type=dict[str, Any])
    error = problems.malformed(refused.value)
    assert error.status == 400
    assert error.kind == "invalid_request"
    assert says in error.detail


# --- Errors
# --------------------------------------------------------------------------------------------------


def test_errors_quote_little_of_the_input() -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        from_json(b'{"model": "m", "prompts": ["a"], "' + b"x" * 1_000_000 + b'": 1}', JobRequest)
    shown = problems.bounded(problems.malformed(refused.value).problem("/" + "y" * 50_000))
    assert isinstance(shown, Problem)
    assert len(problems.malformed(refused.value).field or "") <= 2 * limits.MAX_DETAIL, (
        "it is cut before it is searched"
    )
    assert max(len(shown.field or ""), len(shown.instance or "")) <= limits.MAX_SHOWN
    assert len(shown.detail) <= limits.MAX_DETAIL


@pytest.mark.parametrize(
    "member",
    [
        '"capture": {"at": "VALUE"}',
        '"capture": {"tag": "VALUE"}',
        '"capture": {"hooks": {"VALUE": 0}}',
    ],
)
def test_refused_values_are_truncated_in_errors(member: str) -> None:
    raw = '{"model": "m", "prompts": ["a"], ' + member.replace("VALUE", "/" * 50_000) + "}"
    with pytest.raises(msgspec.ValidationError) as refused:
        from_json(raw, JobRequest)
    assert len(problems.malformed(refused.value).detail) <= limits.MAX_SHOWN


# --- Stored records
# --------------------------------------------------------------------------------------------------


def test_a_job_accepted_under_wider_limits_is_still_read() -> None:
    sampling = Sampling(stop=["x" * 1000] * 100, stop_token_ids=[1] * 5000)
    job = Job(
        id="job_1", kind="generate", model="m" * 500, prompts=[], sampling=sampling, created=1.0
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job).sampling == sampling
