"""Is every change of what is shared in the audit log, with before and after and without secrets?"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge import MODEL, Api, Hand
from litestar import put
from litestar.routes import HTTPRoute
from tenant_kit import ADMIN, asking, flushed
from typer.testing import CliRunner

from midstream.api.app import make_app
from midstream.api.web import audit
from midstream.api.web.auth import needs
from midstream.api.web.request_context import TRACED
from midstream.client import Client
from midstream.client.cli.main import app as cli
from midstream.schemas.access.keys import Limits
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings
from midstream_ops.redis_server import RedisServer

#: Writing routes that no entry follows: users change what is their own.
OF_USERS = {
    "/session": "a login of the page",
    "/v1/attributions": "a job",
    "/v1/captures/{job_id}": "captures of the user's own jobs",
    "/v1/chat/completions": "a job",
    "/v1/completions": "a job",
    "/v1/detokenize": "changes nothing",
    "/v1/doses": "a job",
    "/v1/harvests": "a harvest",
    "/v1/harvests/{harvest_id}": "a harvest of the user's own",
    "/v1/harvests/{harvest_id}/stream/ack": "a harvest of the user's own",
    "/v1/harvests/{harvest_id}/surveys": "a job",
    "/v1/harvests/{harvest_id}/{action}": "a harvest of the user's own",
    "/v1/hits/texts": "texts of the user's own jobs",
    "/v1/jobs": "a job",
    "/v1/jobs/{job_id}/cancel": "a job of the user's own",
    "/v1/modules/fit": "a job; the module that it learns is of the user's tenant",
    "/v1/runs/{name}": "captures of the user's own jobs",
    "/v1/sweeps": "a job",
    "/v1/tokenize": "changes nothing",
    "/v1/webhooks/deliveries/{delivery_id}/redeliver": "a webhook of the user's own job",
}


@pytest.fixture(scope="module")
def api(redis_session: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    flushed(redis_session.url)
    with asking(tmp_path_factory.mktemp("audit"), redis_session.url) as api:
        yield api


@pytest.fixture(scope="module")
def hand(api: Api) -> Iterator[Hand]:
    with Hand(api.settings) as worker:
        yield worker


def test_every_writing_route_is_audited_or_is_of_users() -> None:
    audited = set()
    silent = set()
    for route in make_app(Settings()).routes:
        if not isinstance(route, HTTPRoute):
            continue
        for method, (handler, _) in route.route_handler_map.items():
            if method in TRACED:
                (audited if "audit" in handler.opt else silent).add(route.path_format)
    # what answers in place of a package that is not installed changes nothing
    silent = {path for path in silent if not path.endswith("/{path}")}
    assert silent - OF_USERS.keys() == set()
    # the packages of these two need not be installed
    assert OF_USERS.keys() - silent - {"/session", "/v1/hits/texts"} == set()
    assert {"/v1/keys", "/v1/tenants/{name}", "/v1/steering/global"} <= audited


def test_an_api_with_a_route_that_says_nothing_does_not_start() -> None:
    @put("/v1/secretly", opt=needs("admin"))
    async def secretly() -> None: ...

    app = make_app(Settings())
    app.register(secretly)
    with pytest.raises(ValueError, match="without `audited`: PUT /v1/secretly"):
        audit.check_routes(app.routes)


def test_changes_are_listed_with_before_and_after_and_no_secret(
    api: Api, hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(api.url, ADMIN) as client:
        client.tenants.put("vision", Limits(jobs_in_flight=3))
        client.tenants.put("vision", Limits(jobs_in_flight=5))
        made = client.keys.create("ada", tenant="vision")
        client.keys.delete(made.id)
        width = client.model(MODEL)["hidden_size"]
        client.modules.put("joy", [{"layers": 1, "vector": [1.0] * width}])
        client.modules.delete("joy")
        with pytest.raises(MidstreamError):
            client.keys.delete("unknown")
        with Client(api.url, made.key) as other, pytest.raises(MidstreamError):
            other.changes.list()
        first = client.changes.list(limit=4)
        rest = client.changes.list(cursor=first.next)
    entries = [*first.entries, *rest.entries]
    assert [(each.what, each.name, each.action.split()[0]) for each in entries[:6]] == [
        ("modules", "joy", "DELETE"),
        ("modules", "joy", "PUT"),
        ("key", made.id, "DELETE"),
        ("key", made.id, "POST"),
        ("tenant", "vision", "PUT"),
        ("tenant", "vision", "PUT"),
    ]
    deleted, put_, revoked, created, second, first_limits = entries[:6]
    assert put_.before == {}
    assert deleted.before == put_.after
    assert revoked.before["id"] == made.id
    assert revoked.after is None
    assert created.after["tenant"] == "vision"
    assert second.before["jobs_in_flight"] == 3
    assert second.after["jobs_in_flight"] == 5
    assert first_limits.before.get("jobs_in_flight") is None
    assert {each.by for each in entries[:6]} == {ADMIN.split("_")[1]}
    text = json.dumps([entry.after for entry in entries] + [entry.before for entry in entries])
    assert made.key.split("_")[2] not in text
    monkeypatch.setenv("MIDSTREAM_API_KEY", ADMIN)
    listed = CliRunner().invoke(cli, ["list", "audit", "--url", api.url])
    assert listed.exit_code == 0, listed.output
    assert "tenant vision" in listed.output
    file = tmp_path / "audit.jsonl"
    done = CliRunner().invoke(cli, ["export", "audit", str(file), "--url", api.url])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["id"] for line in lines] == sorted(line["id"] for line in lines)
    assert {entry.id for entry in entries[:6]} <= {line["id"] for line in lines}


def test_a_cursor_that_is_none_is_refused(api: Api) -> None:
    with Client(api.url, ADMIN) as client, pytest.raises(MidstreamError, match="is not a cursor"):
        client.changes.list(cursor="x")
