"""Reads and writes steering vectors in the formats of other tools; the format of a file is
recognised by its content.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...schemas.base import Tensor, Translated, to_numpy
from ...schemas.base.json_bounds import TooManyValues, check_json
from ...schemas.base.limits import MAX_ENTRIES, MAX_LAYER, MAX_VECTOR_FILE
from ...schemas.prompts.selectors import LayerSelector, SelectorError, resolve_hook, resolve_layers
from ...schemas.requests.specs import SteeringSpec
from ...storage.formats import module_files
from ..values import checked
from . import array_files, gguf, lens_vectors
from .array_files import PlainArray

#: Export format → the file suffixes that imply it.
FORMATS: dict[str, tuple[str, ...]] = {
    "safetensors": (".safetensors",),
    "gguf": (".gguf",),
    "npz": (".npz",),
    "pt": (".pt", ".pth"),
    "vllm-lens": (".json",),
}
_ZIP = b"PK\x03\x04"
#: A key that names a layer.
_LAYER = re.compile(
    r"(?:direction\.|layer[._]?|(?:model\.)?layers\.|transformer\.h\.|block_|L)?"
    r"(?P<layer>[0-9]{1,6})"
)
#: Keys of pyreft's LoReFT files, which EasySteer also reads.
_LOREFT = ("rotate_layer", "weight", "bias")


#: Key of a vector → keys beside it that do not say how it is applied: of assistant-axis' axes and
#: roles, and of notebooks.
_BESIDE: dict[str, frozenset[str]] = {
    "axis": frozenset({"default_mean", "metadata", "n_default", "n_roles", "role_mean"}),
    "vector": frozenset({"role", "type"}),
    "steering_vector": frozenset(),
}


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
    given = checked(
        {name: value for name, value in options.items() if value is not None}, SteeringSpec
    )
    chosen = {name: getattr(given, name) for name in options if options[name] is not None}
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
    format = format or next(
        (name for name, suffixes in FORMATS.items() if suffix in suffixes), None
    )
    if format is None:
        raise ValueError(
            f"the suffix {suffix!r} implies no format; give the format: {', '.join(FORMATS)}"
        )
    Path(path).write_bytes(to_bytes(specs, format, model))
    return format


def to_bytes(specs: Sequence[SteeringSpec], format: str, model: str = "") -> bytes:
    """Return entries as a file's content. `model`: the model hint for a GGUF file.

    `safetensors` holds any entry. The other formats hold `add` at all positions: `gguf` and
    `vllm-lens` only at `post_block`; `gguf`, `npz` and `pt` with the scale multiplied into the
    vector (in float32); `vllm-lens` also with `norm_match`. Raises ValueError naming what the
    format cannot hold.
    """
    if format == "safetensors":
        return module_files.to_bytes(specs)
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; valid: {', '.join(FORMATS)}")
    if not specs:
        raise ValueError("no entries to write: give at least one")
    for index, spec in enumerate(specs):
        _check_plain(index, spec, format)
    if format == "vllm-lens":
        return msgspec.json.encode([_lens_vector(spec) for spec in specs])
    sites = _scaled_sites(specs)
    if format == "gguf":
        if wrong := next((hook for hook, _ in sites if hook != "post_block"), None):
            raise ValueError(
                f"a GGUF control vector cannot hold {wrong}: its directions are applied at "
                "post_block"
            )
        return gguf.write({layer: vector for (_, layer), vector in sorted(sites.items())}, model)
    named = {f"{hook}.{layer}": vector for (hook, layer), vector in sites.items()}
    return array_files.write_npz(named) if format == "npz" else array_files.write_torch(named)


# --- Reading


class _Format(NamedTuple):
    what: str
    fits: Callable[[bytes], bool]
    read: Callable[[bytes], list[SteeringSpec]]


def _parsed(raw: bytes) -> list[SteeringSpec]:
    """Return the file's entries; an entry's `layers` is None if the file names none."""
    # the first byte of a safetensors file may be the same: it is of its header's length
    if raw.startswith(array_files.OLD_MAGIC) and not _is_safetensors(raw):
        raise ValueError(
            "it is a pickle, or a file of torch before 1.6: save tensors with a newer "
            "torch.save, or with safetensors"
        )
    for form in _READERS:
        if form.fits(raw):
            return form.read(raw)
    raise ValueError(f"its format is unknown; valid: {', '.join(form.what for form in _READERS)}")


def _of_zip(raw: bytes) -> list[SteeringSpec]:
    if f"/{array_files.PICKLE}".encode() in raw or raw[30:].startswith(array_files.PICKLE.encode()):
        return _of_value(array_files.read_torch(raw))
    return _of_names({name: each.tensor() for name, each in array_files.read_npz(raw).items()})


def _is_safetensors(raw: bytes) -> bool:
    return raw[8:9] == b"{"


def _of_value(value: Any) -> list[SteeringSpec]:
    """Return the vectors in the value of a torch file."""
    if isinstance(value, PlainArray):
        return _of_names({"vector": value.tensor()})
    if (
        isinstance(value, dict)
        and {"activations", "layer_indices"} <= value.keys()
        and isinstance(value["activations"], PlainArray)
    ):
        array = value["activations"]
        fields = value | {"activations": lens_vectors.packed(array.dtype, array.shape, array.data)}
        return _of_lens([{name: field for name, field in fields.items() if field is not None}])
    if not isinstance(value, dict) or not any(
        isinstance(item, PlainArray) for item in value.values()
    ):
        raise ValueError(
            "it holds no tensors by name: save a tensor, or a dictionary from a layer or "
            "site to a tensor"
        )
    tensors: dict[str, Tensor] = {}
    for key, item in _chosen(value).items():
        if not isinstance(item, PlainArray):
            raise ValueError(f"its {key!r:.80} is not a tensor; valid: tensors by layer or site")
        if str(key) in tensors:
            raise ValueError(f"it names {key} twice: as a text and as a number")
        tensors[str(key)] = item.tensor()
    return _of_names(_loreft(tensors) if "rotate_layer" in tensors else tensors)


def _chosen(members: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the vector of a known layout under the name `vector`, and any other as it is."""
    for name, beside in _BESIDE.items():
        if name in members and members.keys() - beside == {name}:
            return {"vector": members[name]}
    return members


