"""Exports captured rows to a `.npz` or a `.safetensors` file."""

from collections.abc import Mapping, Sequence
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


def _prefix(request: int, sites: dict[int, dict[str, list[int]]]) -> str:
    return f"{request}/" if len(sites) > 1 else ""


def _write_npz(
    reader: CaptureReader, target: Path, sites: dict[int, dict[str, list[int]]]
) -> list[str]:
    arrays: dict[str, np.ndarray] = {}
    for request, of_request in sites.items():
        prefix = _prefix(request, sites)
        arrays |= {
            f"{prefix}{hook}.{layer}": reader.array(layer, hook, request)
            for hook, layers in of_request.items()
            for layer in layers
        }
        arrays[f"{prefix}positions"] = np.array(reader.positions(request), dtype=np.int64)
        arrays[f"{prefix}token_ids"] = np.array(reader.token_ids(request), dtype=np.int64)
    with _aside(target) as partial:
        np.savez(partial, **arrays)  # type: ignore[arg-type]
    return list(arrays)


def _write_safetensors(
    reader: CaptureReader, target: Path, sites: dict[int, dict[str, list[int]]]
) -> list[str]:
    entries: list[tuple[str, str, Sequence[int], int]] = []
    arrays: list[np.ndarray] = []
    for request, of_request in sites.items():
        prefix = _prefix(request, sites)
        dtype = DTYPE_NAMES[reader.dtype(request)]
        tensors = [
            (f"{hook}.{layer}", dtype, reader.raw(layer, hook, request))
            for hook, layers in of_request.items()
            for layer in layers
        ]
        tensors += [
            ("positions", "I64", np.array(reader.positions(request), dtype="<i8")),
            ("token_ids", "I64", np.array(reader.token_ids(request), dtype="<i8")),
        ]
        for name, kind, array in tensors:
            entries.append((prefix + name, kind, array.shape, array.nbytes))
            arrays.append(array)
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
    with _aside(target) as partial, partial.open("wb") as file:
        file.write(encode_header(entries, manifest))
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)
    return [name for name, *_ in entries]


class _aside:
    """A temporary path next to `target`, renamed to it on success."""

    def __init__(self, target: Path):
        self._target = target
        self._partial = target.with_name(f".{target.stem}.part{target.suffix}")

    def __enter__(self) -> Path:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        return self._partial

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._partial.rename(self._target)
        else:
            self._partial.unlink(missing_ok=True)
