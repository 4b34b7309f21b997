"""How much later does a held response come than the direct engine call would?

One request at a time.

    python benchmarks/held_latency.py [--requests 100] [--max-tokens 1 8]

In one run and in turns: a stock vLLM engine called directly; HTTP without a capture; HTTP with a
capture of three layers at the last prompt token, held until it is durable and every rank has
reported. Between them the disk alone: appending as much as such a capture is, and `fdatasync`. For
two cores run it under `taskset -c 2,3`.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
from engines import DEMO_MODEL, EngineProcess, bench_prompts, settings_for, tokenised

from midstream.client.stack.supervisor import Supervisor, prepare
from midstream.schemas.base.settings import Settings

CAPTURED = 4096  # bytes
BLOCK = 20  # requests of one kind before the next kind's turn
CAPTURE = {"capture": {"layers": [0, 14, 29], "positions": "last_prompt"}, "capture_wait": True}


def over_http(
    http: httpx2.Client,
    model: str,
    prompts: list[list[int]],
    max_tokens: int,
    extra: dict[str, Any],
) -> list[float]:
    found = []
    for prompt in prompts:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **extra,
        }
        start = time.perf_counter()
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        found.append(time.perf_counter() - start)
        assert not extra or answer["capture_results"]["status"] == "ok"
    return found


def syncs(file: Path, count: int) -> list[float]:
    """Seconds that each takes to be appended and durable."""
    found = []
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for _ in range(count):
        os.write(descriptor, bytes(CAPTURED))
        start = time.perf_counter()
        os.fdatasync(descriptor)
        found.append(time.perf_counter() - start)
    os.close(descriptor)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    prompts = [prompt[:32] for prompt in tokenised(bench_prompts(), DEMO_MODEL)]
    report = []
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        common = {"enable_prefix_caching": False, "max_model_len": 2048}
        stock = EngineProcess("stock", settings_for(Path(folder) / "stock", DEMO_MODEL, **common))
        data = Path(folder) / "stack"
        settings = prepare(
            Settings(
                model=str(DEMO_MODEL), data_dir=str(data), api_port=0, flower_port=0, **common
            ),
            data,
            print,
        )
        with (
            Supervisor(settings, say=lambda line: None) as stack,
            httpx2.Client(base_url=stack.url, timeout=60) as http,
        ):
            for max_tokens in options.max_tokens:
                kinds: dict[str, list[float]] = {"direct": [], "http": [], "held": [], "disk": []}
                for block in range(-1, options.requests // BLOCK):  # the first is a warm-up
                    some = [prompts[(block * BLOCK + n) % len(prompts)] for n in range(BLOCK)]
                    taken = {
                        "direct": stock.run(some, max_tokens, 1)["latencies"],
                        "http": over_http(http, settings.served_model, some, max_tokens, {}),
                        "held": over_http(http, settings.served_model, some, max_tokens, CAPTURE),
                        "disk": syncs(data / "disk", BLOCK),
                    }
                    if block >= 0:
                        for kind, latencies in taken.items():
                            kinds[kind] += latencies
                line: dict[str, Any] = {"max_tokens": max_tokens, "requests": len(kinds["held"])}
                for kind, latencies in kinds.items():
                    cuts = statistics.quantiles(latencies, n=100)
                    line[f"{kind}_p50_ms"], line[f"{kind}_p99_ms"] = (
                        round(cuts[49] * 1e3, 1),
                        round(cuts[98] * 1e3, 1),
                    )
                line["added_p50_ms"] = round(line["held_p50_ms"] - line["direct_p50_ms"], 1)
                line["added_p99_ms"] = round(line["held_p99_ms"] - line["direct_p99_ms"], 1)
                report.append(line)
        stock.close()
    for line in report:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    print(json.dumps({"benchmark": "held_latency", "results": report}))


if __name__ == "__main__":
    main()
