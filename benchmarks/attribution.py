"""What do estimates by gradients cost, in forward passes and beside TransformerLens?

    .venv/bin/python benchmarks/attribution.py          # after `make model` and `make lens`
    .venv/bin/python benchmarks/attribution.py --exact 60  # and how close they are to exact cells

All layers and positions of the demo model on an IOI pair, float32. A forward pass is a plain one of
the patched prompt, without gradients, that computes the logits of the last position. The medians of
runs that take turns; TransformerLens runs in its own environment, between two halves of ours.
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

import numpy as np
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from gradient_kit import exact, heads_at, load, sweep
from lens_heads import ANSWER, CLEAN, CORRUPT, FOIL

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
    options = parser.parse_args()
    main(options.runs, options.exact)
