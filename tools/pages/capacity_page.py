"""How far does one installation go, and which part is full first?

Unit costs measured here, and a simulator that multiplies them.

    python tools/pages/capacity_page.py measure # ten minutes; writes capacity.json
    python tools/pages/capacity_page.py check   # the simulator against those runs
    python tools/pages/capacity_page.py page    # writes the tables of docs/capacity.md
    python tools/pages/capacity_page.py plan --workers 1000 --jobs 10e6 --rows 0 [--peak 3]

A run loads the whole service with held captures (a job, a file, a receipt each) and takes the
processor time of each process. Much of it is shared by what happens at the same time: receipts of a
worker in one message, files of a group in one commit. So the cost of a job is `each + shared /
depth ** power`, `depth` being the jobs that a worker has at a time (batches grow more slowly than
that, hence the power). All three are fitted to some of the runs; the others test them. `plan` finds
the demand on every part at the day's peak. Times in seconds, sizes in bytes.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "capacity.md"
DATA = Path(__file__).with_name("capacity.json")
DAY_S = 86_400.0
#: Above this share of what it can do, a queue in front of a single server grows quickly (see
#: `waits`).
FULL = 0.7
#: Redis' default limit of connections, a third of which is left for people, monitoring and
#: restarts.
REDIS_CLIENTS = 10_000
#: S3's documented rate of PUTs to one prefix, and what a connection of a bucket carries on a 25
#: Gbit/s machine.
BUCKET_PUTS_S = 3500.0
BUCKET_BYTES_S = 2.5e9
SHARD_BYTES = 256 << 20
#: Fewer jobs where they come one after the other.
JOBS = 2000
FEW_JOBS = 400
WARM_JOBS = 300
IDLE_S = 10.0
#: (workers, jobs at a time) of each run, and whether the costs are taken from it.
RUNS = [
    (1, 1, True),
    (1, 64, True),
    (4, 64, False),
    (4, 256, False),
    (16, 64, True),
    (16, 16, False),
    (16, 256, False),
]
#: Jobs of a model that are sent to workers at a time (`dispatch_window`).
WINDOW = 64
PARTS = ("api", "redis", "relay", "worker", "rest")


@dataclass(frozen=True)
class Cost:
    """Processor time of one held capture at one process, in seconds."""

    each: float
    shared: float  # with what else its worker has at the time

    def at(self, alone: float) -> float:
        """`alone`: 1 for a worker with a single job, towards 0 with many: see `Costs.alone`."""
        return self.each + self.shared * alone


@dataclass(frozen=True)
class Costs:
    api: Cost
    redis: Cost
    relay: Cost
    worker: Cost
    rest: Cost  # callbacks, Flower, and the client that loads the service
    idle_redis_s: float  # of a core, for each worker without jobs
    idle_worker_s: float  # of a core, of a worker without jobs
    idle_rest_s: float  # of a core, of everything else
    clients: float  # connections to Redis of each worker
    services_clients: float  # of all other processes
    job_bytes: float  # in Redis, of a job that is kept
    power: float

    def alone(self, depth: float) -> float:
        """How much of what can be shared a job has to itself, 0 to 1.

        `depth`: jobs that its worker has at a time.
        """
        return float(max(1.0, depth) ** -self.power)

    def job_s(self, alone: float) -> float:
        return sum(getattr(self, part).at(alone) for part in PARTS)


@dataclass(frozen=True)
class Load:
    """What is asked of an installation."""

    workers: int
    jobs: float  # a day
    rows: float  # harvested, in all
    peak: float = 3.0  # the busiest hour over the mean
    job_s: float = 10.0  # of a job on its worker: what the engine needs, and its receipts
    kept_s: float = 7 * DAY_S  # of a result (`result_ttl_s`)
    row_bytes: float = 8192.0  # 4,096 values of bf16
    days: float = 30.0  # for the rows

    @property
    def rate(self) -> float:
        """Jobs per second at the peak."""
        return self.jobs / DAY_S * self.peak

    @property
    def depth(self) -> float:
        """Jobs that a worker has at a time, at the peak."""
        return self.rate * self.job_s / self.workers


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
    rate = load.rate
    alone = costs.alone(load.depth)
    harvest = load.rows * load.row_bytes / (load.days * DAY_S)
    shards = harvest / SHARD_BYTES
    return sorted(
        [
            Part(
                "one Redis, its core",
                rate * costs.redis.at(alone) + load.workers * costs.idle_redis_s,
                FULL,
                "cores",
                "shard by model",
            ),
            Part(
                "Redis, connections",
                load.workers * costs.clients + costs.services_clients,
                REDIS_CLIENTS * 2 / 3,
                "connections",
                "raise maxclients and the limit of open files",
            ),
            Part(
                "Redis, memory",
                load.jobs / DAY_S * load.kept_s * costs.job_bytes,
                redis_bytes * 0.85,
                "bytes",
                "keep results shorter",
            ),
            Part(
                "one relay, its core",
                rate * costs.relay.at(alone),
                FULL,
                "cores",
                "a relay for each group of workers",
            ),
            Part(
                "one API replica, its core",
                rate * costs.api.at(alone),
                FULL,
                "cores",
                "more replicas",
            ),
            Part("the bucket, PUTs", shards, BUCKET_PUTS_S, "per s", "more prefixes"),
            Part(
                "the bucket, bytes from one machine",
                harvest,
                BUCKET_BYTES_S,
                "bytes/s",
                "more worker machines: each writes its own",
            ),
        ],
        key=lambda part: -part.share,
    )


def waits(
    rate: float, service_s: float, seconds: float = 200.0, seed: int = 0
) -> tuple[float, float]:
    """Median and 99th percentile of the wait before a single server, for Poisson arrivals and a
    constant service time (Lindley).
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, int(rate * seconds))
    # W[n+1] = max(0, W[n] + service - gap[n]), written as a running minimum.
    walk = np.concatenate([[0.0], np.cumsum(service_s - gaps)])
    queue = walk - np.minimum.accumulate(walk)
    return float(np.quantile(queue, 0.5)), float(np.quantile(queue, 0.99))


