"""Does every route say who may call it, and are names of different tenants never the same?"""

import pytest
from hypothesis import given, settings, strategies as st
from litestar import get
from litestar.routes import HTTPRoute

from midstream.api.app import make_app
from midstream.api.openapi import scopes_of
from midstream.api.web import auth
from midstream.schemas.access.keys import (
    DEFAULT_TENANT,
    TENANT_PATTERN,
    Caller,
    own,
    scoped,
    shown,
    unscoped,
)
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings, asks_for_keys

APP = make_app(Settings(redis_url="redis://127.0.0.1:1/0"))


def test_routes_without_a_key_are_few_and_each_states_its_scope() -> None:
    silent = {
        f"{method} {route.path}"
        for route in APP.routes
        if isinstance(route, HTTPRoute)
        for method, (handler, _) in route.route_handler_map.items()
        if method != "OPTIONS" and "scope" not in handler.opt
    }
    assert silent == set()

    @get("/v1/new")
    async def handler() -> None: ...

    assert auth.scope_of(handler) == "admin"
    opened = {route for route, scope in scopes_of(APP).items() if scope is None}
    # the files of the page and of the documentation, and the page's login
    files = {"get /", "get /page/{path}", "get /docs", "get /docs/{path}"}
    page = files | {"get /session", "post /session", "delete /session"}
    assert {route for route in opened if not route.startswith("get /schema")} == page | {
        "get /healthz",
        "get /readyz",
    }
    assert scopes_of(APP)["get /metrics"] == "observe"


@pytest.mark.parametrize(
    ("host", "setting", "asks"),
    [
        ("127.0.0.1", "auto", False),
        ("127.8.9.1", "auto", False),
        ("::1", "auto", False),
        ("localhost", "auto", False),
        ("0.0.0.0", "auto", True),
        ("::", "auto", True),
        ("10.0.0.7", "auto", True),
        ("example.com", "auto", True),
        ("127.0.0.1", "keys", True),
        ("0.0.0.0", "open", False),
    ],
)
def test_keys_are_required_off_loopback_or_by_setting(host: str, setting: str, asks: bool) -> None:
    assert asks_for_keys(Settings(api_host=host, auth=setting)) is asks  # type: ignore[arg-type]


tenants = st.from_regex(TENANT_PATTERN, fullmatch=True)
names = st.text(
    st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20
) | st.builds("{}/{}".format, tenants, tenants)


@settings(max_examples=40)
@given(tenants | st.just(DEFAULT_TENANT), names, tenants | st.just(DEFAULT_TENANT), names)
def test_tenant_names_never_collide_in_keys(tenant: str, name: str, other: str, its: str) -> None:
    assert (scoped(tenant, name) == scoped(other, its)) is ((tenant, name) == (other, its))
    assert unscoped(scoped(tenant, name)) == (tenant, name)
    assert shown(scoped(tenant, name)) == name
    assert own(tenant, [scoped(other, its)]) == ([its] if other == tenant else [])


def test_listing_another_tenant_needs_admin() -> None:
    caller = Caller("acme", scopes=frozenset({"read"}))
    admin = Caller()
    assert auth.tenant_asked(caller, None) == "acme"
    assert auth.tenant_asked(caller, "acme") == "acme"
    assert auth.tenant_asked(admin, None) is None
    assert auth.tenant_asked(admin, "acme") == "acme"
    with pytest.raises(MidstreamError, match="requires scope admin"):
        auth.tenant_asked(caller, "other")
