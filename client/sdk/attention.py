"""Jobs that compute attention patterns from captured queries and keys, and that patch them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...schemas.base.errors import invalid
from ...schemas.base.tensors import from_numpy
from ...schemas.prompts.selectors import LayerSelector
from ...schemas.requests.specs import PatchSource, PatchSpec
from ..captures.attention import mixed
from ..captures.reader import CaptureReader


def capture_fields(
    prompt: str | Sequence[int], layers: LayerSelector, fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a job that captures a prompt's queries and keys as attention uses them,
    after any edits.

    `fields`: the job's other fields, such as `model` and `steering`.
    """
    return {
        "sampling": {"max_tokens": 0},
        **fields,
        "prompts": _only(prompt),
        "capture": _at_the_prompt({"q": layers, "k": layers}),
    }


def _only(prompt: str | Sequence[int]) -> list[Any]:
    """Return the prompts of a job with one."""
    return [prompt if isinstance(prompt, str) else list(prompt)]


def _at_the_prompt(hooks: Mapping[str, LayerSelector]) -> dict[str, Any]:
    return {"hooks": hooks, "positions": "all_prompt", "at": "after"}


def _listed(given: Any) -> list[Any]:
    """Return the items of a field that may hold one in place of a list."""
    return list(given) if isinstance(given, list | tuple) else [given]


#: Fields of the final job that its helper jobs share, because they affect the values or how the job
#: is handled. Other fields, such as webhooks, apply to the final job alone.
_SHARED = frozenset(
    {"model", "lora", "steering", "patch", "priority", "expires_in", "progress", "timeout"}
)
#: (layer, head) → `[query, key]`.
Patterns = Mapping[tuple[int, int], np.ndarray]


def by_layer(patterns: Patterns, fields: Mapping[str, Any]) -> dict[int, Patterns]:
    """Return the patterns of each layer, lowest layer first.

    Raises MidstreamError for no layers or a negative layer, and for probes that may edit values.
    """
    layers = sorted({layer for layer, _ in patterns})
    if not layers or layers[0] < 0:
        raise invalid(
            "patterns",
            f"names layers {layers}",
            allowed="heads of one or more layers, counted from 0",
        )
    for probe in _listed(fields.get("probes") or []):
        if (
            probe.get("action") if isinstance(probe, Mapping) else getattr(probe, "action", None)
        ) == "steer":
            raise invalid(
                "probes",
                "a probe that steers by its scores may edit the values",
                allowed="other actions of probes",
            )
    return {
        layer: {place: pattern for place, pattern in patterns.items() if place[0] == layer}
        for layer in layers
    }


def values_fields(
    prompt: str | Sequence[int], layer: int, patches: list[PatchSpec], fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a job that captures, at one layer, the rows that `attention_patches`
    needs, with `patches` applied to the layers below.
    """
    # One request for each layer: A′·v in the forward pass would need the values of all tokens at a
    # site where a step (of chunks, cached prefixes, drafts) may hold only some.
    same = {name: value for name, value in fields.items() if name in _SHARED}
    return {
        **patched_fields(prompt, patches, same),
        "sampling": {"max_tokens": 0},
        "capture": _at_the_prompt({"q": [layer], "v": [layer]}),
    }


def attention_patches(reader: CaptureReader, patterns: Patterns) -> list[PatchSpec]:
    """Return one patch of `z` per token of the prompt, z ← A′·v: the output that the heads in
    `patterns` have if their attention is A′, the given pattern.

    `patterns`: those of one layer. `reader`: a capture of `q` and `v` of that layer at all
    positions of the prompt. Raises what `mixed` raises.
    """
    (layer, _), *_ = patterns
    heads = {head: pattern for (_, head), pattern in patterns.items()}
    kind = reader.attention_kind(layer)
    rows = mixed(reader.array(layer, "v"), heads, kind)
    mask = ",".join(
        f"{head * kind.head_dim}-{(head + 1) * kind.head_dim - 1}" for head in sorted(heads)
    )
    return [
        PatchSpec(
            layers=layer,
            positions=[position],
            hook="z",
            source=PatchSource(vector=from_numpy(row)),
            mask=mask,
        )
        for position, row in zip(reader.positions(), rows, strict=True)
    ]


def patched_fields(
    prompt: str | Sequence[int], patches: list[PatchSpec], fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the job's fields with `patches` appended to its own patches."""
    patched = {"patch": [*_listed(fields.get("patch", [])), *patches]} if patches else {}
    return {**fields, "prompts": _only(prompt), **patched}
