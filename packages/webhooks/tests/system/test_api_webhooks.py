"""Can a user ask for webhooks, see what came of them, and send them again; and nobody else?"""

from typing import Any

import httpx2
import pytest
from edge import MODEL, Api, Hand, refused

from midstream.broker.ledger.people.keys import LedgerKeys
from midstream.client import Client
from midstream.schemas.access.keys import KeyRequest, Scope
from midstream.schemas.base.errors import MidstreamError

HOOK = "https://receiver.example/hook"


def key_for(hand: Hand, tenant: str, scopes: list[Scope] | None = None) -> dict[str, str]:
    """Headers of a new key."""
    made = hand.do(
        LedgerKeys(hand.ledger).create(
            KeyRequest(name="test", tenant=tenant, scopes=scopes or ["submit", "read"])
        )
    )
    return {"authorization": f"Bearer {made.key}"}


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("http://127.0.0.1:9/hook", "loopback"),
        ("http://169.254.169.254/latest", "metadata"),
        ("http://[::1]/", "loopback"),
        ("http://10.0.0.8/", "private"),
        ("http://127.1/", "IPv4"),
        ("ftp://receiver.example/", "http"),
        ("https://user:secret@receiver.example/", "password"),
        ("https://receiver.example/#part", "fragment"),
    ],
)
def test_a_blocked_receiver_is_refused_by_name_before_the_job_is_accepted(  # field case 41
    api: Api, hand: Hand, url: str, word: str
) -> None:
    refused(
        api.http.post("/v1/jobs", json={"model": MODEL, "prompts": ["hello"], "callback_url": url}),
        400,
        "callback_url",
        word,
    )
    assert hand.count_jobs() == 0


def test_every_submission_endpoint_checks_callback_url(api: Api, hand: Hand) -> None:
    # field case 41
    hand.serve(grades=True)
    hook = {"model": MODEL, "callback_url": "http://127.0.0.1/"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hello", **hook},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], **hook},
        "/v1/sweeps": {
            "pairs": [{"clean": "hello world a", "corrupt": "hello there a", "answer": " b"}],
            **hook,
        },
    }
    for path, body in bodies.items():
        refused(api.http.post(path, json=body), 400, "callback_url")
    assert hand.count_jobs() == 0


def test_events_are_named_and_need_a_receiver(api: Api, hand: Hand) -> None:
    body = {"model": MODEL, "prompts": ["hello"]}
    for more in (
        {"callback_events": ["job.failed"]},
        {"callback_url": HOOK, "callback_events": []},
    ):
        refused(api.http.post("/v1/jobs", json={**body, **more}), 400, "callback_events")
    refused(
        api.http.post(
            "/v1/jobs", json={**body, "callback_url": HOOK, "callback_events": ["job.exploded"]}
        ),
        400,
        "callback_events[0]",
    )


def test_webhook_deliveries_are_listed_and_resent_on_request(api: Api, hand: Hand) -> None:
    job = api.submit(callback_url=HOOK)
    other = api.submit(callback_url=HOOK, callback_events=["job.failed"])
    assert api.view(job)["callback_url"] == HOOK
    hand.finish(job)
    hand.finish(other)
    with Client(api.url) as client:
        [delivery] = client.webhooks.list(job=job).deliveries
        assert delivery.event == "job.succeeded"
        assert delivery.state == "pending"
        assert delivery.url == HOOK
        assert delivery.attempts == []
        assert client.webhooks.list(state="delivered").deliveries == []
        assert client.webhooks.get(delivery.id) == delivery
        again = client.webhooks.redeliver(delivery.id)
        assert again.id == delivery.id
        assert again.state == "pending"
        with pytest.raises(MidstreamError, match="unknown delivery"):
            client.webhooks.get("msg_nothing")
        assert client.secrets.create(keep_former_s=0).secrets == client.secrets.list().secrets


# field case 40
def test_webhooks_of_another_tenant_are_not_found(api: Api, hand: Hand) -> None:
    ours, theirs, admin = (
        key_for(hand, tenant, scopes)
        for tenant, scopes in (("ours", None), ("theirs", None), ("ops", ["admin"]))
    )
    answer = api.http.post(
        "/v1/jobs", json={"model": MODEL, "prompts": ["hello"], "callback_url": HOOK}, headers=ours
    )
    job = answer.json()["id"]
    hand.finish(job)

    def deliveries(headers: dict[str, str], **params: str) -> httpx2.Response:
        return api.http.get("/v1/webhooks/deliveries", params=params, headers=headers)

    [delivery] = deliveries(ours).json()["deliveries"]
    assert (
        deliveries(theirs).json()["deliveries"]
        == deliveries(theirs, job=job).json()["deliveries"]
        == []
    )
    assert deliveries(theirs, tenant="ours").status_code == 403
    assert [found["id"] for found in deliveries(admin).json()["deliveries"]] == [delivery["id"]]
    path = f"/v1/webhooks/deliveries/{delivery['id']}"
    nothing = api.http.get("/v1/webhooks/deliveries/msg_nothing", headers=theirs).json()
    for answer in (
        api.http.get(path, headers=theirs),
        api.http.post(f"{path}/redeliver", headers=theirs),
    ):
        assert answer.status_code == 404
        assert answer.json()["detail"].replace(delivery["id"], "msg_nothing") == nothing["detail"]
    assert api.http.get(path, headers=admin).json()["tenant"] == "ours"

    def secret(headers: dict[str, str]) -> str:
        found = api.http.get("/v1/webhooks/secrets", headers=headers)
        assert found.headers["cache-control"] == "no-store"
        return str(found.json()["secrets"][0]["secret"])

    assert secret(ours) == secret(ours) != secret(theirs)
    own = api.http.post("/v1/webhooks/secrets", json={"own": True}, headers=theirs).json()
    assert own["of"] == "key"
    assert secret(theirs) == own["secrets"][0]["secret"]
    reader = key_for(hand, "ours", ["read"])
    assert api.http.get("/v1/webhooks/secrets", headers=reader).status_code == 403, (
        "who may sign is not who may look"
    )
