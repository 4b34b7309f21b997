"""How do captured activations become numpy arrays, on any machine, without torch?

Reads the packed layout: one safetensors file per request and pipeline stage, its manifest beside it under `.json`.
"""

import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..schemas.errors import MidstreamError, invalid
from ..schemas.tensors import bfloat16_to_float32

#: `p<request>.a<attempt>.pp<stage>.safetensors`
FILE_NAME = re.compile(r"^p(\d+)\.a(\d+)\.pp(\d+)\.safetensors$")
#: The `dtype` of a safetensors header → numpy's; bfloat16, which numpy lacks, is read as its bit patterns.
_NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8"}
_CRC_CHUNK = 1 << 22  # bytes read at a time while a file is checked


@dataclass(frozen=True)
class Check:
    """What `CaptureReader.verify` found about one file."""

    path: Path
    bytes: int
    crc32: int  # recomputed
    ok: bool
    detail: str = ""  # what is wrong, if anything


class _File:
    """One safetensors file, mapped; its header parsed and held against its size."""

    def __init__(self, path: Path):
        match = FILE_NAME.match(path.name)
        if match is None:
            raise invalid("path", f"{path.name} is not a capture file", allowed="p<request>.a<attempt>.pp<stage>.safetensors")
        self.path = path
        self.request, self.attempt, self.stage = (int(group) for group in match.groups())
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > size - 8:
                raise MidstreamError("capture_failed", f"{path} is cut short: {size} bytes hold no safetensors header")
            header = json.loads(handle.read(length))
        self._start = 8 + length
        self._entries: dict[str, Any] = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = self._start + max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
        if size < end:
            raise MidstreamError("capture_failed", f"{path} is cut short: {size} bytes of {end}")

    @property
    def layers(self) -> dict[str, list[int]]:
        """hook → ascending layers in this file."""
        found: dict[str, list[int]] = {}
        for name in self._entries:
            hook, dot, layer = name.rpartition(".")
            if dot and layer.isdigit():
                found.setdefault(hook, []).append(int(layer))
        return {hook: sorted(layers) for hook, layers in found.items()}

    def raw(self, name: str) -> np.ndarray:
        """The tensor as it lies in the file, memory-mapped and read-only; bfloat16 as uint16."""
        entry = self._entries[name]
        dtype, shape, (first, last) = np.dtype(_NUMPY_DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
        if first == last:
            return np.empty(shape, dtype)
        return np.memmap(self.path, dtype=dtype, mode="r", offset=self._start + first, shape=tuple(shape))

    def array(self, name: str) -> np.ndarray:
        """The tensor as a float32 copy of its own, bfloat16 widened exactly."""
        raw = self.raw(name)
        if self._entries[name]["dtype"] == "BF16":
            return bfloat16_to_float32(np.asarray(raw))
        return np.array(raw, dtype=np.float32)

    def integers(self, name: str) -> list[int]:
        return [int(value) for value in self.raw(name)]

    def manifest(self) -> dict[str, Any]:
        """The `.json` beside the file; raises MidstreamError when it is not there."""
        beside = self.path.with_suffix(".json")
        if not beside.is_file():
            raise MidstreamError("not_found", f"{beside} is missing: without it {self.path.name} cannot be checked")
        return dict(json.loads(beside.read_text()))


class CaptureReader:
    """The captured rows of one job, merged over pipeline stages.

    `source`: the job's folder, or its `.safetensors` files. Of several attempts at a request the last one counts.
    Raises MidstreamError when there is nothing to read, or a file is cut short.
    """

    def __init__(self, source: Path | str | Iterable[Path | str]):
        if isinstance(source, str | Path):
            folder = Path(source)
            paths = [folder] if folder.is_file() else [path for path in folder.glob("*.safetensors") if FILE_NAME.match(path.name)]
        else:
            paths = [Path(path) for path in source]
        if not paths:
            raise MidstreamError("not_found", f"there are no capture files in {source}")
        self._requests: dict[int, list[_File]] = {}
        for file in sorted((_File(path) for path in paths), key=lambda file: (file.request, file.attempt, file.stage)):
            kept = self._requests.setdefault(file.request, [])
            if kept and kept[0].attempt < file.attempt:
                kept.clear()
            kept.append(file)

    def __repr__(self) -> str:
        return f"CaptureReader(requests={len(self._requests)}, files={len(self.files)})"

    @property
    def files(self) -> list[Path]:
        """The files that are read, by request and stage."""
        return [file.path for files in self._requests.values() for file in files]

    def requests(self) -> list[int]:
        """Indices of the job's prompts that have rows."""
        return list(self._requests)

    def hooks(self, request: int = 0) -> list[str]:
        """The hook points that were captured."""
        return sorted({hook for file in self._of(request) for hook in file.layers})

    def layers(self, request: int = 0, hook: str = "post_block") -> list[int]:
        """Ascending layers captured at `hook`, over all stages."""
        return sorted({layer for file in self._of(request) for layer in file.layers.get(hook, [])})

    def positions(self, request: int = 0) -> list[int]:
        """Absolute token positions of the rows; row i of every array is `positions[i]`."""
        return self._shared(request, "positions")

    def token_ids(self, request: int = 0) -> list[int]:
        """The token at each of `positions`."""
        return self._shared(request, "token_ids")

    def array(self, layer: int, hook: str = "post_block", request: int = 0) -> np.ndarray:
        """`[positions, hidden]` float32, a copy. Raises MidstreamError naming the layers there are."""
        for file in self._of(request):
            if layer in file.layers.get(hook, []):
                return file.array(f"{hook}.{layer}")
        raise MidstreamError(
            "not_found", f"layer {layer} was not captured at {hook}", field="layer", allowed=str(self.layers(request, hook))
        )

    def stack(self, layers: Sequence[int] | None = None, hook: str = "post_block", request: int = 0) -> np.ndarray:
        """`[layers, positions, hidden]` float32; by default of every captured layer."""
        return np.stack([self.array(layer, hook, request) for layer in (self.layers(request, hook) if layers is None else layers)])

    def row(self, layer: int, position: int, hook: str = "post_block", request: int = 0) -> np.ndarray:
        """`[hidden]` float32 at an absolute token position."""
        positions = self.positions(request)
        if position not in positions:
            raise MidstreamError("not_found", f"position {position} was not captured", field="position", allowed=str(positions))
        return np.asarray(self.array(layer, hook, request)[positions.index(position)])

    def manifest(self, request: int = 0) -> dict[str, Any]:
        """The manifest of the request's first stage, as written beside its file."""
        return self._of(request)[0].manifest()

    def verify(self) -> list[Check]:
        """Every file's size and CRC32, recomputed and held against its manifest."""
        return [_check(file) for files in self._requests.values() for file in files]

    def _of(self, request: int) -> list[_File]:
        if request not in self._requests:
            raise MidstreamError("not_found", f"request {request} has no captured rows", field="request", allowed=str(self.requests()))
        return self._requests[request]

    def _shared(self, request: int, name: str) -> list[int]:
        """What every stage of a request must say alike."""
        first, *others = self._of(request)
        values = first.integers(name)
        for other in others:
            if other.integers(name) != values:
                raise MidstreamError("ranks_disagree", f"{first.path.name} and {other.path.name} hold rows of different {name}")
        return values


def crc32_of(path: Path) -> int:
    """CRC32 of a whole file."""
    crc = 0
    with path.open("rb") as handle:
        while chunk := handle.read(_CRC_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _check(file: _File) -> Check:
    size, crc, manifest = file.path.stat().st_size, crc32_of(file.path), file.manifest()
    wrong = []
    if size != manifest["bytes"]:
        wrong.append(f"{size} bytes, the manifest says {manifest['bytes']}")
    if crc != manifest["crc32"]:
        wrong.append(f"CRC32 {crc:08x}, the manifest says {manifest['crc32']:08x}")
    return Check(path=file.path, bytes=size, crc32=crc, ok=not wrong, detail="; ".join(wrong))
