"""Do two versions either work together or refuse with both of them named?

The other version is a process with its numbers changed.
"""

import os
import subprocess
import sys

import httpx2
import msgspec
import pytest
from ledger_kit import enqueue, submit_unsent
from midstream_fake_engine.model import identity_of
from stack import Stack, stack_with

from midstream import __version__
from midstream.broker.ledger.jobs.ledger import new_job_id
from midstream.schemas.base.records import now, to_msgpack
from midstream.schemas.jobs.jobs import Job, Sampling, State, StoredPrompt
from midstream.schemas.service.compatibility import WIRE, disagreement
from midstream.schemas.settings.settings import to_environment

MODEL = "fake-model"


stack = stack_with(api=True, callbacks=False, lease_s=15)


def ask(stack: Stack) -> httpx2.Response:
    body = {"model": MODEL, "prompts": ["a"], "sampling": {"max_tokens": 2}}
    return httpx2.post(f"{stack.url}/v1/jobs", json=body, headers={"Prefer": "wait=60"}, timeout=90)


#: Runs a module of the package as a version that speaks another wire.
OTHER = """
import runpy, sys
import midstream.schemas.base.version as version
version.__version__ = sys.argv[1]
import midstream.schemas.service.compatibility as compatibility
compatibility.WIRE, compatibility.OLDEST_WIRE = int(sys.argv[2]), int(sys.argv[3])
sys.argv = [sys.argv[4]]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def restart_worker(stack: Stack, version: str, wire: int, oldest: int) -> None:
    """The worker again, as a version that speaks `wire` and works with `oldest` and newer."""
    stack.end("worker")
    with (stack.directory / "logs" / "worker.log").open("wb") as output:
        stack.processes["worker"] = subprocess.Popen(
            [sys.executable, "-c", OTHER, version, str(wire), str(oldest), "midstream.workers"],
            env=os.environ | to_environment(stack.settings) | {"PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=output,
            cwd=stack.directory,
        )
    stack.wait_ready("worker")


# field case 43
@pytest.mark.parametrize(
    ("version", "wire", "oldest", "upgrade"),
    [("0.0.9", WIRE - 1, 0, "the other"), ("9.0.0", WIRE + 1, WIRE + 1, "this process")],
)
def test_an_incompatible_worker_gets_no_jobs_and_both_versions_are_named(
    stack: Stack, version: str, wire: int, oldest: int, upgrade: str
) -> None:
    restart_worker(stack, version, wire, oldest)
    answer = ask(stack)
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:midstream:version_mismatch")
    detail = answer.json()["detail"]
    assert (
        f"the worker of '{MODEL}' runs midstream {version} (wire {wire}, works with "
        f"{oldest} and newer)"
    ) in detail
    assert f"this process runs midstream {__version__} (wire {WIRE}" in detail
    assert detail.endswith(f"upgrade {upgrade}")

    ready = httpx2.get(f"{stack.url}/readyz")
    assert (ready.status_code, ready.json()["ready"], ready.json()["models"]) == (503, False, [])
    told = next(why for why in ready.json()["missing"] if why.startswith("worker "))
    assert f"runs midstream {version} (wire {wire}" in told
    assert f"this process runs midstream {__version__}" in told
    seen = httpx2.get(f"{stack.url}/v1/status").json()["workers"]
    assert [
        (worker["healthy"], worker["detail"].endswith(f"upgrade {upgrade}")) for worker in seen
    ] == [(False, True)]


def test_a_newer_compatible_worker_takes_jobs(stack: Stack) -> None:
    restart_worker(stack, "9.0.0", WIRE + 1, WIRE)
    answer = ask(stack)
    assert (answer.status_code, answer.json()["state"]) == (200, "succeeded")
    assert httpx2.get(f"{stack.url}/readyz").json()["models"] == [MODEL]


# field case 43
def test_a_job_beyond_the_workers_version_fails_naming_both_versions(stack: Stack) -> None:
    restart_worker(stack, __version__, WIRE, WIRE)
    job = Job(
        id=new_job_id(),
        kind="generate",
        model=MODEL,
        prompts=[StoredPrompt(token_ids=[1])],
        sampling=Sampling(max_tokens=2),
        created=now(),
        identity=identity_of(stack.settings),
    )
    stack.do(lambda ledger: submit_unsent(ledger, job))
    newer = msgspec.msgpack.encode(msgspec.msgpack.decode(to_msgpack(job)) | {"invented_later": 1})
    fields = {"spec": newer, "written_by": "9.0.0"}
    stack.do(lambda ledger: ledger.redis.hset(f"ms:job:{job.id}", mapping=fields))
    enqueue(stack.app, job.id, job.kind, job.model)
    view = stack.wait(job.id)
    assert (view.state, view.attempt, view.error.type) == (
        State.FAILED,
        1,
        "urn:midstream:version_mismatch",
    )
    assert (
        f"accepted by midstream 9.0.0; midstream {__version__} cannot read it" in view.error.detail
    )
    assert "invented_later" in view.error.detail


def test_overlapping_version_ranges_are_compatible() -> None:
    assert disagreement("x", "1", WIRE, WIRE) is None
    assert disagreement("x", "1", WIRE + 5, WIRE) is None
    assert disagreement("x", "1", 0, 0) is not None, (
        "a version that told no number is older than all that do"
    )
