"""How far does one installation go, and which part is full first? Unit costs measured here, and a simulator that multiplies them.

    python benchmarks/capacity.py measure [--workers 1 4 16]     # writes benchmarks/data/capacity.json; fake engines, ten minutes
    python benchmarks/capacity.py check                          # the simulator against those runs
    python benchmarks/capacity.py plan --workers 1000 --jobs 10e6 --rows 0 [--peak 3]

A run loads the whole service with held captures (a job, a file, a receipt each) from as many clients as keep both cores busy, and
takes the processor time of each process. `plan` finds the demand on every part at the day's peak. Times in seconds, sizes in bytes.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).with_name("data") / "capacity.json"
DAY_S = 86_400.0
#: Above this share of what it can do, a queue in front of a single server grows quickly (see `waits`).
FULL = 0.7
#: Redis' default limit of connections, a third of which is left for people, monitoring and restarts.
REDIS_CLIENTS = 10_000
#: S3's documented rate of PUTs to one prefix, and what a connection of a bucket carries on a 25 Gbit/s machine.
BUCKET_PUTS_S, BUCKET_BYTES_S = 3500.0, 2.5e9
SHARD_BYTES = 256 << 20
JOBS, WARM_JOBS, AT_ONCE, IDLE_S = 2000, 300, 64, 10.0


@dataclass(frozen=True)
class Costs:
    """Of one held capture: processor time at each process. Of one idle worker: what it asks of Redis."""

    api_s: float
    redis_s: float
    relay_s: float
    worker_s: float
    rest_s: float  # callbacks, Flower, and the client that loads the service
    idle_redis_s: float  # of a core, for each worker
    idle_worker_s: float  # of a core, of a worker
    clients: float  # connections to Redis of each worker
    services_clients: float  # of all other processes
    job_bytes: float  # in Redis, of a job that is kept

    @property
    def job_s(self) -> float:
        return self.api_s + self.redis_s + self.relay_s + self.worker_s + self.rest_s


@dataclass(frozen=True)
class Load:
    """What is asked of an installation."""

    workers: int
    jobs: float  # a day
    rows: float  # harvested, in all
    peak: float = 3.0  # the busiest hour over the mean
    kept_s: float = 7 * DAY_S  # of a result (`result_ttl_s`)
    row_bytes: float = 8192.0  # 4,096 values of bf16
    days: float = 30.0  # for the rows


@dataclass(frozen=True)
class Part:
    """`used` of `there`, in `unit`."""

    name: str
    used: float
    there: float
    unit: str
    then: str  # what to do when it is full

    @property
    def share(self) -> float:
        return self.used / self.there


def plan(load: Load, costs: Costs, redis_bytes: float = 64e9) -> list[Part]:
    """Every part's demand at the peak, fullest first."""
    rate = load.jobs / DAY_S * load.peak
    harvest = load.rows * load.row_bytes / (load.days * DAY_S)
    shards = harvest / SHARD_BYTES
    return sorted(
        [
            Part("one Redis, its core", rate * costs.redis_s + load.workers * costs.idle_redis_s, FULL, "cores", "shard by model"),
            Part("Redis, connections", load.workers * costs.clients + costs.services_clients, REDIS_CLIENTS * 2 / 3, "connections",
                 "raise maxclients and the limit of open files"),
            Part("Redis, memory", load.jobs / DAY_S * load.kept_s * costs.job_bytes, redis_bytes * 0.85, "bytes", "keep results shorter"),
            Part("one relay, its core", rate * costs.relay_s, FULL, "cores", "a relay for each group of workers"),
            Part("one API replica, its core", rate * costs.api_s, FULL, "cores", "more replicas"),
            Part("the bucket, PUTs", shards, BUCKET_PUTS_S, "per s", "more prefixes"),
            Part("the bucket, bytes from one machine", harvest, BUCKET_BYTES_S, "bytes/s", "more worker machines: each writes its own"),
        ],
        key=lambda part: -part.share,
    )  # fmt: skip