def _of_names(
    tensors: Mapping[str, Tensor], shared: Mapping[str, Any] | None = None
) -> list[SteeringSpec]:
    """Convert tensors whose names are an entry's fields, layers, or sites. `shared`: further fields
    of every entry.
    """
    tensors = _chosen(tensors)
    given = shared or {}
    if tensors.keys() == {"bias"}:
        raise ValueError("its only tensor is 'bias'; valid: a vector to add, named 'vector'")
    if tensors.keys() <= module_files.SHAPES.keys():
        fields = {name: _flat(name, tensor) for name, tensor in tensors.items()}
        return [SteeringSpec(**{"op": module_files.implied_op(fields), **given, **fields})]
    layers = {name: match for name in tensors if (match := _LAYER.fullmatch(name))}
    if len(layers) < len(tensors):
        return module_files.of_sites(tensors, given)
    result = sorted((int(match["layer"]), name) for name, match in layers.items())
    if len({layer for layer, _ in result}) < len(result):
        raise ValueError("it names a layer twice")
    return [
        SteeringSpec(layers=layer, vector=_flat("vector", tensors[name]), **given)
        for layer, name in result
    ]


def _flat(name: str, tensor: Tensor) -> Tensor:
    """Remove a vector's leading dimension of size 1."""
    if name != "vector" or tensor.shape[:-1] != [1]:
        return tensor
    return msgspec.structs.replace(tensor, shape=tensor.shape[1:])


