"""Parses what is typed into fields of a request: `--set`, files, and the short options for layers,
positions, hooks and steering. The server validates their values.
"""

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.base.limits import MAX_PROMPTS
from ...schemas.base.records import json_or_text
from ...schemas.prompts.selectors import HookName, LayerSelector, written_span
from ...schemas.requests.specs import SteeringSpec
from ...schemas.service.global_capture import parse_hooks
from ...schemas.settings.settings import SettingsError
from .. import vectors
from ..sdk import wire
from ..sdk.fields import Steering
from ..texts import READERS, decoded, read_rows, split
from ..values import checked

#: The metavar of every option that takes hooks.
HOOKS_FORM = "HOOK[:LAYERS];…"
#: The column of prompts and documents in a file.
TEXT = ("text",)
#: Files that texts are read from.
ROWS_FORM = "FILE[:COLUMN] in CSV, JSON lines or Parquet, or one a line"
#: The metavar of `--steer`.
STEER = "FILE[:LAYERS[:SCALE]] | @MODULE[:SCALE], [:NAME=VALUE]…"


# --- Fields


def fields(
    file: Path | None,
    pairs: Sequence[str] | None,
    typed: Mapping[str, Any] = MappingProxyType({}),
    items: str = "",
    wanted: Sequence[str] = TEXT,
) -> dict[str, Any]:
    """Return the fields of a request: those of `file`, in place of which those of `typed` (the
    command's own options, by path) and of `--set` are taken.

    A path that is given more than once gets the list of its values. A file that has no fields but
    rows adds to the list at the path `items`: texts, or objects with several that are `wanted`.
    Raises MidstreamError naming the option.
    """
    given: dict[str, Any] = {}
    for path, item in typed.items():
        if item not in (None, [], {}):
            _put(given, path, item)
    content = {} if file is None else _fields_of(file)
    if content is None and not items:
        raise invalid(
            "--file",
            f"{file} has no fields: it is no JSON object and no TOML",
            allowed="a JSON object, or TOML",
        )
    if file is not None and content is None:
        _put(given, items, texts(file) if wanted == TEXT else rows(file, wanted, required=False))
    for pair in pairs or ():
        path, equals, text = pair.partition("=")
        if not (equals and path):
            raise invalid("--set", f"{pair!r} is not FIELD=VALUE", allowed="such as max_tokens=4")
        _put(given, path, json_or_text(text))
    return _merged(content or {}, given)


def _put(given: dict[str, Any], path: str, item: Any) -> None:
    *parents, last = path.split(".")
    place = given
    for name in parents:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise invalid("--set", f"{path!r}: {name!r} has a value, and no fields")
    if last not in place:
        place[last] = item
        return
    former = place[last]
    listed = former if isinstance(former, list) else [former]
    place[last] = [*listed, *(item if isinstance(item, list) else [item])]


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, with the fields of `over` in place of those of `under`."""
    return {**under, **over} | {
        name: _merged(under[name], over[name])
        for name in under.keys() & over.keys()
        if isinstance(under[name], dict) and isinstance(over[name], dict)
    }


def _fields_of(file: Path) -> Any:
    """Return the object of a JSON or TOML file; None for files of rows. Raises MidstreamError
    naming the file.
    """
    path, columns = split(file)
    if columns or path.suffix.lower() in READERS:
        return None
    with Translated(
        (ValueError, OSError),
        lambda error: invalid("--file", f"{file}: {getattr(error, 'strerror', error)}"),
    ):
        raw = file.read_bytes().removeprefix(BOM_UTF8)
        if file.suffix == ".toml":
            return msgspec.toml.decode(raw)
        content = decoded(raw) if file.suffix == ".json" else json_or_text(raw.decode())
    return content if isinstance(content, dict) else None


def texts(file: str | Path | None, option: str = "FILE", hint: str | None = None) -> list[Any]:
    """Return the texts of a file, or its lists of token ids; none of None. Raises as `rows`."""
    if file is None:
        return []
    found = [row["text"] for row in rows(file, TEXT, option=option, hint=hint)]
    if any(isinstance(item, dict) for text in found if isinstance(text, list) for item in text):
        raise invalid(
            option,
            f"{file} has conversations",
            allowed="texts, or lists of token ids",
            hint="send conversations as messages: client.run(messages=…)",
        )
    return found


def rows(
    file: str | Path,
    wanted: Sequence[str],
    required: bool = True,
    option: str = "FILE",
    hint: str | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of a file, of which there must be some, and no more of them than it takes to
    see that they are too many. Raises as `read_rows`, MidstreamError that names `option`, with
    `hint`, in place of OSError.
    """
    with Translated(
        OSError,
        lambda error: invalid(option, f"{file}: {error.strerror}", allowed=ROWS_FORM, hint=hint),
    ):
        found = [*islice(read_rows(file, wanted, required), MAX_PROMPTS + 1)]
    if not found:
        raise invalid("FILE", f"{file} has no rows", allowed=f"rows with {', '.join(wanted)}")
    if all(row.keys().isdisjoint(wanted) for row in found):
        columns = ",".join(map("=".join, zip(wanted, found[0], strict=False)))
        raise invalid(
            "FILE",
            f"{file} has none of {', '.join(wanted)}: it has {', '.join(found[0])}",
            hint=f"name columns as in {file}:{columns}",
        )
    return found


