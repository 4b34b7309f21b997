"""The OpenAPI document: our types as msgspec describes them, what each operation needs, and where
its answers lead.
"""

from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Litestar, Request, Router
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Schema
from litestar.plugins import OpenAPISchemaPlugin
from litestar.routes import HTTPRoute
from litestar.typing import FieldDefinition

from ..schemas.access.keys import Scope
from ..schemas.base.version import __version__
from ..schemas.jobs.openai import OpenAIProblem
from .routes.pages import HEADERS, Operations, Swagger
from .web.auth import needs, scope_of
from .web.problems import OPENAI_PATHS

if TYPE_CHECKING:
    from litestar._openapi.schema_generation import SchemaCreator

DESCRIPTION = (
    "Capture, steering and patching of activations on stock vLLM, as a job service. "
    "Errors are RFC 9457 problem details that name the field."
)


class Records(OpenAPISchemaPlugin):
    """Our types in the document, as msgspec itself describes them: bounds, patterns, defaults, and
    unknown fields refused.

    (Litestar's own description leaves the last two out.) Litestar names the types where routes use
    them; `complete` fills them in.
    """

    def __init__(self) -> None:
        self._met: dict[str, type[msgspec.Struct]] = {}

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        return not field_definition.is_union and field_definition.is_subclass_of(msgspec.Struct)

    def to_openapi_schema(
        self, field_definition: FieldDefinition, schema_creator: "SchemaCreator"
    ) -> Schema:
        kind = field_definition.annotation
        self._met[kind.__name__] = kind
        return schema_creator.create_component_schema(
            field_definition, required=[], property_fields={}
        )

    def complete(self, document: dict[str, Any], app: Litestar) -> dict[str, Any]:
        """The document with every type described, what each operation needs, and where its answer
        leads.
        """
        kinds = [OpenAIProblem, *(self._met[name] for name in sorted(self._met))]
        _, described = msgspec.json.schema_components(
            kinds, ref_template="#/components/schemas/{name}"
        )
        components = document.get("components", {})
        schemas = {
            **components.get("schemas", {}),
            **{name: _dedented(schema) for name, schema in described.items()},
        }
        ids = {
            f"{method} {path}": operation["operationId"]
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        }
        scopes = scopes_of(app)
        return {
            **document,
            "paths": {
                path: {
                    method: _operation(path, operation, ids, scopes[f"{method} {path}"])
                    for method, operation in operations.items()
                }
                for path, operations in document["paths"].items()
            },
            "components": {**components, "schemas": schemas, "securitySchemes": {KEY: BEARER}},
        }


def _dedented(schema: dict[str, Any]) -> dict[str, Any]:
    """Docstrings without their indentation, which Python 3.13 removes automatically and older
    versions keep.
    """
    return (
        {**schema, "description": cleandoc(schema["description"])}
        if "description" in schema
        else schema
    )


#: Of the one security scheme.
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
#: For every operation that needs a key, unless it says more.
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

#: Type of an answer → name of the link → the operation that it leads to, its parameter, and where
#: the answer has its value.
LINKS: dict[str, dict[str, tuple[str, str, str]]] = {
    "JobView": {
        "job": ("get /v1/jobs/{job_id}", "job_id", "$response.body#/id"),
        "events": ("get /v1/jobs/{job_id}/events", "job_id", "$response.body#/id"),
        "result": ("get /v1/jobs/{job_id}/result", "job_id", "$response.body#/id"),
        "cancel": ("post /v1/jobs/{job_id}/cancel", "job_id", "$response.body#/id"),
        "captures": ("get /v1/captures/{job_id}", "job_id", "$response.body#/id"),
    },
    "CaptureManifest": {
        "safetensors": ("get /v1/captures/{job_id}/safetensors", "job_id", "$response.body#/job"),
        "delete": ("delete /v1/captures/{job_id}", "job_id", "$response.body#/job"),
    },
    "ModuleView": {
        "module": ("get /v1/steering/modules/{name}", "name", "$response.body#/name"),
        "delete": ("delete /v1/steering/modules/{name}", "name", "$response.body#/name"),
    },
    "CreatedKey": {"revoke": ("delete /v1/keys/{key_id}", "key_id", "$response.body#/id")},
    "TenantView": {"tenant": ("get /v1/tenants/{name}", "name", "$response.body#/name")},
}


def scopes_of(app: Litestar) -> dict[str, Scope | None]:
    """Return the scope that each operation requires, such as `get /v1/jobs`."""
    return {
        f"{method.lower()} {route.path_format}": scope_of(handler)
        for route in app.routes
        if isinstance(route, HTTPRoute)
        for method, (handler, _) in route.route_handler_map.items()
        if method != "OPTIONS"
    }


def _operation(
    path: str, operation: dict[str, Any], ids: dict[str, str], scope: Scope | None
) -> dict[str, Any]:
    """The operation with its scope, the refusals that come with it, and links out of its
    answers.
    """
    operation = {**operation, "responses": {**operation.get("responses", {}), **MISDIRECTED}}
    if path in OPENAI_PATHS:
        operation = _in_openais_words(operation)
    responses = {
        status: _linked(response, ids) for status, response in operation["responses"].items()
    }
    if scope is None:
        return {**operation, "responses": responses, "security": []}
    description = f"{operation.get('description') or ''}\n\nScope: `{scope}`.".strip()
    limited, refusals = (
        _in_openais_words([LIMITED, REFUSALS]) if path in OPENAI_PATHS else (LIMITED, REFUSALS)
    )
    return {
        **operation,
        "description": description,
        "responses": {**limited, **responses, **refusals},
        "security": [{KEY: []}],
    }


def _in_openais_words(node: Any) -> Any:
    """Add the OpenAI form of each problem document at OpenAI's paths."""
    if isinstance(node, dict):
        return {name: _in_openais_words(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_in_openais_words(value) for value in node]
    return "#/components/schemas/OpenAIProblem" if node == "#/components/schemas/Problem" else node


def _linked(response: dict[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    types = [
        media.get("schema", {}).get("$ref", "").rpartition("/")[2]
        for media in response.get("content", {}).values()
    ]
    links = {
        name: {"operationId": ids[operation], "parameters": {parameter: value}}
        for kind in types
        for name, (operation, parameter, value) in LINKS.get(kind, {}).items()
    }
    return {**response, "links": links} if links else response


class Document(JsonRenderPlugin):
    """`/schema/openapi.json`."""

    def __init__(self, records: Records):
        super().__init__(path="/openapi.json")
        self._records = records

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return msgspec.json.encode(self._records.complete(openapi_schema, request.app))


def config(records: Records) -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Midstream",
        version=__version__,
        description=DESCRIPTION,
        render_plugins=[Operations(), Document(records), Swagger()],
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
    """The document as it is kept in `docs/openapi.json`: indented, keys in order, so that a change
    shows in a review.
    """
    complete = app.plugins.get(Records).complete(app.openapi_schema.to_schema(), app)
    return (
        msgspec.json.format(msgspec.json.encode(complete, order="deterministic"), indent=2) + b"\n"
    )
