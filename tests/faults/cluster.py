"""Which processes does the fault gate run, how are they killed, and when was each of them away?

`Stack` of the system tests with several API replicas. Every process is started again by the
harness, as a supervisor would.
"""

import contextlib
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import s3_kit
from clients import MODEL
from midstream_fake_engine.model import identity_of
from s3_kit import FaultProxy
from stack import Stack, free_port

from midstream.schemas.settings.settings import Settings

#: The weights that workers have under the name `clients.MODEL`: at first, and after a fault of the
#: kind `model`.
MODELS = [MODEL, f"{MODEL}@other"]
#: Leases of a minute would make the gate wait for them; what is shown does not depend on their
#: length.
SETTINGS: dict[str, Any] = {
    "engine_options": {"token_s": 0.02},
    "lease_s": 5.0,
    "tuning.visibility_timeout_s": 6,
    "tuning.sweep_interval_s": 0.5,
    "max_wait_s": 15.0,
    "tuning.worker_concurrency": 48,
    "engine.max_num_seqs": 64,
    "webhook_allow_private": True,
    "log_level": "WARNING",
    "capture_timeout_s": 30.0,
    "model": MODELS[0],
    "model_name": MODEL,
    "on_model_change": "wait",
}
#: Of a gradient worker. It takes longer over a pair, or a step of a fit, so that a kill finds some.
GRADIENTS: dict[str, Any] = {"engine": "gradients-fake", "engine_options": {"token_s": 0.2}}
#: Commands that a log gets before it is loaded slowly, and how long that takes: longer than what
#: starts meanwhile needs for its start.
LOADED_COMMANDS = 20_000
LOAD_S = 12.0
#: How long a process that ends with an error is started again for: while Redis restarts, or workers
#: with other weights count as alive.
STARTING_S = 60.0
#: A start is killed within so many seconds; a process of the fake engine takes about as long.
STRUCK_START_S = 4.0
#: How long a worker's kill waits for the worker to hold a job, in seconds.
WORK_S = 5.0
#: A worker that gets SIGTERM finishes its jobs first.
STOP_S = 90.0


@dataclass
class Outage:
    """From the kill to the ready line, seconds of `time.monotonic`."""

    name: str
    killed: float
    ready: float = float("inf")
    paused: bool = False  # it was stopped, and goes on
    full: bool = False  # Redis runs, and takes no writes
    mend: Callable[[], object] | None = None  # of the bucket


