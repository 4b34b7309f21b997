"""Parsing of `midstream submit` options into request fields; the server validates the rest."""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from ...schemas.base.errors import MidstreamError, invalid, misfit
from ...schemas.base.settings import SettingsError
from ...schemas.base.tensors import Tensor
from ...schemas.prompts.selectors import HookName, LayerSelector, written_range
from ...schemas.requests.interventions import FAMILIES, STEERING_FIELDS
from ...schemas.service.choices import suggestion
from ...schemas.service.global_capture import HOOK_NAMES, parse_hooks
from .. import vectors
from ..durations import seconds
from ..sdk.wire import Patch, Steering
from ..vectors import numpy_file

#: Capture option → the field of a capture that it sets. One of the first two requests a capture;
#: the others are its options.
CAPTURE_OPTIONS = {
    "--layers": "layers",
    "--hooks": "hooks",
    "--positions": "positions",
    "--span": "spans",
    "--at": "at",
    "--dtype": "dtype",
    "--every-n": "every_n",
    "--layout": "layout",
    "--consumer": "consumers",
    "--tag": "tag",
    "--run": "run",
}
_ASKING = ("layers", "hooks")
#: As `--help` shows it, wherever hooks are named.
HOOKS_FORM = "HOOK[:LAYERS];…"


