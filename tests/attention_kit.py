"""A capture of queries and keys whose patterns are known: made of bytes, without a service."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from midstream.client import CaptureReader
from midstream.schemas.jobs.captures import FORMAT, Manifest
from midstream.schemas.model.attention import AttentionKind
from midstream.storage.store import make_blob

LAYERS, HEADS, KEY_HEADS, HEAD = 2, 4, 2, 8
#: Two equal halves behind a first token: what follows a token is known in the second.
TOKENS = [9, *[3, 1, 4, 15, 92, 6], *[3, 1, 4, 15, 92, 6]]
KIND = AttentionKind(layers=list(range(LAYERS)), heads=HEADS, head_dim=HEAD, scale=HEAD**-0.5)


def rows(layer: int, heads: int, count: int = len(TOKENS)) -> np.ndarray:
    """float32 `[count, heads * HEAD]`, random."""
    return (
        np.random.default_rng(100 * layer + heads)
        .normal(size=(count, heads * HEAD))
        .astype(np.float32)
    )


def blob(
    kinds: Sequence[AttentionKind] = (KIND,),
    hooks: Sequence[str] = ("q", "k"),
    positions: Sequence[int] | None = None,
    **more: Any,
) -> bytes:
    """A capture file of all layers, with `rows` in it."""
    chosen = range(len(TOKENS)) if positions is None else positions
    sites = {hook: list(range(LAYERS)) for hook in hooks}
    facts: dict[str, Any] = {
        "format": FORMAT,
        "version": "1",
        "job": "job_a",
        "request": 0,
        "attempt": 1,
        "worker": "w",
        "rank": 0,
        "pp": 0,
        "stages": 1,
        "sites": sites,
        "stage_sites": sites,
        "all_sites": sites,
        "at": "after",
        "dtype": "float32",
        "hidden_size": HEADS * HEAD,
        "prompt_tokens": len(TOKENS),
        "positions": list(chosen),
        "token_ids": [TOKENS[place] for place in chosen],
        "num_layers": LAYERS,
        "attention": list(kinds),
    }
    tensors: list[Any] = []
    for hook in hooks:
        for layer in range(LAYERS):
            values = np.ascontiguousarray(
                rows(layer, HEADS if hook == "q" else KEY_HEADS)[list(chosen)]
            )
            tensors.append((f"{hook}.{layer}", "float32", values.shape, [values]))
    for name, values in (("positions", list(chosen)), ("token_ids", facts["token_ids"])):
        tensors.append((name, "int64", [len(values)], [np.array(values, dtype=np.int64)]))
    made = make_blob(Manifest(**(facts | more)), tensors)
    return b"".join(bytes(each) for each in made.buffers)


def reader(*args: Any, **more: Any) -> CaptureReader:
    return CaptureReader.from_bytes(blob(*args, **more))
