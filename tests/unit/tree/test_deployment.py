"""Do the files of the containers agree with the package, and is what they need refused when it is
wrong?
"""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import http_kit
import pytest
import yaml
from tree import CORE, ROOT

from midstream import __version__
from midstream.broker import health
from midstream.broker.ledger.people import keys
from midstream.broker.processes import install
from midstream.schemas.settings.settings import Settings
from midstream_ops import flower
from midstream_ops.processes import wait_for


def test_compose_names_the_version_one_worker_and_loopback_alone() -> None:
    variables = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert variables["IMAGE_TAG"] == __version__ == project["version"]
    assert f"ARG VERSION={__version__}\n" in (ROOT / "Dockerfile").read_text()
    assert variables["COMPOSE_PROFILES"] == "cpu"
    published = {value for name, value in variables.items() if name.startswith("PUBLISH_")}
    assert {value.partition(":")[0] for value in published} == {"127.0.0.1"}


def test_every_package_folder_gets_into_the_images() -> None:
    taken = re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert {*CORE, "packages"} <= set(taken)


def test_secrets_are_made_once_closed_to_others_and_good_for_what_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    making = [str(ROOT / "compose/secrets.sh"), str(folder)]
    subprocess.run(making, check=True, capture_output=True)
    made = {path.name: path.read_text() for path in folder.iterdir()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert subprocess.run(making, check=True, capture_output=True).stdout == b""
    assert {path.name: path.read_text() for path in folder.iterdir()} == made
    made_keys = keys.of_settings(
        Settings(admin_key=made["admin_key"], observe_key=made["observe_key"])
    )
    assert [key.scopes for key in made_keys.values()] == [["admin"], ["observe"]]
    options = flower.options(Settings(flower_auth=made["flower_auth"], flower_host="0.0.0.0"))
    assert options["FLOWER_BASIC_AUTH"] == made["flower_auth"]


def test_secrets_that_git_has_or_others_could_read_are_not_kept(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    making = [str(ROOT / "compose/secrets.sh"), str(folder)]
    subprocess.run(making, check=True, capture_output=True)
    folder.chmod(0o755)  # as git creates a folder
    refused = subprocess.run(making, check=False, capture_output=True, text=True)
    assert "was open to every account of this machine (valid: mode 700)" in refused.stderr
    folder.chmod(0o700)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    refused = subprocess.run(making, check=False, capture_output=True, text=True)
    assert "is in git" in refused.stderr
    assert refused.returncode != 0


def test_the_first_call_copies_the_variables_of_compose_and_no_later_one(tmp_path: Path) -> None:
    (tmp_path / "compose").mkdir()
    script = Path(shutil.copy(ROOT / "compose/secrets.sh", tmp_path / "compose"))
    shutil.copy(ROOT / ".env.example", tmp_path)
    subprocess.run([script], check=True, capture_output=True)
    assert (tmp_path / ".env").read_bytes() == (tmp_path / ".env.example").read_bytes()
    (tmp_path / ".env").write_text("COMPOSE_PROFILES=gpu\n")
    subprocess.run([script], check=True, capture_output=True)
    assert (tmp_path / ".env").read_text() == "COMPOSE_PROFILES=gpu\n"


#: Files that name images which others publish.
NAMING = ("Dockerfile", "compose.yaml", "deploy/kubernetes/base/redis.yaml")


def pinned(folder: Path, digest: str) -> subprocess.CompletedProcess[str]:
    """Runs compose/pin.sh with a registry whose images all have `digest`."""
    docker = folder / "bin" / "docker"
    docker.parent.mkdir(exist_ok=True)
    docker.write_text(f"#!/bin/sh\necho {digest}\n")
    docker.chmod(0o755)
    path = f"{docker.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [folder / "compose" / "pin.sh"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_images_of_others_are_named_by_digest() -> None:
    text = "\n".join((ROOT / name).read_text() for name in NAMING)
    named = re.findall(r"(?:_IMAGE:-|_IMAGE=|image: )([a-z0-9./-]+:[^}$\s]+)", text)
    assert len(named) == 6
    assert [name for name in named if not re.search("@sha256:[0-9a-f]{64}$", name)] == []


def test_the_digests_are_renewed_in_all_files(tmp_path: Path) -> None:
    for name in (*NAMING, "compose/pin.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for digest in ("sha256:" + "a" * 64, "sha256:" + "b" * 64):  # a later call replaces digests
        assert pinned(tmp_path, digest).returncode == 0
        text = "\n".join((tmp_path / name).read_text() for name in NAMING)
        assert text.count(f"python:3.11-slim-bookworm@{digest}") == 2
        assert text.count(f"redis:7.4-bookworm@{digest}") == 2
        assert text.count("@sha256:") == text.count(f"@{digest}") == 6
    before = (tmp_path / "Dockerfile").read_text()
    refused = pinned(tmp_path, "unauthorized")
    assert refused.returncode == 1
    assert "in place of a digest" in refused.stderr
    assert (tmp_path / "Dockerfile").read_text() == before


def test_a_container_without_redis_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MIDSTREAM_REDIS_URL", "redis://127.0.0.1:1/0")
    for name in ("relay", "worker", "callbacks"):
        assert health.main([name]) == 1
        assert "Redis does not answer" in capsys.readouterr().out
    assert health.main(["nothing"]) == 2


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1)])
def test_the_probe_of_containers_says_whether_the_answer_is_200(
    status: int, exit_status: int
) -> None:
    with http_kit.server(http_kit.reply({"missing": ["redis"]}, status)) as (url, seen):
        done = _probe(url.rpartition(":")[2])
    assert done.returncode == exit_status
    assert done.stdout.strip() == ("" if status == 200 else '{"missing":["redis"]}')
    assert seen == ["GET /readyz"]