def _loreft(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert a LoReFT: pyreft stores R as `[hidden_size, rank]`, and W and b as a linear layer."""
    if tensors.keys() != set(_LOREFT):
        raise ValueError(
            f"its LoReFT has {', '.join(sorted(tensors))}; valid: {', '.join(_LOREFT)}"
        )
    rotation = tensors["rotate_layer"]
    if len(rotation.shape) != 2:
        raise ValueError(f"its rotate_layer has shape {rotation.shape}; valid: [hidden_size, rank]")
    size = len(rotation.data) // math.prod(rotation.shape)
    transposed = np.frombuffer(rotation.data, f"<u{size}").reshape(rotation.shape).T
    return {
        "rotation": Tensor(
            dtype=rotation.dtype, shape=list(transposed.shape), data=transposed.tobytes()
        ),
        "weight": tensors["weight"],
        "bias": tensors["bias"],
    }


def _of_json(raw: bytes) -> list[SteeringSpec]:
    with Translated(
        (msgspec.DecodeError, TooManyValues, UnicodeDecodeError),
        lambda error: ValueError(f"it is not valid JSON of a SteeringVector: {error}"),
    ):
        check_json(raw)
        result = msgspec.json.decode(raw)
    return _of_lens(result if isinstance(result, list) else [result])


def _of_lens(vectors: list[Any]) -> list[SteeringSpec]:
    with Translated(
        msgspec.ValidationError,
        lambda error: ValueError(f"it is not a SteeringVector of vllm-lens: {error}"),
    ):
        return [
            spec
            for vector in msgspec.convert(vectors, lens_vectors.LensVectors)
            for spec in lens_vectors.specs_of(vector)
        ]


#: The formats, in the order in which they are tried.
_READERS: tuple[_Format, ...] = (
    _Format("a GGUF control vector", lambda raw: raw.startswith(gguf.MAGIC), gguf.read),
    _Format(".npz or torch.save's .pt", lambda raw: raw.startswith(_ZIP), _of_zip),
    _Format(
        ".npy",
        lambda raw: raw.startswith(array_files.NPY_MAGIC),
        lambda raw: _of_names({"vector": array_files.read_npy(raw).tensor()}),
    ),
    _Format("safetensors", _is_safetensors, lambda raw: module_files.specs_of(raw, _of_names)),
    _Format(
        "JSON of vllm-lens' SteeringVector", lambda raw: raw.lstrip()[:1] in (b"{", b"["), _of_json
    ),
)


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
    if isinstance(layers, int | list) and (
        missing := [layer for layer in numbers if layer not in present]
    ):
        raise ValueError(
            f"it has no layer {missing[0]}; it has {', '.join(map(str, sorted(present)))}"
        )
    chosen = [spec for spec in specs if spec.layers in numbers]
    if not chosen:
        raise ValueError(
            f"it has none of the layers {layers}; it has {', '.join(map(str, sorted(present)))}"
        )
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
    rows = PlainArray(vector.dtype, tuple(vector.shape), vector.data).rows()
    return [
        SteeringSpec(layers=layer, vector=row.tensor())
        for layer, row in zip(where, rows, strict=True)
    ]


# --- Writing


def _check_plain(index: int, spec: SteeringSpec, format: str) -> None:
    """Raise ValueError for an entry that only `safetensors` can hold."""
    lens = format == "vllm-lens"
    known = {
        "layers",
        "hook",
        "op",
        "positions",
        "scale",
        "vector",
        *(("norm_match",) if lens else ()),
    }
    extra = [
        name
        for name in spec.__struct_fields__
        if name not in known and getattr(spec, name) not in (None, False)
    ]
    if spec.op not in (None, "add"):
        extra.insert(0, f"op {spec.op}")
    if spec.positions not in (None, "all"):
        extra.append("positions")
    if lens and resolve_hook(spec.hook or "post_block") != "post_block":
        extra.append(f"hook {spec.hook}")
    if extra:
        raise ValueError(
            f"entry {index} has {extra[0]}, which {format} cannot hold: export it as safetensors"
        )
    if _layers(spec) is None:
        raise ValueError(f"entry {index} has layers {spec.layers!r}: give numbers from 0")


def _layers(spec: SteeringSpec) -> list[int] | None:
    result = [spec.layers] if isinstance(spec.layers, int) else spec.layers
    return (
        result
        if isinstance(result, list)
        and all(isinstance(layer, int) and layer >= 0 for layer in result)
        else None
    )


def _scaled_sites(specs: Sequence[SteeringSpec]) -> dict[tuple[str, int], np.ndarray]:
    """Return hook and layer → float32 vector, multiplied by its scale."""
    sites: dict[tuple[str, int], np.ndarray] = {}
    for spec in specs:
        assert spec.vector is not None
        vector = to_numpy(spec.vector).astype(np.float32)
        if spec.scale not in (None, 1.0):
            vector = vector * np.float32(spec.scale)
        for layer in _layers(spec) or []:
            site = (resolve_hook(spec.hook or "post_block"), layer)
            if site in sites:
                raise ValueError(
                    f"two entries are at {site[0]} of layer {layer}: export them as safetensors"
                )
            sites[site] = vector
    return sites


def _lens_vector(spec: SteeringSpec) -> dict[str, Any]:
    assert spec.vector is not None
    layers = _layers(spec) or []
    tensor = spec.vector
    return {
        "activations": lens_vectors.packed(
            tensor.dtype, [len(layers), *tensor.shape], tensor.data * len(layers)
        ),
        "layer_indices": layers,
        "scale": 1.0 if spec.scale is None else spec.scale,
        "norm_match": bool(spec.norm_match),
        "position_indices": None,
    }
