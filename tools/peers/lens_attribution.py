"""Records what TransformerLens' attribution patching estimates.

    make lens                                                # TransformerLens' own environment
    .cache/lens/bin/python tools/peers/lens_attribution.py
        # packages/lab/tests/data/attribution.safetensors, which the unit tests are held to

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

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "packages" / "lab" / "tests" / "data" / "attribution.safetensors"
#: Tiny checkpoints of `tests/engine/tiny.py`.
TINY = ("gpt2", "llama", "gpt-neox")
#: TransformerLens scores edges only where keys have as many heads as queries.
EDGES = ("gpt2", "gpt-neox")
#: Of the tiny checkpoints, whose vocabulary is made of numbers.
TINY_CLEAN = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31]
TINY_CORRUPT = [20, 21, 22, 63, 24, 25, 26, 77, 28, 29, 30, 31]
TINY_ANSWER = 100
TINY_FOIL = 200
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
        self.lens = lens
        torch = lens.torch
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
    """As `kind.layer.head`, in the words of `workers.gradients.attribution`."""
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, default=GOLDEN)
    golden(parser.parse_args().file)
