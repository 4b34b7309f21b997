"""Records what TransformerLens says a patched grid is, and makes some for a benchmark.

    make lens # its environment in .cache/lens, then the reference's file
    .cache/lens/bin/python tools/peers/lens.py golden
        # tests/data/patching.safetensors, which the engine tests are held to
    .cache/lens/bin/python tools/peers/lens.py serve  # JSON lines, driven by benchmarks/patching.py

Runs in an environment of its own (`requirements/lens.lock`) and so imports nothing of ours: the
model comes from its folder, and each cell is the logit difference after one row of the corrupt
prompt's forward pass was replaced by the clean prompt's (`TransformerBridge`, hooks by
TransformerLens' names).

The rows are written in place, as `transformer_lens.patching` does: `hook_resid_mid` of the bridge
is the input of the MLP's norm, so a copy returned by the hook would reach the MLP and not the
stream beside it.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MODEL = Path.home() / ".cache" / "midstream" / "models" / "SmolLM2-135M-Instruct"
GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "patching.safetensors"
HOOKS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
#: Cells in one batched forward when the golden file is made.
GOLDEN_BATCH = 12


class Pair(NamedTuple):
    """`places`: (clean, corrupt) positions that belong together; None: all, one to one."""

    clean: str
    corrupt: str
    answer: str
    foil: str
    places: list[tuple[int, int]] | None = None


#: Facts that the model knows: the answer is more likely than the foil after `clean`, and less
#: likely after `corrupt`.
PAIRS = (
    Pair(
        "The Eiffel Tower is located in the city of",
        "The Colosseum is located in the city of",
        " Paris",
        " Rome",
    ),
    Pair(
        "Machu Picchu is located in the country of",
        "The Taj Mahal is located in the country of",
        " Peru",
        " India",
    ),
    # 11 tokens and 9: the last token of one name stands for the last of the other, and one token of
    # the corrupt prompt stays as it is.
    Pair(
        "The Great Pyramid of Giza is located in the country of",
        "The Taj Mahal is located in the country of",
        " Egypt",
        " India",
        [(0, 0), (4, 2), (5, 3), (6, 4), (7, 5), (8, 6), (9, 7), (10, 8)],
    ),
)


class Question(NamedTuple):
    """A pair in token ids."""

    clean: list[int]
    corrupt: list[int]
    answer: int
    foil: int
    places: list[tuple[int, int]]


def questions(model: Path) -> list[Question]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = []
    for pair in PAIRS:
        clean, corrupt, (answer,), (foil,) = (tokenizer.encode(text).ids for text in pair[:4])
        places = pair.places or [(place, place) for place in range(len(corrupt))]
        assert pair.places or len(clean) == len(corrupt), pair
        found.append(Question(clean, corrupt, answer, foil, places))
    return found


class Lens:
    """A bridge on one checkpoint."""

    def __init__(self, model: Path, dtype: str) -> None:
        import torch
        from transformer_lens.model_bridge import TransformerBridge
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_grad_enabled(False)
        self.torch = torch
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        self.bridge: Any = TransformerBridge.boot_transformers(
            str(model),
            hf_model=loaded,
            tokenizer=AutoTokenizer.from_pretrained(model),
            device="cpu",
            dtype=getattr(torch, dtype),
        )
        self.layers = int(loaded.config.num_hidden_layers)

    def cache(self, asked: Question, hook: str) -> Any:
        """The clean prompt's rows at `hook` of every layer."""
        wanted = {name_of(hook, layer) for layer in range(self.layers)}
        _, cache = self.bridge.run_with_cache(
            self.torch.tensor([asked.clean]), names_filter=lambda name: name in wanted
        )
        return cache

    def baseline(self, asked: Question, tokens: list[int]) -> float:
        return float(self._differences(self.bridge(self.torch.tensor([tokens])), asked)[0])

    def _differences(self, logits: Any, asked: Question) -> Any:
        return (logits[:, -1, asked.answer] - logits[:, -1, asked.foil]).float()

    def batched(
        self, asked: Question, hook: str, cells: list[tuple[int, int]], batch: int
    ) -> Iterator[float]:
        """The value of each cell (layer, index in `places`), `batch` of them in a forward pass."""
        cache = self.cache(asked, hook)
        for start in range(0, len(cells), batch):
            part = cells[start : start + batch]
            of_layer: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
            for row, (layer, place) in enumerate(part):
                clean, corrupt = asked.places[place]
                of_layer[layer].append((row, corrupt, clean))
            hooks = [
                (name_of(hook, layer), patch(cache[name_of(hook, layer)], rows))
                for layer, rows in of_layer.items()
            ]
            tokens = self.torch.tensor([asked.corrupt]).repeat(len(part), 1)
            yield from self._differences(
                self.bridge.run_with_hooks(tokens, fwd_hooks=hooks), asked
            ).tolist()