def one_of(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def parse_layers(text: str) -> str | int:
    """One layer as a number; everything else as typed, for the server."""
    number = text.strip()
    return int(number) if number.removeprefix("-").isdecimal() else text


def parse_positions(text: str) -> str | dict[str, int] | list[int | dict[str, int]]:
    """`0,5,-1` as numbers, `5:` or `5:9` as a range; a name stays one, and so does what only the
    server can complain about.
    """
    try:
        return written_range(text) or [written_range(part) or int(part) for part in text.split(",")]
    except ValueError:
        return text


def parse_span(text: str) -> dict[str, Any]:
    """`TEXT`, or `TEXT#1` for its second occurrence, `TEXT#-1` for the last, `TEXT#all` for every
    one.
    """
    part, mark, occurrence = text.rpartition("#")
    if mark and part and occurrence == "all":
        return {"text": part, "occurrence": None}
    if mark and part and occurrence.removeprefix("-").isdecimal():
        return {"text": part, "occurrence": int(occurrence)}
    return {"text": text}


def parse_capture(**options: Any) -> dict[str, Any] | None:
    """The capture that the options ask for, if any; `options`: the values of `CAPTURE_OPTIONS`, as
    typed.

    Raises MidstreamError naming an option that would do nothing, or cannot be read.
    """
    given = {field: value for field, value in options.items() if value not in (None, [], "")}
    if not any(field in given for field in _ASKING):
        for option, field in CAPTURE_OPTIONS.items():
            if field in given:
                raise invalid(
                    option, "requires --layers or --hooks", allowed="such as --layers all"
                )
        return None
    if "layers" in given:
        given["layers"] = parse_layers(given["layers"])
    if "hooks" in given:
        given["hooks"] = read_hooks(given["hooks"], given.pop("layers", None))
    positions = _positions(given.pop("positions", None), given.pop("spans", []))
    return given if positions is None else {**given, "positions": positions}


def read_hooks(text: str, layers: LayerSelector | None = None) -> dict[HookName, LayerSelector]:
    """`--hooks`, where `--layers` are those of the hooks that name none.

    Raises MidstreamError naming the option.
    """
    try:
        hooks = parse_hooks(text, "" if layers is None else layers)
    except ValueError as error:
        raise invalid(
            "--hooks",
            str(error),
            allowed="such as post_block:all;pre_attn:0-3 or resid_pre,mlp_out",
        ) from error
    if layers is not None and layers not in hooks.values():
        raise invalid("--layers", "does nothing: every hook in --hooks names its own layers")
    return {
        hook: "all" if own == "" else parse_layers(own) if isinstance(own, str) else own
        for hook, own in hooks.items()
    }


def sweep_sites(hooks: str | None, layers: str | None) -> dict[str, Any]:
    """`--hooks` and `--layers` of a sweep, whose hooks all have the same layers.

    Raises MidstreamError naming the option.
    """
    chosen = None if layers is None else parse_layers(layers)
    if hooks is None:
        return {"layers": chosen}
    read = read_hooks(hooks, chosen)
    if any(own != next(iter(read.values())) for own in read.values()):
        raise invalid(
            "--hooks",
            "a sweep uses the same layers at every hook",
            allowed="hooks without layers, such as resid_pre,mlp_out, and --layers",
        )
    return {"hooks": list(read), "layers": next(iter(read.values()))}


def parse_site(text: str, option: str) -> tuple[str | None, int]:
    """`[HOOK:]LAYER` as hook and layer. Raises MidstreamError naming the option."""
    hook, colon, layer = text.rpartition(":")
    if (colon and hook not in HOOK_NAMES) or not re.fullmatch(r"[0-9]{1,6}", layer):
        raise invalid(option, f"{text!r} is not [HOOK:]LAYER", allowed="such as 12 or mlp_out:12")
    return hook or None, int(layer)


def _positions(text: str | None, spans: Sequence[str]) -> Any:
    positions = None if text is None else parse_positions(text)
    if not spans:
        return positions
    if isinstance(positions, str):
        raise invalid(
            "--span",
            f"cannot be added to --positions {positions}",
            allowed="numbers in --positions, or no --positions",
        )
    given = [positions] if isinstance(positions, dict) else positions or []
    return [*given, *map(parse_span, spans)]


#: As `--help` shows them.
STEER_FILE = "FILE:[HOOK:]LAYERS[:SCALE][:NAME=VALUE]…"
STEER = f"{STEER_FILE} | @MODULE[:SCALE][:NAME=VALUE]… | %SAE:FEATURE[:VALUE][:op=OP] | FILE"
_YES = {"true": True, "false": False}
_OPTIONS = tuple(
    dict.fromkeys(name for takes in STEERING_FIELDS.values() for name in takes.options)
)
_FLAGS = {family.flag for family in FAMILIES}
#: What may be said by name → how it is read.
STEER_NAMES: dict[str, Callable[[str], Any]] = {
    "op": str, "positions": parse_positions,
    **{name: lambda text: _YES[text] for name in _OPTIONS if name in _FLAGS},
    **{name: float for name in _OPTIONS if name not in _FLAGS},
}  # fmt: skip
#: Those of them that a named module takes.
MODULE_NAMES = ("scale", "positions")
_READ: dict[str, Callable[[str], Any]] = STEER_NAMES | {"feature": int, "value": float}
#: First character of what is not a file → (its field, what follows it, all that may be said by
#: name, what it is called).
_REFERENCES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "@": ("module", ("scale",), MODULE_NAMES, "a module"),
    "%": ("sae", ("feature", "value"), ("feature", "value", "op", "positions"), "a feature"),
}


def parse_steering(texts: Sequence[str], option: str = "--steer") -> list[Steering]:
    """The entries that each text stands for; raises MidstreamError naming `option`.

    `joy.npy:15:4.0`, `joy.npy:mlp_out:15`, or with names: `joy.npy:10-15:op=clamp:low=-1:high=2`.
    The file is in any format of `client.vectors`; where it names its layers, they may be left out,
    and are otherwise those that are taken of it. `@joy:2.0` is the module `joy` at twice its
    strength, `@joy:positions=all_generated` at other positions than its own. `%tiny:123:4.0` adds 4
    times the decoder row of feature 123 of the sparse autoencoder `tiny`; `%tiny:123:0:op=clamp`
    sets it to 0.
    """
    entries: list[Steering] = []
    for text in texts:
        try:
            source, entry = _parse_steer(text)
            entries += (
                [entry]
                if source[:1] in _REFERENCES
                else vectors.read(source, entry.pop("layers", None), **entry)
            )
        except (OSError, ValueError) as error:
            raise invalid(option, f"{text!r}: {error}") from error
        except MidstreamError as error:
            raise MidstreamError(
                error.kind, error.detail, field=option, allowed=error.allowed
            ) from error
    return entries