def test_the_probe_of_containers_says_when_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    done = _probe(port)
    assert done.returncode == 1
    assert port in done.stdout


def test_the_probe_of_flower_shows_its_password(tmp_path: Path) -> None:
    (tmp_path / "auth").write_text("user:pass word,other:one\n")
    with http_kit.server(http_kit.reply("OK")) as (url, seen):
        port = url.rpartition(":")[2]
        assert _probe(port, "/healthcheck", str(tmp_path / "auth")).returncode == 0
        assert (
            health.flower(Settings(flower_port=int(port), flower_auth="user:pass word,other:one"))
            == ""
        )
        assert health.flower(Settings(flower_port=int(port))) == ""
    assert seen.authorizations == [install.basic("user:pass word")] * 2 + [None]
    assert _probe(port, "/healthcheck", str(tmp_path / "none")).returncode == 1


def test_prometheus_has_the_observe_key_alone() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["prometheus"]
    assert service["secrets"] == ["observe_key"]
    for job in yaml.safe_load((ROOT / "compose/prometheus.yml").read_text())["scrape_configs"]:
        wanted = (
            {"type": "Bearer", "credentials_file": "/run/secrets/observe_key"}
            if job["job_name"] in ("api", "flower")
            else None
        )
        assert job.get("authorization") == wanted, job["job_name"]


def _probe(port: str, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-IS",
        str(ROOT / "compose" / "probe.py"),
        port,
        *(more or ["/readyz"]),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def worker_container(
    folder: Path, path: object, *, err: int | None = subprocess.PIPE, **variables: str
) -> Iterator["subprocess.Popen[str]"]:
    """compose/worker.sh with its data in `folder` and `path` first in PATH; killed at the end of
    the block.
    """
    environment = {
        "PATH": f"{path}:/usr/bin:/bin",
        "TMPDIR": str(folder),
        "MIDSTREAM_DATA_DIR": str(folder),
        **variables,
    }
    script = ["sh", str(ROOT / "compose/worker.sh")]
    with subprocess.Popen(
        script,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=err,
        text=True,
        start_new_session=True,
    ) as container:
        try:
            yield container
        finally:
            with suppress(ProcessLookupError):
                os.killpg(container.pid, signal.SIGKILL)


@pytest.fixture
def health_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of the health check, to which no worker has reported."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        health,
        "_worker_seen",
        lambda settings: "no worker on this machine has reported to Redis recently",
    )
    monkeypatch.setattr(health, "START_S", 30.0)
    return tmp_path


