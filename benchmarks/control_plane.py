"""How many jobs per second does everything but the model carry?

A fake engine, beside raw Celery no-op tasks on the same Redis.

    python benchmarks/control_plane.py [--jobs 2000] [--concurrency 64] [--rounds 3]

Kinds, in turns in one run: `celery` sends no-op tasks and waits until all are done; `jobs` posts
jobs over HTTP and waits for their end; `held` posts completions with a capture and `capture_wait`,
each with a real file and a real receipt. Latencies of single requests (concurrency 1) come from a
block of their own. The last lines say what processor time each process takes for a job: where the
machine is shared, those are worth more than jobs per second.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import redis
from noop_tasks import DONE, QUEUE, noop_app
from services import report, service

from midstream.client.sdk.discovery import written

MODEL = "fake-model"
JOB = {"model": MODEL, "prompts": ["a prompt"], "sampling": {"max_tokens": 1}}
HELD = {
    "model": MODEL,
    "prompt": "a prompt",
    "max_tokens": 1,
    "capture": {"layers": "all", "positions": "last_prompt"},
    "capture_wait": True,
}


def celery_round(redis_url: str, count: int) -> float:
    counter = redis.Redis.from_url(redis_url)
    app = noop_app(redis_url)
    counter.delete(DONE)
    start = time.perf_counter()
    with app.connection_for_write() as connection, connection.Producer() as producer:
        for number in range(count):
            app.send_task("bench.noop", args=[str(number)], queue=QUEUE, producer=producer)
    while int(counter.get(DONE) or 0) < count:
        time.sleep(0.005)
    return time.perf_counter() - start


async def http_round(
    url: str, count: int, concurrency: int, held: bool
) -> tuple[float, list[float]]:
    gate = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(url, raise_for_status=True) as http:
        # httpx2 queued unfairly at this rate

        async def one() -> float:
            async with gate:
                start = time.perf_counter()
                path, body = ("/v1/completions", HELD) if held else ("/v1/jobs", JOB)
                async with http.post(
                    path, json=body, headers={} if held else {"Prefer": "wait=60"}
                ) as response:
                    answer = await response.json()
                assert (
                    (answer["capture_results"]["status"] == "ok")
                    if held
                    else (answer["state"] == "succeeded")
                ), answer
                return time.perf_counter() - start

        start = time.perf_counter()
        latencies = await asyncio.gather(*(one() for _ in range(count)))
        return time.perf_counter() - start, list(latencies)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with service(engine="fake", model=MODEL, log_level="WARNING") as stack:
        redis_url = stack.settings.redis_url
        command = [sys.executable, str(Path(__file__).with_name("noop_tasks.py")), redis_url]
        with (stack.data / "noop.log").open("wb") as log:
            noop = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            pids = {name: pid for name, (pid, _) in written(stack.data).processes.items()}
            pids |= {"noop": noop.pid, "client": os.getpid()}
            found = measure(stack.url, redis_url, options, pids)
        finally:
            noop.terminate()
            noop.wait(30)
    report("control_plane", found, jobs=options.jobs, concurrency=options.concurrency)


def processor_s(pids: dict[str, int]) -> dict[str, float]:
    """Processor time of each process so far, in seconds."""
    found = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def measure(
    url: str, redis_url: str, options: argparse.Namespace, pids: dict[str, int]
) -> list[dict[str, Any]]:
    spent: dict[str, Counter[str]] = {kind: Counter() for kind in ("celery", "jobs", "held")}
    before = processor_s(pids)

    def account(kind: str) -> None:
        nonlocal before
        now = processor_s(pids)
        spent[kind].update({name: now[name] - before[name] for name in pids})
        before = now

    rates: dict[str, list[float]] = {"celery": [], "jobs": [], "held": []}
    latencies: dict[str, list[float]] = {"jobs": [], "held": []}
    celery_round(redis_url, 200)
    asyncio.run(http_round(url, 200, options.concurrency, held=True))
    for _ in range(options.rounds):
        before = processor_s(pids)
        rates["celery"].append(options.jobs / celery_round(redis_url, options.jobs))
        account("celery")
        for kind in ("jobs", "held"):
            seconds, taken = asyncio.run(
                http_round(url, options.jobs, options.concurrency, held=kind == "held")
            )
            account(kind)
            rates[kind].append(options.jobs / seconds)
            latencies[kind] += taken
    found: list[dict[str, Any]] = [
        {"kind": "celery", "per_s": round(statistics.median(rates["celery"]))}
    ]
    for kind in ("jobs", "held"):
        _, alone = asyncio.run(http_round(url, 200, 1, held=kind == "held"))
        line: dict[str, Any] = {
            "kind": kind,
            "per_s": round(statistics.median(rates[kind])),
            "of_celery": round(
                statistics.median(k / c for k, c in zip(rates[kind], rates["celery"], strict=True)),
                2,
            ),
        }
        for name, taken in ((f"at_{options.concurrency}", latencies[kind]), ("at_1", alone)):
            cuts = statistics.quantiles(taken, n=100)
            line[f"{name}_p50_ms"] = round(cuts[49] * 1e3, 1)
            line[f"{name}_p99_ms"] = round(cuts[98] * 1e3, 1)
        found.append(line)
    for kind, times in spent.items():
        each = {
            name: round(seconds * 1e6 / options.jobs / options.rounds)
            for name, seconds in times.most_common()
            if seconds
        }
        found.append({"kind": f"{kind}_processor_us", "all": sum(each.values()), **each})
    return found


if __name__ == "__main__":
    main()
