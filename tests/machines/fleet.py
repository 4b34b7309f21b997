"""The service on machines of a `Network`: which process runs where, and what is loaded, killed and
judged.

    with Fleet(tmp_path, network, {"relay": "relay", "worker": "w1", "worker-2": "w2"}) as fleet:
        verdict, observed = fleet.run(steps, seed=1)

Processes without a machine run here, with the API. With a machine for `store`, captures and
harvests are in a bucket there. Redis has TLS and a user per role, the relay CURVE keys;
`SentinelFleet` opens Redis through Sentinel, without TLS, which the redis-server of the lock files
lacks.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import s3_kit
from clients import Clients, Observed, plans
from judge import Verdict, judge_jobs
from machines_rig import Machines
from network import HERE, Network
from redis_group import RedisGroup

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.redis_service.acl import OPERATOR
from midstream.schemas.settings.settings import Settings, load_settings, values_of

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
#: Clients at a time, and the pause of each between two jobs: these machines share two cores.
AT_ONCE = 24
PAUSE_S = 0.2
#: After the last step the load goes on for so long; then everything under way ends within
#: `SETTLE_S`.
AFTER_S = 5.0
SETTLE_S = 60.0
STORE = Path(__file__).with_name("store_machine.py")
STORE_PORT = 9000
BUCKET = "machines"
PROCESSES = ("relay", "callbacks", "worker", "worker-2", "api")

Step = tuple[str, Callable[[], object]]


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

    def settings(self, name: str, **changed: Any) -> Settings:
        if name == "follower":  # of the worker, on another machine
            return super().settings("worker", **{"node_rank": 1} | changed)
        return super().settings(name, **changed)

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

    def run(
        self, steps: list[Step], seed: int, say: Callable[[str], object] = print
    ) -> tuple[Verdict, list[Observed]]:
        """Clients that submit, wait and repeat, while `steps` happen one after the other; then what
        became of every job.
        """
        observed = asyncio.run(self._load(steps, random.Random(seed), say))
        verdict = Verdict()
        asyncio.run(self._settle())
        asyncio.run(judge_jobs(self.judges_settings(), observed, verdict))
        say(f"{len(observed)} jobs: {dict(verdict.seen)}")
        if not verdict.clean:
            say(self.account())
        return verdict, observed

    def account(self) -> str:
        """What may explain a verdict."""
        return ""

    async def _load(
        self, steps: list[Step], rng: random.Random, say: Callable[[str], object]
    ) -> list[Observed]:
        clients = Clients(
            {"api": self.url},
            f"machines-{os.urandom(4).hex()}",
            rng,
            SETTINGS["max_wait_s"],
            lambda *_: True,
        )
        todo = iter(plans(rng, 100_000))
        observed = list[Observed]()
        over = asyncio.Event()

        async def one() -> None:
            while not over.is_set():
                observed.append(await clients.follow(next(todo)))
                await asyncio.sleep(PAUSE_S)

        async def happen() -> None:
            try:
                for name, act in steps:
                    say(f"{time.strftime('%H:%M:%S')} {name} ({len(observed)} jobs are over)")
                    await asyncio.to_thread(act)
                    await asyncio.to_thread(self._supervise)
                await asyncio.sleep(AFTER_S)
            finally:
                over.set()

        try:
            await asyncio.gather(happen(), *[one() for _ in range(AT_ONCE)])
        finally:
            await clients.close()
        return observed

    def _supervise(self) -> None:
        """Start the relay again, as every deployment does, if libzmq has ended it: version 4.3.5
        aborts where it reads from a broken connection just before it writes to it
        (https://github.com/zeromq/libzmq/issues/4841).
        """
        if self.processes["relay"].poll() == -signal.SIGABRT:
            print("libzmq has ended the relay: it is started again")
            self.revive("relay")

    async def _settle(self) -> None:
        self._supervise()
        ledger = Ledger.connect(self.judges_settings())
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and await ledger.redis.zcard("ms:live"):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        await ledger.close()


class SentinelFleet(Fleet):
    """The same over a `RedisGroup` on `redis`; `replicas` must have what is acknowledged."""

    def __init__(
        self,
        directory: Path,
        network: Network,
        where: dict[str, str],
        redis: tuple[str, ...],
        replicas: int,
        **settings: Any,
    ):
        super().__init__(directory, network, where, redis_replicas=replicas, **settings)
        self.group = RedisGroup(network, redis, directory / "redis", self.acl)

    def _start_redis(self) -> None:
        self.group.__enter__()

    def settings(self, name: str, **changed: Any) -> Settings:
        found = super().settings(name, **{"redis_url": ""} | changed)
        role = name.partition("-")[0]
        return (
            found
            if found.redis_url
            else load_settings({}, **{**_given(found), "redis_url": self.group.url(role)})
        )

    def redis_url(self, role: str) -> str:
        return self.group.url(role)

    def account(self) -> str:
        return self.group.account()

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self.group.__exit__()


def _given(settings: Settings) -> dict[str, Any]:
    default = values_of(Settings())
    return {name: value for name, value in values_of(settings).items() if value != default[name]}
