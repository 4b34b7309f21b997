"""The battery that every registered kind passes: over HTTP, from Python and on the command line.

A kind has an example in `KINDS`. The engine is a fake.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import msgspec
import numpy as np
import pytest
from edge import refused
from ledger_kit import MODEL as OTHER, open_ledger
from midstream_fake_engine.model import HIDDEN_SIZE
from redis.asyncio.connection import AbstractConnection
from refusal_kit import refuses
from stack import Stack

from midstream.api import app
from midstream.api.openapi import document
from midstream.api.resolve.admission.names import Names
from midstream.api.resolve.admission.served import Served
from midstream.api.resolve.prompts.request_parsing import parse_job
from midstream.api.routes import registered
from midstream.broker.ledger.named.registry import (
    PUT_TRIES,
    Registry,
    _say_former,
    look_up,
)
from midstream.client import Client
from midstream.client.cli.kinds import KINDS as COMMANDS
from midstream.client.render.records import layout
from midstream.client.sdk.registered import Named, calls_of
from midstream.schemas.access.keys import EVERYBODY
from midstream.schemas.artifacts.registered import ArtifactKind, FolderRequest, Registered
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.jobs import JobRequest
from midstream.schemas.requests.artifact_kinds import ARTIFACTS, OWN
from midstream.schemas.requests.policies import POLICIES, Policy
from midstream.schemas.settings.settings import Settings

pytest_plugins = ["shared_stack"]
pytestmark = [pytest.mark.xdist_group("shared_stack")]

DATA = Path(__file__).parents[1] / "data"
MODEL = "fake-model"
ONES = [1.0] * HIDDEN_SIZE
PROBE = {"weight": [ONES], "layer": 1, "labels": ["x"], "thresholds": [1.5]}
POLICY = {"probe": "read", "condition": {"at_least": 5.0}, "actions": ["flag"]}


class Example(NamedTuple):
    """Contents of a kind, and a request that names one."""

    body: dict[str, Any]
    other: dict[str, Any]
    shown: str  # what the command line says of `body`
    asked: dict[str, Any]  # fields of a job that names `mine`
    field: str  # that names it there


KINDS = {
    "modules": Example(
        {"steering": [{"layers": 1, "vector": ONES}]},
        {"steering": [{"layers": 2, "vector": ONES}]},
        "post_block",
        {"steering": [{"module": "mine"}]},
        "steering[0].module",
    ),
    "loras": Example(
        {"path": "calm"}, {"path": "other"}, "model.layers.*", {"lora": "mine"}, "lora"
    ),
    "saes": Example(
        {"path": "gemma_scope", "hook": "post_block", "layer": 2},
        {"path": "jumprelu"},
        "post_block of layer 2",
        {"features": [{"sae": "mine"}]},
        "features[0].sae",
    ),
    "lenses": Example(
        {"path": "some", "residual": True},
        {"path": "all"},
        "post_block of layers 1-2",
        {"lens": {"tuned": "mine"}},
        "lens.tuned",
    ),
    "jacobians": Example(
        {"path": "jacobian"},
        {"path": "bare"},
        "sketched, of 9 prompts, error up to 12.5%",
        {"lens": {"jacobian": "mine"}},
        "lens.jacobian",
    ),
    "probes": Example(PROBE, {**PROBE, "layer": 2}, "x ≥ 1.5", {"probes": ["mine"]}, "probes[0]"),
    "policies": Example(
        POLICY,
        {**POLICY, "condition": {"at_least": 6.0}},
        "last ≥ 5",
        {"policies": ["mine"]},
        "policies[0]",
    ),
}


@pytest.fixture(params=OWN, ids=lambda kind: kind.plural)
def kind(request: pytest.FixtureRequest) -> ArtifactKind[Any]:
    return request.param


@pytest.fixture
def given(kind: ArtifactKind[Any], client: Client, installed: Any, nameless: None) -> Example:
    """The kind's contents; the probe that policies read is there."""
    if kind.plural == "policies":
        client.probes.put("read", weight=np.ones((1, HIDDEN_SIZE)), layer=1)
    return KINDS[kind.plural]


