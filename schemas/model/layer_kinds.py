"""Facts that a group of layers shares, as a rank reads them from the loaded model."""

from collections.abc import Collection, Iterable
from typing import TypeVar

import msgspec

from ..base.records import Published


class LayerKind(Published):
    """Facts that hold in `layers`."""

    layers: list[int]  # ascending


LayerKindT = TypeVar("LayerKindT", bound=LayerKind)


def grouped(kinds: Iterable[LayerKindT]) -> list[LayerKindT]:
    """Merge kinds that differ only in their layers."""
    result: dict[bytes, tuple[LayerKindT, list[int]]] = {}
    for kind in kinds:
        key = msgspec.msgpack.encode(msgspec.structs.replace(kind, layers=[]))
        result.setdefault(key, (kind, []))[1].extend(kind.layers)
    joined = [
        msgspec.structs.replace(kind, layers=sorted(set(layers)))
        for kind, layers in result.values()
    ]
    return sorted(joined, key=lambda kind: kind.layers)


def of_layers(kinds: Iterable[LayerKindT], layers: Collection[int]) -> list[LayerKindT]:
    """Return the kinds restricted to `layers`, without kinds that have none of these layers."""
    cut = [
        msgspec.structs.replace(kind, layers=[layer for layer in kind.layers if layer in layers])
        for kind in kinds
    ]
    return [kind for kind in cut if kind.layers]