def _parse_steer(text: str) -> tuple[str, dict[str, Any]]:
    """Return what comes before the first colon, and the fields of an entry.

    Raises MidstreamError naming `--steer`.
    """
    source, *parts = _parts(text)
    refers = source[:1] in _REFERENCES
    hook = parts.pop(0) if not refers and parts and parts[0] in HOOK_NAMES else None
    field, places, names, called = _REFERENCES.get(
        source[:1], ("", ("layers", "scale"), tuple(STEER_NAMES), "there")
    )
    named = [part for part in parts if "=" in part]
    placed = [part for part in parts if "=" not in part]
    if len(placed) > len(places) or parts[: len(placed)] != placed or source in _REFERENCES:
        raise _unreadable(text, "is not valid")
    given = dict(zip(places, placed, strict=False)) | dict(part.split("=", 1) for part in named)
    layers = given.pop("layers", "") if not refers else ""
    entry: dict[str, Any] = (
        {field: source[1:]} if refers else {"layers": parse_layers(layers)} if layers else {}
    )
    if hook is not None:
        entry["hook"] = hook
    for name, value in given.items():
        if name not in names:
            suggested = suggestion(name, names)
            why = f"{called} {'takes' if refers else 'is'} no {name!r}: use {', '.join(names)}"
            raise _unreadable(text, why + (f"; {suggested}" if suggested else ""))
        if value:
            try:
                entry[name] = _READ[name](value)
            except (ValueError, KeyError) as error:
                raise _unreadable(text, f"invalid {name} {value!r}") from error
    return source, entry


def _parts(text: str) -> list[str]:
    """Return what colons part; those of a range belong to it: `positions=5:9`,
    `positions=5::scale=2`.
    """
    parts: list[str] = []
    for part in text.split(":"):
        if parts and parts[-1].startswith("positions=") and "=" not in part:
            parts[-1] += f":{part}"
        else:
            parts.append(part)
    return parts


def _vector(path: str, text: str) -> dict[str, Tensor]:
    """The vector of a `.npy` file, for a patch."""
    try:
        return {"vector": numpy_file.read_npy(vectors.content(path)).tensor()}
    except (OSError, ValueError) as error:
        raise invalid("--patch", f"{text!r}: {error}") from error


def _unreadable(text: str, why: str) -> MidstreamError:
    return invalid(
        "--steer",
        f"{text!r}: {why}",
        allowed=f"{STEER}, such as joy.npy:15:4.0, joy.npy:mlp_out:15:op=ablate or @joy:2",
    )


# --- Readings


def parse_lens(text: str) -> dict[str, Any]:
    """`0-5,9` or `all:3`: layers, and how many tokens of each.

    Raises MidstreamError naming `--lens`.
    """
    layers, more = _with_top_k(text, "--lens", "LAYERS[:TOP_K], such as all or 0,10,-1:3")
    return {"layers": parse_layers(layers), **more}


def parse_features(text: str, option: str = "--features") -> dict[str, Any]:
    """`words` or `words:3`: an autoencoder, and how many features of each token.

    Raises MidstreamError naming the option.
    """
    name, more = _with_top_k(text, option, "NAME[:TOP_K], such as words:5")
    return {"sae": name, **more}


def _with_top_k(text: str, option: str, allowed: str) -> tuple[str, dict[str, int]]:
    name, colon, number = text.partition(":")
    if not name or (colon and not number.isdecimal()):
        raise invalid(option, f"{text!r} is not valid", allowed=allowed)
    return name, {"top_k": int(number)} if colon else {}


# --- Probes

PROBE = "NAME[:ACTION] | NAME:steer:MODULE[:SCALE]"