def test_a_kind_has_its_rows_everywhere(kind: ArtifactKind[Any]) -> None:
    (command,) = (each for each in COMMANDS if each.plural == kind.plural)
    assert {"list", "get", "put", "delete"} <= command.acts.keys()
    assert layout(kind.view).columns
    assert calls_of(kind)._kind is kind
    assert KINDS.keys() == {row.plural for row in OWN}


def test_a_name_is_put_replaced_listed_and_deleted(
    http: httpx2.Client, kind: ArtifactKind[Any], given: Example
) -> None:
    path = f"/v1/artifacts/{kind.plural}"
    made = http.put(f"{path}/mine", json={**given.body, "description": "of nothing"})
    assert made.status_code == 201
    assert made.headers["Location"].endswith(f"{path}/mine")
    assert http.get(path, params={"model": MODEL}).json() == {kind.plural: [made.json()]}
    assert http.put(f"{path}/mine", json=given.other).status_code == 200
    http.put(f"{path}/beside", json=given.body)
    assert http.delete(f"{path}/mine").status_code == 204
    for gone in (http.get(f"{path}/mine"), http.delete(f"{path}/mine")):
        problem = refused(gone, 404, "name", f"unknown {kind.noun} 'mine'")
        assert problem["allowed"] == "beside"


def test_identical_content_changes_nothing_that_is_shown(
    http: httpx2.Client, kind: ArtifactKind[Any], given: Example
) -> None:
    """But when a policy was registered, which ends its latches."""
    path = f"/v1/artifacts/{kind.plural}/mine"
    http.put(path, json=given.other)
    made, again = (http.put(path, json=given.body).json() for _ in range(2))
    for each in (made, again):
        each.pop("replaced", None)
        for version in each.get("versions", []):
            del version["registered"]
    assert again == made


def test_python_has_the_same_calls(client: Client, kind: ArtifactKind[Any], given: Example) -> None:
    calls = getattr(client, kind.plural)
    made = calls.put("mine", **given.body)
    assert type(made) is kind.view
    assert made.name == "mine"
    assert made.model == MODEL
    assert made.replaced == ""
    assert calls.get("mine") == made
    assert calls.list() == [made]
    assert "mine" in calls.list()._repr_html_()
    changed = calls.put("mine", **given.other)
    assert changed.replaced == made.digest != changed.digest
    calls.delete("mine")
    assert calls.list() == []
    with refuses(kind="not_found"):
        calls.delete("mine")
    with refuses(field="name"):
        calls.get("a b")


def test_the_command_line_puts_lists_shows_and_deletes(
    midstream: Callable[..., str], kind: ArtifactKind[Any], given: Example, tmp_path: Path
) -> None:
    (command,) = (each for each in COMMANDS if each.plural == kind.plural)
    (tmp_path / "body.json").write_text(json.dumps(given.body))
    np.save(tmp_path / "ones.npy", np.ones(HIDDEN_SIZE, np.float32))
    file = ["--file", str(tmp_path / "body.json")]
    typed = [f"{tmp_path}/ones.npy:1"] if kind.plural == "modules" else file
    made = json.loads(midstream("put", command.name, "mine", *typed, "--json"))
    assert given.shown in midstream("get", command.name, "mine")
    assert json.loads(midstream("get", command.name, "mine", "--json")) == made
    assert "mine" in midstream("list", kind.plural)
    assert "mine deleted" in midstream("delete", command.name, "mine")
    assert json.loads(midstream("list", command.name, "--json")) == []


def test_only_an_operator_changes_what_all_tenants_see(
    client: Client, kind: ArtifactKind[Any], given: Example
) -> None:
    """A tenant's own kind is neither seen nor replaced by another's."""
    made = getattr(client, kind.plural).put("mine", **given.body)
    key = client.keys.create("a user", tenant="theirs", scopes=["submit", "read"]).key
    with Client(client.url, api_key=key) as user:
        calls = getattr(user, kind.plural)
        if kind.of_tenants:
            assert calls.list() == []
            assert calls.put("mine", **given.other).replaced == ""
            calls.delete("mine")
        else:
            assert [(each.name, each.digest) for each in calls.list()] == [("mine", made.digest)]
            for change in (lambda: calls.put("x", **given.other), lambda: calls.delete("mine")):
                with refuses(status=403):
                    change()
    assert getattr(client, kind.plural).list() == [made]


