"""What does TransformerLens' attribution patching estimate, and how fast?

    make lens                                                # TransformerLens' own environment
    .cache/lens/bin/python benchmarks/lens_attribution.py golden
        # tests/data/attribution.safetensors, which the unit tests are held to
    .cache/lens/bin/python benchmarks/lens_attribution.py time
        # seconds of its estimates, for benchmarks/attribution.py
    .cache/lens/bin/python benchmarks/lens_attribution.py serve
        # JSON lines: a pair in, seconds and estimates out, for the same

Runs in an environment of its own (`requirements/lens.lock`), as `lens.py` beside it, and imports
nothing of the product; the tiny checkpoints are those of the tests. float32.
"""

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from lens_heads import ANSWER, CLEAN, CORRUPT, FOIL

from lens import MODEL, Lens

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "data" / "attribution.safetensors"
#: Tiny checkpoints of `tests/engine/tiny.py`.
TINY = ("gpt2", "llama", "gpt-neox")
#: TransformerLens scores edges only where keys have as many heads as queries.
EDGES = ("gpt2", "gpt-neox")
#: Of the tiny checkpoints, whose vocabulary is made of numbers.
TINY_CLEAN = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31]
TINY_CORRUPT = [20, 21, 22, 63, 24, 25, 26, 77, 28, 29, 30, 31]
TINY_ANSWER, TINY_FOIL = 100, 200
HOOKS = {
    "pre_attn": "hook_resid_pre",
    "post_block": "hook_resid_post",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "z": "attn.hook_z",
}


def asked_of(name: str) -> dict[str, Any]:
    """A pair in token ids."""
    if name != "demo":
        return {
            "clean": TINY_CLEAN, "corrupt": TINY_CORRUPT, "answer": TINY_ANSWER, "foil": TINY_FOIL
        }  # fmt: skip
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    clean, corrupt, (answer,), (foil,) = (
        tokenizer.encode(text).ids for text in (CLEAN, CORRUPT, ANSWER, FOIL)
    )
    return {"clean": clean, "corrupt": corrupt, "answer": answer, "foil": foil}


class Attribution:
    """TransformerLens' attribution patching of one pair: clean rows into the corrupt prompt."""

    def __init__(self, lens: Lens, asked: dict[str, Any]) -> None:
        self.lens, torch = lens, lens.torch
        torch.set_grad_enabled(True)
        self.clean, self.corrupt = (torch.tensor([asked[of]]) for of in ("clean", "corrupt"))
        self.metric = lambda logits: logits[0, -1, asked["answer"]] - logits[0, -1, asked["foil"]]

    def grids(self, hooks: dict[str, str]) -> dict[str, np.ndarray]:
        """Hook → `[layers, positions]`; of `z` `[layers, heads, positions]`."""
        from transformer_lens.tools.analysis import attribution_patching as ap

        names = [
            f"blocks.{layer}.{name}" for layer in range(self.lens.layers) for name in hooks.values()
        ]
        clean = ap.cache_activation_and_gradient(
            self.lens.bridge, self.clean, self.metric, names, compute_gradient=False
        )
        corrupt = ap.cache_activation_and_gradient(
            self.lens.bridge, self.corrupt, self.metric, names
        )
        grids = {}
        for hook, name in hooks.items():
            layers = []
            for layer in range(self.lens.layers):
                full = f"blocks.{layer}.{name}"
                difference = clean.activations[full] - corrupt.activations[full]
                slope = corrupt.gradients[full]
                assert slope is not None, full
                layers.append((difference * slope)[0].sum(-1).T.detach().numpy())
            grids[hook] = np.stack(layers)
        return grids

    def edges(self) -> dict[str, float]:
        """`sender>receiver` → score, summed over positions."""
        from transformer_lens.tools.analysis import attribution_patching as ap

        result = ap.attribution_patch(
            self.lens.bridge,
            self.clean,
            self.corrupt,
            self.metric,
            ap.EdgeAttributionConfig(granularity="edge"),
        )
        total: dict[str, float] = defaultdict(float)
        for (writer, reader), score in result.edge_scores.items():
            total[f"{label(writer)}>{label(reader)}"] += score
        return dict(total)


def label(node: Any) -> str:
    """As `kind.layer.head`, in the words of `workers.gradients.edges`."""
    kinds = {"attn_head_out": "head", "mlp_out": "mlp", "mlp_in": "mlp"}
    kind = kinds.get(node.kind, node.kind.removesuffix("_input"))
    return ".".join(str(part) for part in (kind, node.layer, node.head) if part is not None)


def folder_of(name: str, root: Path) -> Path:
    if name == "demo":
        return MODEL
    sys.path.append(str(ROOT / "tests" / "engine"))
    import tiny

    return tiny.checkpoint(name, root / name)


def golden(file: Path) -> None:
    """`<checkpoint>.<hook>`: float32, as `Attribution.grids`; `<checkpoint>.edges`: in the order of
    their names, which are in the file's metadata.
    """
    from safetensors.numpy import save_file

    grids: dict[str, Any] = {}
    about: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        for name in ("demo", *TINY):
            asked = asked_of(name)
            start = time.perf_counter()
            found = Attribution(Lens(folder_of(name, Path(root)), "float32"), asked)
            for hook, grid in found.grids(HOOKS).items():
                grids[f"{name}.{hook}"] = grid
            about[name] = asked
            if name in EDGES:
                edges = found.edges()
                about[name]["edges"] = list(edges)
                grids[f"{name}.edges"] = np.array(list(edges.values()))
            print(f"{name} {time.perf_counter() - start:.1f} s", flush=True)
    packages = {
        name: importlib.metadata.version(name)
        for name in ("transformer-lens", "transformers", "torch")
    }
    save_file(
        {name: np.ascontiguousarray(grid, np.float32) for name, grid in grids.items()},
        str(file),
        {"about": json.dumps(about), "versions": json.dumps(packages)},
    )
    print(f"{file}: {file.stat().st_size} bytes")


def timed(runs: int) -> None:
    """JSON lines: seconds of the estimates at `post_block` and of all hooks; loading the model is
    not part of them. The first run is a warm-up.
    """
    found = Attribution(Lens(MODEL, "float32"), asked_of("demo"))
    for number in range(runs + 1):
        for name, hooks in (("post_block", {"post_block": HOOKS["post_block"]}), ("all", HOOKS)):
            start = time.perf_counter()
            cells = sum(grid.size for grid in found.grids(hooks).values())
            if number:
                line = {"hooks": name, "seconds": time.perf_counter() - start, "cells": cells}
                print(json.dumps(line), flush=True)


def serve() -> None:
    """Answer each JSON line, a pair and its `hook`, with seconds and `[layers, positions]`."""
    lens = Lens(MODEL, "float32")
    for line in sys.stdin:
        asked = json.loads(line)
        found = Attribution(lens, asked)
        start = time.perf_counter()
        grid = found.grids({asked["hook"]: HOOKS[asked["hook"]]})[asked["hook"]]
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "values": grid.tolist()}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["golden", "time", "serve"])
    parser.add_argument("--file", type=Path, default=GOLDEN)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.what == "golden":
        golden(options.file)
    elif options.what == "serve":
        serve()
    else:
        timed(options.runs)
