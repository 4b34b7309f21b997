"""What does the service do while Redis refuses writes, and after Redis has lost its data?"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import httpx2
import pytest
import redis
from ports import free_port
from stack import Stack, stack_with, unsuccessful
from wait_kit import wait_until

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import State

WAIT_S = 90.0
NOTICED = "Redis rejects writes"


stack = stack_with(api=True)


def ask(stack: Stack, **more: object) -> httpx2.Response:
    body = {
        "model": stack.settings.served_model,
        "prompts": ["hello"],
        "sampling": {"max_tokens": 2},
        **more,
    }
    return httpx2.post(f"{stack.url}/v1/jobs", json=body, timeout=60)


def ready(stack: Stack) -> bool:
    return httpx2.get(f"{stack.url}/readyz", timeout=30).status_code == 200


def runs_a_job(stack: Stack) -> None:
    answer = ask(stack)
    assert answer.status_code == 202, answer.text
    assert stack.wait(answer.json()["id"], WAIT_S).state is State.SUCCEEDED


@pytest.fixture
def unharmed(stack: Stack) -> Iterator[None]:
    """After the test, jobs run in the same processes."""
    processes = dict(stack.processes)
    yield
    runs_a_job(stack)
    assert stack.processes == processes
    assert all(process.poll() is None for process in processes.values())


def keep_under_way(stack: Stack) -> str:
    """A job whose message waits while the worker is stopped, so that the worker gets Redis' next
    answer.
    """
    stack.kill("worker", signal.SIGSTOP)
    try:
        return stack.submit(["hello"])
    except BaseException:
        stack.kill("worker", signal.SIGCONT)
        raise


def test_processes_wait_for_a_redis_out_of_memory(stack: Stack, unharmed: None) -> None:
    """It still gives messages out, and the worker keeps those that it took."""
    job = keep_under_way(stack)
    with redis.Redis.from_url(stack.settings.redis_url) as client:
        try:
            client.config_set("maxmemory", 1)
            stack.kill("worker", signal.SIGCONT)
            wait_until(lambda: f"claim of {job} waiting for Redis" in stack.log("worker"), WAIT_S)
            answer = ask(stack)
        finally:
            client.config_set("maxmemory", 0)
    assert answer.status_code == 503, answer.text
    wait_until(lambda: ready(stack), WAIT_S)
    assert stack.wait(job, WAIT_S).state is State.SUCCEEDED
    # the API looks at the memory once a second
    wait_until(lambda: ask(stack).status_code == 202, WAIT_S)


@pytest.mark.slow("a stack starts, and jobs run while Redis forgets scripts")
def test_scripts_that_redis_forgets_between_load_and_call_cost_no_job(
    stack: Stack, unharmed: None
) -> None:
    """A restart between the two has the same effect."""
    jobs: list[str] = []
    enough = threading.Event()

    def forget() -> None:
        with redis.Redis.from_url(stack.settings.redis_url) as client:
            while not enough.is_set():
                client.script_flush()

    def noticed() -> bool:
        with contextlib.suppress(MidstreamError):  # not accepted, and said so
            jobs.append(stack.submit(["hello"]))
        return "Redis was restarted during the call" in stack.log("worker")

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    try:
        wait_until(noticed, WAIT_S)
    finally:
        enough.set()
        forgetting.join()
    assert unsuccessful(stack.wait(job, WAIT_S) for job in jobs) == {}


@pytest.mark.long
def test_processes_wait_for_a_read_only_redis(stack: Stack, unharmed: None) -> None:
    """As a managed Redis is for a moment when another takes over: they log it once, no process
    ends, and the API answers 503; afterwards the waiting job and new ones run.

    (It keeps its data: there is none to copy from.)
    """
    who = ("worker", "callbacks")
    said = {name: stack.log(name).count(NOTICED) for name in who}
    job = keep_under_way(stack)
    with redis.Redis.from_url(stack.settings.redis_url) as client:
        try:
            client.slaveof("127.0.0.1", free_port())
            stack.kill("worker", signal.SIGCONT)
            for name in who:
                wait_until(lambda name=name: stack.log(name).count(NOTICED) > said[name], WAIT_S)
            answer = ask(stack)
            time.sleep(2.0)  # time for a process to end
        finally:
            client.slaveof()
    assert answer.status_code == 503, answer.text
    assert "retry-after" in answer.headers
    assert {name: stack.log(name).count(NOTICED) - said[name] for name in who} == dict.fromkeys(
        who, 1
    )
    wait_until(lambda: ready(stack), WAIT_S)
    assert stack.wait(job, WAIT_S).state is State.SUCCEEDED


@pytest.mark.parametrize("how", ["FLUSHALL", "AOF removed"])
def test_a_worker_registers_again_after_redis_lost_its_data(stack: Stack, how: str) -> None:
    if how == "FLUSHALL":
        with redis.Redis.from_url(stack.settings.redis_url) as client:
            client.flushall()
    else:
        stack.kill("redis")
        for path in (stack.directory / "redis").rglob("*.aof*"):  # with the manifest of Redis 7
            path.unlink()
        stack.restart("redis")
    wait_until(lambda: ready(stack), WAIT_S)
    runs_a_job(stack)
    answer = ask(stack, capture={"layers": "all", "positions": "all_prompt"})
    assert answer.status_code == 202, answer.text
    done = stack.wait(answer.json()["id"], WAIT_S)
    assert done.state is State.SUCCEEDED
    assert stack.result(done.id).capture_results.status == "ok"
