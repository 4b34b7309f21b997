"""What does a step cost where scheduler, model runner, ranks and all of our threads share one
interpreter, as on one GPU?

    python benchmarks/host_bound.py [--requests 64 256] [--kinds stock idle one steer both]
        [--modes together churn bound] [--device-ms 7] [--rounds 3] [--generated 128]

vLLM's real engine core, scheduler and v2 runner, asynchronous scheduling and our whole data plane
run in one process (executor `uni`); the device is a timeline (`gpu/timed_device.py`) on which a
step takes `--device-ms`. Prints for each kind: mean, median, 95th percentile and longest step in
ms, the ratio of its mean to stock vLLM's of the same round, and how long the model's thread is busy
in a step.

Modes: `together`: all requests decode together, and the steps 16 to 112 of 128 count (more with
more tokens); `churn`: whenever a request ends another begins, as in service, and `--steps` steps
count, each without the time in which requests are added; `bound`: as `together`, on a device that
takes half of the time that stock vLLM's thread is busy, so that nothing is hidden behind it.

Kinds: `idle`: nothing is asked; `one`: each request captures one layer; `steer`: each has a
configuration of its own at all layers; `both`: that, and captures of all layers; `mixed`: in turn
a trigger, a gate, a limit, a window, a probe, every fourth token, sites of its own, its prompt
alone, and twice nothing. No adapters: what vLLM does for them on the host of a GPU is not what it
does here.
"""

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("gpu")))
from stepped_engine import KINDS, Child, Setup, Work

EVERY = (*KINDS, "mixed")
MODES = ("together", "churn", "bound")
#: What is printed of a run, in ms.
NUMBERS = ("mean", "median", "p95", "longest", "busy")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--kinds", nargs="+", choices=EVERY, default=list(KINDS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["together"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device-ms", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--generated", type=int, default=128)
    return parser.parse_args()


def work_of(asked: argparse.Namespace, mode: str, kind: str, requests: int) -> Work:
    return Work(
        kind,
        requests,
        generated=asked.generated,
        churn=asked.steps if mode == "churn" else 0,
    )


def main() -> None:
    asked = options()
    most = max(asked.requests)
    engines = {
        engine: Child(Setup(engine, most=most, device_ms=asked.device_ms, parts=False)).ready()
        for engine in ("stock", "ours")
    }
    kinds = ["stock", *(kind for kind in asked.kinds if kind != "stock")]
    results = []
    for mode, requests in itertools.product(asked.modes, asked.requests):
        device_ms = asked.device_ms
        if mode == "bound":
            stock = engines["stock"].run(work_of(asked, mode, "stock", requests))
            device_ms = stock["busy"] / 2
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for number in range(asked.rounds + 1):
            for kind in kinds:
                work = replace(work_of(asked, mode, kind, requests), device_ms=device_ms)
                found = engines["stock" if kind == "stock" else "ours"].run(work)
                if number:  # the first round warms up
                    runs[kind].append(found)
        for kind, of_kind in runs.items():
            median = {name: statistics.median(run[name] for run in of_kind) for name in NUMBERS}
            ratio = statistics.median(
                run["mean"] / stock["mean"]
                for run, stock in zip(of_kind, runs["stock"], strict=True)
            )
            longest = max(run["longest"] for run in of_kind)
            results.append({"mode": mode, "device_ms": round(device_ms, 2), "requests": requests})
            results[-1] |= {"kind": kind, "ratio": round(ratio, 3)}
            results[-1] |= {name: round(value, 2) for name, value in median.items()}
            results[-1]["longest"] = round(longest, 1)
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    for engine in engines.values():
        engine.close()
    print(json.dumps({"benchmark": "host_bound", "results": results}))


if __name__ == "__main__":
    main()