def predicted(workers: int, at_once: int, costs: Costs, cores: float) -> float:
    """Jobs per second when everything shares `cores` that are all busy; a single-threaded part may
    be full before.
    """
    alone = costs.alone(min(at_once, WINDOW) / workers)
    free = cores - workers * (costs.idle_redis_s + costs.idle_worker_s) - costs.idle_rest_s
    redis = (1 - workers * costs.idle_redis_s) / costs.redis.at(alone)
    return max(
        0.0,
        min(free / costs.job_s(alone), 1 / costs.api.at(alone), 1 / costs.relay.at(alone), redis),
    )


# ---- measuring -----------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    runs = [_run(workers, at_once, fitted) for workers, at_once, fitted in RUNS]
    return {"date": time.strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count(), "runs": runs}


def costs_of(found: dict[str, Any]) -> Costs:
    """From the runs that are there to be fitted; what idle workers take, from all."""
    runs = found["runs"]
    fitted = [run for run in runs if run["fitted"]]
    first = runs[0]
    last = runs[-1]
    more = last["workers"] - first["workers"]
    best = min(
        np.linspace(0.2, 1.5, 27),
        key=lambda power: sum(_fit(fitted, part, power)[1] for part in PARTS),
    )
    clients = (last["clients"] - first["clients"]) / more
    return Costs(
        **{part: _fit(fitted, part, best)[0] for part in PARTS},
        idle_redis_s=max(0.0, (last["idle"]["redis"] - first["idle"]["redis"]) / more),
        idle_worker_s=last["idle"]["worker"] / last["workers"],
        idle_rest_s=statistics.mean(
            sum(run["idle"].values()) - run["idle"]["redis"] - run["idle"]["worker"] for run in runs
        ),
        clients=clients,
        services_clients=first["clients"] - clients * first["workers"],
        job_bytes=first["job_bytes"],
        power=float(best),
    )


def _fit(runs: list[dict[str, Any]], part: str, power: float) -> tuple[Cost, float]:
    """The cost beyond what is spent without jobs, neither summand below 0; and the sum of the
    squared relative errors.
    """
    net = np.array(
        [sum(_of(run["spent"], part)) - sum(_of(run["idle"], part)) / run["per_s"] for run in runs]
    )
    alone = np.array(
        [max(1.0, min(run["at_once"], WINDOW) / run["workers"]) ** -power for run in runs]
    )
    found, _ = nnls(np.stack([1 / net, alone / net], axis=1), np.ones(len(net)))
    return Cost(float(found[0]), float(found[1])), float(
        np.square((found[0] + found[1] * alone) / net - 1).sum()
    )


