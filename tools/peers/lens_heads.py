"""Records what TransformerLens and a transformers model with hooks say of single heads, and of
paths between them.

    make lens                                                # TransformerLens' own environment
    .cache/lens/bin/python tools/peers/lens_heads.py
        # tests/data/heads.safetensors, which the engine tests are held to

Runs in an environment of its own (`requirements/lens.lock`), as `lens.py` beside it, and imports
nothing of ours. float32.
"""

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lens import MODEL, Lens, Question

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "heads.safetensors"
#: Indirect objects: the name that is not said twice comes next. Both prompts have as many tokens.
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
ANSWER = " Mary"
FOIL = " John"
#: Of the grid by positions, every which layer: TransformerLens takes one forward pass for each
#: cell.
EVERY = 5
#: The sender of the paths whose receivers are the grid.
SENDER = (20, 0)
#: The receivers of the paths whose senders are the grid: (layer, part, head; −1: all).
RECEIVERS: dict[str, list[tuple[int, str, int]]] = {
    "q": [(23, "q", 3), (24, "q", 4), (29, "q", 1)],
    "k": [(23, "k", 1)],
    "v": [(23, "v", 1), (24, "v", 1)],
    "mlp": [(23, "mlp", -1), (29, "mlp", -1)],
    "logits": [],
}
#: Layers of the senders in those grids.
SENDERS = (3, 17, 20, 23)


class Frozen:
    """Path patching by forward hooks on a transformers model, as Wang et al. 2022
    (arXiv:2211.00593, appendix B) have it.

    The first pass runs the patched prompt with the sender's output from the other prompt, and with
    the outputs of all branches that are frozen as they are without a patch; what the receivers
    compute in it is kept. The second pass runs the patched prompt with that in the receivers'
    place. For `logits`, the answer is the first pass' own.
    """

    def __init__(self, model: Any, torch: Any) -> None:
        self.model = model
        self.torch = torch
        self.layers = model.model.layers
        config = model.config
        self.size = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )

    def part(self, layer: int, part: str) -> Any:
        block = self.layers[layer]
        return {
            "q": block.self_attn.q_proj,
            "k": block.self_attn.k_proj,
            "v": block.self_attn.v_proj,
            "attn": block.self_attn.o_proj,
            "mlp": block.mlp,
        }[part]

    def columns(self, head: int) -> slice:
        return slice(None) if head < 0 else slice(head * self.size, (head + 1) * self.size)

    @contextmanager
    def hooked(self, hooks: list[Any]) -> Iterator[None]:
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def kept(self, tokens: list[int]) -> dict[tuple[int, str], Any]:
        """(layer, part) → `[tokens, width]` without a patch; `z`: what enters the output
        projection.
        """
        rows: dict[tuple[int, str], Any] = {}
        hooks = []
        for layer in range(len(self.layers)):
            hooks.append(
                self.part(layer, "attn").register_forward_pre_hook(_keep_input(rows, (layer, "z")))
            )
            hooks += [
                self.part(layer, part).register_forward_hook(_keep(rows, (layer, part)))
                for part in ("q", "k", "v", "attn", "mlp")
            ]
        with self.hooked(hooks):
            self.logits(tokens)
        return rows

    def logits(self, tokens: list[int]) -> Any:
        return self.model(self.torch.tensor([tokens])).logits[0, -1]

    def path(
        self,
        asked: Question,
        sender: tuple[int, int],
        receivers: list[tuple[int, str, int]],
        frozen: tuple[str, ...],
        rows: Any,
    ) -> float:
        """`rows`: of the corrupt and of the clean prompt, as `kept` has them.

        The clean prompt's go into the corrupt one.
        """
        base, source = rows
        layer, head = sender
        seen: dict[tuple[int, str], Any] = {}
        hooks = [
            self.part(at, part).register_forward_hook(_keep(seen, (at, part)))
            for at, part, _ in receivers
        ]
        own = self.columns(head)
        hooks.append(
            self.part(layer, "attn").register_forward_pre_hook(_put_input(source[layer, "z"], own))
        )
        for above in range(layer, len(self.layers)):
            for part in frozen:
                if part == "mlp" or above > layer:
                    hooks.append(
                        self.part(above, part).register_forward_hook(
                            _put(base[above, part], slice(None))
                        )
                    )
        with self.hooked(hooks):
            first = self.logits(asked.corrupt)
        if not receivers:
            return float(first[asked.answer] - first[asked.foil])
        hooks = [
            self.part(at, part).register_forward_hook(_put(seen[at, part], self.columns(of)))
            for at, part, of in receivers
        ]
        with self.hooked(hooks):
            second = self.logits(asked.corrupt)
        return float(second[asked.answer] - second[asked.foil])


