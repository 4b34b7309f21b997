"""Converts captured rows to a pandas data frame or an xarray array (extra `notebook`)."""

from typing import Any, Protocol

import numpy as np

from ..frames import pandas, xarray


class RowSource(Protocol):
    """The part of `CaptureReader` that tables use."""

    job: str
    tag: str

    def layers(self, request: int = 0, hook: str | None = None) -> list[int]: ...

    def positions(self, request: int = 0) -> list[int]: ...

    def token_ids(self, request: int = 0) -> list[int]: ...

    def tokens_of(self, request: int = 0) -> list[str]: ...

    def array(self, layer: int, hook: str | None = None, request: int = 0) -> np.ndarray: ...


def data_frame(reader: RowSource, hook: str | None, requests: list[int]) -> Any:
    """Return one line per captured row, indexed by request, layer and position; columns: token,
    token_id and the row's elements.
    """
    module = pandas()
    parts = []
    for request in requests:
        positions = reader.positions(request)
        for layer in reader.layers(request, hook):
            index = module.MultiIndex.from_product(
                [[request], [layer], positions], names=["request", "layer", "position"]
            )
            rows = module.DataFrame(reader.array(layer, hook, request), index=index)
            rows.insert(0, "token", reader.tokens_of(request))
            rows.insert(1, "token_id", reader.token_ids(request))
            parts.append(rows)
    return module.concat(parts)


def data_array(reader: RowSource, hook: str | None, request: int) -> Any:
    """Return `[layer, position, dim]` float32 with its coordinates."""
    module = xarray()
    layers = reader.layers(request, hook)
    positions = reader.positions(request)
    return module.DataArray(
        np.stack([reader.array(layer, hook, request) for layer in layers]),
        dims=("layer", "position", "dim"),
        coords={
            "layer": layers,
            "position": positions,
            "token": ("position", reader.tokens_of(request)),
            "token_id": ("position", reader.token_ids(request)),
        },
        name=hook or "rows",
        attrs={"job": reader.job, "tag": reader.tag, "request": request},
    )
