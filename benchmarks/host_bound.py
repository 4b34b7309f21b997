"""What does a step cost where scheduler, model runner, ranks and all of our threads share one
interpreter, as on one GPU?

    python benchmarks/host_bound.py [--requests 64 256] [--kinds stock idle one steer both]
        [--device-ms 7] [--rounds 3] [--generated 128]

vLLM's real engine core, scheduler and v2 runner, asynchronous scheduling and our whole data plane
run in one process (executor `uni`); the device is a timeline (`gpu/timed_device.py`) on which a
step takes `--device-ms`. All requests decode together. Prints for each kind, over the steps 16 to
112 of 128 (more with more tokens): mean, median, 95th percentile and longest step in ms, the ratio
of its mean to stock vLLM's of the same round, and how long the model's thread is busy in a step.

Kinds: `idle`: nothing is asked; `one`: each request captures one layer; `steer`: each has a
configuration of its own at all layers; `both`: that, and captures of all layers.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("gpu")))
from stepped_engine import KINDS, Child, Setup, Work

#: What is printed of a run, in ms.
NUMBERS = ("mean", "median", "p95", "longest", "busy")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--device-ms", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--generated", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    asked = options()
    most = max(asked.requests)
    engines = {
        engine: Child(Setup(engine, most=most, device_ms=asked.device_ms, parts=False)).ready()
        for engine in ("stock", "ours")
    }
    kinds = ["stock", *(kind for kind in asked.kinds if kind != "stock")]
    results = []
    for requests in asked.requests:
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for number in range(asked.rounds + 1):
            for kind in kinds:
                work = Work(kind, requests, generated=asked.generated)
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
            results.append({"requests": requests, "kind": kind, "ratio": round(ratio, 3)})
            results[-1] |= {name: round(value, 2) for name, value in median.items()}
            results[-1]["longest"] = round(longest, 1)
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    for engine in engines.values():
        engine.close()
    print(json.dumps({"benchmark": "host_bound", "device_ms": asked.device_ms, "results": results}))


if __name__ == "__main__":
    main()