class Cluster(Stack):
    """`workers` workers (`worker`, `worker-2`, …), a gradient worker (`worker-g`) with `gradients`,
    and `apis` API replicas (`api`, `api-2`, …), which clients choose from.
    """

    def __init__(
        self,
        directory: Path,
        *,
        workers: int = 2,
        gradients: bool = False,
        apis: int = 2,
        callbacks_fault: str = "",
        bucket: FaultProxy | None = None,
        **settings: Any,
    ):
        """`callbacks_fault`: the setting `fault` of the callbacks process, which moves its clock.

        `bucket`: what harvests go into.
        """
        if bucket is not None:
            settings |= {
                "harvest_stores": s3_kit.uri(bucket),
                "artifact_access_key": s3_kit.ACCESS_KEY,
            }
            settings |= {"artifact_secret_key": s3_kit.SECRET_KEY}
        self.sources = directory / "sources"
        self.sources.mkdir(parents=True)
        settings["harvest_sources"] = str(self.sources)
        super().__init__(
            directory, api=False, workers=workers, start_timeout_s=120, **(SETTINGS | settings)
        )
        replicas = ["api", *[f"api-{number}" for number in range(2, apis + 1)]][:apis]
        self.ports = {name: free_port() for name in replicas}
        self.names += replicas
        self.workers = [name for name in self.names if name.startswith("worker")]
        self.gradients = ["worker-g"] if gradients else []
        self.names += self.gradients
        self.outages: list[Outage] = []
        self.model = self.settings.model
        self._callbacks_fault = callbacks_fault
        self._bucket = bucket

    @property
    def urls(self) -> dict[str, str]:
        return {name: f"http://127.0.0.1:{port}" for name, port in self.ports.items()}

    def spawn(self, name: str, *, suffix: bool = True, **changed: Any) -> None:
        if name in self.ports:
            changed["api_port"] = self.ports[name]
        if name == "callbacks":
            changed.setdefault("fault", self._callbacks_fault)
        if name in self.gradients:
            changed = GRADIENTS | changed
        super().spawn(name, suffix=suffix, **changed)

    def strike(self, name: str, how: signal.Signals = signal.SIGKILL) -> Outage:
        """`kill -9`, or SIGSTOP; a worker not before it holds a job."""
        if name.startswith("worker"):
            self._await_work(name)
        outage = Outage(name, time.monotonic(), paused=how == signal.SIGSTOP)
        self.outages.append(outage)
        self.kill(name, how)
        return outage

    def strike_start(self, name: str, how: signal.Signals) -> Outage:
        """`kill -9`, and again while it starts."""
        outage = self.strike(name, how)
        self.spawn(name)
        time.sleep(random.uniform(0.0, STRUCK_START_S))
        self.kill(name)
        return outage

    def fill(self, name: str, _: signal.Signals) -> Outage:
        """Redis answers from now on, and refuses every write, as when its memory or its disk is
        full.
        """
        outage = Outage(name, time.monotonic(), full=True)
        self.outages.append(outage)
        self._limit_redis(1)
        return outage

    def outage(self, names: list[str]) -> Outage:
        """A machine with Redis and one of each other process dies.

        What comes back with it starts while Redis loads its log, slowly.
        """
        with (
            redis.Redis.from_url(self.settings.redis_url) as client,
            client.pipeline(transaction=False) as pipe,
        ):
            for number in range(LOADED_COMMANDS):
                pipe.set("ms:gate-load", number)
            with contextlib.suppress(redis.ResponseError):  # it takes no writes just now
                pipe.execute()
        found = [Outage(name, time.monotonic()) for name in names]
        self.outages += found
        for name in names:
            self.kill(name)

        def mend() -> None:
            with ThreadPoolExecutor(1) as pool:
                loading = pool.submit(self.load_redis, LOAD_S)
                self.await_loading(lambda: not loading.done())
                others = [outage for outage in found if outage.name != "redis"]
                for outage in others:
                    self.spawn(outage.name)
                loading.result()
                for outage in others:
                    self.wait_ready(outage.name)  # without another start: it has waited
            for outage in found:
                outage.ready = time.monotonic()

        found[0].mend = mend
        return found[0]

    def swap(self, names: list[str]) -> Outage:
        """All workers end, and come back under the same names with the weights of another model."""
        outage = Outage(names[0], time.monotonic(), mend=lambda: None)
        self.outages.append(outage)
        self.model = next(model for model in MODELS if model != self.model)
        self._chosen["model"] = self.model
        for name in names:
            self.kill(name)
        for name in names:
            self._start(name)
        return outage

    def unserved(self) -> bool:
        """Whether jobs wait for the weights that are not served, and none is left for those that
        are.
        """
        served = identity_of(Settings(model=self.model)).encode()
        try:
            with (
                redis.Redis.from_url(self.settings.redis_url, retry=None) as client,
                client.pipeline(transaction=False) as pipe,
            ):
                for job in client.zrange("ms:live", 0, -1):
                    pipe.hget(f"ms:job:{job.decode()}", "identity")
                found = pipe.execute()
        except (redis.ConnectionError, redis.TimeoutError):  # it may be killed just now
            return False
        return bool(found) and all(raw is not None and raw != served for raw in found)

    def part(self, name: str, _: signal.Signals) -> Outage:
        """Nobody reaches the bucket any more."""
        assert self._bucket is not None, "this cluster has no bucket"
        outage = Outage(name, time.monotonic(), mend=self._bucket.start)
        self.outages.append(outage)
        self._bucket.stop()
        return outage

    def burden(self, name: str, _: signal.Signals) -> Outage:
        """The bucket answers writes with 503 and cuts some in the middle; it still does so for a
        while once others go on.
        """
        assert self._bucket is not None, "this cluster has no bucket"
        outage = Outage(name, time.monotonic(), mend=lambda: None)
        self.outages.append(outage)
        self._bucket.fault("503", "^PUT", times=20)
        self._bucket.fault("cut", "^PUT", times=3)
        return outage

    def _limit_redis(self, memory: int) -> None:
        with redis.Redis.from_url(self.settings.redis_url) as client:
            client.config_set("maxmemory", memory)

    def stop_in_order(self, name: str, _: signal.Signals) -> Outage:
        """SIGTERM, which must end the process in time and in order.

        (uvicorn stops in order and then dies of the signal.) A worker finishes its jobs first, and
        a harvest waits for its bucket.
        """
        if self._bucket is not None and name in self.workers:
            self._bucket.faults.clear()
        outage = Outage(name, time.monotonic())
        self.outages.append(outage)
        code = self.end(name, STOP_S)
        in_order = code == 0 or (name in self.ports and code == -signal.SIGTERM)
        assert in_order, f"{name} ended with {code} after SIGTERM:\n{self.log(name)[-3000:]}"
        return outage

    def _await_work(self, worker: str) -> None:
        """Until it holds a job, so that there is something to lose; not for long."""
        number = worker.partition("-")[2]
        name = f"ms:held:{self.settings.worker_id}" + (f"-{number}" if number else "")
        deadline = time.monotonic() + WORK_S
        with redis.Redis.from_url(self.settings.redis_url, retry=None) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                    # it may be killed just now
                    if client.scard(name):
                        return
                time.sleep(0.005)

    def revive(self, outage: Outage, **changed: Any) -> None:
        """Start it again, as a supervisor would also when it ends while it starts, and wait until
        it is ready.
        """
        if outage.paused:
            self.kill(outage.name, signal.SIGCONT)
            outage.ready = time.monotonic()
            return
        if outage.mend is not None:
            outage.mend()
            outage.ready = time.monotonic()
            return
        if outage.full:
            self._limit_redis(0)
            outage.ready = time.monotonic()
            return
        self._start(outage.name, **changed)
        outage.ready = time.monotonic()

    def _start(self, name: str, **changed: Any) -> None:
        """Start a process again, as a supervisor would also when it ends while it starts: a worker
        with other weights does so while the others count as alive.
        """
        deadline = time.monotonic() + STARTING_S
        while True:
            try:
                self.restart(name, **changed)
                return
            except AssertionError:
                if (
                    time.monotonic() > deadline
                    or name == "redis"
                    or self.processes[name].poll() is None
                ):
                    raise

    def was_away(self, name: str, start: float, end: float) -> bool:
        """Whether `name` was killed, or not ready again, at some time between."""
        return any(
            outage.name == name and outage.killed <= end and outage.ready >= start
            for outage in self.outages
        )
