"""Records what TransformerLens, without weight processing, says of one prompt, for the facade
`midstream.lens` to be compared with.

    make lens                                            # TransformerLens' own environment
    .cache/lens/bin/python tools/peers/lens_facade.py           # tests/data/hooked.safetensors
    .cache/lens/bin/python tools/peers/lens_facade.py FILE
        # every activation of every layer, for packages/bridges/tests/long/test_equivalents.py

Runs in an environment of its own (`requirements/lens.lock`), as `lens.py` beside it, and imports
nothing of ours. float32. Hooks are Python functions; the facade is given the op that does the same.
"""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lens import MODEL, Lens

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "hooked.safetensors"
PROMPT = "The Eiffel Tower is located in the city of"
OTHER = "The Colosseum is located in the city of"
#: Layers of which whole activations are kept.
LAYERS = (0, 17)
NAMES = (
    "hook_resid_pre",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "attn.hook_pattern",
    "attn.hook_z",
    "hook_attn_out",
    "hook_resid_mid",
    "mlp.hook_post",
    "hook_mlp_out",
    "hook_resid_post",
)
#: Layers that runs stop at: `stop_at_layer`.
STOPS = (0, 17, -12)
#: Tokens whose log-probabilities are kept, at every position.
TOKENS = (" Paris", " Rome", " the", ".", " London")


def edits(
    torch: Any, direction: Any, other: Any
) -> dict[str, list[tuple[str, Callable[..., Any]]]]:
    """Name → the hooks of one run.

    `direction`: `[d_model]`; `other`: the cache of the other prompt.
    """
    unit = direction / direction.norm()

    def add(row: Any, hook: Any) -> Any:
        row[:, -1] += 0.5 * direction
        return row

    def ablate(row: Any, hook: Any) -> Any:
        return row - (row @ unit)[..., None] * unit

    def clamp(row: Any, hook: Any) -> Any:
        along = row @ unit
        return row + (along.clamp(-1.0, 1.0) - along)[..., None] * unit

    def zero_heads(z: Any, hook: Any) -> Any:
        z[:, :, [1, 4]] = 0
        return z

    def zero(row: Any, hook: Any) -> Any:
        return torch.zeros_like(row)

    def patch(row: Any, hook: Any) -> Any:
        row[:, 2:5] = other[hook.name][:, 2:5]
        return row

    def identity(pattern: Any, hook: Any) -> Any:
        pattern[:, 3] = torch.eye(pattern.shape[-1])
        return pattern

    return {
        "add": [("blocks.10.hook_resid_post", add)],
        "ablate": [(f"blocks.{layer}.hook_resid_post", ablate) for layer in range(10, 20)],
        "clamp": [("blocks.12.hook_resid_post", clamp)],
        "zero_heads": [("blocks.20.attn.hook_z", zero_heads)],
        "zero_attn": [("blocks.23.hook_attn_out", zero)],
        "zero_mlp": [("blocks.5.mlp.hook_post", zero)],
        "patch": [("blocks.8.hook_resid_pre", patch)],
        "pattern": [("blocks.17.attn.hook_pattern", identity)],
        "two": [("blocks.10.hook_resid_post", add), ("blocks.23.hook_attn_out", zero)],
    }


def main() -> None:
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer  # the bridge's own puts a token before each text

    lens = Lens(MODEL, "float32")
    torch = lens.torch
    bridge = lens.bridge
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in (PROMPT, OTHER)]
    assert len(ids[0]) == len(ids[1]), ids
    tokens = [tokenizer.encode(text).ids[0] for text in TOKENS]
    logits, cache = bridge.run_with_cache(torch.tensor([ids[0]]))
    _, other = bridge.run_with_cache(torch.tensor([ids[1]]))
    layers = range(lens.layers) if sys.argv[1:] else LAYERS
    kept = {
        f"blocks.{layer}.{name}": cache[f"blocks.{layer}.{name}"]
        for layer in layers
        for name in NAMES
    }
    logprobs = logits.float().log_softmax(-1)
    kept["logprobs"] = logprobs[0][:, tokens]
    kept["top"] = logprobs[0].topk(5).indices
    kept["loss"] = -logprobs[0, :-1].gather(-1, torch.tensor(ids[0][1:])[:, None])[:, 0]
    labels = {}
    for name, options in (("accumulated_resid", {"incl_mid": True}), ("decompose_resid", {})):
        stack, labels[name] = getattr(cache, name)(return_labels=True, **options)
        kept[name] = stack[:, :, -1]
    stopped: dict[int, list[int]] = {}  # layer that a run stops at → layers in its cache
    direction = torch.from_numpy(
        np.random.default_rng(0).standard_normal(cache["resid_pre", 0].shape[-1]).astype(np.float32)
    )
    kept["direction"] = direction
    for name, hooks in edits(torch, direction, other).items():
        edited = bridge.run_with_hooks(torch.tensor([ids[0]]), fwd_hooks=hooks)
        kept[f"edited.{name}"] = edited.float().log_softmax(-1)[0][:, tokens]
    for stop in STOPS:
        stream, below = bridge.run_with_cache(torch.tensor([ids[0]]), stop_at_layer=stop)
        kept[f"stopped.{stop}"] = stream
        stopped[stop] = sorted({int(name.split(".")[1]) for name in below if "blocks." in name})
    packages = {
        name: importlib.metadata.version(name)
        for name in ("transformer-lens", "transformers", "torch")
    }
    about = {
        "prompt": PROMPT,
        "other": OTHER,
        "ids": json.dumps(ids),
        "tokens": json.dumps(tokens),
        "labels": json.dumps(labels),
        "stopped": json.dumps(stopped),
    }
    arrays = {name: np.ascontiguousarray(values.detach().numpy()) for name, values in kept.items()}
    path = Path(sys.argv[1]) if sys.argv[1:] else GOLDEN
    save_file(arrays, str(path), about | {"versions": json.dumps(packages), "model": MODEL.name})
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
