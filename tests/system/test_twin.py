"""Does the twin answer large calls as the API itself would, and does neither harm the other?"""

import json
import os
import re
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from edge import CALL_TIMEOUT_S, MODEL, Api, Hand, refused, running
from wait_kit import wait_until

from midstream.api.operations.twin import NICE
from midstream.api.web.body import INLINE_ITEMS
from midstream_ops.redis_server import RedisServer

LARGE = {"model": MODEL, "prompts": ["hello there"] * (INLINE_ITEMS + 1)}
SMALL = {"model": MODEL, "prompts": ["hello there"]}


def descendants(pid: int) -> list[int]:
    """The processes that `pid` started, and those that these started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def twin_of(api: Api) -> int:
    """The pid of the API's twin, which gives way to the others."""
    own = os.getpriority(os.PRIO_PROCESS, api.process.pid)
    (twin,) = (
        pid
        for pid in descendants(api.process.pid)
        if os.getpriority(os.PRIO_PROCESS, pid) == own + NICE
    )
    return twin


@pytest.fixture
def own_api(redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """One that is new, without a twin."""
    with running(tmp_path, redis_url) as api, Hand(api.settings):
        yield api


@pytest.fixture(scope="module")
def running_api(
    redis_session: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    with running(tmp_path_factory.mktemp("twinned"), redis_session.url) as api:
        with Hand(api.settings):
            api.submit(prompts=LARGE["prompts"])
        yield api


@pytest.fixture
def twinned(running_api: Api, redis_url: str) -> Iterator[Api]:
    """One that has a twin, over an empty Redis; whoever kills the twin leaves another."""
    with Hand(running_api.settings):
        yield running_api


def test_a_small_call_starts_no_twin_and_a_large_one_does(own_api: Api) -> None:
    own_api.submit()
    (nursery,) = descendants(own_api.process.pid)
    own_api.submit(prompts=LARGE["prompts"])
    assert set(descendants(own_api.process.pid)) == {nursery, twin_of(own_api)}


def test_a_small_call_that_takes_long_is_answered_by_the_twin(own_api: Api) -> None:
    positions = {"positions": [{"start": 0, "stop": 4, "every": 2}] * 100}
    own_api.submit(prompts=["hello there a b"], capture=positions)
    assert len(descendants(own_api.process.pid)) == 1
    own_api.submit(prompts=["hello there a b"] * 100, capture=positions)
    assert twin_of(own_api)


def test_the_answer_has_each_header_once_and_the_caller_s_request_id(twinned: Api) -> None:
    headers = {"X-Request-ID": "mine"}
    small = twinned.http.post("/v1/jobs", json=SMALL, headers=headers)
    large = twinned.http.post("/v1/jobs", json=LARGE, headers=headers)
    assert large.status_code == small.status_code == 202
    assert sorted(large.headers) == sorted(small.headers)
    assert len(large.headers.raw) == len({name for name, _ in large.headers.raw})
    assert large.headers["x-request-id"] == "mine"


def test_a_refusal_of_the_twin_names_the_field_and_is_counted(
    redis_url: str, tmp_path: Path
) -> None:
    with running(tmp_path, redis_url, **{"limits.jobs_in_flight": 1}) as api, Hand(api.settings):
        wrong = {**LARGE, "prompts": [*LARGE["prompts"], "hello " * 40]}
        refused(api.http.post("/v1/jobs", json=wrong), 400, f"prompts[{INLINE_ITEMS + 1}]")
        api.submit()
        refused(api.http.post("/v1/jobs", json=LARGE), 429, kind="too_many_jobs")
        counted = 'midstream_refusals_total{kind="too_many_jobs"} 1.0'
        assert counted in api.http.get("/metrics").text


def test_the_release_of_a_held_answer_of_the_twin_is_measured(
    twinned: Api, pool: ThreadPoolExecutor
) -> None:
    held = pool.submit(
        httpx2.post,
        f"{twinned.url}/v1/jobs",
        json=LARGE,
        headers={"Prefer": "wait=60"},
        timeout=CALL_TIMEOUT_S,
    )
    wait_until(lambda: twinned.http.get("/v1/jobs").json()["jobs"], CALL_TIMEOUT_S)
    with Hand(twinned.settings) as hand:
        hand.finish(twinned.http.get("/v1/jobs").json()["jobs"][0]["id"])
    assert held.result().status_code == 200
    assert twin_of(twinned)
    counted = 'midstream_release_seconds_count{route="/v1/jobs"} 1.0'
    assert counted in twinned.http.get("/metrics").text


def test_a_key_is_asked_for_once_and_its_tenant_owns_the_job(
    redis_url: str, tmp_path: Path
) -> None:
    key = "ms_admin0000000_" + "a" * 43
    with running(tmp_path, redis_url, auth="keys", admin_key=key) as api, Hand(api.settings):
        refused(api.http.post("/v1/jobs", json=LARGE), 401)
        assert len(descendants(api.process.pid)) == 1
        api.http.headers["Authorization"] = f"Bearer {key}"
        assert api.http.post("/v1/jobs", json=LARGE).status_code == 202


def test_the_twin_answers_only_its_own_process(twinned: Api) -> None:
    twin = twin_of(twinned)
    sockets = {
        os.readlink(entry) for entry in Path(f"/proc/{twin}/fd").iterdir() if entry.is_symlink()
    }
    ports = [
        int(fields[1].split(":")[1], 16)
        for fields in (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets
    ]
    (port,) = ports
    answer = httpx2.post(f"http://127.0.0.1:{port}/v1/jobs", json=SMALL, timeout=CALL_TIMEOUT_S)
    assert answer.status_code == 404
    assert answer.content == b""


def test_a_killed_twin_fails_the_calls_that_it_has_and_no_others(
    twinned: Api, pool: ThreadPoolExecutor
) -> None:
    twin = twin_of(twinned)
    held = pool.submit(twinned.http.post, "/v1/jobs", json=LARGE, headers={"Prefer": "wait=60"})
    wait_until(lambda: twinned.http.get("/v1/jobs").json()["jobs"], CALL_TIMEOUT_S)
    os.kill(twin, signal.SIGKILL)
    refused(held.result(), 503, None, "may have been accepted", "Idempotency-Key")
    twinned.submit()
    twinned.submit(prompts=LARGE["prompts"])
    assert twin_of(twinned) != twin


def test_calls_that_find_the_twin_dead_start_one_together(
    twinned: Api, pool: ThreadPoolExecutor
) -> None:
    before = twin_of(twinned)
    end = os.pidfd_open(before)
    os.kill(before, signal.SIGKILL)
    # until its last thread has ended, it takes connections
    assert select.select([end], [], [], CALL_TIMEOUT_S)[0]
    os.close(end)
    calls = [pool.submit(twinned.submit, prompts=LARGE["prompts"]) for _ in range(8)]
    assert len({call.result() for call in calls}) == len(calls)
    running = [pid for pid in descendants(twinned.process.pid) if _runs(pid)]
    assert len(running) == 2, "one that forks, and one twin"


def test_all_processes_end_with_an_api_that_is_killed(own_api: Api) -> None:
    own_api.submit(prompts=LARGE["prompts"])
    others = descendants(own_api.process.pid)
    assert len(others) == 2
    own_api.kill()
    wait_until(lambda: not any(map(_runs, others)), CALL_TIMEOUT_S)


def _runs(pid: int) -> bool:
    try:
        state = re.search(r"\) (\w)", Path(f"/proc/{pid}/stat").read_text())
    except FileNotFoundError:
        return False
    assert state is not None
    return state[1] not in "ZX"


def test_a_held_answer_of_the_twin_is_sent_when_the_api_stops(
    own_api: Api, pool: ThreadPoolExecutor
) -> None:
    held = pool.submit(
        httpx2.post,
        f"{own_api.url}/v1/jobs",
        json=LARGE,
        headers={"Prefer": "wait=60"},
        timeout=CALL_TIMEOUT_S,
    )
    wait_until(lambda: own_api.http.get("/v1/jobs").json()["jobs"], CALL_TIMEOUT_S)
    own_api.stop()
    assert held.result().status_code == 202
    assert held.result().json()["state"] == "queued"


def test_a_stream_of_the_twin_arrives_token_by_token(twinned: Api) -> None:
    body = {"model": MODEL, "prompt": ["hello"] * (INLINE_ITEMS + 1), "stream": True}
    with (
        Hand(twinned.settings) as hand,
        ThreadPoolExecutor() as pool,
        twinned.http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        claim = pool.submit(hand.say_next, "a", "b").result()
        data = (json.loads(line[6:]) for line in lines if line.startswith("data"))
        texts = [next(data)["choices"][0]["text"] for _ in range(2)]
        assert texts == ["a", "b"]
        assert claim.job.stream