def _of(values: dict[str, float], part: str) -> list[float]:
    return [
        value
        for name, value in values.items()
        if name == part or (part == "rest" and name not in PARTS)
    ]


def _run(workers: int, at_once: int, fitted: bool) -> dict[str, Any]:
    """The service with `workers` fake engines: processor seconds per job of each process, idle ones
    a second, and the rate.
    """
    import redis

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from control_plane import MODEL, http_round, processor_s
    from services import service

    from midstream.client.sdk.discovery import written
    from midstream.schemas.settings.settings import to_environment

    count = JOBS if at_once > 1 else FEW_JOBS
    others: list[subprocess.Popen[bytes]] = []
    with service(engine="fake", model=MODEL, log_level="WARNING", worker_id="w1") as stack:
        data = stack.data
        try:
            for number in range(2, workers + 1):
                environment = (
                    os.environ
                    | to_environment(stack.settings)
                    | {"MIDSTREAM_WORKER_ID": f"w{number}"}
                )
                with (data / f"worker-{number}.log").open("wb") as log:
                    command = [sys.executable, "-m", "midstream.workers"]
                    others.append(
                        subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                    )
            pids = {name: pid for name, (pid, _) in written(stack.data).processes.items()} | {
                "client": os.getpid()
            }
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
                asyncio.run(http_round(stack.url, max(WARM_JOBS, 2 * at_once), at_once, held=True))
                used = client.info("memory")["used_memory"]
                before = processor_s(pids)
                load = os.getloadavg()[0]
                seconds, _ = asyncio.run(http_round(stack.url, count, at_once, held=True))
                spent = _by_role(before, processor_s(pids), count)
                size = (client.info("memory")["used_memory"] - used) / count
        finally:
            for process in others:
                process.terminate()
            for process in others:
                process.wait(60)

    job_s = sum(spent.values())
    found = {
        "workers": workers,
        "at_once": at_once,
        "fitted": fitted,
        "per_s": count / seconds,
        "cores": job_s * count / seconds,
        "load": load,
        "spent": spent,
        "idle": idle,
        "clients": connections,
        "job_bytes": size,
    }
    said = (
        f"{found['per_s']:.0f} held captures a second, {1e3 * job_s:.2f} ms of processor time each"
    )
    print(f"{workers} workers, {at_once} at a time: {said}", flush=True)
    return found


