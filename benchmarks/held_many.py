"""What does it cost to hold many responses?

Added latency at 1, 64 and 512 held at once, and the API's memory per 1,000.

    python benchmarks/held_many.py [--held 1 64 512] [--memory 1000 4000]

One service with a fake engine that takes `ENGINE_S` for every request, however many there are, so
that what a request takes beyond that is ours. `held` captures and waits until the capture is
durable, `plain` asks for nothing and is answered when its output is stored; both in turns, each
with so many requests open all the time. Memory: so many held completions whose engine takes for
ever, resident memory of the API's process before, with all of them open, and after their clients
have left.
"""

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from fake_engine import install

from midstream.client.stack.supervisor import Supervisor, prepare, read_state
from midstream.schemas.base.settings import Settings
from midstream.schemas.base.tuning import Tuning

MODEL = "fake-model"
PLAIN = {"model": MODEL, "prompt": "a prompt", "max_tokens": 1}
HELD = {**PLAIN, "capture": {"layers": "all", "positions": "last_prompt"}, "capture_wait": True}
#: Seconds that the engine takes for a request; at 512 held this asks for 128 requests a second.
ENGINE_S = 4.0
#: Seconds for which a level is measured, after everybody has had one answer.
LEVEL_S = 14.0
SETTLE_S = 3.0


@contextmanager
def service(engine_s: float, concurrency: int) -> Iterator[Supervisor]:
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        data = Path(folder)
        wanted = Settings(
            engine="fake",
            model=MODEL,
            data_dir=folder,
            api_port=0,
            flower_port=0,
            log_level="WARNING",
            engine_options={"token_s": engine_s},
            tuning=Tuning(worker_concurrency=concurrency, dispatch_window=concurrency),
            max_num_seqs=concurrency,
            max_wait_s=600.0,
        )
        with Supervisor(prepare(wanted, data, print), say=lambda line: None) as stack:
            yield stack


async def level(url: str, body: dict[str, Any], held: int) -> list[float]:
    """Seconds beyond `ENGINE_S` of requests, `held` of which are open at any time."""
    over = time.perf_counter() + ENGINE_S + LEVEL_S
    added: list[float] = []

    async def client(http: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(ENGINE_S * number / held)  # they come evenly, not all at once
        first = True
        while time.perf_counter() < over:
            began = time.perf_counter()
            async with http.post("/v1/completions", json=body) as response:
                answer = await response.json()
            assert body is PLAIN or answer["capture_results"]["status"] == "ok", answer
            if not first or held == 1:
                added.append(time.perf_counter() - began - ENGINE_S)
            first = False

    async with aiohttp.ClientSession(
        url, raise_for_status=True, connector=aiohttp.TCPConnector(limit=0), timeout=_patient()
    ) as http:
        await asyncio.gather(*(client(http, number) for number in range(held)))
    return added


async def memory(url: str, pid: int, held: int) -> dict[str, Any]:
    """Resident memory of the API around `held` open requests."""
    async with aiohttp.ClientSession(
        url, connector=aiohttp.TCPConnector(limit=0), timeout=_patient()
    ) as http:
        before = resident(pid)
        waiting = [asyncio.create_task(_swallow(http)) for _ in range(held)]
        async with asyncio.timeout(120):
            while True:
                if await _accepted(http) == held:
                    break
                await asyncio.sleep(0.5)
        await asyncio.sleep(SETTLE_S)
        during = resident(pid)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(SETTLE_S)
    line = {"held": held, "before_mib": before, "during_mib": during, "after_mib": resident(pid)}
    return {name: round(value) for name, value in line.items()} | {
        "mib_per_1000": round((during - before) / held * 1000, 1)
    }


async def _swallow(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json=HELD) as response:
        await response.read()


async def _accepted(http: aiohttp.ClientSession) -> int:
    async with http.get("/metrics") as response:
        text = await response.text()
    return sum(
        int(float(line.split()[-1]))
        for line in text.splitlines()
        if "requests_in_progress{" in line and "completions" in line
    )


def _patient() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None)


def resident(pid: int) -> float:
    """Resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def measure_levels(levels: list[int]) -> list[dict[str, Any]]:
    report = []
    with service(ENGINE_S, max(levels)) as stack:
        for held in levels:
            line: dict[str, Any] = {"held": held}
            for kind, body in (("plain", PLAIN), ("held", HELD)):
                added = asyncio.run(level(stack.url, body, held))
                cuts = statistics.quantiles(added, n=100)
                line[f"{kind}_requests"] = len(added)
                line[f"{kind}_added_p50_ms"], line[f"{kind}_added_p99_ms"] = (
                    round(cuts[49] * 1e3, 1),
                    round(cuts[98] * 1e3, 1),
                )
            report.append(line)
    return report


def measure_memory(levels: list[int]) -> list[dict[str, Any]]:
    report = []
    for held in levels:
        with service(3600.0, 64) as stack:
            pid = read_state(stack.data)["processes"]["api"][0]
            report.append(asyncio.run(memory(stack.url, pid, held)))
    return report


def main() -> None:
    install()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--held", type=int, nargs="*", default=[1, 64, 512])
    parser.add_argument("--memory", type=int, nargs="*", default=[1000, 4000])
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    report = {
        "latency": measure_levels(options.held) if options.held else [],
        "memory": measure_memory(options.memory),
    }
    for lines in report.values():
        for line in lines:
            print("  ".join(f"{name} {value}" for name, value in line.items()))
    print(json.dumps({"benchmark": "held_many", **report}))


if __name__ == "__main__":
    main()
