"""Which Docker is talked to, and how?

The machine's own engine, or one that is started for the test alone.

Without an engine that answers, root's `dockerd` is started on a folder of its own, without a hand
in the machine's firewall, and stopped again. Both generations of Compose are known: the plugin
`docker compose` and the older program `docker-compose`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
#: Builds and pulls are the longest.
COMMAND_S = 3600.0
#: Everything that is built leaves the machine's other work in peace.
GENTLY = ["nice", "-n", "15"]


class Failed(Exception):
    """A command did not do what it was for; the message ends with what it wrote."""


def run(
    *command: str,
    env: Mapping[str, str] | None = None,
    timeout: float = COMMAND_S,
    check: bool = True,
    stdin: str = "",
) -> str:
    """What the command wrote to stdout.

    Raises Failed when it ends with another code than 0 (`check`), or not in time.
    """
    try:
        done = subprocess.run(
            command,
            env=dict(env or os.environ),
            cwd=ROOT,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(command)} did not end in {timeout:.0f} s") from error
    if check and done.returncode:
        raise Failed(
            f"{' '.join(command)} ended with "
            f"{done.returncode}:\n{(done.stderr + done.stdout)[-3000:]}"
        )
    return done.stdout


def succeeds(*command: str, env: Mapping[str, str] | None = None, timeout: float = 120.0) -> bool:
    try:
        run(*command, env=env, timeout=timeout)
    except (Failed, FileNotFoundError):
        return False
    return True


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `docker` reaches an engine; `folder` takes the images of one that is
    started here.
    """
    environment = {**os.environ, "DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}
    if succeeds("docker", "version", env=environment):
        yield _able_to_build(environment)
        return
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        raise Failed(
            "no Docker engine answers, and none can be started here: that takes root and `dockerd`"
        )
    socket = folder / "docker.sock"
    environment["DOCKER_HOST"] = f"unix://{socket}"
    folder.mkdir(parents=True, exist_ok=True)
    options = [
        "--data-root",
        str(folder / "root"),
        "--exec-root",
        str(folder / "exec"),
        "--pidfile",
        str(folder / "docker.pid"),
    ]
    with (folder / "dockerd.log").open("w") as log:
        daemon = subprocess.Popen(
            [
                "dockerd",
                *options,
                "--host",
                environment["DOCKER_HOST"],
                "--iptables=false",
                "--ip6tables=false",
                "--bridge=none",
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while not succeeds("docker", "version", env=environment):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise Failed(
                    f"dockerd did not start:\n{(folder / 'dockerd.log').read_text()[-2000:]}"
                )
            time.sleep(0.5)
        yield _able_to_build(environment)
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _able_to_build(environment: dict[str, str]) -> dict[str, str]:
    """With that `docker` first in PATH which has BuildKit: a client of another generation than its
    engine may lack it.
    """
    folders = environment["PATH"].split(os.pathsep)
    for folder in folders:
        if (Path(folder) / "docker").exists():
            found = {**environment, "PATH": os.pathsep.join([folder, *folders])}
            if _builds(found):
                return found
    raise Failed("no `docker` in PATH can build with BuildKit")


def _builds(environment: Mapping[str, str]) -> bool:
    try:
        run(
            "docker",
            "build",
            "--quiet",
            "-",
            env=environment,
            stdin="FROM scratch\nLABEL probe=1\n",
            timeout=120,
        )
    except Failed:
        return False
    return True


def compose(environment: Mapping[str, str]) -> list[str]:
    """How Compose is called here."""
    if succeeds("docker", "compose", "version", env=environment):
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise Failed("neither `docker compose` nor `docker-compose` is installed")
