"""Interventions in safetensors files: tensors named by site, or a list of entries with their
tensors.

Simple: tensors `{hook}.{layer}`, `[hidden_size]`, with Midstream's or TransformerLens's name of the
hook, or `blocks.{layer}.{name}`; a `lowrank` entry has `{hook}.{layer}.rotation`, `.weight` and
`.bias` instead. Each site is a separate entry. The file's `__metadata__` may hold the fields in
`SHARED`, for all entries, written as in JSON; names may be bare: `{"op": "clamp", "low": "-1.5",
"positions": "[0, -1]"}`.

General, which `to_bytes` writes: the metadata key `midstream` holds a JSON list of entries without
their tensors, and tensor `{index}.{field}` belongs to entry `index`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from ...schemas.base.dtypes import DTYPE_OF_FILE, DType
from ...schemas.base.errors import Translated
from ...schemas.base.json_bounds import TooManyValues, check_json
from ...schemas.base.limits import MAX_ENTRIES, MAX_FILE_HEADER, MAX_FILE_TENSORS
from ...schemas.base.records import JsonObject
from ...schemas.base.tensors import Tensor
from ...schemas.prompts.selectors import ALIASES, EVERY, full_name, resolve_hook
from ...schemas.requests.interventions import STEERING_FIELDS, TENSORS
from ...schemas.requests.specs import SteeringSpec
from .capture_blobs import TensorPlace, encode_safetensors
from .tensor_files import whole_header

#: The metadata key that marks a file as general.
ENTRIES_KEY = "midstream"
#: Metadata that other tools write and that does not concern steering (`format`: `pt`).
_FOREIGN = frozenset({"format"})
#: Fields of an entry that are tensors → names of their dimensions.
SHAPES = {
    name: tuple(
        side
        for side, present in (("rank", TENSORS[name].ranked), ("hidden_size", TENSORS[name].wide))
        if present
    )
    for name in dict.fromkeys(name for takes in STEERING_FIELDS.values() for name in takes.tensors)
}
#: Fields that the metadata of a simple file may set, for all its sites.
SHARED = (
    "op",
    "positions",
    "heads",
    *dict.fromkeys(name for takes in STEERING_FIELDS.values() for name in takes.options),
)
_SITE = re.compile(r"(?P<hook>[a-z_]+)\.(?P<layer>-?[0-9]{1,6})(?:\.(?P<field>[a-z]+))?")
_INDEXED = re.compile(r"(?P<index>0|[1-9][0-9]{0,5})\.(?P<field>[a-z]+)")
#: Tensors by name, and the fields that their entries share → the entries.
OfNames = Callable[[Mapping[str, Tensor], Mapping[str, Any]], list[SteeringSpec]]
_FIELD_TYPES: dict[str, Any] = {
    field.name: field.type for field in msgspec.structs.fields(SteeringSpec)
}


def specs_of(raw: bytes, of_names: OfNames | None = None) -> list[SteeringSpec]:
    """Returns the entries in a file. Those of a general file keep their order; those of a simple
    file are sorted by hook, in the order of a forward pass, and then by layer. `of_names` reads a
    simple file in place of `of_sites`.

    Raises ValueError naming the wrong key and what is valid. The caller checks what depends on the
    model (its layers, its width), and which fields an op takes.
    """
    _check_header(raw)
    metadata, places = whole_header(lambda start, count: raw[start : start + count], len(raw))
    tensors = {name: _tensor(place, raw) for name, place in places.items()}
    if not tensors:
        raise ValueError("it has no tensors: name them {hook}.{layer}, such as post_block.12")
    specs = (
        _general(tensors, metadata[ENTRIES_KEY])
        if ENTRIES_KEY in metadata
        else (of_names or of_sites)(tensors, _shared(metadata))
    )
    if len(specs) > MAX_ENTRIES:
        raise ValueError(f"it has {len(specs)} entries: at most {MAX_ENTRIES} are allowed")
    return specs


def to_bytes(specs: Sequence[SteeringSpec]) -> bytes:
    """Returns the entries as a general file; the inverse of `specs_of`.

    Raises ValueError for an empty list or entries without tensors.
    """
    if not specs:
        raise ValueError("no entries to write: give at least one")
    entries: list[JsonObject] = []
    tensors: dict[str, Tensor] = {}
    for index, spec in enumerate(specs):
        _check_vectors(index, spec)
        given = {name: value for name in _FIELD_TYPES if (value := getattr(spec, name)) is not None}
        tensors |= {f"{index}.{name}": given.pop(name) for name in SHAPES if name in given}
        entries.append(given)
    return encode_safetensors(tensors, {ENTRIES_KEY: msgspec.json.encode(entries).decode()})


def of_sites(
    tensors: Mapping[str, Tensor], shared: Mapping[str, Any] | None = None
) -> list[SteeringSpec]:
    """Returns the entries of tensors named `{hook}.{layer}` or `{hook}.{layer}.{field}`, each with
    the fields in `shared`.

    Raises ValueError naming the key.
    """
    sites: dict[tuple[int, int], dict[str, Tensor]] = {}
    named: dict[tuple[int, int, str], str] = {}
    wide: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        site_named = full_name(key)
        match = _SITE.fullmatch(f"{site_named[0]}.{site_named[1]}" if site_named else key)
        # the next line checks that the name is a hook's
        hook = match and resolve_hook(match["hook"])  # type: ignore[arg-type]
        if match is None or hook not in EVERY:
            names = ", ".join([*EVERY, *(name for name in ALIASES if not name.startswith("hook_"))])
            raise ValueError(
                f"{_quoted(key)} is not a site: write {{hook}}.{{layer}}, such as "
                f"post_block.12, with hooks {names}"
            )
        field = match["field"] or "vector"
        site = (EVERY.index(hook), int(match["layer"]))
        if (before := named.setdefault((*site, field), key)) != key:
            raise ValueError(f"{_quoted(key)} is the same as {_quoted(before)}: keep one of them")
        sites.setdefault(site, {})[field] = _fitting(key, field, tensor)
        if TENSORS[field].wide:
            wide[key] = tensor
    _same_width(wide)
    specs = []
    for (hook_index, layer), fields in sorted(sites.items()):
        given = {"op": implied_op(fields), **(shared or {}), **fields}
        specs.append(SteeringSpec(layers=layer, hook=EVERY[hook_index], **given))
    return specs


def implied_op(tensors: Iterable[str]) -> str | None:
    """Returns the op that takes these tensors; None: the default, which takes a vector."""
    if "vector" in tensors:
        return None
    ops = [op for op, takes in STEERING_FIELDS.items() if set(tensors) & set(takes.tensors)]
    return ops[0] if ops else None


def _general(tensors: Mapping[str, Tensor], text: str) -> list[SteeringSpec]:
    with Translated(
        (msgspec.DecodeError, TooManyValues),
        lambda error: ValueError(f"metadata {ENTRIES_KEY} is not a list of entries: {error}"),
    ):
        check_json(text.encode())
        entries = msgspec.json.decode(text, type=list[SteeringSpec])
    for index, entry in enumerate(entries):
        _check_vectors(index, entry)
        if inside := [name for name in SHAPES if getattr(entry, name) is not None]:
            raise ValueError(
                f"entry {index} contains its {inside[0]} inline: make it the tensor "
                f"{index}.{inside[0]}"
            )
    of_entry: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(entries))}
    wide: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = _INDEXED.fullmatch(key)
        if match is None or int(match["index"]) not in of_entry:
            raise ValueError(
                f"{_quoted(key)} belongs to no entry: write {{index}}.{{field}}, index 0 to "
                f"{len(entries) - 1}"
            )
        field = match["field"]
        of_entry[int(match["index"])][field] = _fitting(key, field, tensor)
        if TENSORS[field].wide:
            wide[key] = tensor
    for index, value in of_entry.items():
        if not value:
            raise ValueError(f"entry {index} has no tensor, such as {index}.vector")
    _same_width(wide)
    return [
        msgspec.structs.replace(entry, **of_entry[index]) for index, entry in enumerate(entries)
    ]


def _check_vectors(index: int, spec: SteeringSpec) -> None:
    if spec.module is not None:
        raise ValueError(
            f"entry {index} refers to module {spec.module!r}: a file contains vectors, not names"
        )


def _check_header(raw: bytes) -> None:
    """Raises ValueError for a header of more bytes or tensors than a module needs, before the file
    is parsed.
    """
    length = int.from_bytes(raw[:8], "little")
    if length > MAX_FILE_HEADER:
        raise ValueError(f"its header is {length} bytes: at most {MAX_FILE_HEADER} are allowed")
    if (tensors := raw.count(b'"data_offsets"', 8, 8 + length)) > MAX_FILE_TENSORS:
        raise ValueError(f"it has {tensors} tensors: at most {MAX_FILE_TENSORS} are allowed")


def _shared(metadata: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, text in metadata.items():
        if name in _FOREIGN:
            continue
        if name not in SHARED:
            raise ValueError(
                f"unknown metadata {_quoted(name)}: use {', '.join(SHARED)}, or {ENTRIES_KEY}"
            )
        values[name] = _value(name, text)
    return values


def _value(name: str, text: str) -> Any:
    """Returns the value of a field that is written as JSON, or as a bare name such as `ablate`."""
    try:
        return msgspec.json.decode(text, type=_FIELD_TYPES[name])
    except msgspec.DecodeError as not_json:
        try:
            return msgspec.convert(text, _FIELD_TYPES[name])
        except msgspec.ValidationError:
            raise ValueError(
                f"metadata {name} has the invalid value {_quoted(text)}: {not_json}"
            ) from not_json


def _tensor(place: TensorPlace, raw: bytes) -> Tensor:
    data = raw[place.start : place.start + place.length]
    return Tensor(dtype=cast(DType, DTYPE_OF_FILE[place.dtype]), shape=place.shape, data=data)


def _fitting(key: str, field: str, tensor: Tensor) -> Tensor:
    if field not in SHAPES:
        raise ValueError(f"{_quoted(key)}: unknown tensor {field!r}; valid: {', '.join(SHAPES)}")
    if len(tensor.shape) != len(SHAPES[field]):
        raise ValueError(
            f"{_quoted(key)} has shape {tensor.shape}: a {field} must be "
            f"[{', '.join(SHAPES[field])}]"
        )
    return tensor


def _same_width(tensors: Mapping[str, Tensor]) -> None:
    first, of_first = next(iter(tensors.items()), ("", None))
    for key, tensor in tensors.items():
        if of_first is not None and tensor.shape[-1] != of_first.shape[-1]:
            raise ValueError(
                f"{_quoted(key)} has width {tensor.shape[-1]}, but {_quoted(first)} has "
                f"{of_first.shape[-1]}: all must have the same width"
            )


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
