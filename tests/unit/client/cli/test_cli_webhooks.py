"""Do the commands about webhooks ask for what was meant, and show what came back?"""

import json

import msgspec
import pytest
from http_kit import reply, server

from midstream.client.cli import main
from midstream.schemas.access.webhooks import (
    Delivery,
    DeliveryAttempt,
    DeliveryPage,
    DisabledEndpoint,
    DisabledList,
    Secret,
    SecretList,
)

SENT = Delivery(
    id="msg_1_succeeded",
    job="job_1",
    event="job.succeeded",
    tenant="lab",
    url="https://a.example/hook",
    state="failed",
    created=1.0,
    attempts=[
        DeliveryAttempt(at=2.0, status=500, error="not accepted", seconds=0.25),
        DeliveryAttempt(at=9.0, error="no answer", seconds=20),
    ],
)
SECRETS = SecretList(
    of="tenant",
    secrets=[
        Secret(secret="whsec_new", created=1.0),
        Secret(secret="whsec_old", created=0.0, until=9e9),
    ],
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def typed(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["webhooks", *words])
    assert ended.value.code == 0


def test_deliveries_are_filtered_and_listed_with_their_last_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with server(reply(DeliveryPage(deliveries=[SENT]))) as (url, seen):
        typed("list", "--job", "job_1", "--state", "failed", "--url", url)
    assert seen == ["GET /v1/webhooks/deliveries?job=job_1&state=failed&limit=20"]
    shown = capsys.readouterr().out
    assert "msg_1_succeeded" in shown
    assert "no answer" in shown


def test_ids_and_receivers_stay_whole_on_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = msgspec.structs.replace(
        SENT, id=f"msg_{'1' * 35}_succeeded", url="https://hooks.lab.example/midstream"
    )
    with server(reply(DeliveryPage(deliveries=[long]))) as (url, _):
        typed("list", "--url", url)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.strip().startswith(long.id) and "failed" in line for line in lines)
    assert any(line.strip() == f"→ {long.url}" for line in lines)


def test_a_delivery_is_shown_with_its_attempts_and_resent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with server(reply(SENT)) as (url, seen):
        typed("show", SENT.id, "--url", url)
        typed("redeliver", SENT.id, "msg_2", "--url", url)
    assert seen == [
        f"GET /v1/webhooks/deliveries/{SENT.id}",
        f"POST /v1/webhooks/deliveries/{SENT.id}/redeliver",
        "POST /v1/webhooks/deliveries/msg_2/redeliver",
    ]
    assert "500 not accepted" in capsys.readouterr().out


def test_the_new_secret_alone_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with server(reply(SECRETS, 201)) as (url, seen):
        typed("rotate", "--keep-former", "12h", "--own", "--url", url)
    assert json.loads(seen.bodies[0]) == {"keep_former_s": 43200.0, "own": True}
    told = capsys.readouterr()
    assert told.out == "whsec_new\n"
    assert "whsec_old" in told.err


def test_disabled_receivers_are_listed_and_enabled(capsys: pytest.CaptureFixture[str]) -> None:
    listed = DisabledList(endpoints=[DisabledEndpoint(tenant="lab", url=SENT.url, since=1.0)])
    with server(reply(listed), (204, {}, b"")) as (url, seen):
        typed("list", "--disabled", "--url", url)
        typed("enable", SENT.url, "--url", url)
    assert SENT.url in capsys.readouterr().out
    assert seen[1] == "DELETE /v1/webhooks/disabled?url=https%3A%2F%2Fa.example%2Fhook"
