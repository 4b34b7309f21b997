"""How much slower are small requests of others while one client keeps the API at its limits?

    python benchmarks/small_jobs.py [--samples 300] [--only NAME …]

A service with keys and a fake engine, beside which a model with the demo model's tokenizer and
shape is published that no worker serves: work for it costs the API and the broker, and the engine
nothing. One process asks for one token at a time, first alone and then while another tenant keeps
four requests of a kind under way; a third requests /healthz. For each
kind: the median and the 99th percentile of the small requests, the latter also as a multiple of the
one alone just before; the longest wait of /healthz; the peak of the API's resident memory. Goal: a
99th percentile of at most twice that alone, on a quiet machine.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import httpx2
from api_attacks import (
    FAKE,
    LEASE_S,
    MODEL,
    MODULE,
    Probe,
    edits,
    job,
    mark,
    memory,
    module,
    publish,
    words,
)
from services import report, service

from midstream.client.sdk.discovery import written

MIB = 1 << 20
ADMIN = "ms_admin0000000_" + "a" * 43
#: Requests of a kind that are under way at once.
AT_ONCE = 4
#: Tokens that the model takes.
LENGTH = 1 << 16


class Work(NamedTuple):
    name: str
    make: Callable[[], bytes]
    path: str = "/v1/jobs"
    at_once: int = AT_ONCE


def read(content: str, positions: dict[str, Any]) -> bytes:
    """A conversation with a call of a tool after so much text, and a part of it to be found."""
    call = {"id": "a", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    return json.dumps({"model": MODEL, "messages": messages, "positions": positions}).encode()


def conversations(count: int, **fields: Any) -> bytes:
    said = [[{"role": "user", "content": f"a {number}"}] for number in range(count)]
    return json.dumps({"model": MODEL, "messages": said, **fields}).encode()


def of_module(entries: int) -> bytes:
    """Steering by a module, once at each position."""
    steering = [{"module": "m", "positions": [number]} for number in range(entries)]
    return job(prompts=[[7] * (entries + 1)], steering=steering)


def chosen(count: int) -> bytes:
    """Patterns of outputs, each of many alternatives."""
    pattern = "(" + "|".join(f"w{number}" for number in range(count)) + ")"
    return job(sampling={"structured_outputs": {"regex": pattern}})


OF_ROLE = {"positions": [{"role": "user"}], "layers": 0}
KINDS = [
    Work("nothing", lambda: b"", "", 0),
    Work(
        "text span, 3 MiB",
        lambda: read("-" * 3 * MIB, {"text": "weather"}),
        "/v1/tokenize",
    ),
    Work(
        "tool_calls, 3 MiB",
        lambda: read("-" * 3 * MIB, {"part": "tool_calls"}),
        "/v1/tokenize",
    ),
    Work("4,096 conversations", lambda: conversations(4096)),
    Work("4,096 conversations with role", lambda: conversations(4096, capture=OF_ROLE)),
    Work("4,096 prompts", lambda: job(prompts=[f"hello {number}" for number in range(4096)])),
    Work("2,500 edits with vectors", lambda: job(steering=edits(2500))),
    Work("4,096 entries of a module", lambda: of_module(4096)),
    Work("regular expression of 4 kB", lambda: chosen(700)),
    Work("60,000 token ids", lambda: job(prompts=[[7] * 60] * 1000)),
    Work("prompt of 30 kB", lambda: job(prompts=[words(30_000)])),
]


def headers_of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def small(url: str, key: str, samples: int, pipe: Connection) -> None:
    """From each `begin`, ask for one token so many times, and send how long each took, in
    seconds.
    """
    asked = {"model": FAKE, "prompt": "hello", "max_tokens": 1}
    with httpx2.Client(base_url=url, headers=headers_of(key), timeout=300) as http:
        pipe.send("ready")
        while pipe.recv() == "begin":
            taken = []
            for _ in range(samples):
                began = time.perf_counter()
                http.post("/v1/completions", json=asked).raise_for_status()
                taken.append(time.perf_counter() - began)
            pipe.send(taken)


class Busy:
    """Keeps requests of a kind under way while it is open."""

    def __init__(self, url: str, key: str, work: Work):
        self._url = url
        self._headers = headers_of(key)
        self._work = work
        self._body = work.make()
        self._over = threading.Event()
        self.statuses: list[int] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(work.at_once)]

    def __enter__(self) -> "Busy":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx2.Client(base_url=self._url, headers=self._headers, timeout=300) as http:
            while not self._over.is_set():
                answer = http.post(self._work.path, content=self._body)
                self.statuses.append(answer.status_code)


def percentiles(taken: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile, in ms."""
    cuts = statistics.quantiles(taken, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    kinds = [
        work
        for work in KINDS
        if not options.only or any(part in work.name for part in options.only)
    ]
    rows = []
    with service(
        engine="fake",
        model=FAKE,
        log_level="WARNING",
        auth="keys",
        admin_key=ADMIN,
        lease_s=LEASE_S,
    ) as stack:
        asyncio.run(publish(stack.settings, LENGTH))
        pid = written(stack.data).processes["api"][0]
        keys = {}
        for tenant in ("small", "large"):
            asked = {"name": tenant, "tenant": tenant}
            made = httpx2.post(f"{stack.url}/v1/keys", json=asked, headers=headers_of(ADMIN))
            keys[tenant] = made.raise_for_status().json()["key"]
        with httpx2.Client(
            base_url=stack.url, headers=headers_of(keys["large"]), timeout=300
        ) as http:
            # reads the tokenizer, starts a helper and the API's second process
            http.post("/v1/jobs", json={"model": MODEL, "prompts": [words(5000)] * 600})
            http.put(MODULE, content=module(1)).raise_for_status()
        pipe, there = multiprocessing.Pipe()
        asking = multiprocessing.get_context("spawn").Process(
            target=small, args=(stack.url, keys["small"], options.samples, there)
        )
        asking.start()
        pipe.recv()
        prober = Probe(stack.url)

        def measured() -> list[float]:
            pipe.send("begin")
            return pipe.recv()

        measured()
        for work in kinds:
            alone = percentiles(measured())
            before = mark(pid)
            with Busy(stack.url, keys["large"], work) as busy, prober.probing():
                beside = percentiles(measured())
            worst = max(took for _, took in prober.samples) * 1000
            rows.append(
                {
                    "work": work.name,
                    "answers": "/".join(sorted({str(status) for status in busy.statuses})),
                    "requests": len(busy.statuses),
                    "alone p50/p99 ms": "{:.0f}/{:.0f}".format(*alone),
                    "beside p50/p99 ms": "{:.0f}/{:.0f}".format(*beside),
                    "p99 ×": round(beside[1] / alone[1], 1),
                    "healthz ms": round(worst),
                    "API MiB": round((memory(pid, "VmHWM") - before) / MIB),
                }
            )
            print(rows[-1], flush=True)
        pipe.send("end")
        asking.join()
        prober.close()
    report("small_jobs", rows, cores=os.cpu_count(), load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
