"""Reads and writes files of steering vectors; the format of a file is recognised by its content.

Safetensors files are read here, those of other tools by installed packages, which offer their
formats as entry points (`GROUP`). `docs/steering.md` lists the formats, and the layers at which
their vectors are applied.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..schemas.base.dtypes import ITEM_BYTES, DType
from ..schemas.base.errors import Translated
from ..schemas.base.limits import MAX_ENTRIES, MAX_LAYER, MAX_VECTOR_FILE
from ..schemas.base.tensors import Tensor, to_numpy
from ..schemas.packages import installing, load_all
from ..schemas.prompts.selectors import LayerSelector, SelectorError, resolve_layers
from ..schemas.requests.specs import SteeringSpec
from ..storage.formats import module_files
from .values import checked, given

#: Entry points of formats: a package's name → its rows, `VectorFormat`s.
GROUP = "midstream.formats"
#: The extra with other tools' formats.
EXTRA = "bridges"
#: A key that names a layer.
_LAYER = re.compile(
    r"(?:direction\.|layer[._]?|(?:model\.)?layers\.|transformer\.h\.|block_|L)?"
    r"(?P<layer>[0-9]{1,6})"
)
#: Key of a vector → keys beside it that do not say how it is applied: of assistant-axis' axes and
#: roles, and of notebooks.
_BESIDE: dict[str, frozenset[str]] = {
    "axis": frozenset({"default_mean", "metadata", "n_default", "n_roles", "role_mean"}),
    "vector": frozenset({"role", "type"}),
    "steering_vector": frozenset(),
}


class VectorFormat(NamedTuple):
    """A format of files of steering vectors. No two formats fit the same file."""

    name: str  # as `write` takes it
    suffixes: tuple[str, ...]  # those that imply it
    fits: Callable[[bytes], bool]  # whether a file's content begins like one of this format
    # the entries, whose `layers` are None if the file names none; raises ValueError
    read: Callable[[bytes], list[SteeringSpec]]
    # (entries, the model's name) → a file's content; raises ValueError naming what it cannot hold;
    # None: files are only read
    write: Callable[[Sequence[SteeringSpec], str], bytes] | None = None


def read(
    path: str | Path, layers: LayerSelector | None = None, **options: Any
) -> list[SteeringSpec]:
    """Read the entries in a file.

    `layers`: counted from 0. If the file names layers, selects among them (None: all). Otherwise
    required: a vector `[hidden_size]` is applied at each of these layers, `[layers, hidden_size]`
    with one row for each. `options`: fields of every entry, such as `scale` or `op`, which replace
    the file's own.

    Raises ValueError with the reason, OSError.
    """
    return from_bytes(content(path), layers, **options)


def content(path: str | Path) -> bytes:
    """Return a file's bytes. Raises ValueError if it exceeds MAX_VECTOR_FILE, OSError."""
    with Path(path).open("rb") as file:
        raw = file.read(MAX_VECTOR_FILE + 1)
    if len(raw) > MAX_VECTOR_FILE:
        raise ValueError(f"it has more than {MAX_VECTOR_FILE} bytes, which is the limit")
    return raw


def from_bytes(
    raw: bytes, layers: LayerSelector | None = None, **options: Any
) -> list[SteeringSpec]:
    """Read a file's content, like `read`."""
    specs = _placed(_parsed(raw), layers)
    if len(specs) > MAX_ENTRIES:
        raise ValueError(f"it has {len(specs)} entries: at most {MAX_ENTRIES} are allowed")
    options = given(**options)
    read_as = checked(options, SteeringSpec)
    chosen = {name: getattr(read_as, name) for name in options}
    if "hook" in chosen and any(spec.hook is not None for spec in specs):
        raise ValueError("the file names its hook points: leave the hook out")
    specs = [msgspec.structs.replace(spec, **chosen) for spec in specs]
    for spec in specs:
        for name in module_files.SHAPES:
            tensor = getattr(spec, name)
            if tensor is not None and not np.isfinite(to_numpy(tensor)).all():
                raise ValueError(f"its {name} at layer {spec.layers} is not finite")
    return specs


def write(
    path: str | Path, specs: Sequence[SteeringSpec], format: str | None = None, model: str = ""
) -> str:
    """Write entries to a file, and return the format, by default the one of the file's suffix.

    Raises ValueError, OSError.
    """
    suffix = Path(path).suffix
    writers = _writers().values()
    name = format or next((row.name for row in writers if suffix in row.suffixes), "")
    if not name:
        raise ValueError(
            f"the suffix {suffix!r} implies no format; give the format: {_known(writers)}"
        )
    Path(path).write_bytes(to_bytes(specs, name, model))
    return name


def to_bytes(specs: Sequence[SteeringSpec], format: str, model: str = "") -> bytes:
    """Return entries as a file's content. `model`: the model hint for a GGUF file.

    `safetensors` holds any entry. The other formats hold `add` at all positions: `gguf` and
    `vllm-lens` only at `post_block`; `gguf`, `npz` and `pt` with the scale multiplied into the
    vector (in float32); `vllm-lens` also with `norm_match`. Raises ValueError naming what the
    format cannot hold.
    """
    row = _writers().get(format)
    if row is None or row.write is None:
        raise ValueError(f"there is no format {format!r}; valid: {_known(_writers().values())}")
    return row.write(specs, model)


# --- Formats


def is_safetensors(raw: bytes) -> bool:
    """Return whether a file's header begins as in a safetensors file, after its length."""
    return raw[8:9] == b"{"


