"""Host time per engine step of a rank's data plane on its paths for a GPU, without a model.

    python benchmarks/host_step.py [--requests 64 256] [--layers 30] [--hidden 576] [--steps 1000]
    python benchmarks/host_step.py --against FOLDER [--rounds 3]

Prints µs of the model's thread in `begin`, `choose`, `plan` and `drain` (medians), and of their sum
the median, mean, 95th percentile and maximum, per step in which every request generates one token:
idle, without a spec; one layer captured; each steered with a configuration of its own at all
layers; and both.

`--against`: another checkout with its own `.venv`, measured in turns with this one; prints the
medians of both, and of the rounds' ratios.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from probe_steps import CAPACITY, PARTS, PROMPT, Stand, arriving, spec_of

from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.requests.specs import StoredCapture, StoredSteering, steering_digest
from midstream.workers.runner.base.engine_step import Finish

KINDS = {"idle": (False, False), "captured": (True, False), "steered": (False, True)} | {
    "both": (True, True)
}
#: Steps that requests run: after these they end, and new ones come.
LIFE = 64


class Load:
    """Requests on one plane that end and come again every `LIFE` steps."""

    def __init__(self, folder: Path, kind: str, requests: int, layers: int, hidden: int) -> None:
        self._stand = Stand(
            folder, layers, hidden, on_device=True, configurations=requests * (1 + layers)
        )
        self._plane = self._stand.plane
        self._requests, self._kind, self._round = requests, kind, 0
        captured, steered = KINDS[kind]
        self._specs = [
            spec_of(
                PROMPT,
                captures=[capture] * captured,
                steering=(steering := [self._steering(number, layers, hidden)] * steered),
                digest=steering_digest(steering),
            )
            for capture in [
                StoredCapture(sites={"post_block": [layers // 2]}, positions="all", tag="t")
            ]
            for number in range(requests)
        ]

    def _steering(self, number: int, layers: int, hidden: int) -> StoredSteering:
        vector = from_numpy(np.full(hidden, 1 + number, dtype=np.float32))
        self._plane.rank_state.put_vectors({content_hash(vector): vector})
        return StoredSteering(
            layers=list(range(layers)),
            hook="post_block",
            positions="all",
            family="add",
            tensors=[content_hash(vector)],
        )

    def life(self) -> list[list[float]]:
        """Seconds of `PARTS` in each step that generates, from the prompts to the end."""
        self._round += 1
        ids = [f"{self._round}.{number}" for number in range(self._requests)]
        # the step of its prompt makes a request's first token
        new = [
            one
            for name, spec in zip(ids, self._specs, strict=True)
            for one in arriving([name], spec, 1 + LIFE)
            if self._kind != "idle"
        ]
        prompts = CAPACITY // PROMPT
        for batch in range(0, len(ids), prompts):
            part = slice(batch, batch + prompts)
            self._stand.parts(new[part], {}, [(one, 0, PROMPT) for one in ids[part]])
        times = [
            self._stand.parts([], {}, [(one, PROMPT + step, 1) for one in ids])
            for step in range(LIFE)
        ]
        tokens = list(range(PROMPT + LIFE + 1))
        self._stand.parts([], {one: Finish(tokens, False) for one in ids}, [])
        return times

    def close(self) -> None:
        self._plane.close()


def compare(trees: list[Path], arguments: list[str], rounds: int) -> None:
    """Print medians of each tree, and of the ratios of the last to the first."""
    sums: list[dict[str, list[float]]] = [{} for _ in trees]
    for _ in range(rounds):
        for tree, of_tree in zip(trees, sums, strict=True):
            printed = subprocess.run(
                [tree / ".venv/bin/python", "host_step.py", *arguments],
                cwd=tree / "benchmarks",
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for result in json.loads(printed.splitlines()[-1])["results"]:
                kind = f"{result['requests']} {result['kind'].replace('plain', 'idle')}"
                of_tree.setdefault(kind, []).append(result["sum"])
    before, now = sums
    for kind, figures in now.items():
        ratio = statistics.median(new / old for new, old in zip(figures, before[kind], strict=True))
        both = [statistics.median(item) for item in (before[kind], figures)]
        print(f"{kind}: {both[0]:.0f} -> {both[1]:.0f} µs, ratio {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    against, rounds = vars(options).pop("against"), vars(options).pop("rounds")
    if against is not None:
        given = [f"--{name}={value}" for name, value in vars(options).items() if name != "requests"]
        given += ["--requests", *map(str, options.requests)]
        compare([against, Path(__file__).resolve().parents[1]], given, rounds)
        return
    torch.set_num_threads(1)
    results = []
    for requests in options.requests:
        with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
            loads = {
                kind: Load(Path(folder, kind), kind, requests, options.layers, options.hidden)
                for kind in KINDS
            }
            times: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
            for _ in range(max(1, options.steps // LIFE)):  # in turns: the machine drifts
                for kind, load in loads.items():
                    times[kind] += load.life()
            for load in loads.values():
                load.close()
        for kind, steps in times.items():
            medians = [statistics.median(part) * 1e6 for part in zip(*steps, strict=True)]
            parts = dict(zip(PARTS, medians, strict=True))
            del parts["forward"]  # without a model it says nothing
            results.append({"requests": requests, "kind": kind, "steps": len(steps)})
            results[-1] |= {part: round(us, 1) for part, us in parts.items()}
            sums = sorted(sum(parts) - parts[PARTS.index("forward")] for parts in steps)
            figures = {"sum": statistics.median(sums), "mean": statistics.fmean(sums)}
            figures |= {"p95": sums[int(0.95 * len(sums))], "max": sums[-1]}
            results[-1] |= {name: round(s * 1e6, 1) for name, s in figures.items()}
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    print(json.dumps({"benchmark": "host_step", **vars(options), "results": results}))


if __name__ == "__main__":
    main()
