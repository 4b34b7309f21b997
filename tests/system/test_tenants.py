"""Is what belongs to one tenant invisible to every other, whatever that one guesses?"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from capture_kit import HIDDEN
from edge import MODEL, Api, Hand, model_info, refused
from tenant_kit import ADMIN, Caller, asking, bearer, flushed

from midstream.broker.ledger.jobs.ledger import new_job_id
from midstream.broker.ledger.named.steering import LedgerSteering
from midstream.client import Client
from midstream.schemas.access.keys import Limits
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.requests.steering import WorkerSteering
from midstream_ops.redis_server import RedisServer

CAPTURE = {"layers": [0, 1], "positions": "all_prompt"}


@pytest.fixture(scope="module")
def api(redis_session: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    flushed(redis_session.url)
    with asking(tmp_path_factory.mktemp("tenants"), redis_session.url, steering_wait_s=1.0) as api:
        yield api


@pytest.fixture(scope="module")
def hand(api: Api) -> Iterator[Hand]:
    with Hand(api.settings, hidden_size=HIDDEN) as worker:  # of the rows that it captures
        yield worker


@pytest.fixture(scope="module")
def ours(api: Api, hand: Hand) -> Caller:
    return Caller(api, hand, "ours")


@pytest.fixture(scope="module")
def theirs(api: Api, hand: Hand) -> Caller:
    return Caller(api, hand, "theirs")


@pytest.fixture(scope="module")
def everyday(api: Api, hand: Hand) -> Caller:
    """Of the tenant whose names are kept as they are."""
    return Caller(api, hand, "default")


@pytest.fixture(scope="module")
def captured(ours: Caller, hand: Hand) -> str:
    """A job of ours that is over, whose captures are kept as our run `clean`."""
    job_id = ours.submit(capture={**CAPTURE, "run": "clean"})
    hand.finish(job_id)
    return job_id


def vector() -> dict[str, Any]:
    return dict(msgspec.to_builtins(from_numpy(np.ones(HIDDEN, np.float32))))


def steering() -> list[dict[str, Any]]:
    return [{"layers": [0], "vector": vector()}]


# --- Jobs and captures
# -------------------------------------------------------------------------------------------------

#: Every route that takes a job's id.
BY_JOB = [
    ("GET", "/v1/jobs/{}"),
    ("GET", "/v1/jobs/{}?wait=2"),
    ("GET", "/v1/jobs/{}/events"),
    ("GET", "/v1/jobs/{}/result"),
    ("POST", "/v1/jobs/{}/cancel"),
    ("GET", "/v1/captures/{}"),
    ("GET", "/v1/captures/{}/safetensors"),
    ("GET", "/v1/captures/{}/safetensors?tag=default&layers=0"),
    ("GET", "/v1/captures/{}/files/default.p0000.pp0.safetensors"),
    ("DELETE", "/v1/captures/{}"),
    ("GET", "/v1/runs/{}"),
    ("DELETE", "/v1/runs/{}"),
    ("GET", "/v1/sweeps/{}"),
]


# field case 40
@pytest.mark.parametrize("state", ["queued", "running", "succeeded", "deleted"])
def test_jobs_of_another_tenant_are_404_like_unknown_ones(
    ours: Caller, theirs: Caller, hand: Hand, captured: str, state: str
) -> None:
    job_id = captured if state == "succeeded" else ours.submit(capture=CAPTURE)
    if state == "running":
        hand.claim(job_id)
    if state == "deleted":
        hand.finish(job_id)
        assert ours.http.delete(f"/v1/captures/{job_id}").status_code == 204
        assert ours.http.get(f"/v1/captures/{job_id}").status_code == 410
    nowhere = new_job_id()
    before = ours.http.get(f"/v1/jobs/{job_id}").json()
    for method, path in BY_JOB:
        there = theirs.http.request(method, path.format(job_id))
        absent = theirs.http.request(method, path.format(nowhere))
        assert there.status_code == absent.status_code == 404, path
        assert there.text.replace(job_id, nowhere) == absent.text
        assert sorted(there.headers) == sorted(absent.headers)
    assert ours.http.get(f"/v1/jobs/{job_id}").json() == before


def test_captures_keep_their_tenant_after_the_job_expires(
    ours: Caller, theirs: Caller, hand: Hand
) -> None:
    job_id = ours.submit(capture=CAPTURE)
    hand.finish(job_id)
    hand.do(hand.ledger.redis.delete(f"ms:job:{job_id}"))
    assert job_id in listed(ours, "/v1/captures", "captures", "job")
    assert theirs.http.delete(f"/v1/captures/{job_id}").status_code == 404
    assert ours.http.delete(f"/v1/captures/{job_id}").status_code == 204


def listed(caller: Caller, path: str, what: str, name: str, **parameters: Any) -> list[str]:
    page = {} if "modules" in path else {"limit": 200}
    answer = caller.http.get(path, params={**page, **parameters})
    assert answer.status_code == 200, answer.text
    return [entry[name] for entry in answer.json()[what]]


def test_listings_are_per_tenant_and_complete_for_admins(
    api: Api, ours: Caller, theirs: Caller, hand: Hand, captured: str
) -> None:
    other = theirs.submit()
    assert captured in listed(ours, "/v1/jobs", "jobs", "id")
    assert other not in listed(ours, "/v1/jobs", "jobs", "id")
    assert captured not in listed(theirs, "/v1/jobs", "jobs", "id")
    assert captured not in listed(theirs, "/v1/captures", "captures", "job")
    admin = Caller(api, hand, "ops", "admin")
    assert {captured, other} <= set(listed(admin, "/v1/jobs", "jobs", "id"))
    assert {
        job["tenant"]
        for job in admin.http.get("/v1/jobs", params={"tenant": "ours"}).json()["jobs"]
    } == {"ours"}
    assert captured in listed(admin, "/v1/captures", "captures", "job", tenant="ours")
    assert theirs.http.get("/v1/jobs", params={"tenant": "ours"}).status_code == 403
    assert theirs.http.get("/v1/jobs", params={"tenant": "nobody"}).status_code == 403


def test_a_tenants_list_goes_on_over_pages(api: Api, hand: Hand, theirs: Caller) -> None:
    caller = Caller(api, hand, "pages")
    made = []
    for _ in range(5):
        made.append(caller.submit())
        theirs.submit()
    found = []
    cursor = None
    while True:
        page = caller.http.get(
            "/v1/jobs", params={"limit": 2} | ({"cursor": cursor} if cursor else {})
        ).json()
        found += [job["id"] for job in page["jobs"]]
        if not (cursor := page.get("next")):
            break
    assert found == made[::-1]


def test_an_admin_sees_and_ends_any_tenants_job(
    api: Api, ours: Caller, hand: Hand, captured: str
) -> None:
    admin = Caller(api, hand, "ops", "admin")
    assert admin.http.get(f"/v1/jobs/{captured}/result").status_code == 200
    assert admin.http.get(f"/v1/captures/{captured}").status_code == 200
    job_id = ours.submit()
    assert admin.http.post(f"/v1/jobs/{job_id}/cancel").status_code == 202


# --- Idempotency
# --------------------------------------------------------------------------------------------------


def test_idempotency_keys_are_per_tenant(ours: Caller, theirs: Caller, everyday: Caller) -> None:
    def send(caller: Caller, key: str, prompt: str = "hello") -> str:
        body = {"model": MODEL, "prompts": [prompt]}
        answer = caller.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": key})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    first = send(ours, "k")
    assert send(ours, "k") == first
    assert send(theirs, "k", "there") != first  # and not 422 for another body
    assert send(everyday, "ours/k", "there") != first, "however it is spelt in Redis"


# --- Modules
# --------------------------------------------------------------------------------------------------


def test_module_names_are_per_tenant(ours: Caller, theirs: Caller) -> None:
    for caller, layer in ((ours, 0), (theirs, 1)):
        answer = caller.http.put(
            "/v1/artifacts/modules/joy",
            json={"steering": [{"layers": [layer], "vector": vector()}]},
        )
        assert answer.status_code == 201
        assert answer.json()["name"] == "joy"
    assert ours.http.get("/v1/artifacts/modules/joy").json()["entries"][0]["layers"] == [0]
    assert listed(theirs, "/v1/artifacts/modules", "modules", "name") == ["joy"]
    assert theirs.http.delete("/v1/artifacts/modules/joy").status_code == 204
    assert ours.http.get("/v1/artifacts/modules/joy").status_code == 200


@pytest.mark.parametrize("name", ["secret", "ours/secret", "default/secret"])
def test_another_tenants_module_cannot_be_used_by_any_name(
    ours: Caller, theirs: Caller, everyday: Caller, hand: Hand, name: str
) -> None:
    assert ours.http.put(
        "/v1/artifacts/modules/secret", json={"steering": steering()}
    ).status_code in (200, 201)
    for caller in (theirs, everyday):
        for body in (
            {"steering": [{"module": name}]},
            {"patch": [{"layers": [0], "positions": [0], "source": {"module": name}}]},
        ):
            answer = caller.http.post(
                "/v1/jobs", json={"model": MODEL, "prompts": ["hello"], **body}
            )
            assert answer.status_code == 400, answer.text
            assert "allowed" not in answer.json()
        for method in ("GET", "DELETE"):
            answer = caller.http.request(
                method, f"/v1/artifacts/modules/{name.replace('/', '%2F')}"
            )
            assert answer.status_code == 404
            assert "digest" not in answer.text
    assert list(hand.job(ours.submit(steering=[{"module": "secret"}])).modules) == ["secret"]


def test_global_steering_resolves_modules_of_the_callers_tenant(
    api: Api, ours: Caller, hand: Hand
) -> None:
    ours.http.put("/v1/artifacts/modules/calm", json={"steering": steering()})
    body = {"steering": [{"module": "calm"}]}
    of_us, of_them = (Caller(api, hand, tenant, "steer-global") for tenant in ("ours", "theirs"))
    refused(of_them.http.put("/v1/steering/global", json=body), 400, "steering[0].module")
    assert of_us.http.put("/v1/steering/global", json=body).status_code != 400


def test_what_of_a_policy_is_its_tenants_is_shown_to_nobody_else(
    api: Api, ours: Caller, theirs: Caller, hand: Hand
) -> None:
    """By no route; and a version of another model cannot be restored."""
    ours.http.put("/v1/artifacts/modules/calm", json={"steering": steering()})
    of_us, of_them = (
        Caller(api, hand, tenant, "steer-global", "read") for tenant in ("ours", "theirs")
    )
    weight = np.ones(HIDDEN).tolist()
    of_us.http.put("/v1/artifacts/probes/p", json={"weight": weight, "layer": 0, "thresholds": 1.0})
    steer = {"action": "steer", "module": "calm", "scale": 7.5}
    hook = {"action": "webhook", "url": "http://93.184.216.34/hook?secret=1"}
    body = {"probe": "p", "condition": {"at_least": 1.0}, "actions": ["flag", steer, hook]}
    path = "/v1/artifacts/policies/guard"
    assert of_us.http.put(path, json=body | {"all_traffic": True}).status_code == 201
    days = f"ms:policy-days:{MODEL}:guard"
    hand.do(hand.ledger.redis.hset(days, 0, f"[{int(time.time() // 86400)},9,0,0]"))
    answers = [caller.http.get(path) for caller in (ours, Caller(api, hand, "ops", "admin"))]
    answers += [
        of_them.http.get(path),
        theirs.http.get("/v1/artifacts/policies"),
        theirs.http.get(path),
    ]
    answers.append(of_them.http.patch(path, json={"mode": "active"}))
    words = ("calm", "secret", '"scale":7.5', of_us.key.id, '"ours"', '"prompts":9')
    assert [sum(word in answer.text for word in words) for answer in answers] == [6, 6, 0, 0, 0, 0]
    assert {answer.status_code for answer in answers} == {200}
    shown = {"action": "steer", "module": "hidden", "scale": None, "limit": None}
    assert answers[4].json()["versions"][0]["content"]["actions"][1] == shown
    for caller, code in ((ours, 409), (theirs, 404)):
        refused(caller.http.delete("/v1/artifacts/modules/calm"), code, "name", "module 'calm'")

    other = {"identity": "b" * 64}
    model = model_info(hidden_size=HIDDEN, **other)
    hand.do(hand.ledger.publish_model(model, hand.sign(boot="b2", **other)))
    changes = ({"version": 1}, {"mode": "shadow"}, {"all_traffic": False})
    answer, *others = [of_us.http.patch(path, json=change) for change in changes]
    refused(answer, 409, None, "registered for a model with the identity")
    assert [each.status_code for each in others] == [409, 200]
    of_us.http.delete(path)
    hand.serve(hidden_size=HIDDEN)


@pytest.mark.slow("calls wait for a worker that does not answer")
def test_only_admins_see_why_a_worker_does_not_serve(
    api: Api, ours: Caller, theirs: Caller, hand: Hand
) -> None:
    report = WorkerSteering(
        worker=hand.worker,
        boot="b1",
        model=MODEL,
        state="quarantined",
        detail="rank 1: job_plan-b of theirs",
        at=0.0,
    )
    hand.do(LedgerSteering(hand.ledger).report(report))
    told = ours.http.get("/v1/steering/dynamic")
    assert told.status_code == 200
    assert "plan-b" not in told.text
    assert "plan-b" in Caller(api, hand, "ops", "admin").http.get("/v1/steering/dynamic").text


# --- Source runs
# --------------------------------------------------------------------------------------------------


def test_run_names_are_per_tenant(ours: Caller, theirs: Caller, hand: Hand, captured: str) -> None:
    job_id = theirs.submit(capture={**CAPTURE, "run": "clean"})
    hand.finish(job_id)
    assert ours.http.get("/v1/runs/clean").json()["job"] == captured
    assert theirs.http.get("/v1/runs/clean").json()["job"] == job_id
    assert listed(ours, "/v1/runs", "runs", "name") == ["clean"]
    assert ours.http.get(f"/v1/jobs/{captured}").json()["run"] == "clean"


@pytest.mark.parametrize("how", ["name", "ours/{}", "job"])
def test_another_tenants_run_cannot_be_patched_with(
    ours: Caller, everyday: Caller, hand: Hand, captured: str, how: str
) -> None:
    def send(caller: Caller, run: str) -> Any:
        patch = [{"layers": [0], "positions": [0], "source": {"run": run, "position": 0}}]
        return caller.http.post(
            "/v1/jobs", json={"model": MODEL, "prompts": ["hello there"], "patch": patch}
        )

    name = captured if how == "job" else how.format("clean").replace("name", "clean")
    nowhere = new_job_id() if how == "job" else "ours/other"
    there = send(everyday, name)
    absent = send(everyday, nowhere)
    assert there.status_code == absent.status_code == 400
    assert there.text.replace(name, nowhere) == absent.text.replace(name, nowhere) or how == "name"
    assert "unknown source run" in there.json()["detail"]
    if how != "ours/{}":
        answer = send(ours, name)
        assert answer.status_code == 202, answer.text


def test_internal_row_names_are_refused_in_requests(everyday: Caller, captured: str) -> None:
    row = f"run:{captured}.0.default:post_block:0:0"
    for body in (
        {"steering": [{"layers": [0], "module": row}]},
        {"steering": [{"layers": [0], "vector": row}]},
        {"steering": [{"layers": [0], "tensors": [row]}]},
        {"patch": [{"layers": [0], "positions": [0], "source": {"run": row, "position": 0}}]},
        {"patch": [{"layers": [0], "positions": [0], "source": {"module": row}}]},
    ):
        answer = everyday.http.post(
            "/v1/jobs", json={"model": MODEL, "prompts": ["hello there"], **body}
        )
        assert answer.status_code == 400, answer.text


def test_tensors_are_never_addressed_by_their_hash(ours: Caller, everyday: Caller) -> None:
    name = ours.http.put("/v1/artifacts/modules/hashed", json={"steering": steering()}).json()[
        "entries"
    ][0]["tensors"][0]
    for source in (
        {"module": name},
        {"run": name, "position": 0},
        {"vector": name},
        {"vector": {"sha256": name}},
    ):
        body = {
            "model": MODEL,
            "prompts": ["hello"],
            "patch": [{"layers": [0], "positions": [0], "source": source}],
        }
        assert everyday.http.post("/v1/jobs", json=body).status_code == 400
    for path in (
        f"/v1/blobs/{name}",
        f"/v1/captures/{name}",
        f"/v1/runs/{name}",
        f"/v1/artifacts/modules/{name}",
    ):
        assert everyday.http.get(path).status_code == 404


# --- Completions and sweeps
# --------------------------------------------------------------------------------------------


def test_completion_jobs_belong_to_the_callers_tenant(
    ours: Caller, theirs: Caller, hand: Hand
) -> None:
    job_id = ours.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "hello"},
        headers={"Idempotency-Key": "held"},
    ).headers["x-midstream-job"]
    assert hand.job(job_id).tenant == "ours"
    assert hand.job(job_id).key == ours.key.id
    assert theirs.http.get(f"/v1/jobs/{job_id}").status_code == 404


# --- Limits
# --------------------------------------------------------------------------------------------------


def test_admins_set_limits_and_tenants_see_them(api: Api, ours: Caller, theirs: Caller) -> None:
    with Client(api.url, ADMIN) as admin:
        admin.tenants.put("theirs", Limits(jobs_in_flight=1000, weight=4))
        assert {"ours", "theirs"} <= {tenant.name for tenant in admin.tenants.list()}
    own = theirs.http.get("/v1/tenant").json()
    assert own["name"] == "theirs"
    assert own["limits"]["jobs_in_flight"] == 1000
    assert own["limits"]["weight"] == 4
    assert ours.http.get("/v1/tenant").json()["limits"].get("jobs_in_flight") == 0
    assert ours.http.get("/v1/tenants/theirs").status_code == 403
    assert ours.http.put("/v1/tenants/ours", json={"jobs_in_flight": 0}).status_code == 403
    assert api.http.put("/v1/tenants/Bad_Name", json={}, headers=bearer(ADMIN)).status_code == 400