def _by_role(before: dict[str, float], after: dict[str, float], over: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in before:
        role = name.partition("-")[0]
        found[role] = found.get(role, 0.0) + (after[name] - before[name]) / over
    return found


def check(found: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """(run, predicted jobs per second) of each.

    Of each run only the cores that its processes got are taken, for other programs may have used
    the rest: so this tests the processor time of a job, and what workers cost beside.
    """
    costs = costs_of(found)
    return [
        (run, predicted(run["workers"], run["at_once"], costs, run["cores"]))
        for run in found["runs"]
    ]


# ---- the page ------------------------------------------------------------------------------------

#: What the page plans for.
PLANNED = Load(workers=1000, jobs=10e6, rows=1e12)
DAY_KEPT = replace(PLANNED, kept_s=DAY_S)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/capacity.md by name, in Markdown."""
    costs = costs_of(found)
    return {
        "costs": _costs_table(costs),
        "carries": _carries_table(costs),
        "runs": _runs_table(found),
        "plan": _plan_table(costs),
    }


def _table(head: str, rows: list[tuple[object, ...]]) -> str:
    lines = [
        f"| {head} |",
        "|" + "---|" * (head.count("|") + 1),
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _costs_table(costs: Costs) -> str:
    others = "callbacks, Flower, client"
    names = {
        "api": "the API",
        "redis": "Redis",
        "relay": "the relay",
        "worker": "the worker (fake engine)",
        "rest": others,
    }
    rows: list[tuple[object, ...]] = [
        (names[part], *(f"{1e3 * getattr(costs, part).at(alone):.2f} ms" for alone in (0.0, 1.0)))
        for part in PARTS
    ]
    rows.append(("all processes", *(f"{1e3 * costs.job_s(alone):.1f} ms" for alone in (0.0, 1.0))))
    return _table(
        "processor time of a held capture at | busy workers | workers with one job at a time", rows
    )


def _carries_table(costs: Costs) -> str:
    rows: list[tuple[object, ...]] = []
    for name, part in (
        ("one Redis", costs.redis),
        ("one relay", costs.relay),
        ("one API core", costs.api),
    ):
        rows.append((name, *(f"{FULL / part.at(alone):.0f} jobs/s" for alone in (0.0, 1.0))))
    rows.append(("one prefix of a bucket (AWS' figure)", *[f"{BUCKET_PUTS_S:.0f} PUTs/s"] * 2))
    return _table(
        f"at {FULL:.0%} of its core | busy workers | workers with one job at a time", rows
    )


def _runs_table(found: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for run, said in check(found):
        rows.append(
            (
                run["workers"],
                run["at_once"],
                f"{run['load']:.0f}",
                f"{run['cores']:.2f}",
                f"{run['per_s']:.0f}",
                f"{said:.0f}",
                f"{said / run['per_s'] - 1:+.0%}",
                "fitted" if run["fitted"] else "",
            )
        )
    return _table(
        (
            "workers | jobs at a time | load of the machine | cores that we got | jobs/s "
            "measured | simulated | error | "
        ),
        rows,
    )


def _plan_table(costs: Costs) -> str:
    rows: list[tuple[object, ...]] = []
    for part in plan(PLANNED, costs):
        scale, unit = (
            (1e9, f"G{part.unit}".replace("Gbytes", "GB"))
            if part.unit.startswith("bytes")
            else (1.0, part.unit)
        )
        used, there = (
            f"{value / scale:,.{0 if value / scale >= 100 else 2}f}"
            for value in (part.used, part.there)
        )
        rows.append((part.name, f"{used} of {there} {unit}", f"{part.share:.0%}", part.then))
    return _table("part | demand | used | then", rows)


def write_page(found: dict[str, Any]) -> None:
    text = PAGE.read_text()
    for name, table in tables(found).items():
        block = re.compile(rf"(<!-- {name}: .*? -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text = block.sub(lambda at, table=table: at[1] + "\n" + table + at[2], text)  # type: ignore[misc]
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("measure")
    commands.add_parser("check")
    commands.add_parser("page")
    planning = commands.add_parser("plan")
    planning.add_argument("--workers", type=int, default=1000)
    planning.add_argument("--jobs", type=float, default=10e6, help="a day")
    planning.add_argument("--rows", type=float, default=0.0, help="harvested in --days")
    planning.add_argument("--days", type=float, default=30.0)
    planning.add_argument("--peak", type=float, default=3.0)
    options = parser.parse_args()
    if options.command in (None, "measure"):
        found = measure()
        DATA.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(DATA.read_text())
    if options.command == "page":
        write_page(found)
    if options.command != "plan":
        for run, said in check(found):
            name = (
                f"{run['workers']:>3} workers, {run['at_once']:>4} at a time, "
                f"{'fitted' if run['fitted'] else 'not fitted'}"
            )
            print(
                f"{name:<44} measured {run['per_s']:4.0f}, predicted {said:4.0f} jobs/s "
                f"({said / run['per_s'] - 1:+.0%})"
            )
        return
    costs = costs_of(found)
    load = Load(options.workers, options.jobs, options.rows, options.peak, days=options.days)
    for part in plan(load, costs):
        print(
            f"{part.share:7.1%}  {part.name:<36} {part.used:12.4g} of {part.there:.4g} "
            f"{part.unit:<12} full: {part.then}"
        )
    for name, part in (("Redis", costs.redis), ("relay", costs.relay)):
        if load.rate * (service := part.at(costs.alone(load.depth))) < 1:
            middle, late = waits(load.rate, service)
            print(
                f"wait for {name} at {load.rate:.0f} jobs/s: median {1e3 * middle:.2f} ms, 99th "
                f"percentile {1e3 * late:.2f} ms"
            )


if __name__ == "__main__":
    main()
