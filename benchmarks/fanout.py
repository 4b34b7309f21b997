"""How much do watchers, and a second replica of the API, slow down held jobs?

A fake engine; everything in one run, in turns.

    python benchmarks/fanout.py [--jobs 600] [--concurrency 64] [--rounds 3] [--watchers 200]

`alone`: one API answers held captures. `watched`: `--watchers` clients follow `GET /v1/feed`; half
of them connect again every second.
`two`: a second API has the same Redis, and no clients. `shared`: both have half of the jobs.
`half`: one API has half as many at a time. Processor time per job is that of all API processes
together: on a shared machine it is worth more than jobs per second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from control_plane import MODEL, http_round, processor_s
from fake_engine import install

from midstream.client.stack.supervisor import Supervisor, prepare, read_state
from midstream.schemas.base.settings import Settings, to_environment

#: Seconds after which a watcher that does not stay connects again, and that all have to come first.
AGAIN_S, COME_S = 1.0, 3.0


@asynccontextmanager
async def watchers(url: str, count: int) -> AsyncIterator[Counter[str]]:
    """Followers of the feed, half of whom come again and again.

    Counts the bytes that they got, and the answers by status.
    """
    got: Counter[str] = Counter()

    async def watch(http: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(number / count)
        while True:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with (
                    asyncio.timeout(AGAIN_S if number % 2 else None),
                    http.get("/v1/feed?limit=500") as answer,
                ):
                    got[str(answer.status)] += 1
                    async for part in answer.content.iter_any():
                        got["bytes"] += len(part)
                    await asyncio.sleep(AGAIN_S)

    patient = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        url, connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=patient
    ) as http:
        tasks = [asyncio.create_task(watch(http, number)) for number in range(count)]
        await asyncio.sleep(COME_S if count else 0)
        yield got
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def second_api(settings: Settings, folder: Path) -> Iterator[tuple[str, int]]:
    """URL and process id of another API with the same Redis."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")
    }
    environment |= to_environment(msgspec.structs.replace(settings, api_port=0))
    with (folder / "second-api.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "midstream.api"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        try:
            yield (
                next(line for line in process.stdout if line.startswith("api ready")).split()[-1],
                process.pid,
            )
        finally:
            process.terminate()
            process.wait(30)


async def rounds_of(
    urls: list[str], options: argparse.Namespace, watching: int
) -> tuple[float, Counter[str]]:
    """Held jobs per second, shared by the URLs."""
    async with watchers(urls[0], watching) as got:
        got.clear()
        share = options.jobs // len(urls)
        took = await asyncio.gather(
            *(http_round(url, share, options.concurrency // len(urls), held=True) for url in urls)
        )
        return share * len(urls) / max(seconds for seconds, _ in took), got


def measure(
    urls: list[str],
    pids: list[int],
    options: argparse.Namespace,
    watching: int = 0,
    at_once: float = 1.0,
) -> dict[str, Any]:
    """`at_once`: share of `--concurrency`."""
    options = argparse.Namespace(
        **vars(options) | {"concurrency": round(options.concurrency * at_once)}
    )
    before = processor_s({str(pid): pid for pid in pids})
    rate, got = asyncio.run(rounds_of(urls, options, watching))
    after = processor_s({str(pid): pid for pid in pids})
    spent = sum(after[name] - before[name] for name in before)
    return {"per_s": rate, "api_ms": spent * 1e3 / options.jobs, **got}


def main() -> None:
    install()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=600)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--watchers", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        data = Path(folder)
        wanted = Settings(
            engine="fake",
            model=MODEL,
            data_dir=folder,
            api_port=0,
            flower_port=0,
            log_level="WARNING",
        )
        with Supervisor(prepare(wanted, data, print), say=lambda line: None) as stack:
            api = read_state(stack.data)["processes"]["api"][0]
            measure([stack.url], [api], options)  # a warm-up
            found: dict[str, list[dict[str, Any]]] = {
                "alone": [],
                "watched": [],
                "half": [],
                "two": [],
                "shared": [],
            }
            for _ in range(options.rounds):
                found["alone"].append(measure([stack.url], [api], options))
                found["watched"].append(measure([stack.url], [api], options, options.watchers))
                found["half"].append(measure([stack.url], [api], options, at_once=0.5))
                with second_api(stack.settings, data) as (url, other):
                    found["two"].append(measure([stack.url], [api, other], options))
                    found["shared"].append(measure([stack.url, url], [api, other], options))
    for kind, lines in found.items():
        ratio = statistics.median(
            line["per_s"] / base["per_s"] for line, base in zip(lines, found["alone"], strict=True)
        )
        cost = statistics.median(
            line["api_ms"] / base["api_ms"]
            for line, base in zip(lines, found["alone"], strict=True)
        )
        per_s, api_ms = (
            statistics.median(line[name] for line in lines) for name in ("per_s", "api_ms")
        )
        more = {name: value for name, value in lines[-1].items() if name not in ("per_s", "api_ms")}
        print(
            f"{kind:>8} {per_s:7.1f} jobs/s, {ratio:.2f} of alone; {api_ms:6.2f} ms of the "
            f"API per job, {cost:.2f} of alone  {more or ''}"
        )
    print(json.dumps({"benchmark": "fanout", "results": found}))


if __name__ == "__main__":
    main()
