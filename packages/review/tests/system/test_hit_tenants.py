"""Does a tenant see its own hits alone, and may only operators mark them?"""

from collections.abc import Iterator

import httpx2
import pytest
from edge import MODEL, Api, Hand, refused
from ledger_kit import settler
from review_kit import hit, registered
from tenant_kit import ADMIN, Caller, asking, bearer, flushed

from midstream_ops.redis_server import RedisServer

HITS = "/v1/policies/guard/hits"


@pytest.fixture(scope="module")
def api(redis_session: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    flushed(redis_session.url)
    with asking(tmp_path_factory.mktemp("hits"), redis_session.url) as api:
        yield api


@pytest.fixture(scope="module")
def hand(api: Api) -> Iterator[Hand]:
    with Hand(api.settings) as worker:
        yield worker


@pytest.fixture(scope="module")
def made(api: Api, hand: Hand) -> dict[str, str]:
    """Tenant → its hit."""

    async def make() -> dict[str, str]:
        await registered(hand.ledger)
        settle = settler(api.settings.redis_url)
        found = {}
        for number, tenant in enumerate(("ours", "theirs"), 1):
            found[tenant] = await hit(hand.ledger, settle, number, {"tenant": tenant}, text=False)
        return found

    return hand.do(make())


def test_a_tenant_sees_its_own_hits_and_an_admin_all(
    api: Api, hand: Hand, made: dict[str, str]
) -> None:
    admin = httpx2.Client(base_url=api.url, headers=bearer(ADMIN), timeout=60)
    ours = Caller(api, hand, "ours").http
    safety = Caller(api, hand, "safety", "steer-global", "read").http
    listed = {
        name: [each["id"] for each in http.get(HITS).json()["hits"]]
        for name, http in {"admin": admin, "ours": ours, "safety": safety}.items()
    }
    assert listed == {"admin": [made["theirs"], made["ours"]], "ours": [made["ours"]], "safety": []}
    one = admin.get(HITS, params={"tenant": "theirs"}).json()["hits"]
    assert [each["tenant"] for each in one] == ["theirs"]
    refused(ours.get(HITS, params={"tenant": "theirs"}), 403, "tenant")
    refused(ours.get(f"{HITS}/{made['theirs']}"), 404, None, "unknown hit")
    assert ours.get(f"{HITS}/{made['ours']}").status_code == 200
    refused(httpx2.get(f"{api.url}{HITS}"), 401, "Authorization")


def test_marks_are_the_operators_and_their_authors_stay_among_themselves(
    api: Api, hand: Hand, made: dict[str, str]
) -> None:
    admin = httpx2.Client(base_url=api.url, headers=bearer(ADMIN), timeout=60)
    ours = Caller(api, hand, "ours")
    ours_too = Caller(api, hand, "ours", "steer-global", "read")
    body = {"verdict": "false_alarm", "note": "of the template"}
    path = f"{HITS}/{made['ours']}/mark"
    refused(ours.http.put(path, json=body), 403, None, "steer-global")
    refused(ours.http.delete(path), 403, None, "steer-global")
    refused(ours_too.http.put(f"{HITS}/{made['theirs']}/mark", json=body), 404, None)
    assert admin.put(path, json=body).status_code == 200
    seen = ours.http.get(f"{HITS}/{made['ours']}").json()["mark"]
    assert seen["verdict"] == "false_alarm"
    assert seen["note"] == ""
    assert seen["key"] == ""
    shares = {
        name: [
            each["precision"]
            for each in http.get("/v1/policies/guard/precision").json()["versions"]
        ]
        for name, http in {"admin": admin, "ours": ours.http}.items()
    }
    assert shares == {"admin": [0.0], "ours": [0.0]}
    theirs = Caller(api, hand, "theirs").http
    assert theirs.get("/v1/policies/guard/precision").json() == {"versions": []}
    assert ours_too.http.put(path, json=body | {"verdict": "right"}).status_code == 200
    assert admin.get(f"{HITS}/{made['ours']}").json()["mark"]["key"] == ours_too.key.id
    assert ours_too.http.delete(path).status_code == 204


def test_a_tenant_deletes_the_texts_of_its_own_hits(
    api: Api, hand: Hand, made: dict[str, str]
) -> None:
    ours = Caller(api, hand, "ours").http
    assert ours.delete("/v1/hits/texts").status_code == 204
    refused(ours.delete("/v1/hits/texts", params={"tenant": "theirs"}), 403, "tenant")
    assert ours.get(HITS, params={"model": MODEL}).json()["hits"][0]["text"] is None
