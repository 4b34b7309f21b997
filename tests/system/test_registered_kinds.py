"""A further kind of registered artifact needs a description for the ledger and a row for its
routes, and no code of its own in either.
"""

import asyncio
import itertools
import json
from pathlib import Path

import msgspec
import pytest
from ledger_kit import MODEL, open_ledger

from midstream.api import app, openapi
from midstream.api.openapi import document
from midstream.api.routes import registered
from midstream.api.routes.registered import RegisteredKind, from_folder, routes_of
from midstream.broker.ledger.named.registry import PUT_TRIES, Registry, look_up
from midstream.schemas.artifacts.probes import PROBES
from midstream.schemas.artifacts.registered import ArtifactKind, FolderRequest, Registered
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.settings.settings import Settings


class Ruler(Registered, kw_only=True):
    """A registered ruler."""

    inches: int


class RulerRequest(FolderRequest, kw_only=True):
    """Body of `PUT /v1/artifacts/rulers/{name}`."""

    inches: int


RULERS = ArtifactKind("rulers", "ruler", Ruler, RulerRequest, "ms:rulers:", 2)


def ruler(name: str, digest: str = "d") -> Ruler:
    return Ruler(name=name, model=MODEL, digest=digest, created=1.0, inches=12)


def resolve_ruler(request: RulerRequest, name: str, model: ModelInfo, root: str) -> Ruler:
    return Ruler(name=name, model=model.name, digest="d", created=1.0, inches=request.inches)


async def test_the_ledger_keeps_a_further_kind(redis_url: str, tmp_path: Path) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        rulers = Registry(ledger, RULERS)

        async def put(artifact: Ruler) -> Ruler | None:
            _, former = await rulers.put(MODEL, artifact.name, lambda _: artifact, {})
            return former

        assert (
            await put(ruler("one")),
            await put(ruler("one", "e")),
            ruler("one", "e").replacing(ruler("one")).replaced,
        ) == (None, ruler("one"), "d")
        assert await rulers.known(MODEL, "one") == ruler("one", "e")
        await put(ruler("two"))
        with pytest.raises(MidstreamError, match="has 2 rulers"):
            await put(ruler("three"))
        assert await rulers.delete(MODEL, "two")
        assert await rulers.of_model(MODEL) == [ruler("one", "e")]
        with pytest.raises(MidstreamError, match=r"unknown ruler 'two' .*\(allowed: one\)"):
            await rulers.known(MODEL, "two")
        assert await rulers.delete(MODEL, "one")


async def test_what_a_request_names_is_looked_up_together(redis_url: str, tmp_path: Path) -> None:
    """In one round trip; the names that exist take another where one does not."""
    other = msgspec.structs.replace(ruler("one", "e"), model="other")
    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        for each in (ruler("one"), ruler("two"), other):
            await Registry(ledger, RULERS).put(each.model, each.name, lambda _, it=each: it, {})
        asked = [(RULERS, "two"), (RULERS, "one"), (RULERS, "two"), (PROBES, "none")]
        found = await look_up(ledger, MODEL, asked)
        assert found.present(RULERS, ["two", "three", "one"]) == [ruler("two"), ruler("one")]
        assert (found.known(RULERS, "one", "f"), found.names) == (ruler("one"), {"probes": []})
        with pytest.raises(MidstreamError, match=r"unknown probe .none.*no probe exists yet"):
            found.known(PROBES, "none", "f")
        for each in (ruler("one"), ruler("two"), other):
            await Registry(ledger, RULERS).delete(each.model, each.name)


async def test_changes_at_once_each_build_on_the_one_before(redis_url: str, tmp_path: Path) -> None:
    """As many as are tried again all succeed. Of more, those that fail change nothing."""

    moments = itertools.count(1.0)

    def longer(now: Ruler | None) -> Ruler:
        inches = 1 if now is None else now.inches + 1
        # a record equal to the stored one is a repeat whose reply was lost
        return Ruler(name="one", model=MODEL, digest="d", created=next(moments), inches=inches)

    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        rulers = Registry(ledger, RULERS)

        async def change(times: int) -> list[BaseException]:
            calls = (rulers.put(MODEL, "one", longer, {}) for _ in range(times))
            ends = await asyncio.gather(*calls, return_exceptions=True)
            return [end for end in ends if isinstance(end, BaseException)]

        assert await change(PUT_TRIES) == []
        assert (await rulers.known(MODEL, "one")).inches == PUT_TRIES
        refused = await change(10 * PUT_TRIES)
        assert (await rulers.known(MODEL, "one")).inches == 11 * PUT_TRIES - len(refused)
        for error in refused:
            assert isinstance(error, MidstreamError)
            assert error.kind == "conflict"
        await rulers.delete(MODEL, "one")


def test_a_further_kind_is_served_by_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = RegisteredKind(RULERS, from_folder(resolve_ruler, "lenses"), "A ruler.")
    rows = (*registered.ROWS, row)
    monkeypatch.setattr(openapi, "ROWS", rows)
    others = [route for route in app.ROUTES if route not in registered.ROUTES]
    monkeypatch.setattr(app, "ROUTES", [*others, *routes_of(rows)])
    described = json.loads(document(app.make_app(Settings())))
    put = described["paths"]["/v1/artifacts/{kind}/{name}"]["put"]
    assert "- `rulers`: A ruler." in put["description"]
    assert {"Ruler", "RulerRequest", "RulerPage"} <= described["components"]["schemas"].keys()
    assert "#/components/schemas/RulerRequest" in json.dumps(put["requestBody"])
