"""What do estimates by gradients cost, in forward passes and beside TransformerLens?

    .venv/bin/python benchmarks/attribution.py          # after `make model` and `make lens`
    .venv/bin/python benchmarks/attribution.py --exact 60  # and how close they are to exact cells
    .venv/bin/python benchmarks/attribution.py --served 5
        # instead: jobs of a service, beside sweeps of the same grid on vLLM

All layers and positions of the demo model on an IOI pair, float32. A forward pass is a plain one of
the patched prompt, without gradients, that computes the logits of the last position. The medians of
runs that take turns; TransformerLens runs in its own environment, between two halves of ours.

`--served`: in each round, one after the other: a sweep of all cells of `pre_attn` (`resid_pre`), an
attribution of the same grid, one that also computes the 50 largest estimates exactly, and
TransformerLens' attribution patching of the same prompts, whose model is loaded already. Jobs are
timed from the request until they have ended.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

import httpx2
from gradient_kit import exact, heads_at, load, sweep
from lens_heads import ANSWER, CLEAN, CORRUPT, FOIL
from patching import LAYERS, Pair, pair_of as served_pair, stack, sweep as whole_sweep

from lens import MODEL
from midstream.schemas.jobs.sweeps import StoredSweep
from midstream.workers.gradients.attribution import Options, estimate_pair
from midstream.workers.gradients.edges import edge_scores
from midstream.workers.gradients.points import Points

#: IOI with a first sentence, as long as many published pairs are.
CONTEXT = (
    "It was a warm afternoon and the whole family had come together to cook dinner, to talk, and "
    "to plan a trip. "
)
LENS = Path(__file__).resolve().parents[1] / ".cache" / "lens" / "bin" / "python"


def pair_of(context: str) -> dict[str, list[int]]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    texts = {
        "base": context + CORRUPT, "source": context + CLEAN, "answer": ANSWER, "foil": FOIL
    }  # fmt: skip
    return {name: tokenizer.encode(text).ids for name, text in texts.items()}


def in_turn(calls: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Median seconds of each call; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def lens_seconds(runs: int) -> dict[str, tuple[float, int]]:
    """Hooks → (median seconds, cells)."""
    script = Path(__file__).with_name("lens_attribution.py")
    command = [str(LENS), str(script), "time", "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        name: (
            statistics.median(line["seconds"] for line in lines if line["hooks"] == name),
            next(line["cells"] for line in lines if line["hooks"] == name),
        )
        for name in ("post_block", "all")
    }


def ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values))


def accuracy(points: Points, stored: StoredSweep, count: int) -> None:
    """Compare estimates with the exact values of the largest cells and of random ones."""
    found = estimate_pair(points, stored, 0, Options(doubts=True))
    grid = found.effects["post_block"]
    order = np.argsort(-np.abs(grid).ravel())
    others = np.random.default_rng(0).permutation(order[count // 2 :])[: count // 2]
    chosen = np.concatenate([order[: count // 2], others])
    layers = {number // grid.shape[1] for number in chosen}
    cells = {layer: exact(points, stored, ("post_block", layer)) for layer in layers}
    wanted = np.array([cells[at // grid.shape[1]](at % grid.shape[1]) for at in chosen])
    given, doubts = (values.ravel()[chosen] for values in (grid, found.doubts["post_block"]))
    errors = np.abs(given - wanted)
    print(
        f"{count} cells: Spearman {np.corrcoef(ranks(given), ranks(wanted))[0, 1]:.3f}, largest "
        f"error {errors.max():.2f} of {np.abs(wanted).max():.2f} nats, Spearman of doubts and "
        f"errors {np.corrcoef(ranks(doubts), ranks(errors))[0, 1]:.3f}"
    )


#: Cells that the verified attribution computes exactly.
TOP = 50


class Lens:
    """TransformerLens' attribution patching in a process that has the model loaded."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("lens_attribution.py")
        self._process = subprocess.Popen(
            [str(LENS), str(script), "serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def run(self, pair: Pair) -> tuple[float, np.ndarray]:
        """Return the seconds, and the estimates `[layers, positions]`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(pair._asdict() | {"hook": "pre_attn"}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["seconds"], np.array(answer["values"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def attribution(
    http: httpx2.Client, model: str, pair: Pair, verify: dict[str, int] | None
) -> tuple[float, dict[str, Any]]:
    """Return the seconds from the request until the job has ended, and the pair's result."""
    asked = pair._asdict() | {"answer": [pair.answer], "foil": [pair.foil]}
    body = {"model": model, "pairs": [asked], "hooks": ["resid_pre"], "metric": "logit_diff"}
    start = time.perf_counter()
    answer = http.post("/v1/attributions", json=body | {"verify": verify}).raise_for_status()
    path = f"/v1/jobs/{answer.json()['id']}"
    while (state := http.get(path, params={"wait": 30}).json()["state"]) in ("queued", "running"):
        pass
    seconds = time.perf_counter() - start
    assert state == "succeeded", state
    found = http.get(f"{path}/result").raise_for_status().json()["attribution"]["estimated"][0]
    return seconds, found


def ready(http: httpx2.Client, model: str, pair: Pair) -> None:
    """Wait for the model's gradient worker, which begins to serve after the vLLM worker."""
    while True:
        try:
            attribution(http, model, pair, None)
        except httpx2.HTTPStatusError as error:
            if "no gradient worker" not in error.response.text:
                raise
            time.sleep(2)
        else:
            return


def served(rounds: int, length: int) -> None:
    """Print seconds of each kind in each round, medians, ratios to the sweep and differences."""
    pair, lens = served_pair(length), Lens()
    cells = LAYERS * length
    checks = {"estimates": None, f"top {TOP} exact": {"top": TOP, "random": 0, "doubtful": 0}}
    seconds: dict[str, list[float]] = {name: [] for name in ("sweep", *checks, "TransformerLens")}
    apart = 0.0
    with stack("float32", True, False, gradients=True) as (http, model):
        ready(http, model, pair)
        for number in range(rounds + 1):  # the first is a warm-up
            took = {"sweep": whole_sweep(http, model, pair).seconds}
            for name, verify in checks.items():
                took[name], found = attribution(http, model, pair, verify)
            took["TransformerLens"], theirs = lens.run(pair)
            ours = np.array(found["estimates"]["pre_attn"], dtype=float)
            apart = max(apart, float(np.abs(ours - found["base"] - theirs).max()))
            line = "  ".join(f"{name} {value:.2f} s" for name, value in took.items())
            print(f"round {number}: {line}; load {os.getloadavg()[0]:.1f}", flush=True)
            for name, value in took.items() if number else ():
                seconds[name].append(value)
    lens.close()
    for name, values in seconds.items():
        rates = ", ".join(f"{cells / value:,.0f}" for value in values)
        print(f"{name}: median {statistics.median(values):.2f} s; cells/s {rates}")
        for other in ("sweep", "TransformerLens"):
            ratios = [theirs / own for theirs, own in zip(seconds[other], values, strict=True)]
            print(
                f"  {statistics.median(ratios):.2f} times as fast as {other} "
                f"({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
            )
    print(f"{cells} cells; largest difference of our estimates to TransformerLens': {apart:.2g}")


def main(runs: int, count: int) -> None:
    points = Points(load(MODEL, torch.float32))
    for context in (CONTEXT, ""):
        pair = pair_of(context)
        batch = points.batch([pair["base"]])
        stream = sweep(points, ["post_block"], pair=pair)
        many = sweep(points, ["pre_attn", "attn_out", "mlp_out", "post_block"], pair=pair)
        heads = sweep(points, ["z"], heads_at(points, "z", len(pair["base"])), pair=pair)
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda batch=batch: points.run(batch),
            "post_block": lambda stored=stream: estimate_pair(points, stored, 0),
            "post_block, doubts": lambda stored=stream: estimate_pair(
                points, stored, 0, Options(doubts=True)
            ),
            "four hooks": lambda stored=many: estimate_pair(points, stored, 0),
            "heads": lambda stored=heads: estimate_pair(points, stored, 0),
            "edges": lambda stored=stream: edge_scores(points, stored, 0),
        }
        seconds = in_turn(calls, runs)
        print(f"{len(pair['base'])} positions, a forward pass takes {seconds['forward']:.3f} s")
        cells = {name: points.num_layers * len(pair["base"]) for name in calls}
        cells["four hooks"] *= 4
        cells["heads"] *= points.heads("z")
        for name, value in seconds.items():
            if name != "forward":
                shown = f", {cells[name] / value:,.0f} cells/s" if name != "edges" else ""
                print(f"  {name}: {value:.3f} s, {value / seconds['forward']:.2f} forwards{shown}")
        if count:
            accuracy(points, stream, count)
    for name, (value, number) in lens_seconds(runs).items():
        print(f"TransformerLens, {name}: {value:.3f} s, {number / value:,.0f} cells/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--exact", type=int, default=0, help="cells to compute exactly")
    parser.add_argument("--served", type=int, default=0, help="rounds of jobs of a service")
    parser.add_argument("--length", type=int, default=23, choices=[23, 100], help="prompt tokens")
    options = parser.parse_args()
    if options.served:
        served(options.served, options.length)
    else:
        main(options.runs, options.exact)
