"""What do the options of `midstream submit` ask for? Text as typed becomes the fields of a request; the server judges the rest."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ..schemas.errors import MidstreamError, invalid
from ..schemas.global_capture import parse_hooks
from ..schemas.selectors import written_range
from .wire import Steering

#: Capture option → the field of a capture that it sets. One of the first three asks for a capture; the others say how.
CAPTURE_OPTIONS = {
    "--layers": "layers", "--capture-hook": "hook", "--hooks": "hooks", "--positions": "positions", "--span": "spans", "--at": "at",
    "--dtype": "dtype", "--every-n": "every_n", "--layout": "layout", "--consumer": "consumers", "--tag": "tag",
}  # fmt: skip
_ASKING = ("layers", "hook", "hooks")


def parse_layers(text: str) -> str | int:
    """One layer as a number; everything else as typed, for the server."""
    number = text.strip()
    return int(number) if number.removeprefix("-").isdecimal() else text


def parse_positions(text: str) -> str | dict[str, int] | list[int | dict[str, int]]:
    """`0,5,-1` as numbers, `5:` or `5:9` as a range; a name stays one, and so does what only the server can complain about."""
    try:
        return written_range(text) or [written_range(part) or int(part) for part in text.split(",")]
    except ValueError:
        return text


def parse_span(text: str) -> dict[str, Any]:
    """`TEXT`, or `TEXT#1` for its second occurrence, `TEXT#-1` for the last, `TEXT#all` for every one."""
    part, mark, occurrence = text.rpartition("#")
    if mark and part and occurrence == "all":
        return {"text": part, "occurrence": None}
    if mark and part and occurrence.removeprefix("-").isdecimal():
        return {"text": part, "occurrence": int(occurrence)}
    return {"text": text}


def parse_capture(**options: Any) -> dict[str, Any] | None:
    """The capture that the options ask for, if any; `options`: the values of `CAPTURE_OPTIONS`, as typed.

    Raises MidstreamError naming an option that would do nothing, or cannot be read.
    """
    given = {field: value for field, value in options.items() if value not in (None, [], "")}
    if not any(field in given for field in _ASKING):
        for option, field in CAPTURE_OPTIONS.items():
            if field in given:
                raise invalid(option, "captures nothing without --layers, --capture-hook or --hooks", allowed="such as --layers all")
        return None
    if "layers" in given:
        given["layers"] = parse_layers(given["layers"])
    if "hooks" in given:
        try:
            given["hooks"] = parse_hooks(given["hooks"])
        except ValueError as error:
            raise invalid("--hooks", str(error), allowed='such as "post_block:all;pre_attn:0-3"') from error
    positions = _positions(given.pop("positions", None), given.pop("spans", []))
    return given if positions is None else {**given, "positions": positions}


def _positions(text: str | None, spans: Sequence[str]) -> Any:
    positions = None if text is None else parse_positions(text)
    if not spans:
        return positions
    if isinstance(positions, str):
        raise invalid("--span", f"cannot be added to --positions {positions}", allowed="numbers in --positions, or no --positions")
    given = [positions] if isinstance(positions, dict) else positions or []
    return [*given, *map(parse_span, spans)]


#: As `--help` shows them.
STEER_FILE = "FILE:LAYERS[:SCALE[:HOOK]][:NAME=VALUE]…"
STEER = f"{STEER_FILE} | @MODULE[:SCALE][:NAME=VALUE]… | FILE.safetensors"
_YES = {"true": True, "false": False}
#: What may be said by name → how it is read.
STEER_NAMES: dict[str, Callable[[str], Any]] = {
    "op": str, "hook": str, "positions": parse_positions, "norm_match": lambda text: _YES[text],
    "scale": float, "alpha": float, "strength": float, "low": float, "high": float,
}  # fmt: skip
#: Those of them that a named module takes.
MODULE_NAMES = ("scale", "positions")


def parse_steering(texts: Sequence[str], option: str = "--steer") -> list[Steering]:
    """What `parse_steer` reads of each text, and of a `.safetensors` file all of its entries; raises MidstreamError naming `option`."""
    entries: list[Steering] = []
    for text in texts:
        try:
            if text.endswith(".safetensors"):
                from ..schemas.module_files import specs_of

                entries += specs_of(Path(text).read_bytes())
            else:
                entries.append(parse_steer(text))
        except (OSError, ValueError) as error:
            raise invalid(option, f"{text!r}: {error}") from error
        except MidstreamError as error:
            raise MidstreamError(error.kind, error.detail, field=option, allowed=error.allowed) from error
    return entries


def parse_steer(text: str) -> dict[str, Any]:
    """`joy.npy:15:4.0`, or with names: `joy.npy:10-15:op=clamp:low=-1:high=2`; raises MidstreamError naming `--steer`.

    A `.npy` file is the vector. A `.npz` file holds the entry's tensors under their names: `rotation`, `weight`, `bias`.
    `@joy:2.0` is the module `joy` at twice its strength, `@joy:positions=all_generated` at other positions than its own.
    """
    source, *parts = _parts(text)
    is_module = source.startswith("@")
    places, names = (("scale",), MODULE_NAMES) if is_module else (("layers", "scale", "hook"), tuple(STEER_NAMES))
    named = [part for part in parts if "=" in part]
    placed = [part for part in parts if "=" not in part]
    if not is_module and (not placed or not placed[0]):
        raise _unreadable(text, "names no layers")
    if len(placed) > len(places) or parts[: len(placed)] != placed or source == "@":
        raise _unreadable(text, "cannot be read")
    given = dict(zip(places, placed, strict=False)) | dict(part.split("=", 1) for part in named)
    entry: dict[str, Any] = {"module": source[1:]} if is_module else {"layers": parse_layers(given.pop("layers"))}
    for name, value in given.items():
        if name not in names:
            raise _unreadable(text, f"{'a module takes' if is_module else 'there is'} no {name!r}: use {', '.join(names)}")
        if value:
            try:
                entry[name] = STEER_NAMES[name](value)
            except (ValueError, KeyError) as error:
                raise _unreadable(text, f"{name} cannot be {value!r}") from error
    return entry if is_module else entry | _tensors(source, text)


def _parts(text: str) -> list[str]:
    """What colons part; those of a range belong to it: `positions=5:9`, `positions=5::scale=2`."""
    parts: list[str] = []
    for part in text.split(":"):
        if parts and parts[-1].startswith("positions=") and "=" not in part:
            parts[-1] += f":{part}"
        else:
            parts.append(part)
    return parts


def _tensors(path: str, text: str) -> dict[str, np.ndarray]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"vector": loaded}
        with loaded:
            return dict(loaded)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise invalid("--steer", f"{text!r}: {error}") from error


def _unreadable(text: str, why: str) -> MidstreamError:
    return invalid("--steer", f"{text!r}: {why}", allowed=f"{STEER}, such as joy.npy:15:4.0, joy.npy:15:op=ablate or @joy:2")


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, or a JSON list of texts."""
    text = path.read_text()
    if text.lstrip().startswith("["):
        found = json.loads(text)
        if not all(isinstance(entry, str) for entry in found):
            raise invalid("file", f"{path}: a JSON file of prompts is a list of texts")
        return list(found)
    return [line for line in text.splitlines() if line.strip()]
