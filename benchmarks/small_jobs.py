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
import os
from collections.abc import Callable
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
from services import ADMIN, Busy, client_of, keys_of, report, service, small_jobs

from midstream.client.sdk.discovery import written

MIB = 1 << 20
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


def token() -> dict[str, Any]:
    return {"model": FAKE, "prompt": "hello", "max_tokens": 1}


class Answered(Busy):
    """Keeps requests of a kind under way while it is open."""

    def __init__(self, url: str, key: str, work: Work) -> None:
        super().__init__(url, key, work.at_once)
        self._path = work.path
        self._body = work.make()
        self.statuses: list[int] = []

    def _ask(self, http: httpx2.Client) -> None:
        self.statuses.append(http.post(self._path, content=self._body).status_code)


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
        keys = keys_of(stack.url, "small", "large")
        with client_of(stack.url, keys["large"]) as http:
            # reads the tokenizer, starts a helper and the API's second process
            http.post("/v1/jobs", json={"model": MODEL, "prompts": [words(5000)] * 600})
            http.put(MODULE, content=module(1)).raise_for_status()
        prober = Probe(stack.url)
        with small_jobs(stack.url, keys["small"], options.samples, token) as measured:
            for work in kinds:
                alone = measured()
                before = mark(pid)
                with Answered(stack.url, keys["large"], work) as busy, prober.probing():
                    beside = measured()
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
        prober.close()
    report("small_jobs", rows, cores=os.cpu_count(), load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
