"""Does every route say who may call it, and are names of different tenants never the same?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.api.app import make_app
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
from midstream.schemas.base.settings import Settings, asks_for_keys


def routes() -> set[str]:
    app = make_app(Settings(redis_url="redis://127.0.0.1:1/0"))
    return {
        f"{method} {route.path.rstrip('/') or '/'}"
        for route in app.routes
        for method in route.methods
        if method != "OPTIONS"
    }  # type: ignore[union-attr]


def test_every_route_has_its_scope_in_the_table_and_the_table_no_other() -> None:
    there = {route.replace(":str}", "}").replace(":path}", "}") for route in routes()}
    assert there - auth.SCOPE_OF.keys() == set()
    assert auth.SCOPE_OF.keys() - there == set()


def test_unlisted_routes_need_scope_admin() -> None:
    assert auth.needed("GET", "/v1/new") == "admin"


def test_only_health_and_documents_need_no_key() -> None:
    opened = {route for route, scope in auth.SCOPE_OF.items() if scope is None}
    # the page's files, and its login
    page = {"GET /", "GET /page/{path}", "GET /session", "POST /session", "DELETE /session"}
    assert {route for route in opened if not route.startswith("GET /schema")} == page | {
        "GET /healthz",
        "GET /readyz",
    }


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


@given(tenants | st.just(DEFAULT_TENANT), names, tenants | st.just(DEFAULT_TENANT), names)
def test_tenant_names_never_collide_in_keys(tenant: str, name: str, other: str, its: str) -> None:
    assert (scoped(tenant, name) == scoped(other, its)) is ((tenant, name) == (other, its))
    assert unscoped(scoped(tenant, name)) == (tenant, name)
    assert shown(scoped(tenant, name)) == name
    assert own(tenant, [scoped(other, its)]) == ([its] if other == tenant else [])


def test_listing_another_tenant_needs_admin() -> None:
    caller, admin = Caller("acme", scopes=frozenset({"read"})), Caller()
    assert auth.tenant_asked(caller, None) == "acme"
    assert auth.tenant_asked(caller, "acme") == "acme"
    assert auth.tenant_asked(admin, None) is None
    assert auth.tenant_asked(admin, "acme") == "acme"
    with pytest.raises(MidstreamError, match="requires scope admin"):
        auth.tenant_asked(caller, "other")
