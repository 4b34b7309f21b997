"""Exports a harvest to Parquet and Arrow files, and to files like those of vLLM's hidden-states
connector, which speculator training reads.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from midstream.schemas.base.errors import invalid

from ..files.shards import HookLayer, Shard, open as open_harvest, shard_buffers, site_name

GAPS = "the harvest's positions leave gaps: training reads whole documents"
#: (name, dtype, bits) of a tensor.
NamedBits = tuple[str, str, np.ndarray]


def to_parquet(
    uri: str, folder: str | Path, sites: Sequence[HookLayer] | None = None
) -> list[Path]:
    """Write one Parquet file for each shard, with the columns of `table`; return the paths, in
    order.
    """
    import pyarrow.parquet as parquet

    return _files(uri, folder, sites, "parquet", parquet.write_table)


def to_arrow(uri: str, folder: str | Path, sites: Sequence[HookLayer] | None = None) -> list[Path]:
    """Write one Arrow file (IPC) for each shard, with the columns of `table`; return the paths, in
    order.
    """
    import pyarrow as pa

    def write(rows: Any, path: Path) -> None:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)

    return _files(uri, folder, sites, "arrow", write)


def _files(
    uri: str,
    folder: str | Path,
    sites: Sequence[HookLayer] | None,
    ending: str,
    write: Callable[[Any, Path], None],
) -> list[Path]:
    harvest = open_harvest(uri)
    target = Path(folder)
    paths = []
    target.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(harvest.shards):
        paths.append(target / f"rows-{number:06d}.{ending}")
        write(table(shard, sites or harvest.sites), paths[-1])
        shard.close()
    return paths


def table(shard: Shard, sites: Sequence[HookLayer]) -> Any:
    """Return a pyarrow table: `document`, `position`, `token_id` int64, and for each site a column
    `<hook>.<layer>` of lists of `width` floats.
    """
    import pyarrow as pa

    columns: dict[str, Any] = dict(
        zip(("document", "position", "token_id"), map(pa.array, shard.keys()), strict=True)
    )
    for hook, layer in sites:
        rows = shard.rows(hook, layer)
        columns[site_name(hook, layer)] = pa.FixedSizeListArray.from_arrays(
            pa.array(rows.reshape(-1)), rows.shape[1]
        )
    return pa.table(columns)


def to_hidden_states(
    uri: str, folder: str | Path, hook: str | None = None, layers: Sequence[int] | None = None
) -> list[Path]:
    """Write one safetensors file for each document, as vLLM's hidden-states connector does for a
    request; return the paths.

    `hidden_states` `[tokens, layers, hidden]` in the harvest's dtype (float32 if the dtype has
    scales), `token_ids` int64 `[tokens]`, and `loss_mask` int64 `[tokens]`: 1 for generated
    tokens, or for all tokens if the harvest generated none. A document's tokens are those at
    harvested positions. Raises MidstreamError if the harvested positions leave gaps.
    """
    harvest = open_harvest(uri)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    rule = harvest.manifest.positions
    if rule.every != 1 or rule.sample is not None:
        raise invalid("positions", GAPS)
    hook = hook or harvest.sites[0][0]
    layers = list(layers) if layers is not None else harvest.manifest.sites.get(hook, [])
    for layer in layers:
        harvest.site(hook, layer)
    paths: list[Path] = []
    for unit in harvest.units:
        shards = [shard for shard in harvest.shards if shard.unit is unit]
        for document, tensors in documents(shards, hook, layers):
            paths.append(target / f"{document:09d}.safetensors")
            paths[-1].write_bytes(b"".join(shard_buffers(tensors, {})[0]))
    return paths


def documents(
    shards: Sequence[Shard], hook: str, layers: Sequence[int]
) -> Iterator[tuple[int, list[NamedBits]]]:
    """Yield (document, tensors of its file) for the documents of a unit, given all its shards.

    Raises MidstreamError if the harvested positions of a document leave gaps.
    """
    if not shards:
        return
    of, positions, token_ids = (
        np.concatenate(parts) for parts in zip(*[shard.keys() for shard in shards], strict=True)
    )
    generated = (
        np.concatenate([shard.generated() for shard in shards])
        if shards[0].unit.generated
        else np.ones(len(of), bool)
    )
    states = np.stack(
        [np.concatenate([shard.stored(hook, layer) for shard in shards]) for layer in layers],
        axis=1,
    )
    for shard in shards:
        shard.close()
    order = np.lexsort((positions, of))
    dtype = {"uint16": "bfloat16"}.get(states.dtype.name, states.dtype.name)
    for document in np.unique(of).tolist():
        rows = order[of[order] == document]
        if (np.diff(positions[rows]) != 1).any():
            raise invalid("positions", GAPS)
        yield (
            document,
            [
                ("token_ids", "int64", token_ids[rows]),
                ("loss_mask", "int64", generated[rows].astype(np.int64)),
                ("hidden_states", dtype, np.ascontiguousarray(states[rows])),
            ],
        )