def reason_why_unhealthy(folder: Path, container: "subprocess.Popen[str]") -> str:
    """The health check's answer, once the container has noted why it cannot start; fails when it
    does not.
    """
    note = folder / health.STARTING
    assert wait_for(
        lambda: container.poll() is not None or (note.exists() and note.read_text() != ""), 120
    )
    assert container.poll() is None
    return health.worker(Settings())


def test_a_worker_without_its_model_is_unhealthy_with_the_reason_and_tries_again(
    health_folder: Path,
) -> None:
    """Its container goes on: each start of a container would be "health: starting" again."""
    found = health_folder / "model"
    python = health_folder / "python"
    python.write_text(
        f"""#!/bin/sh
note=$WORKER_STARTING_NOTE
if [ "$2" = midstream.workers ]; then
  echo "serves $MIDSTREAM_MODEL, note: '$(cat "$note")'"; rm "$note"; exit
fi
[ -d {found} ] && echo {found} && exit
echo "error: pip could not download it" >&2
exit 1
"""
    )
    python.chmod(0o755)
    with worker_container(health_folder, health_folder, START_RETRY_S="0.1") as container:
        assert (
            reason_why_unhealthy(health_folder, container)
            == "the demo model could not be fetched: see the log of this container"
        )
        found.mkdir()
        out, err = container.communicate(timeout=60)
    assert out == f"serves {found}, note: ''\n"
    assert "pip could not download it" in err


def test_a_worker_that_cannot_start_is_unhealthy_with_the_reason_until_stopped(
    health_folder: Path,
) -> None:
    """The real worker, whose model is not there.

    Its container goes on and can be stopped at any time.
    """
    variables = {
        "MIDSTREAM_REDIS_URL": "redis://127.0.0.1:1/0",
        "MIDSTREAM_RELAY_URL": "tcp://127.0.0.1:1",
        "MIDSTREAM_MODEL": "/no/such/model",
        "START_RETRY_S": "600",
    }
    with worker_container(health_folder, Path(sys.executable).parent, **variables) as container:
        assert (
            reason_why_unhealthy(health_folder, container)
            == "MIDSTREAM_MODEL=/no/such/model: no such folder"
        )
        container.terminate()
        _, err = container.communicate(timeout=60)
    assert err.count("worker failed: MIDSTREAM_MODEL=/no/such/model: no such folder") == 1


WORKER_THAT_DRAINS = """#!/bin/sh
[ -e "$0.tried" ] || { touch "$0.tried"; exit 137; }
[ -s "$WORKER_STARTING_NOTE" ] && cat "$WORKER_STARTING_NOTE"
trap 'echo drained; exit 7' TERM
echo ready
while :; do sleep 0.05; done
"""


@pytest.mark.timeout(120)
def test_a_stopped_container_lets_its_worker_finish(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(WORKER_THAT_DRAINS)
    python.chmod(0o755)
    with worker_container(
        tmp_path, tmp_path, err=None, MIDSTREAM_MODEL="m", START_RETRY_S="0.1"
    ) as container:
        assert container.stdout is not None
        assert "ended with exit code 137 before it was ready" in container.stdout.readline()
        assert container.stdout.readline() == "ready\n"
        container.terminate()
        assert container.stdout.read() == "drained\n"
    assert container.returncode == 7


def test_the_check_of_a_worker_that_starts_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(health, "LOOK_S", 0.01)
    answers = iter(["not yet", "not yet", "", "gone"])
    monkeypatch.setattr(health, "_worker_seen", lambda settings: next(answers))
    (tmp_path / health.STARTING).touch()
    assert health.worker(Settings()) == ""
    assert health.worker(Settings()) == "gone", "it was ready before: nothing is waited for"
    monkeypatch.setattr(health, "_worker_seen", lambda settings: "not yet")
    monkeypatch.setattr(health, "START_S", 0.0)
    (tmp_path / health.STARTING).touch()
    assert health.worker(Settings()) == "not yet"


def test_workers_can_be_scaled_with_one_flag() -> None:
    """Compose gives each container of a service its own name, address and ports only where the file
    does not fix them. Each takes a free worker id: compose/worker.sh.
    """
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for name in ("worker", "worker-gpu"):
        fixed = {"container_name", "hostname", "ports", "mac_address"}
        assert not fixed & services[name].keys(), name
        assert "MIDSTREAM_WORKER_ID" not in services[name]["environment"]