def waits(rate: float, service_s: float, seconds: float = 200.0, seed: int = 0) -> tuple[float, float]:
    """Median and 99th percentile of the wait before a single server, for Poisson arrivals and a constant service time (Lindley)."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, int(rate * seconds))
    # W[n+1] = max(0, W[n] + service - gap[n]), written as a running minimum.
    walk = np.concatenate([[0.0], np.cumsum(service_s - gaps)])
    queue = walk - np.minimum.accumulate(walk)
    return float(np.quantile(queue, 0.5)), float(np.quantile(queue, 0.99))


def predicted(workers: int, costs: Costs, cores: int) -> float:
    """Jobs per second when everything shares `cores` that are all busy; a single-threaded part may be full before."""
    free = cores - workers * (costs.idle_redis_s + costs.idle_worker_s)
    return min(free / costs.job_s, 1 / costs.api_s, 1 / costs.relay_s, (1 - workers * costs.idle_redis_s) / costs.redis_s)


# ---- measuring -----------------------------------------------------------------------------------------------------------------


def measure(counts: list[int]) -> dict[str, Any]:
    runs = [_run(count) for count in counts]
    first, last = runs[0], runs[-1]
    more = last["workers"] - first["workers"]
    idle_redis = (last["idle"]["redis"] - first["idle"]["redis"]) / more if more else last["idle"]["redis"]
    clients = (last["clients"] - first["clients"]) / more if more else last["clients"]
    spent = first["spent"]
    costs = Costs(
        api_s=spent["api"], redis_s=spent["redis"], relay_s=spent["relay"], worker_s=spent["worker"],
        rest_s=sum(value for name, value in spent.items() if name not in ("api", "redis", "relay", "worker")),
        idle_redis_s=max(0.0, idle_redis), idle_worker_s=last["idle"]["worker"] / last["workers"],
        clients=clients, services_clients=first["clients"] - clients * first["workers"], job_bytes=first["job_bytes"],
    )  # fmt: skip
    return {"cores": os.cpu_count(), "costs": asdict(costs), "runs": runs}


def _run(workers: int) -> dict[str, Any]:
    """The service with `workers` fake engines: processor seconds per job of each process, idle ones a second, and the rate."""
    import redis
    from control_plane import MODEL, http_round, processor_s

    from midstream.client.stack.supervisor import Supervisor, prepare, read_state
    from midstream.schemas.settings import Settings, to_environment

    with tempfile.TemporaryDirectory(prefix="midstream-capacity-") as folder:
        data = Path(folder)
        wanted = Settings(engine="fake", model=MODEL, data_dir=folder, api_port=0, flower_port=0, log_level="WARNING", worker_id="w1")
        others: list[subprocess.Popen[bytes]] = []
        with Supervisor(prepare(wanted, data, print), say=lambda line: None) as stack:
            try:
                for number in range(2, workers + 1):
                    environment = os.environ | to_environment(stack.settings) | {"MIDSTREAM_WORKER_ID": f"w{number}"}
                    with (data / f"worker-{number}.log").open("wb") as log:
                        command = [sys.executable, "-m", "midstream.workers"]
                        others.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                pids = {name: pid for name, (pid, _) in read_state(stack.data)["processes"].items()} | {"client": os.getpid()}
                pids |= {f"worker-{number}": process.pid for number, process in enumerate(others, 2)}
                with redis.Redis.from_url(stack.settings.redis_url) as client:
                    deadline = time.monotonic() + 300
                    while client.hlen("ms:workers") < workers:
                        assert time.monotonic() < deadline, "not all workers started"
                        time.sleep(0.2)
                    time.sleep(5)
                    before = processor_s(pids)
                    time.sleep(IDLE_S)
                    idle = _by_role(before, processor_s(pids), IDLE_S)
                    connections = client.info("clients")["connected_clients"]
                    asyncio.run(http_round(stack.url, WARM_JOBS, AT_ONCE, held=True))
                    used, before = client.info("memory")["used_memory"], processor_s(pids)
                    seconds, _ = asyncio.run(http_round(stack.url, JOBS, AT_ONCE, held=True))
                    spent = _by_role(before, processor_s(pids), JOBS)
                    size = (client.info("memory")["used_memory"] - used) / JOBS
            finally:
                for process in others:
                    process.terminate()
                for process in others:
                    process.wait(60)
    found = {"workers": workers, "per_s": JOBS / seconds, "spent": spent, "idle": idle, "clients": connections, "job_bytes": size}
    print(f"{workers} workers: {found['per_s']:.0f} held captures a second, {1e3 * sum(spent.values()):.2f} ms of processor time each")
    return found


def _by_role(before: dict[str, float], after: dict[str, float], over: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in before:
        role = name.partition("-")[0]
        found[role] = found.get(role, 0.0) + (after[name] - before[name]) / over
    return found


def check(found: dict[str, Any]) -> list[tuple[int, float, float]]:
    """(workers, measured, predicted jobs per second) of each run. The costs are those of the first run, and of idle workers."""
    costs = Costs(**found["costs"])
    return [(run["workers"], run["per_s"], predicted(run["workers"], costs, found["cores"])) for run in found["runs"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    commands.add_parser("check")
    planning = commands.add_parser("plan")
    planning.add_argument("--workers", type=int, default=1000)
    planning.add_argument("--jobs", type=float, default=10e6, help="a day")
    planning.add_argument("--rows", type=float, default=0.0, help="harvested in --days")
    planning.add_argument("--days", type=float, default=30.0)
    planning.add_argument("--peak", type=float, default=3.0)
    options = parser.parse_args()
    if options.command in (None, "measure"):
        found = measure(getattr(options, "workers", [1, 4, 16]))
        DATA.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(DATA.read_text())
    if options.command != "plan":
        for workers, measured, said in check(found):
            print(f"{workers:>3} workers: measured {measured:6.0f}, predicted {said:6.0f} jobs/s ({said / measured - 1:+.0%})")
        return
    costs, load = Costs(**found["costs"]), Load(options.workers, options.jobs, options.rows, options.peak, days=options.days)
    for part in plan(load, costs):
        print(f"{part.share:7.1%}  {part.name:<36} {part.used:12.4g} of {part.there:.4g} {part.unit:<12} full: {part.then}")
    rate = load.jobs / DAY_S * load.peak
    for name, service in (("Redis", costs.redis_s), ("relay", costs.relay_s)):
        if rate * service < 1:
            middle, late = waits(rate, service)
            print(f"wait for {name} at {rate:.0f} jobs/s: median {1e3 * middle:.2f} ms, 99th percentile {1e3 * late:.2f} ms")


if __name__ == "__main__":
    main()