def parse_probes(texts: Sequence[str]) -> list[dict[str, Any]]:
    """`probes` of a request. Raises a problem for a text of another form."""
    result: list[dict[str, Any]] = []
    for text in texts:
        name, *rest = text.split(":")
        use: dict[str, Any] = {"probe": name, "action": rest[0] if rest and rest[0] else "none"}
        try:
            use |= (
                dict(zip(("module", "scale"), (rest[1], *map(float, rest[2:])), strict=False))
                if len(rest) > 1
                else {}
            )
        except ValueError:
            raise invalid(
                "--probe", f"{text!r}: {rest[2]!r} is not a number", allowed=PROBE
            ) from None
        if len(rest) > 3:
            raise invalid("--probe", f"{text!r} has {len(rest) + 1} parts", allowed=PROBE)
        result.append(use)
    return result


# --- Patches

#: As `--help` shows it.
PATCH = "[HOOK:]LAYERS@POSITIONS=SOURCE[:NAME=VALUE]…"
_PATCH = re.compile(
    r"""(?:(?P<hook>[a-z_]+):)?(?P<layers>[^@:="]+)"""
    r"""@(?:"(?P<text>[^"]+)"(?:\#(?P<occurrence>all|-?[0-9]+))?|(?P<positions>[^="]+))"""
    r"""=(?P<source>.+)"""
)
#: What may follow by name → how it is read. The first are the patch's own; the others are its
#: source's, of a run.
PATCH_NAMES: dict[str, Callable[[str], Any]] = {"alpha": float, "mask": str}
RUN_NAMES: dict[str, Callable[[str], Any]] = {"prompt": int, "positions": parse_positions}


def parse_patch(text: str) -> dict[str, Any]:
    """`12@5=clean:5`: the row of run `clean` at position 5 in place of that at position 5, at
    `post_block` of layer 12.

    Before `=` stands what is written: `HOOK:` (if left out: `post_block`), layers, and positions as
    elsewhere, or a part of the prompt's text in double quotes, with `#N` behind them for another
    occurrence than the first. Behind it the source: a run (or a job's id) with a position or
    several separated by commas, none for those that are written, or `mean`; a `.npy` file;
    `@MODULE`; `zeros`. Then by name `alpha`, `mask`, and of a run `prompt` and (of a mean)
    `positions`. Raises MidstreamError naming `--patch`.
    """
    match = _PATCH.fullmatch(text)
    if match is None:
        raise _no_patch(text, "is not valid")
    name, *parts = _parts(match["source"])
    entry: dict[str, Any] = {"layers": parse_layers(match["layers"]), "positions": _written(match)}
    if match["hook"]:
        entry["hook"] = match["hook"]
    is_run = not (name == "zeros" or name.startswith("@") or name.endswith(".npy"))
    source = {"run": name} if is_run else _source(name, text)
    names = PATCH_NAMES | (RUN_NAMES if is_run else {})
    for number, part in enumerate(parts):
        key, equals, value = part.partition("=")
        if not equals and is_run and number == 0:
            source |= (
                {"mean": True}
                if key == "mean"
                else {"position": _read(text, "position", key, _places)}
            )
        elif equals and key in names:
            (entry if key in PATCH_NAMES else source)[key] = _read(text, key, value, names[key])
        else:
            raise _no_patch(text, f"unknown part {part!r}: use {', '.join(names)}")
    return {**entry, "source": source}


def _written(match: re.Match[str]) -> Any:
    """The positions that are patched."""
    if match["text"] is None:
        return parse_positions(match["positions"])
    occurrence = match["occurrence"]
    if occurrence is None:
        return {"text": match["text"]}
    return {"text": match["text"], "occurrence": None if occurrence == "all" else int(occurrence)}


def _places(text: str) -> int | list[int]:
    places = [int(part) for part in text.split(",")]
    return places if len(places) > 1 else places[0]


def _source(name: str, text: str) -> dict[str, Any]:
    """Parse a patch's source that is not a run."""
    if name == "zeros":
        return {"zeros": True}
    return {"module": name[1:]} if name.startswith("@") else _vector(name, text)


