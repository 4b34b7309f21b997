"""Tiny models with gradients, sweeps over them, and the exact value of a cell."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.prompts.selectors import Hook
from midstream_lab.gradients.pairs import PairRuns
from midstream_lab.gradients.points import ATTENTION, Points, SiteKey
from midstream_lab.records.sweeps import Column, StoredPair, StoredSweep

PointsOf = Callable[[str], Points]
#: What TransformerLens computed, and how far an own number may be from it, of the largest.
GOLDEN = Path(__file__).parent / "data" / "attribution.safetensors"
LENS = 1e-5
BASE = [20, 21, 22, 63, 24, 25, 26, 77, 28, 29]
SOURCE = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]


def model_info(num_layers: int = 2, hidden_size: int = 8, hooks: Sequence[Hook] = ()) -> ModelInfo:
    """A Llama's description, as a worker publishes it."""
    return ModelInfo(
        name="m",
        version="1",
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=32,
        max_model_len=64,
        dtype="float32",
        hooks=[*hooks],
        tokenizer="",
        identity="i" * 64,
    )


def small_llama(**changes: Any) -> LlamaForCausalLM:
    """A random Llama of 2 layers and 4 heads of 4, without gradients of its weights."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(**fields | changes, attn_implementation=ATTENTION)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Of a tiny model: fields of the pair that TransformerLens was asked about, and its numbers."""
    with safe_open(GOLDEN, "numpy") as file:
        asked = json.loads(file.metadata()["about"])[name]
        found = {
            key.removeprefix(f"{name}."): file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118  # it is no mapping
            if key.startswith(f"{name}.")
        }
    pair = {"base": asked["corrupt"], "source": asked["clean"]}
    pair |= {"answer": [asked["answer"]], "foil": [asked["foil"]]}
    return pair, found | {"names of edges": asked.get("edges", [])}


def no_sae(_sae: object) -> Any:
    raise AssertionError("no scalar names an autoencoder")


def load(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)


def tiny_points(root: Path, name: str, dtype: torch.dtype = torch.float32) -> Points:
    return Points(load(tiny.checkpoint(name, root / name), dtype))


def positions(count: int) -> list[Column]:
    return [Column(label=str(at), places=[(at, at)]) for at in range(count)]


def heads_at(points: Points, hook: Hook, count: int) -> list[Column]:
    """A column for each head at each position."""
    return [
        Column(label="", places=[(at, at)], head=head, dims=columns_of(points, head))
        for head in range(points.heads(hook))
        for at in range(count)
    ]


def columns_of(points: Points, head: int) -> str:
    return f"{head * points.head_size}-{(head + 1) * points.head_size - 1}"


def sweep(
    points: Points, hooks: Sequence[Hook], columns: list[Column] | None = None, **given: Any
) -> StoredSweep:
    """All layers of one pair. `pair`: fields of its `StoredPair`."""
    pair = {"base": BASE, "source": SOURCE, "answer": [100], "foil": [200]} | given.pop("pair", {})
    if given.get("ablation"):
        pair["source"] = []
    fields: dict[str, Any] = {
        "layers": list(range(points.num_layers)),
        "metric": "logit_diff",
        "direction": "denoise",
    }
    return StoredSweep(
        pairs=[StoredPair(columns=columns or positions(len(pair["base"])), **pair)],
        hooks=list(hooks),
        **fields | given,
    )


def exact(points: Points, stored: StoredSweep, site: SiteKey) -> Callable[[int], float]:
    """Column → effect in nats of the patched forward pass itself, at one site."""
    pair = PairRuns(points, stored, 0, sites=[site])
    run = pair.run(grad=False)
    base, differences = pair.replaced(site, run)
    prompt = pair.stored.base
    at = np.array(pair.columns.base)
    parts = pair.columns.parts(differences)

    def effect(column: int) -> float:
        written = base.clone()
        dims = next(part.dims for part in parts if column in part.columns)
        written[:, dims] += differences[:, dims]
        places = pair.columns.member[column].bool().numpy()

        def edit(_: SiteKey, rows: torch.Tensor) -> torch.Tensor:
            edited = rows.clone()
            edited[:, at[places]] = written[places].to(rows.dtype)
            return edited

        batch = points.batch(pair.metric.sequences(prompt))
        patched = points.run(batch, [site], keep=pair.metric.keep(prompt), edit=edit)
        return float(pair.metric.value(patched.logits) - pair.metric.value(run.logits))

    return cache(effect)