#: Midstream's own format.
SAFETENSORS = VectorFormat(
    "safetensors",
    (".safetensors",),
    is_safetensors,
    lambda raw: module_files.specs_of(raw, of_names),
    lambda specs, _: module_files.to_bytes(specs),
)


@cache
def _foreign() -> tuple[VectorFormat, ...]:
    """Return the formats of installed packages."""
    return tuple(row for rows in load_all(GROUP) for row in rows)


def _writers() -> dict[str, VectorFormat]:
    """Return the formats that files are written in, by name."""
    return {row.name: row for row in (SAFETENSORS, *_foreign()) if row.write is not None}


def _known(rows: Iterable[VectorFormat]) -> str:
    """Return the names of valid formats, and how to get others."""
    others = "" if _foreign() else f"; for those of other tools: {installing(EXTRA)}"
    return ", ".join(row.name for row in rows) + others


def _parsed(raw: bytes) -> list[SteeringSpec]:
    """Return the file's entries; an entry's `layers` is None if the file names none."""
    # another format's first bytes decide before the ninth, which says that a file is safetensors
    formats = (*_foreign(), SAFETENSORS)
    for row in formats:
        if row.fits(raw):
            return row.read(raw)
    raise ValueError(f"its format is unknown; valid: {_known(formats)}")


# --- Names


def without_notes(members: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the vector of a known layout alone, under the name `vector`; any other as it is."""
    for name, beside in _BESIDE.items():
        if name in members and members.keys() - beside == {name}:
            return {"vector": members[name]}
    return members


def of_names(
    tensors: Mapping[str, Tensor], shared: Mapping[str, Any] | None = None
) -> list[SteeringSpec]:
    """Convert tensors whose names are an entry's fields, layers, or sites. `shared`: further fields
    of every entry. Raises ValueError.
    """
    tensors = without_notes(tensors)
    fields_of_all = shared or {}
    if tensors.keys() == {"bias"}:
        raise ValueError("its only tensor is 'bias'; valid: a vector to add, named 'vector'")
    if tensors.keys() <= module_files.SHAPES.keys():
        fields = {name: _flat(name, tensor) for name, tensor in tensors.items()}
        return [SteeringSpec(**{"op": module_files.implied_op(fields), **fields_of_all, **fields})]
    layers = {name: match for name in tensors if (match := _LAYER.fullmatch(name))}
    if len(layers) < len(tensors):
        return module_files.of_sites(tensors, fields_of_all)
    result = sorted((int(match["layer"]), name) for name, match in layers.items())
    if len({layer for layer, _ in result}) < len(result):
        raise ValueError("it names a layer twice")
    return [
        SteeringSpec(layers=layer, vector=_flat("vector", tensors[name]), **fields_of_all)
        for layer, name in result
    ]


def _flat(name: str, tensor: Tensor) -> Tensor:
    """Remove a vector's leading dimension of size 1."""
    if name != "vector" or tensor.shape[:-1] != [1]:
        return tensor
    return msgspec.structs.replace(tensor, shape=tensor.shape[1:])


# --- Layers


def _placed(specs: list[SteeringSpec], layers: LayerSelector | None) -> list[SteeringSpec]:
    """Select the entries of `layers`; if the file names no layers, apply its only entry at them."""
    with Translated(SelectorError, lambda error: ValueError(f"layers: {error}")):
        if specs and specs[0].layers is None:
            return _at_layers(specs[0], layers)
        if layers is None or layers == "all":
            return specs
        present = {spec.layers for spec in specs if isinstance(spec.layers, int)}
        numbers = _numbers(layers)
    if len(present) < len({msgspec.json.encode(spec.layers) for spec in specs}):
        raise ValueError("its entries have several layers each: leave the layers out")
    has = f"it has {', '.join(map(str, sorted(present)))}"
    if isinstance(layers, int | list) and (
        missing := [layer for layer in numbers if layer not in present]
    ):
        raise ValueError(f"it has no layer {missing[0]}; {has}")
    chosen = [spec for spec in specs if spec.layers in numbers]
    if not chosen:
        raise ValueError(f"it has none of the layers {layers}; {has}")
    return chosen


def _numbers(layers: LayerSelector) -> list[int]:
    result = resolve_layers(layers, 2 * MAX_LAYER)
    if result[-1] >= MAX_LAYER:
        raise ValueError("layers: must be counted from 0 for a file")
    return result


def _at_layers(spec: SteeringSpec, layers: LayerSelector | None) -> list[SteeringSpec]:
    if layers is None:
        raise ValueError(
            "it names no layer: write FILE:LAYERS, such as joy.pt:15; in Python, "
            "midstream.client.vectors.read(path, layers)"
        )
    vector = spec.vector
    if vector is None or len(vector.shape) == 1:
        return [msgspec.structs.replace(spec, layers=layers)]
    if layers == "all":
        raise ValueError(f"it has {vector.shape[0]} rows: name as many layers, not all")
    where = _numbers(layers)
    if len(where) != vector.shape[0]:
        raise ValueError(
            f"it has {vector.shape[0]} rows for {len(where)} layers: name as many; a row more than "
            "the model's layers may be the embedding's, in row 0: save the others"
        )
    rows = rows_of(vector.dtype, vector.shape[1], vector.data)
    return [SteeringSpec(layers=layer, vector=row) for layer, row in zip(where, rows, strict=True)]


def rows_of(dtype: DType, width: int, data: bytes) -> list[Tensor]:
    """Return each row of an array as a vector."""
    size = width * ITEM_BYTES[dtype]
    return [
        Tensor(dtype=dtype, shape=[width], data=data[at : at + size])
        for at in range(0, len(data), size)
    ]