# --- Sites


def layers(text: str | None) -> str | int | None:
    """Convert a single layer to a number; return other text unchanged, for the server."""
    return int(text) if text and text.strip().removeprefix("-").isdecimal() else text


def positions(text: str | None) -> Any:
    """Parse `0,5,-1` as numbers, `5:` or `5:9` as a range, `last:64` as the last rows, and JSON
    such as `{"role": "user"}`; return other text unchanged, for the server.
    """
    try:
        parts = [written_span(part) or int(part) for part in (text or "x").split(",")]
    except ValueError:
        return text and json_or_text(text)
    return parts[0] if len(parts) == 1 and isinstance(parts[0], dict) else parts


def hooks(text: str | None, chosen: LayerSelector | None) -> dict[HookName, LayerSelector] | None:
    """Parse `--hooks`; `chosen` (of `--layers`) applies to hooks without layers of their own.

    Raises MidstreamError naming the option.
    """
    if text is None:
        return None
    with Translated(
        ValueError,
        lambda error: invalid(
            "--hooks",
            str(error),
            allowed="such as post_block:all;pre_attn:0-3 or resid_pre,mlp_out",
        ),
    ):
        parsed = parse_hooks(text, "" if chosen is None else chosen)
    if chosen is not None and chosen not in parsed.values():
        raise invalid("--layers", "has no effect: every hook in --hooks names its own layers")
    for hook, own in parsed.items():
        if isinstance(own, str):
            found = layers(own)
            parsed[hook] = "all" if found is None or found == "" else found
    return parsed


def sites(hooks_text: str | None, layers_text: str | None) -> dict[str, Any]:
    """Return the fields `hooks` or `layers` of what captures."""
    chosen = layers(layers_text)
    by_hook = hooks(hooks_text, chosen)
    return {"hooks": by_hook} if by_hook else wire.given(layers=chosen)


# --- Steering


def steering(texts: Sequence[str] | None, option: str = "--steer") -> list[Steering]:
    """Parse the entries in each text. Raises MidstreamError naming `option`.

    `joy.npy:15:4.0`, or with names: `joy.npy:10-15:hook=mlp_out:op=clamp:low=-1:high=2`. The file
    is in any format of `client.vectors`; if it names its layers, LAYERS selects among them, and may
    be omitted. `@joy:2.0` is the module `joy` at twice its strength, and
    `@joy:positions=all_generated` the same at other positions than its own.
    """
    entries: list[Steering] = []
    for text in texts or ():
        source, *parts = _parts(text)
        module = source.removeprefix("@") if source.startswith("@") else None
        places = ("layers", "scale") if module is None else ("scale",)
        by_place = [part for part in parts if "=" not in part]
        if len(by_place) > len(places) or parts[: len(by_place)] != by_place or module == "":
            allowed = f"{STEER}, such as joy.npy:15:4.0, joy.npy:15:op=ablate or @joy:2"
            raise invalid(option, f"{text!r}: is not valid", allowed=allowed)
        named = [part.partition("=")[::2] for part in parts[len(by_place) :]]
        given = [*zip(places, by_place, strict=False), *named]
        try:
            entry = {name: _READ.get(name, json_or_text)(item) for name, item in given if item}
            if module is not None:
                entries += checked([{"module": module, **entry}], list[SteeringSpec], "steering")
            else:
                entries += vectors.read(source, entry.pop("layers", None), **entry)
        except (OSError, ValueError, MidstreamError) as error:
            raise invalid(option, f"{text!r}: {error}") from error
    return entries


#: Name in NAME=VALUE of `--steer` → the function that parses its value, where it is not `value`.
_READ = {"layers": layers, "positions": positions}


def _parts(text: str) -> list[str]:
    """Split text at colons, except those of a range (`positions=5:9`, `positions=5::scale=2`) and
    those in braces (`trigger={"text": "because"}`).
    """
    parts: list[str] = []
    for part in text.split(":"):
        last = parts[-1] if parts else ""
        in_range = last.startswith("positions=") and "=" not in part
        if in_range or last.count("{") > last.count("}"):
            parts[-1] += f":{part}"
        else:
            parts.append(part)
    return parts


# --- Settings


def overrides(pairs: list[str]) -> dict[str, str]:
    """Parse `--set name=value`, repeatedly. Raises SettingsError."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise SettingsError(f"--set {pair!r}: write it as NAME=VALUE, such as kv_cache_gib=2")
        values[name.strip().lower()] = text
    return values
