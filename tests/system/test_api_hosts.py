"""What can a page that the user visits do to an API which asks for no key?

Everything is sent as a browser would send it.
"""

import pytest
from edge import MODEL, Api, Hand, refused

EVIL = "http://evil.example:8321"
JOB = b'{"model": "tiny", "prompts": ["hello there"]}'


@pytest.mark.parametrize(
    "call",
    [
        "GET /v1/jobs",
        "POST /v1/jobs",
        "GET /healthz",
        "GET /metrics",
        "GET /schema/openapi.json",
        "OPTIONS /v1/jobs",
    ],
)
def test_a_rebound_host_name_is_refused(api: Api, call: str) -> None:
    answer = api.http.request(*call.split(), headers={"host": "evil.example:8321"})
    problem = refused(answer, 421, "Host", "MIDSTREAM_ALLOWED_HOSTS", kind="misdirected")
    assert "localhost" in problem["allowed"]


def test_openai_endpoints_refuse_hosts_in_openai_error_shape(api: Api) -> None:
    answer = api.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "a"}, headers={"host": "evil.example"}
    )
    assert answer.status_code == 421
    assert answer.json()["error"]["code"] == "misdirected"


def test_cross_origin_pages_cannot_read_or_send_json(api: Api, hand: Hand) -> None:
    asked = {
        "origin": EVIL,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    answers = [
        api.http.options("/v1/jobs", headers=asked),
        api.http.get("/v1/jobs", headers={"origin": EVIL}),
    ]
    assert [
        name for answer in answers for name in answer.headers if name.startswith("access-control")
    ] == []


@pytest.mark.parametrize(
    "media",
    [
        "text/plain; x=application/json",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "",
    ],
)
def test_cross_origin_form_posts_are_refused(api: Api, hand: Hand, media: str) -> None:
    form = {"content-type": media} if media else {}
    for path in ("/v1/jobs", "/v1/completions", "/v1/chat/completions", "/v1/sweeps", "/v1/keys"):
        assert api.http.post(path, content=JOB, headers=form).status_code == 415
        assert (
            api.http.post(path, content=JOB, headers={**form, "origin": EVIL}).json()["type"]
            == "urn:midstream:cross_site"
        )
    assert hand.do(hand.ledger.list()).jobs == []


def test_cross_origin_posts_without_a_body_are_refused(api: Api, hand: Hand) -> None:
    job_id = api.submit()
    answer = api.http.post(f"/v1/jobs/{job_id}/cancel", headers={"origin": EVIL})
    assert answer.status_code == 403
    assert answer.json()["field"] == "Origin"
    assert "www-authenticate" not in answer.headers
    assert api.view(job_id)["state"] == "queued"
    assert (
        api.http.post(f"/v1/jobs/{job_id}/cancel", headers={"origin": api.url}).status_code == 202
    )
