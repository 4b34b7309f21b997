"""The service as on several machines: Redis with TLS, a user per role and passwords, a relay with
CURVE. All processes run on this machine; `Fleet` of tests/machines puts them on others.

Where the installed redis-server speaks no TLS, a small proxy does so in front of it.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import forks
import redis
from processes import Processes
from receipt_rig import free_port
from wait_kit import wait_until

from midstream.broker.receipts.curve import new_keys
from midstream.broker.redis_service.acl import OPERATOR, write_users
from midstream.schemas.settings.settings import Settings, load_settings, to_environment
from midstream_ops import redis_server

MODULES = {
    "relay": "midstream.broker.relay",
    "callbacks": "midstream.broker.callbacks",
    "worker": "midstream.workers",
    "ranks": "midstream.workers",
    "api": "midstream.api",
    "flower": "midstream_ops.flower",
}


class Machines(Processes):
    """Processes `relay`, `callbacks`, `api` and `worker` (`worker-2`, … with ids of their own)."""

    host = "127.0.0.1"  # of Redis and the relay

    def __init__(
        self,
        directory: Path,
        names: tuple[str, ...] = ("relay", "callbacks", "worker", "api"),
        **settings: Any,
    ):
        self.directory = directory
        self.names = names
        self.tls_port = free_port()
        self._redis_port = free_port()
        self.processes: dict[str, forks.Process] = {}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._plain: list[str] = []
        self._chosen: dict[str, Any] = {
            "data_dir": str(directory / "data"),
            "engine": "fake",
            "model": "fake-model",
            "worker_id": "w1",
            "lease_s": 3.0,
            "tuning.visibility_timeout_s": 4,
            "tuning.sweep_interval_s": 0.5,
            "tuning.worker_concurrency": 32,
            "auth": "open",
            "relay_url": f"tcp://{self.host}:{free_port()}",
            "api_host": "127.0.0.1",
            "api_port": free_port(),
            "flower_port": free_port(),
        } | settings
        self.acl = directory / "acl"
        self.curve = directory / "curve"
        write_users(self.acl)
        make_certificates(directory / "tls", self.host)
        self.ca = directory / "tls" / "ca.pem"
        _, relay = new_keys("relay", "relay", self.curve)
        self._server_key = relay.read_text().strip()
        (self.curve / "clients").mkdir()

    # Who is told what

    def password(self, role: str) -> str:
        return (self.acl / f"{role}.password").read_text().strip()

    def redis_url(self, role: str) -> str:
        place = f"{self.host}:{self.tls_port}/0?ssl_ca_certs={quote(str(self.ca), safe='')}"
        return f"rediss://{role}:{self.password(role)}@{place}"

    def client(self, role: str = OPERATOR) -> "redis.Redis":
        return redis.Redis.from_url(self.redis_url(role))

    def settings(self, name: str, **changed: Any) -> Settings:
        role, _, number = name.partition("-")
        values = self._chosen | {"redis_url": self.redis_url(role)}
        if role == "worker":
            values["worker_id"] += f"-{number}" if number else ""
            if not (self.curve / f"{values['worker_id']}.key").exists():
                new_keys("worker", values["worker_id"], self.curve)
            values |= {
                "curve_secret_file": str(self.curve / f"{values['worker_id']}.key"),
                "curve_server_key": self._server_key,
            }
        if role == "relay":
            values |= {
                "curve_secret_file": str(self.curve / "relay.key"),
                "curve_clients_dir": str(self.curve / "clients"),
            }
        return load_settings({}, **(values | changed))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._chosen['api_port']}"

    # Processes

    def stop(self) -> None:
        for name in reversed(list(self.processes)):
            self.end(name)
        for process in reversed(self._servers):
            process.terminate()
            process.wait(60)

    def spawn(self, name: str, **changed: Any) -> None:
        role = name.partition("-")[0]
        environment = to_environment(self.settings(name, **changed)) | self.environment(name)
        file = self.log_file(name)
        there = self.inside(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as log:
            log.write(f"--- started at {time.time()}\n".encode())
            log.flush()
            if there:
                self.processes[name] = subprocess.Popen(
                    [*there, sys.executable, "-m", MODULES[role]],
                    env=forks.beside(environment),
                    stdout=log,
                    stderr=log,
                )
            else:
                self.processes[name] = forks.start(MODULES[role], environment, self.directory, file)

    def inside(self, name: str) -> list[str]:
        """What to put before a command to run it on the machine of the process `name`."""
        return []

    def environment(self, name: str) -> dict[str, str]:
        """Further variables of the process `name`."""
        return {}

    def wait_ready(self, name: str, timeout: float = 900.0) -> None:
        def ready() -> bool:
            assert self.processes[name].poll() is None, (
                f"{name} has ended:\n{self.log(name)[-4000:]}"
            )
            if name == "flower":  # says nothing
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", self._chosen["flower_port"]), 1),
                ):
                    return True
                return False
            last = self.log(name).rpartition("--- started at ")[2]
            return f"{name.partition('-')[0]} ready" in last

        wait_until(ready, timeout)

    def end(self, name: str, timeout: float = 180.0) -> int:
        """SIGTERM; returns the exit code."""
        process = self.processes[name]
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        return self._ended(name, timeout)

    def restart(self, name: str, **changed: Any) -> None:
        """SIGTERM, wait, start again, wait until it is ready."""
        assert self.end(name) == 0, self.log(name)[-3000:]
        self.add(name, **changed)

    def log_file(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def log(self, name: str) -> str:
        return (
            self.log_file(name).read_text(errors="replace") if self.log_file(name).exists() else ""
        )

    # Redis

    def _start_redis(self) -> None:
        folder = self.directory / "redis"
        folder.mkdir(parents=True)
        plain = [
            redis_server.executable(),
            "--bind",
            "127.0.0.1",
            "--port",
            str(self._redis_port),
            "--dir",
            str(folder),
            "--appendonly",
            "yes",
            "--save",
            "",
            "--maxmemory-policy",
            "noeviction",
            "--aclfile",
            str(self.acl / "users.acl"),
        ]
        tls = self.directory / "tls"
        native = [
            *plain,
            "--bind",
            self.host,
            "127.0.0.1",
            "--tls-port",
            str(self.tls_port),
            "--tls-auth-clients",
            "no",
            "--tls-cert-file",
            str(tls / "redis.pem"),
            "--tls-key-file",
            str(tls / "redis.key"),
            "--tls-ca-cert-file",
            str(self.ca),
        ]
        self._plain = native  # how it is started again
        if not self._serve(native):
            self._plain = plain
            assert self._serve(plain), (folder / "redis.log").read_text()
            proxy = [
                sys.executable,
                str(Path(__file__).with_name("tls_proxy.py")),
                self.host,
                str(self.tls_port),
                str(self._redis_port),
            ]
            self._servers.append(
                subprocess.Popen(
                    [*proxy, str(tls / "redis.pem"), str(tls / "redis.key")], stdout=subprocess.PIPE
                )
            )
            assert self._servers[-1].stdout.readline() == b"ready\n"
        with self.client() as client:
            assert client.ping()

    def _serve(self, command: list[str]) -> bool:
        """Whether this redis-server knows all of these options, and listens now."""
        with (self.directory / "redis" / "redis.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self._redis_port), 1),
            ):
                self._servers.append(process)
                self._redis = process
                return True
            time.sleep(0.02)
        return False


def make_certificates(folder: Path, host: str) -> None:
    """`ca.pem`, and `redis.pem` with `redis.key`, signed by it for `host`.

    Python 3.13 wants to read what an authority's key is for.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req",
        "-x509",
        *curve,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-days",
        "2",
        "-subj",
        "/CN=test authority",
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign",
    )
    openssl(
        "req", "-new", *curve, "-keyout", "redis.key", "-out", "redis.csr", "-subj", "/CN=redis"
    )
    (folder / "names").write_text(f"subjectAltName=IP:{host}\n")
    openssl(
        "x509",
        "-req",
        "-in",
        "redis.csr",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-out",
        "redis.pem",
        "-extfile",
        "names",
    )
