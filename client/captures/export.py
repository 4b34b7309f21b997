"""Exports captured rows to a `.npz` or a `.safetensors` file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from ...schemas.base.errors import Translated, invalid
from ...schemas.prompts.selectors import (
    ALIASES,
    HookName,
    LayerSelector,
    SelectorError,
    resolve_layers,
)
from ...storage.formats.capture_blobs import DTYPE_NAMES, encode_header
from ..values import plain
from .reader import CaptureReader

FORMATS = (".npz", ".safetensors")
#: (layer, hook, request) → rows.
ReadSite = Callable[[int, str, int], np.ndarray]


def export(
    reader: CaptureReader,
    target: Path,
    *,
    hooks: Sequence[str] | Mapping[HookName, LayerSelector] = (),
    layers: LayerSelector = "all",
    requests: Sequence[int] = (),
) -> list[str]:
    """Write the chosen rows to one file, and return the names of its arrays.

    The arrays are `<hook>.<layer>` `[positions, hidden]`, `positions` and `token_ids`; for several
    requests, each name begins with `<request>/`. `.npz` holds float32, `.safetensors` the captured
    dtype; with one request, a `.safetensors` file is a capture file that `CaptureReader` can read.
    `hooks`: names, all at `layers`, or hook → layers. `hooks`, `requests`: empty for all.
    Raises MidstreamError naming a hook or layer that was not captured.
    """
    if target.suffix not in FORMATS:
        raise invalid(
            "target",
            f"{target.name}: the name must end in {' or '.join(FORMATS)}",
            allowed="rows.npz",
        )
    sites = {
        request: _sites(reader, request, hooks, layers)
        for request in list(requests) or reader.requests()
    }
    if target.suffix == ".npz":
        return _write_npz(reader, target, sites)
    return _write_safetensors(reader, target, sites)


def _sites(
    reader: CaptureReader,
    request: int,
    hooks: Sequence[str] | Mapping[HookName, LayerSelector],
    layers: LayerSelector,
) -> dict[str, list[int]]:
    captured = {
        ALIASES.get(hook, hook): reader.layers(request, hook) for hook in reader.hooks(request)
    }
    names = {ALIASES.get(hook, hook): hook for hook in hooks} or {hook: hook for hook in captured}
    for name, alias in names.items():
        if name not in captured:
            raise invalid("hooks", f"{alias!r} was not captured", allowed=", ".join(captured))
    if isinstance(hooks, Mapping):
        sites = {
            name: _layers(hooks[cast(HookName, alias)], captured[name])
            for name, alias in names.items()
        }
    else:  # hooks may have been captured at different layers
        everywhere = _layers(layers, sorted({layer for name in names for layer in captured[name]}))
        sites = {name: [layer for layer in captured[name] if layer in everywhere] for name in names}
    return {name: kept for name, kept in sites.items() if kept}


def _layers(layer_selector: LayerSelector, present: list[int]) -> list[int]:
    if layer_selector == "all":
        return present
    with Translated(
        SelectorError, lambda error: invalid("layers", str(error), allowed=str(present))
    ):
        chosen = resolve_layers(plain(layer_selector, LayerSelector), present[-1] + 1)
    if missing := set(chosen) - set(present):
        raise invalid("layers", f"layer {min(missing)} was not captured", allowed=str(present))
    return chosen


def _arrays(
    reader: CaptureReader, sites: Mapping[int, Mapping[str, Sequence[int]]], read: ReadSite
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield each array with its name, and the name of its dtype in capture files."""
    for request, of_request in sites.items():
        prefix = f"{request}/" if len(sites) > 1 else ""
        dtype = DTYPE_NAMES[reader.dtype(request)]
        for hook, layers in of_request.items():
            for layer in layers:
                yield f"{prefix}{hook}.{layer}", dtype, read(layer, hook, request)
        for name, numbers in (
            ("positions", reader.positions(request)),
            ("token_ids", reader.token_ids(request)),
        ):
            yield f"{prefix}{name}", "I64", np.array(numbers, dtype="<i8")


def _write_npz(
    reader: CaptureReader, target: Path, sites: dict[int, dict[str, list[int]]]
) -> list[str]:
    arrays = {name: array for name, _, array in _arrays(reader, sites, reader.array)}
    with _aside(target) as partial:
        np.savez(partial, **arrays)  # type: ignore[arg-type]
    return list(arrays)


def _write_safetensors(
    reader: CaptureReader, target: Path, sites: dict[int, dict[str, list[int]]]
) -> list[str]:
    tensors = list(_arrays(reader, sites, reader.raw))
    manifest = None
    if len(sites) == 1:
        ((request, of_request),) = sites.items()
        manifest = msgspec.structs.replace(
            reader.manifest(request),
            sites=of_request,
            stage_sites=of_request,
            all_sites=of_request,
            stages=1,
            pp=0,
            reused=0,
            widths={
                site.partition(".")[0]: array.shape[1]
                for site, _, array in tensors
                if array.ndim > 1
            },
            columns=[],
            row=None,
            requests=0,
            positions=reader.positions(request),
            token_ids=reader.token_ids(request),
            dropped=reader.dropped(request),
        )
    entries = [(name, dtype, array.shape, array.nbytes) for name, dtype, array in tensors]
    with _aside(target) as partial, partial.open("wb") as file:
        file.write(encode_header(entries, manifest))
        for _, _, array in tensors:
            file.write(np.ascontiguousarray(array).data)
    return [name for name, *_ in entries]


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to `target`, renamed to it on success."""
    partial = target.with_name(f".{target.stem}.part{target.suffix}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
