"""Builds the OpenAPI document: our types as msgspec describes them, and the scope of each
operation.
"""

from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Litestar, Router
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Schema
from litestar.plugins import OpenAPISchemaPlugin
from litestar.routes import HTTPRoute
from litestar.typing import FieldDefinition

from ..schemas.access.keys import Scope
from ..schemas.base.version import __version__
from ..schemas.jobs.openai import OpenAIProblem
from ..schemas.requests.artifact_kinds import ARTIFACTS
from .routes.pages import HEADERS, Operations, Swagger
from .web.auth import needs, scope_of
from .web.problems import OPENAI_PATHS
from .web.request_context import AnyRequest

if TYPE_CHECKING:
    from litestar._openapi.schema_generation import SchemaCreator

#: An object of the document, or the document.
DocumentPart = dict[str, Any]
DESCRIPTION = (
    "Capture, steering and patching of activations on stock vLLM, as a job service. "
    "Errors are RFC 9457 problem details that name the field."
)


class RecordSchemas(OpenAPISchemaPlugin):
    """Describes our types with msgspec's own schemas, because Litestar's omit defaults, and that
    unknown fields are rejected.

    Litestar names the types where routes use them; `complete` adds their schemas.
    """

    def __init__(self) -> None:
        self._types: dict[str, type[msgspec.Struct]] = {}

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        return not field_definition.is_union and field_definition.is_subclass_of(msgspec.Struct)

    def to_openapi_schema(
        self, field_definition: FieldDefinition, schema_creator: "SchemaCreator"
    ) -> Schema:
        kind = field_definition.annotation
        self._types[kind.__name__] = kind
        return schema_creator.create_component_schema(
            field_definition, required=[], property_fields={}
        )

    def complete(self, document: DocumentPart, app: Litestar) -> DocumentPart:
        """Return the document with the schema of every type and the scope of each operation."""
        known = sorted(self._types)
        bodies = [row.request for row in ARTIFACTS.values()]
        kinds = [OpenAIProblem, *(self._types[name] for name in known), *bodies]
        _, described = msgspec.json.schema_components(
            kinds, ref_template="#/components/schemas/{name}"
        )
        components = document.get("components", {})
        schemas = {
            **components.get("schemas", {}),
            **{  # docstrings are dedented, which Python 3.13 does by itself
                name: schema | {"description": cleandoc(schema["description"])}
                if "description" in schema
                else schema
                for name, schema in described.items()
            },
        }
        scopes = scopes_of(app)
        return {
            **document,
            "paths": {
                path: {
                    method: _operation(path, operation, scopes[f"{method} {path}"])
                    for method, operation in operations.items()
                }
                for path, operations in document["paths"].items()
            },
            "components": {**components, "schemas": schemas, "securitySchemes": {KEY: BEARER}},
        }


#: Name of the only security scheme.
KEY = "key"
BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, `ms_…`. Not needed where authentication is off.",
}
_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_CHALLENGE = {"WWW-Authenticate": {"schema": {"type": "string"}}}
REFUSALS = {
    "401": {
        "description": "The key is missing or invalid",
        "headers": _CHALLENGE,
        "content": _PROBLEM,
    },
    "403": {
        "description": (
            "The key lacks the scope that `detail` names; or the request comes from a page "
            "on another site (`cross_site`)"
        ),
        "headers": _CHALLENGE,
        "content": _PROBLEM,
    },
}
#: For every operation that needs a key, unless it documents a 429 of its own.
LIMITED = {
    "429": {
        "description": (
            "The tenant has too many requests or event streams open, or opens streams too "
            "often: retry after `Retry-After`"
        ),
        "headers": {"Retry-After": {"schema": {"type": "integer"}}},
        "content": _PROBLEM,
    }
}
#: For every operation, including unauthenticated ones.
MISDIRECTED = {
    "421": {"description": "The `Host` header does not name this API", "content": _PROBLEM}
}


def scopes_of(app: Litestar) -> dict[str, Scope | None]:
    """Return the scope that each operation requires, by method and path: `get /v1/jobs`."""
    return {
        f"{method.lower()} {route.path_format}": scope_of(handler)
        for route in app.routes
        if isinstance(route, HTTPRoute)
        for method, (handler, _) in route.route_handler_map.items()
        if method != "OPTIONS"
    }


def _operation(path: str, operation: DocumentPart, scope: Scope | None) -> DocumentPart:
    """Return the operation with its scope and the errors of authorization."""
    operation = {**operation, "responses": {**operation.get("responses", {}), **MISDIRECTED}}
    if path in OPENAI_PATHS:
        operation = _with_openai_problems(operation)
    if scope is None:
        return {**operation, "security": []}
    description = f"{operation.get('description') or ''}\n\nScope: `{scope}`.".strip()
    limited, refusals = (
        _with_openai_problems([LIMITED, REFUSALS]) if path in OPENAI_PATHS else (LIMITED, REFUSALS)
    )
    return {
        **operation,
        "description": description,
        "responses": {**limited, **operation["responses"], **refusals},
        "security": [{KEY: []}],
    }


def _with_openai_problems(node: Any) -> Any:
    """Replace `Problem` by `OpenAIProblem` in all references, for OpenAI's paths."""
    if isinstance(node, dict):
        return {name: _with_openai_problems(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_with_openai_problems(value) for value in node]
    return "#/components/schemas/OpenAIProblem" if node == "#/components/schemas/Problem" else node


class OpenAPIRender(JsonRenderPlugin):
    """Renders `/schema/openapi.json`."""

    def __init__(self, records: RecordSchemas):
        super().__init__(path="/openapi.json")
        self._records = records

    def render(self, request: AnyRequest, openapi_schema: DocumentPart) -> bytes:
        return msgspec.json.encode(self._records.complete(openapi_schema, request.app))


def config(records: RecordSchemas) -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Midstream",
        version=__version__,
        description=DESCRIPTION,
        render_plugins=[Operations(), OpenAPIRender(records), Swagger()],
        openapi_router=Router(
            "/schema",
            route_handlers=[],
            include_in_schema=False,
            opt=needs(None),
            dto=None,
            return_dto=None,
            response_headers=HEADERS,
        ),
    )


def document(app: Litestar) -> bytes:
    """Return the document, indented and with sorted keys."""
    complete = app.plugins.get(RecordSchemas).complete(app.openapi_schema.to_schema(), app)
    return (
        msgspec.json.format(msgspec.json.encode(complete, order="deterministic"), indent=2) + b"\n"
    )