def _keep(rows: dict[Any, Any], name: Any) -> Callable[..., None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        rows[name] = output[0].clone()

    return hook


def _keep_input(rows: dict[Any, Any], name: Any) -> Callable[..., None]:
    def hook(module: Any, inputs: Any) -> None:
        rows[name] = inputs[0][0].clone()

    return hook


def _put(rows: Any, columns: slice) -> Callable[..., Any]:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        output = output.clone()
        output[0, :, columns] = rows[:, columns]
        return output

    return hook


def _put_input(rows: Any, columns: slice) -> Callable[..., Any]:
    def hook(module: Any, inputs: Any) -> Any:
        changed = inputs[0].clone()
        changed[0, :, columns] = rows[:, columns]
        return (changed, *inputs[1:])

    return hook


class Setup(NamedTuple):
    lens: Lens
    asked: Question
    cache: Any  # of the clean prompt
    metric: Callable[[Any], Any]


def set_up(model: Path) -> Setup:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    clean, corrupt, (answer,), (foil,) = (
        tokenizer.encode(text).ids for text in (CLEAN, CORRUPT, ANSWER, FOIL)
    )
    assert len(clean) == len(corrupt)
    asked = Question(clean, corrupt, answer, foil, [(place, place) for place in range(len(clean))])
    lens = Lens(model, "float32")
    _, cache = lens.bridge.run_with_cache(lens.torch.tensor([clean]))
    return Setup(lens, asked, cache, lambda logits: logits[0, -1, answer] - logits[0, -1, foil])


def golden(model: Path, file: Path) -> None:
    """float32 grids; what is not a cell is NaN. Metadata: `about`."""
    import pandas as pd
    from safetensors.numpy import save_file
    from transformer_lens import patching

    setup = set_up(model)
    lens = setup.lens
    asked = setup.asked
    corrupt = lens.torch.tensor([asked.corrupt])
    values = {name: lens.baseline(asked, getattr(asked, name)) for name in ("clean", "corrupt")}
    print(f"logit difference: {values}", flush=True)
    heads = lens.bridge.cfg.n_heads
    layers = lens.layers
    grids: dict[str, Any] = {}

    start = time.perf_counter()
    grids["z.all_pos"] = patching.get_act_patch_attn_head_out_all_pos(
        lens.bridge, corrupt, setup.cache, setup.metric
    ).numpy()
    print(f"z.all_pos {time.perf_counter() - start:.1f} s", flush=True)
    cells = [
        (layer, place, head)
        for layer in range(0, layers, EVERY)
        for place in range(len(asked.corrupt))
        for head in range(heads)
    ]
    frame = pd.DataFrame(cells, columns=["layer", "pos", "head"])
    found = patching.generic_activation_patch(
        lens.bridge,
        corrupt,
        setup.cache,
        setup.metric,
        patching.layer_pos_head_vector_patch_setter,
        "z",
        index_df=frame,
    )
    grids["z.by_pos"] = np.array([float(value) for value in found], np.float32).reshape(
        -1, len(asked.corrupt), heads
    )
    print(f"z.by_pos {time.perf_counter() - start:.1f} s", flush=True)
    _, corrupted = lens.bridge.run_with_cache(corrupt)
    grids["direct.q"] = patching.get_act_patch_direct_path(
        lens.bridge,
        corrupt,
        setup.cache,
        corrupted,
        setup.metric,
        *SENDER,
        component="q",
        verbose=False,
    ).numpy()
    grids["direct.q"][: SENDER[0] + 1] = np.nan
    print(f"direct.q {time.perf_counter() - start:.1f} s", flush=True)

    frozen = Frozen(plain(model), lens.torch)
    rows = frozen.kept(asked.corrupt), frozen.kept(asked.clean)
    for name, receivers in RECEIVERS.items():
        for held in (("attn", "mlp"), ("attn",)):
            grid = np.full((len(SENDERS), heads), np.nan, np.float32)
            for place, layer in enumerate(SENDERS):
                above = [
                    receiver
                    for receiver in receivers
                    if receiver[0] > layer or (receiver[0] == layer and receiver[1] == "mlp")
                ]
                if above or not receivers:
                    grid[place] = [
                        frozen.path(asked, (layer, head), above, held, rows)
                        for head in range(heads)
                    ]
            grids[f"{name}.{'+'.join(held)}"] = grid
        print(f"{name} {time.perf_counter() - start:.1f} s", flush=True)
    neurons = np.full((len(SENDERS), 4), np.nan, np.float32)
    for place, layer in enumerate(SENDERS):
        neurons[place] = neuron_cells(frozen, asked, layer)
    grids["neurons"] = neurons
    about = {
        "clean": CLEAN,
        "corrupt": CORRUPT,
        "answer": ANSWER,
        "foil": FOIL,
        "logit_diff": values,
        "sender": SENDER,
        "senders": SENDERS,
        "receivers": RECEIVERS,
        "every": EVERY,
        "neurons": NEURONS,
    }
    packages = {
        name: importlib.metadata.version(name)
        for name in ("transformer-lens", "transformers", "torch")
    }
    save_file(
        {name: np.ascontiguousarray(grid, np.float32) for name, grid in grids.items()},
        str(file),
        {"about": json.dumps(about), "versions": json.dumps(packages), "model": model.name},
    )
    print(f"{file}: {file.stat().st_size} bytes in {time.perf_counter() - start:.1f} s")


#: So many neurons at once: those in which the two prompts differ most, summed over all positions.
NEURONS = (1, 4, 16, 64)


def neuron_cells(frozen: Frozen, asked: Question, layer: int) -> list[float]:
    torch = frozen.torch
    down = frozen.layers[layer].mlp.down_proj
    rows: dict[str, Any] = {}
    for name, tokens in (("clean", asked.clean), ("corrupt", asked.corrupt)):
        with frozen.hooked([down.register_forward_pre_hook(_keep_input(rows, name))]):
            frozen.logits(tokens)
    order = torch.argsort(
        (rows["clean"] - rows["corrupt"]).abs().sum(0), descending=True, stable=True
    )
    found = []
    for count in NEURONS:
        with frozen.hooked(
            [down.register_forward_pre_hook(_put_input(rows["clean"], order[:count]))]
        ):
            logits = frozen.logits(asked.corrupt)
        found.append(float(logits[asked.answer] - logits[asked.foil]))
    return found


def plain(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--file", type=Path, default=GOLDEN)
    options = parser.parse_args()
    golden(options.model, options.file)
