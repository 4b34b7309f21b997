"""The service on machines of a `Network`: which process runs where, and what is loaded, killed and
judged.

    with Fleet(tmp_path, network, {"relay": "relay", "worker": "w1", "worker-2": "w2"}) as fleet:
        verdict, observed = fleet.run(steps, seed=1)

Processes without a machine run here, with the API. With a machine for `store`, captures and
harvests are in a bucket there. Redis has TLS and a user per role, the relay CURVE keys.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import s3_kit
from clients import Observed
from judge import Verdict
from load import Step, judged, load
from machines_rig import Machines
from network import HERE, Network

from midstream.broker.redis_service.acl import OPERATOR
from midstream.schemas.settings.settings import Settings

SETTINGS: dict[str, Any] = {
    "engine_options": {"token_s": 0.02},
    "lease_s": 5.0,
    "tuning.visibility_timeout_s": 6,
    "tuning.sweep_interval_s": 0.5,
    "max_wait_s": 15.0,
    "tuning.worker_concurrency": 48,
    "engine.max_num_seqs": 64,
    "log_level": "WARNING",
}
AT_ONCE = 24  # clients
STORE = Path(__file__).with_name("store_machine.py")
STORE_PORT = 9000
BUCKET = "machines"
PROCESSES = ("relay", "callbacks", "worker", "worker-2", "api")


class Fleet(Machines):
    """`where`: process → machine."""

    def __init__(
        self,
        directory: Path,
        network: Network,
        where: dict[str, str],
        names: tuple[str, ...] = PROCESSES,
        **settings: Any,
    ):
        self.network = network
        self.where = where
        self.host = network.address(HERE)
        super().__init__(directory, names, **(SETTINGS | settings))
        port = self._chosen["relay_url"].rpartition(":")[2]
        self._chosen["relay_url"] = f"tcp://{network.address(where.get('relay', HERE))}:{port}"
        if "store" in where:
            endpoint = f"http://{network.address(where['store'])}:{STORE_PORT}"
            query = urlencode({"endpoint": endpoint, "region": s3_kit.REGION})
            self._chosen |= {
                "artifact_store": f"s3://{BUCKET}/kept?{query}",
                "artifact_access_key": s3_kit.ACCESS_KEY,
                "artifact_secret_key": s3_kit.SECRET_KEY,
                "harvest_stores": f"s3://{BUCKET}/rows?{query}",
            }

    def environment(self, name: str) -> dict[str, str]:
        """The network that ranks on several machines meet on."""
        machine = self.where.get(name, HERE)
        return {
            "VLLM_HOST_IP": self.network.address(machine),
            "GLOO_SOCKET_IFNAME": self.network.device(machine),
        }

    def inside(self, name: str) -> list[str]:
        return self.network.inside(self.where.get(name, HERE))

    def _start_redis(self) -> None:
        if "store" in self.where:
            machine = self.where["store"]
            command = [
                sys.executable,
                str(STORE),
                self.network.address(machine),
                str(STORE_PORT),
                BUCKET,
            ]
            self._servers.append(self.network.popen(machine, command, stdout=subprocess.PIPE))
            assert self._servers[-1].stdout.readline() == b"ready\n"
        super()._start_redis()

    def judges_settings(self) -> Settings:
        """Redis as the operator, and the folder of captures."""
        return self.settings("api", redis_url=self.redis_url(OPERATOR))

    # What happens to processes

    def kill(self, name: str) -> None:
        """`kill -9`, also of the engine that a worker has started."""
        found = self.processes[name]
        family = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(found.pid)],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
        for pid in [found.pid, *map(int, family)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        found.wait()

    def revive(self, name: str) -> None:
        self.add(name)

    def kill_redis(self) -> None:
        self._redis.kill()
        self._redis.wait()

    def revive_redis(self) -> None:
        self._servers.remove(self._redis)
        assert self._serve(self._plain)

    def stop(self) -> None:
        self.network.heal()
        super().stop()

    # Load

    def run(self, steps: list[Step], seed: int) -> tuple[Verdict, list[Observed]]:
        """What became of every job of clients that submit while `steps` happen."""

        def supervised(act: Callable[[], object]) -> None:
            act()
            self._supervise()

        steps = [(name, partial(supervised, act)) for name, act in steps]
        observed = asyncio.run(load(self.url, steps, seed, SETTINGS["max_wait_s"], AT_ONCE))
        self._supervise()
        return asyncio.run(judged(self.judges_settings(), observed)), observed

    def _supervise(self) -> None:
        """Start the relay again, as every deployment does, if libzmq has ended it: version 4.3.5
        aborts where it reads from a broken connection just before it writes to it
        (https://github.com/zeromq/libzmq/issues/4841).
        """
        if self.processes["relay"].poll() == -signal.SIGABRT:
            print("libzmq has ended the relay: it is started again")
            self.revive("relay")