@pytest.mark.parametrize(
    ("path", "more", "status", "field", "says"),
    [
        ("a%20b", {}, 400, "name", "does not match the pattern"),
        ("mine", {"model": "other"}, 404, "model", "unknown model 'other'"),
        ("mine", {"colour": 1}, 400, "colour", "unknown field"),
        ("mine", {"description": "x" * 100_000}, 400, "description", "length"),
    ],
)
def test_what_cannot_be_registered_is_refused_by_field(
    http: httpx2.Client,
    kind: ArtifactKind[Any],
    given: Example,
    path: str,
    more: dict[str, Any],
    status: int,
    field: str,
    says: str,
) -> None:
    answer = http.put(f"/v1/artifacts/{kind.plural}/{path}", json=given.body | more)
    refused(answer, status, field, says)
    assert http.get(f"/v1/artifacts/{kind.plural}").json() == {kind.plural: []}


def test_a_job_keeps_what_it_was_accepted_with(
    client: Client, kind: ArtifactKind[Any], given: Example
) -> None:
    calls = getattr(client, kind.plural)
    digest = calls.put("mine", **given.body).digest
    fields = {"model": MODEL, "prompts": ["hello"], "max_tokens": 2, **given.asked}
    job = client.submit(**fields)
    calls.delete("mine")
    assert client.wait(job).state == "succeeded"
    held = {f"module/{name}": of for name, of in job.modules.items()} | job.contents
    assert held == {f"{kind.short}/mine": digest}
    with refuses(f"unknown {kind.noun} 'mine'", kind="invalid_request", field=given.field):
        client.submit(**fields)


async def test_what_another_version_stored_is_refused_with_both_versions(
    redis_url: str, tmp_path: Path, kind: ArtifactKind[Any]
) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        await ledger.redis.hset(kind.key + OTHER, "mine", b"\x80")
        await ledger.redis.hset(f"ms:steering:{OTHER}", f"{kind.plural}_by:mine", "9.0.0")
        registry = Registry(ledger, kind)
        said = f"the {kind.noun} 'mine' of {OTHER!r} was stored by midstream 9.0.0"
        for read in (
            registry.get(OTHER, "mine"),
            registry.of_model(OTHER),
            look_up(ledger, OTHER, [(kind, "mine")]),
        ):
            with refuses(said, kind="version_mismatch"):
                await read
        assert await registry.names(OTHER) == ["mine"], "what cannot be read is not deleted"


@pytest.fixture
async def former_policy(
    redis_url: str, tmp_path: Path
) -> AsyncIterator[tuple[Registry[Policy], dict[str, Any]]]:
    """A policy as a build stored it that had the mode `canary` and the field `share`: an active
    version, and then a canary.
    """
    stored = json.loads((DATA / "former_policy.json").read_text())
    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        await ledger.redis.hset(POLICIES.key + OTHER, "guard", msgspec.msgpack.encode(stored))
        yield Registry(ledger, POLICIES), stored


async def test_a_policy_of_the_former_mode_canary_only_records(
    former_policy: tuple[Registry[Policy], dict[str, Any]],
) -> None:
    registry, stored = former_policy
    policy = await registry.known(OTHER, "guard")
    assert [version.content.mode for version in policy.versions] == ["active", "shadow"]
    for version in stored["versions"]:
        del version["content"]["share"]
        version["content"] |= {"told": False, "keep_texts": False}
    stored["versions"][1]["content"]["mode"] = "shadow"
    stored["warnings"] = []
    assert msgspec.to_builtins(policy) == stored, "all else is as it was stored"


