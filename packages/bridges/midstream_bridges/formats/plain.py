"""Entries that other tools' formats hold: vectors that are added at all positions of layers."""

from collections.abc import Collection, Sequence

import numpy as np

from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.prompts.selectors import resolve_hook
from midstream.schemas.requests.specs import SteeringSpec

#: The fields of such an entry.
_FIELDS = frozenset({"layers", "hook", "op", "positions", "scale", "vector"})


def check(specs: Sequence[SteeringSpec], format: str, keeps: Collection[str] = ()) -> None:
    """Raise ValueError for no entries, and for one that only `safetensors` can hold. `keeps`:
    further fields that `format` has.
    """
    if not specs:
        raise ValueError("no entries to write: give at least one")
    for index, spec in enumerate(specs):
        extra = [
            name
            for name in spec.__struct_fields__
            if name not in _FIELDS
            and name not in keeps
            and getattr(spec, name) not in (None, False)
        ]
        if spec.op not in (None, "add"):
            extra.insert(0, f"op {spec.op}")
        if spec.positions not in (None, "all"):
            extra.append("positions")
        if extra:
            raise cannot_hold(index, extra[0], format)
        if layers_of(spec) is None:
            raise ValueError(f"entry {index} has layers {spec.layers!r}: give numbers from 0")


def cannot_hold(index: int, what: str, format: str) -> ValueError:
    """Return the error for an entry that has more than `format` can hold."""
    return ValueError(
        f"entry {index} has {what}, which {format} cannot hold: export it as safetensors"
    )


def layers_of(spec: SteeringSpec) -> list[int] | None:
    """Return an entry's layers; None if they are not numbers from 0."""
    result = [spec.layers] if isinstance(spec.layers, int) else spec.layers
    if not isinstance(result, list):
        return None
    numbers = all(isinstance(layer, int) and layer >= 0 for layer in result)
    return result if numbers else None


def by_site(specs: Sequence[SteeringSpec], format: str) -> dict[tuple[str, int], np.ndarray]:
    """Return hook and layer → float32 vector, multiplied by its scale.

    Raises ValueError for what `format` cannot hold, and for two entries at a site.
    """
    check(specs, format)
    sites: dict[tuple[str, int], np.ndarray] = {}
    for spec in specs:
        assert spec.vector is not None
        vector = to_numpy(spec.vector).astype(np.float32)
        if spec.scale not in (None, 1.0):
            vector = vector * np.float32(spec.scale)
        for layer in layers_of(spec) or []:
            site = (resolve_hook(spec.hook or "post_block"), layer)
            if site in sites:
                raise ValueError(
                    f"two entries are at {site[0]} of layer {layer}: export them as safetensors"
                )
            sites[site] = vector
    return sites


def by_name(specs: Sequence[SteeringSpec], format: str) -> dict[str, np.ndarray]:
    """Return the vectors of `by_site` under names as in `post_block.12`."""
    return {f"{hook}.{layer}": vector for (hook, layer), vector in by_site(specs, format).items()}
