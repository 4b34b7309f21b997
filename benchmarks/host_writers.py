"""Processor time that captured rows cost beside the model: of the writers, per step.

    python benchmarks/host_writers.py [--before FOLDER] [--rounds 5] [--requests 64] [--layers 32]

`--before`: another checkout with a `.venv`, measured in turns with this one, by its own copy of
this script. Every layer is captured at all positions, without a model, on the plane's paths for a
GPU. Prints, for steps in which every request generates one token, and for steps of whole prompts:
ms of the writers per step until the files are durable, and ms of the model's thread
in the plane, per step: mean, median, 95th percentile and maximum.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from probe_steps import CAPACITY, PARTS, PROMPT, Stand, arriving, spec_of

from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.runner.base.engine_step import Finish, NewRequest

#: Kind of step → prompt tokens, generated tokens.
KINDS = {"decode": (PROMPT, 64), "prompts": (128, 1)}
#: How often a kind's requests come and go in a round; the first time is not measured.
LIVES = 2
#: ms of a step: of the helpers (mean), and of the model's thread.
FIGURES = ("helpers", "mean", "median", "p95", "max")


def helpers_s() -> float:
    """Processor time of the writers so far."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
        for thread in threading.enumerate()
        if thread.name.startswith("midstream-writer")
    )


class Load:
    """Requests on one plane that come together, capture every layer, and end together."""

    def __init__(self, stand: Stand, kind: str, requests: int, layers: int) -> None:
        self._stand = stand
        self._prompt, self._generated = KINDS[kind]
        self._requests, self._lives = requests, 0
        self._model_s: list[float] = []
        capture = StoredCapture(
            sites={"post_block": list(range(layers))},
            positions="all",
            tag="t",
            layout="packed",
        )
        self._spec = spec_of(self._prompt, captures=[capture])

    def life(self) -> tuple[float, list[float]]:
        """Return the seconds of the helpers, and of the model's thread in each step."""
        self._lives += 1
        before, self._model_s = helpers_s(), []
        ids = [f"{self._lives}.{number}" for number in range(self._requests)]
        at_once = CAPACITY // self._prompt
        for first in range(0, len(ids), at_once):
            some = ids[first : first + at_once]
            new = arriving(some, self._spec, self._generated)
            self._step(new, {}, [(one, 0, self._prompt) for one in some])
        for position in range(self._prompt, self._prompt + self._generated - 1):
            self._step([], {}, [(one, position, 1) for one in ids])
        tokens = list(range(self._prompt + self._generated))
        self._step([], {one: Finish(tokens, False) for one in ids}, [])
        while self._stand.plane._delivery.held:
            self._stand.plane._delivery.turn()
            time.sleep(0.01)
        return helpers_s() - before, self._model_s

    def _step(
        self, new: list[NewRequest], ended: dict[str, Finish], windows: list[tuple[str, int, int]]
    ) -> None:
        seconds = dict(zip(PARTS, self._stand.parts(new, ended, windows), strict=True))
        self._model_s.append(sum(seconds.values()) - seconds["forward"])


def measure(requests: int, layers: int, hidden: int, folder: str | None) -> dict[str, list[float]]:
    """Return kind → ms of `FIGURES`."""
    torch.set_num_threads(1)
    found = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="midstream-bench-", dir=folder) as place:
            stand = Stand(Path(place), layers, hidden, on_device=True)
            load = Load(stand, kind, requests, layers)
            lives = [load.life() for _ in range(LIVES)][1:]
            stand.plane.close()
        steps = sorted(seconds for _, model in lives for seconds in model)
        parts = (
            sum(helpers for helpers, _ in lives) / len(steps),
            statistics.fmean(steps),
            statistics.median(steps),
            steps[int(0.95 * len(steps))],
            steps[-1],
        )
        found[kind] = [1e3 * seconds for seconds in parts]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--folder", help="of the files; the default is that of temporary files")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        found = measure(options.requests, options.layers, options.hidden, options.folder)
        print(json.dumps(found))
        return
    trees = {"now": Path(__file__).parents[1]}
    if options.before:
        trees = {"before": options.before, **trees}
    arguments = [
        item
        for name in ("requests", "layers", "hidden", "folder")
        if (value := getattr(options, name)) is not None
        for item in (f"--{name}", str(value))
    ]
    times: dict[str, dict[str, list[list[float]]]] = {
        tree: {kind: [] for kind in KINDS} for tree in trees
    }
    for _ in range(options.rounds):  # in turns: the machine drifts
        for tree, folder in trees.items():
            script = [folder / ".venv/bin/python", folder / "benchmarks" / Path(__file__).name]
            script += ["--once", *arguments]
            out = subprocess.run(script, check=True, stdout=subprocess.PIPE, stderr=sys.stderr)
            for kind, parts in json.loads(out.stdout).items():
                times[tree][kind].append(parts)
    results = []
    for kind in KINDS:
        for tree in trees:
            found = [statistics.median(part) for part in zip(*times[tree][kind], strict=True)]
            results.append({"kind": kind, "tree": tree})
            results[-1] |= {
                f"{name}_ms": round(ms, 2) for name, ms in zip(FIGURES, found, strict=True)
            }
            if tree == "now" and len(trees) > 1:
                pairs = zip(times["before"][kind], times["now"][kind], strict=True)
                ratios = sorted(now[0] / before[0] for before, now in pairs)
                results[-1]["ratio"] = [
                    round(ratio, 3) for ratio in (statistics.median(ratios), ratios[0], ratios[-1])
                ]
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    del options.once
    print(
        json.dumps({"benchmark": "host_writers", **vars(options), "results": results}, default=str)
    )


if __name__ == "__main__":
    main()