def name_of(hook: str, layer: int) -> str:
    return f"blocks.{layer}.hook_{hook}"


def patch(clean: Any, rows: list[tuple[int, int, int]]) -> Callable[..., Any]:
    """Write, in each row of the batch, the clean prompt's row.

    `rows`: (row, its position, the clean prompt's position).
    """
    which, where, from_where = (list(numbers) for numbers in zip(*rows, strict=True))

    def hook(activation: Any, hook: Any) -> Any:
        activation[which, where] = clean[0, from_where]
        return activation

    return hook


def check_stream(lens: Lens, asked: Question) -> None:
    """`resid_mid` must be the stream: an edit of it shows in the block's output also where the MLP
    adds nothing of it.
    """
    seen: dict[str, Any] = {}

    def keep(activation: Any, hook: Any, name: str) -> Any:
        seen[name] = activation.clone()
        return activation

    cache = lens.cache(asked, "resid_mid")
    clean, corrupt = asked.places[-1]
    hooks = [
        (name_of("resid_mid", 0), patch(cache[name_of("resid_mid", 0)], [(0, corrupt, clean)])),
        (name_of("mlp_out", 0), partial(keep, name="mlp")),
        (name_of("resid_post", 0), partial(keep, name="post")),
    ]
    lens.bridge.run_with_hooks(lens.torch.tensor([asked.corrupt]), fwd_hooks=hooks)
    wanted = cache[name_of("resid_mid", 0)][0, clean] + seen["mlp"][0, corrupt]
    assert lens.torch.allclose(seen["post"][0, corrupt], wanted, atol=1e-5), (
        "the stream went on without the edit"
    )


def golden(model: Path, file: Path) -> None:
    """`<pair>.<hook>`: float32 `[layers, corrupt positions]`, NaN where nothing corresponds; the
    rest is in the file's metadata.
    """
    import importlib.metadata

    import numpy as np
    from safetensors.numpy import save_file

    lens = Lens(model, "float32")
    grids: dict[str, Any] = {}
    about = []
    for number, (pair, asked) in enumerate(zip(PAIRS, questions(model), strict=True)):
        check_stream(lens, asked)
        clean = lens.baseline(asked, asked.clean)
        corrupt = lens.baseline(asked, asked.corrupt)
        assert clean > 0 > corrupt, (pair, clean, corrupt)
        about.append(
            pair._asdict()
            | {"tokens": asked._asdict(), "logit_diff": {"clean": clean, "corrupt": corrupt}}
        )
        cells = [
            (layer, place) for layer in range(lens.layers) for place in range(len(asked.places))
        ]
        for hook in HOOKS:
            start = time.perf_counter()
            grid = np.full((lens.layers, len(asked.corrupt)), np.nan, dtype=np.float32)
            for (layer, place), value in zip(
                cells, lens.batched(asked, hook, cells, GOLDEN_BATCH), strict=True
            ):
                grid[layer, asked.places[place][1]] = value
            grids[f"{number}.{hook}"] = grid
            print(
                f"{pair.clean!r} {hook}: {len(cells)} cells in {time.perf_counter() - start:.1f} s",
                flush=True,
            )
    packages = {
        name: importlib.metadata.version(name)
        for name in ("transformer-lens", "transformers", "torch")
    }
    file.parent.mkdir(exist_ok=True)
    save_file(
        grids,
        str(file),
        {"pairs": json.dumps(about), "versions": json.dumps(packages), "model": model.name},
    )
    print(f"{file}: {file.stat().st_size} bytes")


def serve(model: Path) -> None:
    """Answer `{"dtype", "hook", "layers": [numbers], "batch", "clean", "corrupt",
    "answer", "foil", "places"}` with `{"seconds", "values"}`; the clean run is part of the time,
    loading the model is not.
    """
    lenses: dict[str, Lens] = {}
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        question = Question(*(asked[name] for name in Question._fields))
        if asked["dtype"] not in lenses:
            lenses[asked["dtype"]] = Lens(model, asked["dtype"])
        lens = lenses[asked["dtype"]]
        cells = [
            (layer, place) for layer in asked["layers"] for place in range(len(question.places))
        ]
        start = time.perf_counter()
        values = list(lens.batched(question, asked["hook"], cells, asked["batch"]))
        _answers.write(
            json.dumps({"seconds": time.perf_counter() - start, "values": values}).encode() + b"\n"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["golden", "serve"])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--file", type=Path, default=GOLDEN)
    options = parser.parse_args()
    if options.what == "golden":
        golden(options.model, options.file)
    else:
        _answers = os.fdopen(os.dup(1), "wb", buffering=0)  # the libraries print to stdout
        os.dup2(2, 1)
        serve(options.model)
