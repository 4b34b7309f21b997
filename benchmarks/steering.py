"""What does steering cost?

Ratios of conditions that take turns in short rounds: the same prompts, the same engine.

    python benchmarks/steering.py [--rounds 10] [--starts 3] [--prompts 256] [--max-tokens 16] \\
        [--compiled] [--dtype float32] [--only idle one all]

Conditions: `stock` (vLLM with nothing of ours, a process of its own), `idle` (nothing is steered),
`one` (every request adds a vector at one layer), `all` (at every layer); `one-64`, `one-256`,
`all-64`, `all-256`: the same with so many distinct vectors among the requests; `one-limit`,
`all-limit`: `one` and `all` with a limit on the edits' size; `one-scaled`, `all-scaled`: with one
that every edit exceeds. `--steering-rows`: fewer than the vectors have some wait.

Every engine process keeps a speed of its own for its life (memory, cores), so both engines are
started anew `--starts` times: where stock and ours are compared, trust the spread over starts. The
others are within one engine. Receipts are written and taken by a relay, as ever.

Also counted: how often and with how many bytes the ranks are called for vectors; and timed: hashing
a tensor, and taking a request's tensor from JSON to its hash.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from engines import DEMO_MODEL, EngineProcess, bench_prompts, settings_for, tokenised

from midstream.broker.ops import redis_server
from midstream.schemas.base.settings import Settings, to_environment
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy

ONE_LAYER = [14]
ALL_LAYERS = list(range(30))
#: Of one vector of the demo model, float32.
HIDDEN_BYTES = 576 * 4
#: Name → layers and distinct vectors; None: nothing is steered.
CONDITIONS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "idle": None,
    **{
        name + (f"-{distinct}" if distinct > 1 else ""): {
            "layers": layers,
            "distinct": distinct,
            "seed": distinct,
        }
        for distinct in (1, 64, 256)
        for name, layers in (("one", ONE_LAYER), ("all", ALL_LAYERS))
    },
    **{
        f"{name}-{limited}": {"layers": layers, "distinct": 1, "seed": 1, "limit": limit}
        for limited, limit in (("limit", 100.0), ("scaled", 0.001))
        for name, layers in (("one", ONE_LAYER), ("all", ALL_LAYERS))
    },
}
#: What each is held against, and the most that it may cost.
COMPARED = {
    "idle": ("stock", 1.005),
    "one": ("idle", 1.01),
    "all": ("idle", 1.03),
    "one-64": ("one", 1.03),
    "one-256": ("one", 1.03),
    "all-64": ("all", 1.03),
    "all-256": ("all", 1.03),
    "one-limit": ("one", 1.01),
    "one-scaled": ("one", 1.01),
    "all-limit": ("all", 1.03),
    "all-scaled": ("all", 1.03),
}
#: Of tensors that are hashed, in floats: 2 KiB to 4 MiB (a request takes at most 8 MiB).
SIZES = (576, 1 << 16, 1 << 20)


def measure(
    engines: dict[str, EngineProcess], names: list[str], prompts: list[list[int]], options: Any
) -> dict[str, list[float]]:
    """Seconds of each round; the first, which brings the vectors to the ranks, is not among
    them.
    """

    def run(name: str) -> dict[str, Any]:
        engine = engines["stock" if name == "stock" else "ours"]
        return engine.run(prompts, options.max_tokens, len(prompts), CONDITIONS[name])

    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        first, again = run(name), run(name)
        wish = CONDITIONS[name]
        if wish is not None:
            sent = f"{first['sends']} calls, {first['sent_bytes']} bytes"
            print(
                (
                    f"  {name}: first use {sent}; again {again['sends']} calls, "
                    f"{again['sent_bytes']} bytes"
                ),
                flush=True,
            )
            assert first["sent_bytes"] in (0, min(wish["distinct"], len(prompts)) * HIDDEN_BYTES), (
                "0: an earlier condition had them"
            )
            assert again["sends"] == 0, "vectors crossed again"
    for number in range(options.rounds):
        for name in names if number % 2 else names[::-1]:
            seconds[name].append(run(name)["seconds"])
        print(
            "  " + "  ".join(f"{name} {taken[-1]:.3f}" for name, taken in seconds.items()),
            flush=True,
        )
    return seconds


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Condition → round by round, to what it is held against."""
    return {
        name: [mine / other for mine, other in zip(seconds[name], seconds[base], strict=True)]
        for name, (base, _) in COMPARED.items()
        if name in seconds and base in seconds
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Bootstrap of the median: 2.5th and 97.5th percentile."""
    draws = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    low, high = np.percentile(np.median(np.array(values)[draws], axis=1), [2.5, 97.5])
    return round(float(low), 4), round(float(high), 4)


@contextmanager
def relay(folder: Path) -> Iterator[str]:
    """The address of a relay that takes the receipts, over a Redis of its own: senders try again
    what nobody takes, more and more.
    """
    server = redis_server.start(folder)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")
    }
    environment |= to_environment(Settings(redis_url=server.url))
    process = subprocess.Popen(
        [sys.executable, "-m", "midstream.broker.relay"], env=environment, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        server.stop()


def engine_figures(options: Any) -> list[dict[str, Any]]:
    texts = tokenised(bench_prompts(), DEMO_MODEL)
    prompts = [texts[n % len(texts)][: 8 + n % 17] for n in range(options.prompts)]
    names = [name for name in CONDITIONS if not options.only or name in options.only]
    pooled: dict[str, list[float]] = {}
    medians: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for number in range(options.starts):
        with (
            tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder,
            relay(Path(folder) / "redis") as relay_url,
        ):
            common = {
                "relay_url": relay_url,
                "enable_prefix_caching": False,
                "enforce_eager": not options.compiled,
                "tuning.steering_rows": options.steering_rows,
                "dtype": options.dtype,
            }
            engines = {
                kind: EngineProcess(kind, settings_for(Path(folder) / kind, DEMO_MODEL, **common))
                for kind in ("stock", "ours")
                if kind == "ours" or "stock" in names
            }
            print(f"start {number + 1} of {options.starts}", flush=True)
            taken = measure(engines, names, prompts, options)
            for engine in engines.values():
                engine.close()
        for name, values in taken.items():
            seconds.setdefault(name, []).extend(values)
        for name, found in ratios(taken).items():
            pooled.setdefault(name, []).extend(found)
            medians.setdefault(name, []).append(round(statistics.median(found), 4))
    return [
        {
            "condition": name,
            "to": COMPARED[name][0],
            "seconds": round(statistics.median(seconds[name]), 3),
            "ratio": round(statistics.median(found), 4),
            "interval": interval(found),
            "starts": medians[name],
            "at_most": COMPARED[name][1],
        }
        for name, found in pooled.items()
    ]


def hashing() -> list[dict[str, Any]]:
    """Milliseconds per MB (10⁶ bytes): the hash alone, and from the request's JSON (base64) to the
    hash; best of five.
    """
    found = []
    for size in SIZES:
        tensor = from_numpy(np.random.default_rng(0).standard_normal(size).astype(np.float32))
        body = msgspec.json.encode(tensor)
        repeats = max(1, (1 << 18) // size)
        hashed = _best(lambda tensor=tensor: content_hash(tensor), repeats)
        taken = _best(
            lambda body=body: content_hash(msgspec.json.decode(body, type=Tensor)), repeats
        )
        megabytes = len(tensor.data) / 1e6
        found.append(
            {
                "bytes": len(tensor.data),
                "hash_ms_per_mb": round(hashed / megabytes, 3),
                "json_ms_per_mb": round(taken / megabytes, 3),
            }
        )
    return found


def _best(call: Any, repeats: int) -> float:
    """Milliseconds of one call."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--steering-rows", type=int, default=256)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", nargs="+", choices=list(CONDITIONS), default=[])
    options = parser.parse_args()
    hashed = hashing()
    report = engine_figures(options)
    for line in [*report, *hashed]:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    told = {name: value for name, value in vars(options).items() if name != "only"}
    print(json.dumps({"benchmark": "steering", **told, "results": report, "hashing": hashed}))


if __name__ == "__main__":
    main()
