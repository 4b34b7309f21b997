"""How long does a rank's model thread take to admit a steering configuration, and to release it?

No engine, no model.

    taskset -c 3 python benchmarks/admission.py [--hidden 8192] [--layers 80]

CPU time of the thread. `first`: laid out by the model thread; `kept`: admitted again; `expected`:
laid out by the thread meanwhile.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.model.banks import RESIDUAL
from midstream.schemas.requests.specs import StoredSteering, steering_rows
from midstream.workers.runner.base.actions import ActionLedger
from midstream.workers.runner.edits.steering_tables import Tables
from midstream.workers.runner.hooks.sites import Site, Sizes, buffers_of

REPEATS = 12
RANK = 8


def timed(call: Callable[[], Any], into: list[float]) -> Any:
    start = time.thread_time()
    result = call()
    into.append((time.thread_time() - start) * 1e3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=80)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as vLLM does
    rows, layers = Tables(ActionLedger()), range(options.layers)
    rng, store = np.random.default_rng(0), rows.vectors
    sites = [Site("post_block", layer, "pair") for layer in layers]
    sizes = Sizes(ring_rows=1, capacity=8, lists=8, patterns=1, configurations=64, entries=4096)
    rows.add(
        RESIDUAL,
        sites,
        buffers_of(len(sites), sizes, options.hidden, torch.bfloat16, torch.device("cpu")),
        None,
    )
    prepared = rows.prepared
    prepared.start()

    def vector(*shape: int) -> str:
        tensor = from_numpy(rng.standard_normal(shape).astype(np.float32))
        name: str = content_hash(tensor)
        store.put(name, tensor)
        return name

    def entry(at: range, family: str, tensors: list[str], **numbers: Any) -> StoredSteering:
        return StoredSteering(
            layers=list(at),
            hook="post_block",
            positions="all",
            family=family,
            tensors=tensors,
            **numbers,
        )

    own, low = (
        [vector(options.hidden) for _ in layers],
        [vector(RANK, options.hidden), vector(RANK, options.hidden), vector(RANK)],
    )
    kinds: dict[str, Callable[[float], list[StoredSteering]]] = {
        "add, one vector": lambda n: [entry(layers, "add", own[:1], scale=n)],
        "add, a vector for each layer": lambda n: [
            entry(range(k, k + 1), "add", [own[k]], scale=n) for k in layers
        ],
        "ablate, a direction for each layer": lambda n: [
            entry(range(k, k + 1), "ablate", [own[k]], numbers=[n]) for k in layers
        ],
        "lowrank of rank 8": lambda n: [entry(layers, "lowrank", low, numbers=[n], rank=RANK)],
    }
    report = []
    for kind, made in kinds.items():
        taken: dict[str, list[float]] = {"first": [], "kept": [], "expected": [], "release": []}
        for number in range(REPEATS):
            wanted = steering_rows(made(1.0 - number / 1000))
            for how in ("first", "kept"):
                held = timed(lambda wanted=wanted: rows.acquire(0, wanted), taken[how])
                timed(lambda held=held: rows.release(0, held), taken["release"])
            ahead, done = steering_rows(made(0.5 - number / 1000)), threading.Event()
            prepared.expect(lambda ahead=ahead: ahead)
            prepared.expect(lambda done=done: done.set() or [])
            done.wait()
            rows.release(0, timed(lambda ahead=ahead: rows.acquire(0, ahead), taken["expected"]))
        report.append(
            {"kind": kind}
            | {
                f"{how}_ms": round(statistics.median(each), 3)
                for how, each in taken.items()
                if each
            }
        )
        print("  ".join(f"{name} {value}" for name, value in report[-1].items()))
    print(
        json.dumps(
            {
                "benchmark": "admission",
                "hidden": options.hidden,
                "layers": options.layers,
                "results": report,
            }
        )
    )


if __name__ == "__main__":
    main()
