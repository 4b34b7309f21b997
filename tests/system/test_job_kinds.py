"""A kind of jobs that an installed package brings: the example in `examples/echo`, with no file of
the core changed. It is built and installed as its users do, beside the stack.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from edge import refused
from extension_kit import ECHO, pip_install, with_package
from stack import Stack
from tree import ROOT, tracked

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.kinds import KINDS

pytestmark = pytest.mark.xdist_group("job_kinds")

REQUEST = {"model": "fake-model", "prompts": ["hello", "you"], "layer": 1}
WANTED = {"layer": 1, "texts": ["hello", "you"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has installed the package to."""
    return pip_install(ECHO, tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Iterator[Stack]:
    """A token takes half a second, so that a worker can be killed while it runs a job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        # processes start anew, not as copies of one that has read the table of kinds
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        with Stack(
            tmp_path_factory.mktemp("stack"),
            api=True,
            engine_options={"token_s": 0.5},
            lease_s=9.0,
            **{"tuning.visibility_timeout_s": 60},
        ) as running:
            yield running


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=stack.url, timeout=60.0) as client:
        yield client


def test_the_example_has_six_files() -> None:
    assert len([path for path in tracked() if ECHO.relative_to(ROOT) in path.parents]) == 6


def test_the_core_does_not_know_the_kind() -> None:
    assert "echo" not in KINDS


def test_a_route_accepts_it_and_its_result_has_its_field(stack: Stack, http: httpx2.Client) -> None:
    answer = http.post("/v1/echoes", json=REQUEST, headers={"Prefer": "wait=60"})
    assert answer.status_code == 200, answer.text
    result = answer.json()
    assert result["echo"] == WANTED
    assert result["outputs"] == []
    assert result["sweep"] is None
    assert result["capture_results"]["status"] == "ok"
    sites = [file["sites"] for file in result["capture_results"]["files"]]
    assert sites == [{"post_block": [1]}] * 2
    assert "/v1/echoes" in http.get("/schema/openapi.json").json()["paths"]


def test_the_page_knows_its_name_and_not_its_parts(http: httpx2.Client) -> None:
    script = http.get("/page/lib/kinds.js").text
    assert '"echo":{' in script
    assert "midstream_echo" not in script, "where its code is concerns no browser"


def test_python_has_its_call(stack: Stack) -> None:
    program = (
        "import sys; from midstream import Client; "
        "from midstream.schemas.base.records import to_json; "
        "client = Client(sys.argv[1]); "
        "found = client.echo(prompts=['hello', 'you'], layer=1); "
        "assert client.result(found.id) == found; "
        "print(to_json(found.echo).decode())"
    )
    assert json.loads(with_package("-c", program, stack.url)) == WANTED


def test_the_command_line_has_its_verb(stack: Stack) -> None:
    verb = ["-m", "midstream.client", "echo", "hello", "you", "--layer", "1", "--json"]
    assert json.loads(with_package(*verb, "--url", stack.url))["echo"] == WANTED


def test_a_killed_attempt_is_made_again(stack: Stack, http: httpx2.Client) -> None:
    job = http.post("/v1/echoes", json=REQUEST).json()["id"]
    stack.wait_running(job)
    stack.crash("worker")
    view = stack.wait(job)
    assert view.state is State.SUCCEEDED
    assert view.attempt > 1
    assert http.get(f"/v1/jobs/{job}/result").json()["echo"] == WANTED


def test_without_its_package_a_job_is_named_kept_and_run_once_it_is_back(
    stack: Stack, http: httpx2.Client, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = http.post("/v1/echoes", json=REQUEST, headers={"Prefer": "wait=60"}).json()["id"]
    stack.end("worker")
    waiting = http.post("/v1/echoes", json=REQUEST).json()["id"]
    with monkeypatch.context() as away:
        folders = os.environ["PYTHONPATH"].split(os.pathsep)
        away.setenv("PYTHONPATH", os.pathsep.join(set(folders) - {str(site)}))
        stack.replace("api")
        stack.restart("worker")
        asked = http.post("/v1/jobs", json={"model": "fake-model", "prompts": ["a"]}).json()["id"]
        assert stack.wait(asked).state is State.SUCCEEDED, "the worker serves other kinds"
        assert http.get(f"/v1/jobs/{waiting}").json()["kind"] == "echo"
        assert {job["id"] for job in http.get("/v1/jobs").json()["jobs"]} >= {done, waiting}
        problem = refused(http.get(f"/v1/jobs/{done}/result"), 501, None, "'echo'")
        assert problem["type"] == "urn:midstream:not_installed"
        assert "install its package" in problem["detail"]
        assert http.get(f"/v1/jobs/{waiting}/request").json()["prompts_total"] == 2
        assert stack.view(waiting).state is State.QUEUED
    stack.replace("api")
    stack.replace("worker")
    assert stack.wait(waiting, timeout=60).state is State.SUCCEEDED
    for job in (done, waiting):
        assert http.get(f"/v1/jobs/{job}/result").json()["echo"] == WANTED


def test_work_of_an_unknown_kind_is_refused_by_name(stack: Stack, http: httpx2.Client) -> None:
    job = http.post("/v1/echoes", json=REQUEST).json()["id"]
    stored = stack.do(lambda ledger: ledger.job(job))
    with pytest.raises(MidstreamError, match="'echo'") as found:
        _ = stored.opened
    assert found.value.kind == "not_installed"