async def test_a_policy_of_a_former_build_is_logged_once(
    former_policy: tuple[Registry[Policy], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    registry, _ = former_policy
    _say_former.cache_clear()
    for _ in range(2):
        await registry.known(OTHER, "guard")
    said = f"the policy 'guard' of {OTHER!r} was stored by an earlier build"
    assert caplog.text.count(said) == 1


def test_a_request_looks_up_all_names_together(
    stack: Stack, client: Client, installed: Any, nameless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one round trip; its source run is named, ready, and has the receipts of two ranks."""
    client.probes.put("read", weight=np.ones((1, HIDDEN_SIZE)), layer=1)
    body: dict[str, Any] = {"model": MODEL, "prompts": ["hello"], "lens": {}}
    for plural, example in KINDS.items():
        getattr(client, plural).put("mine", **example.body)
        body |= example.asked | {"lens": body["lens"] | example.asked.get("lens", {})}
    client.run(model=MODEL, prompts=["hello"], capture={"layers": 0, "run": "clean"}, max_tokens=1)
    patch = {"layers": 0, "positions": [0], "source": {"run": "clean", "prompt": 0}}
    sent: list[object] = []
    send = AbstractConnection.send_packed_command

    async def counted(connection: Any, *command: Any, **options: Any) -> None:
        sent.append(command)
        await send(connection, *command, **options)

    async def asked(ledger: Any, fields: dict[str, Any]) -> tuple[Any, int]:
        settings = ledger.settings
        names = Names(settings, ledger, Served(settings, ledger))
        model = await ledger.watched_model(MODEL)
        sent.clear()
        parsed = parse_job(from_json(to_json(fields), JobRequest))
        return await names.resolve(parsed, *model, EVERYBODY), len(sent)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counted)
    found, climbs = stack.do(lambda ledger: asked(ledger, body))
    assert {plural for plural, _ in found.found.records} == KINDS.keys()
    assert found.state.modules.keys() == {"mine"}
    assert climbs == 1
    found, climbs = stack.do(lambda ledger: asked(ledger, {**body, "patch": [patch]}))
    assert found.state.runs["clean"].state == "ready"
    assert climbs == 1 + 4


# --- A further kind: its row is all that it takes


class Ruler(Registered, kw_only=True):
    """A registered ruler."""

    inches: int


class RulerRequest(FolderRequest, kw_only=True):
    """Body of `PUT /v1/artifacts/rulers/{name}`."""

    inches: int


RULERS = ArtifactKind(
    plural="rulers",
    short="ruler",
    noun="ruler",
    record=Ruler,
    request=RulerRequest,
    takes="A ruler.",
    make="nowhere:make",
    limit=2,
)


def ruler(name: str, digest: str = "d") -> Ruler:
    return Ruler(name=name, model=OTHER, digest=digest, created=1.0, inches=12)


async def test_a_model_has_a_limited_number_of_a_kind(redis_url: str, tmp_path: Path) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        rulers = Registry(ledger, RULERS)
        for name in ("one", "two"):
            await rulers.put(OTHER, name, lambda _, name=name: ruler(name), {})
        with refuses("has 2 rulers"):
            await rulers.put(OTHER, "three", lambda _: ruler("three"), {})


async def test_changes_at_once_each_build_on_the_one_before(redis_url: str, tmp_path: Path) -> None:
    """As many as are tried again all succeed. Of more, those that fail change nothing."""

    moments = itertools.count(1.0)

    def longer(now: Ruler | None) -> Ruler:
        inches = 1 if now is None else now.inches + 1
        # a record equal to the stored one is a repeat whose reply was lost
        return Ruler(
            name="one", model=OTHER, digest=str(inches), created=next(moments), inches=inches
        )

    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        rulers = Registry(ledger, RULERS)

        async def change(times: int) -> list[BaseException]:
            calls = (rulers.put(OTHER, "one", longer, {}) for _ in range(times))
            ends = await asyncio.gather(*calls, return_exceptions=True)
            return [end for end in ends if isinstance(end, BaseException)]

        assert await change(PUT_TRIES) == []
        assert (await rulers.known(OTHER, "one")).inches == PUT_TRIES
        refused = await change(10 * PUT_TRIES)
        assert (await rulers.known(OTHER, "one")).inches == 11 * PUT_TRIES - len(refused)
        for error in refused:
            assert isinstance(error, MidstreamError)
            assert error.kind == "conflict"


def test_a_further_kind_is_served_by_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARTIFACTS, "rulers", RULERS)
    others = [route for route in app.ROUTES if route not in registered.ROUTES]
    monkeypatch.setattr(app, "ROUTES", [*others, *registered.artifact_routes()])
    described = json.loads(document(app.make_app(Settings())))
    put = described["paths"]["/v1/artifacts/{kind}/{name}"]["put"]
    assert "- `rulers`: A ruler." in put["description"]
    assert {"Ruler", "RulerRequest", "RulerPage"} <= described["components"]["schemas"].keys()
    assert "#/components/schemas/RulerRequest" in json.dumps(put["requestBody"])
    with Client("http://127.0.0.1:1") as client:
        assert isinstance(client.rulers, Named)