def _read(text: str, name: str, value: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise _no_patch(text, f"invalid {name} {value!r}") from error


def _no_patch(text: str, why: str) -> MidstreamError:
    example = (
        "such as 12@5=clean:5, resid_pre:0-11@-1=clean:-1:alpha=0.5 or "
        'mlp_out:8@"Eiffel Tower"=zeros'
    )
    return invalid("--patch", f"{text!r}: {why}", allowed=f"{PATCH}, {example}")


def parse_patches(texts: Sequence[str]) -> list[Patch]:
    """Return what `parse_patch` reads of each text."""
    return [parse_patch(text) for text in texts]


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, or a JSON list of texts."""
    text = path.read_text()
    if text.lstrip().startswith("["):
        result = json.loads(text)
        if not all(isinstance(entry, str) for entry in result):
            raise invalid("file", f"{path}: a JSON file of prompts must be a list of texts")
        return list(result)
    return read_lines(path)


def read_lines(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    return [line for line in path.read_text().splitlines() if line.strip()]


def read_json(path: Path, kind: Any, option: str) -> Any:
    """A file's JSON as `kind`. Raises MidstreamError naming the option."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.ValidationError as error:
        detail, field = misfit(error)
        raise invalid(option, f"{path}: {field}: {detail}") from error
    except msgspec.DecodeError as error:
        raise MidstreamError(
            "invalid_request", f"{path} is not JSON: {error}", field=option
        ) from error


# --- How a job is handled


class HandlingOption(NamedTuple):
    """An option of how a job is handled."""

    field: str  # of a submission
    kind: Any  # as typer has it
    read: Callable[[Any], Any] = lambda value: value


def _option(kind: Any, **settings: Any) -> Any:
    return Annotated[kind, typer.Option(rich_help_panel="Handling", **settings)]


#: Option as a parameter → what it sets. Every command that submits takes all of them, by
#: `with_handling`.
HANDLING: dict[str, HandlingOption] = {
    "lora": HandlingOption(
        "lora",
        _option(str | None, metavar="NAME", help="Compute everything with this LoRA adapter."),
    ),
    "priority": HandlingOption(
        "priority", _option(str | None, help="high, normal (default) or low.")
    ),
    "expires_in": HandlingOption(
        "expires_in",
        _option(
            str | None,
            metavar="TIME",
            help="Abort if no worker has started it within this time: 30s, 10m, 2h or 600.",
        ),
        lambda text: seconds(text, "--expires-in"),
    ),
    "callback": HandlingOption(
        "callback_url",
        _option(
            str | None, metavar="URL", help="Send a signed webhook to this URL when the job ends."
        ),
    ),
    "callback_event": HandlingOption(
        "callback_events",
        _option(
            list[str] | None,
            metavar="EVENT",
            help="Event to send instead, such as job.running; repeatable.",
        ),
    ),
}


def with_handling(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options in `HANDLING` where it has the parameter `handling`, the fields
    that they set.
    """

    @wraps(command)
    def takes_options(**given: Any) -> None:
        values = {name: given.pop(name) for name in HANDLING}
        fields = {
            HANDLING[name].field: HANDLING[name].read(value)
            for name, value in values.items()
            if value not in (None, [])
        }
        command(**given, handling=fields)

    own = inspect.signature(command)
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, kind, default=None, annotation=option.kind)
        for name, option in HANDLING.items()
    ]
    result = [
        item
        for name, parameter in own.parameters.items()
        for item in (options if name == "handling" else [parameter])
    ]
    takes_options.__signature__ = own.replace(parameters=result)  # type: ignore[attr-defined]
    return takes_options


def overrides(pairs: list[str]) -> dict[str, str]:
    """`--set name=value` as if it stood in the environment: the same conversion, the same
    complaints.
    """
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SettingsError(f"--set {pair!r}: write it as NAME=VALUE, such as kv_cache_gib=2")
        values[f"MIDSTREAM_{name.strip().upper()}"] = value
    return values
