"""Parses command-line options into request fields; the server validates their values."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from ...schemas.base.errors import MidstreamError, Translated, invalid, suggestion
from ...schemas.base.settings import SettingsError
from ...schemas.base.tensors import Tensor
from ...schemas.prompts.selectors import HookName, LayerSelector, written_span
from ...schemas.requests.interventions import FAMILIES, STEERING_FIELDS
from ...schemas.service.choices import refusal
from ...schemas.service.global_capture import HOOK_NAMES, parse_hooks
from .. import vectors
from ..durations import seconds
from ..sdk.fields import Patch, Steering
from ..vectors import numpy_file

#: Capture option → the field of a capture that it sets. `--layers` or `--hooks` requests a capture;
#: the others require one of these.
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
_REQUESTING = ("layers", "hooks")
#: The metavar of every option that takes hooks.
HOOKS_FORM = "HOOK[:LAYERS];…"


def one_of(names: Sequence[str]) -> str:
    """Join names as `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def parse_layers(text: str) -> str | int:
    """Convert a single layer to a number; return other text unchanged, for the server."""
    number = text.strip()
    return int(number) if number.removeprefix("-").isdecimal() else text


def parse_positions(text: str) -> str | dict[str, int] | list[int | dict[str, int]]:
    """Parse `0,5,-1` as numbers, `5:` or `5:9` as a range, `last:64` as the last rows; return other
    text unchanged, for the server.
    """
    try:
        parts = [written_span(part) or int(part) for part in text.split(",")]
        return parts[0] if len(parts) == 1 and isinstance(parts[0], dict) else parts
    except ValueError:
        return text


def parse_span(text: str) -> dict[str, Any]:
    """Parse `TEXT`, or `TEXT#1` for its second occurrence, `TEXT#-1` for the last, `TEXT#all` for
    all occurrences.
    """
    part, mark, occurrence = text.rpartition("#")
    if mark and part and occurrence == "all":
        return {"text": part, "occurrence": None}
    if mark and part and occurrence.removeprefix("-").isdecimal():
        return {"text": part, "occurrence": int(occurrence)}
    return {"text": text}


def parse_capture(**options: Any) -> dict[str, Any] | None:
    """Return the capture that the options request, or None. `options`: the values of
    `CAPTURE_OPTIONS`, as typed.

    Raises MidstreamError naming an option that has no effect or is invalid.
    """
    fields = {field: value for field, value in options.items() if value not in (None, [], "")}
    if not any(field in fields for field in _REQUESTING):
        for option, field in CAPTURE_OPTIONS.items():
            if field in fields:
                raise invalid(
                    option, "requires --layers or --hooks", allowed="such as --layers all"
                )
        return None
    if "layers" in fields:
        fields["layers"] = parse_layers(fields["layers"])
    if "hooks" in fields:
        fields["hooks"] = read_hooks(fields["hooks"], fields.pop("layers", None))
    positions = _positions(fields.pop("positions", None), fields.pop("spans", []))
    return fields if positions is None else {**fields, "positions": positions}


def read_hooks(text: str, layers: LayerSelector | None = None) -> dict[HookName, LayerSelector]:
    """Parse `--hooks`; `layers` (of `--layers`) applies to hooks without layers of their own.

    Raises MidstreamError naming the option.
    """
    with Translated(
        ValueError,
        lambda error: invalid(
            "--hooks",
            str(error),
            allowed="such as post_block:all;pre_attn:0-3 or resid_pre,mlp_out",
        ),
    ):
        hooks = parse_hooks(text, "" if layers is None else layers)
    if layers is not None and layers not in hooks.values():
        raise invalid("--layers", "has no effect: every hook in --hooks names its own layers")
    return {
        hook: "all" if own == "" else parse_layers(own) if isinstance(own, str) else own
        for hook, own in hooks.items()
    }


def sweep_sites(hooks: str | None, layers: str | None) -> dict[str, Any]:
    """Parse `--hooks` and `--layers` of a sweep, in which all hooks have the same layers.

    Raises MidstreamError naming the option.
    """
    chosen = None if layers is None else parse_layers(layers)
    if hooks is None:
        return {"layers": chosen}
    parsed = read_hooks(hooks, chosen)
    if any(own != next(iter(parsed.values())) for own in parsed.values()):
        raise invalid(
            "--hooks",
            "a sweep uses the same layers at every hook",
            allowed="hooks without layers, such as resid_pre,mlp_out, and --layers",
        )
    return {"hooks": list(parsed), "layers": next(iter(parsed.values()))}


def parse_site(text: str, option: str) -> tuple[str | None, int]:
    """Parse `[HOOK:]LAYER` as hook and layer. Raises MidstreamError naming the option."""
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
    listed = [positions] if isinstance(positions, dict) else positions or []
    return [*listed, *map(parse_span, spans)]


#: The metavars of `--steer`.
STEER_FILE = "FILE:[HOOK:]LAYERS[:SCALE][:NAME=VALUE]…"
STEER = f"{STEER_FILE} | @MODULE[:SCALE][:NAME=VALUE]… | %SAE:FEATURE[:VALUE][:op=OP] | FILE"
_YES = {"true": True, "false": False}
_OPTIONS = tuple(
    dict.fromkeys(name for takes in STEERING_FIELDS.values() for name in takes.options)
)
_FLAGS = {family.flag for family in FAMILIES}
#: Name in NAME=VALUE of `--steer` → the function that parses its value.
STEER_NAMES: dict[str, Callable[[str], Any]] = {
    "op": str, "positions": parse_positions,
    **{name: lambda text: _YES[text] for name in _OPTIONS if name in _FLAGS},
    **{name: float for name in _OPTIONS if name not in _FLAGS},
}  # fmt: skip
#: The names that a module accepts.
MODULE_NAMES = ("scale", "positions")
#: The names that a token's direction accepts.
_OF_TOKEN = ("token", "layers", "scale", "op", "swap", "norm_match", "strength", "positions")
_READ: dict[str, Callable[[str], Any]] = STEER_NAMES | {
    "feature": int, "value": float, "token": lambda text: int(text) if text.isdecimal() else text,
    "layers": lambda text: parse_layers(text),
}  # fmt: skip
_READ["swap"] = _READ["token"]
#: First character of a reference (in place of a file) → (its field, the values after it in order,
#: the valid names, and its description in errors).
_REFERENCES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "@": ("module", ("scale",), MODULE_NAMES, "a module"),
    "%": ("sae", ("feature", "value"), ("feature", "value", "op", "positions"), "a feature"),
    "^": ("jacobian", ("token", "layers", "scale"), _OF_TOKEN, "a token's direction"),
}


def parse_steering(texts: Sequence[str], option: str = "--steer") -> list[Steering]:
    """Parse the entries in each text. Raises MidstreamError naming `option`.

    `joy.npy:15:4.0`, `joy.npy:mlp_out:15`, or with names: `joy.npy:10-15:op=clamp:low=-1:high=2`.
    The file is in any format of `client.vectors`; if the file names its layers, LAYERS selects
    among them, and may be omitted. `@joy:2.0` is the module `joy` at twice its strength,
    `@joy:positions=all_generated` at other positions than its own. `%tiny:123:4.0` adds 4 times the
    decoder row of feature 123 of the sparse autoencoder `tiny`; `%tiny:123:0:op=clamp` sets the
    feature to 0. `^name: Paris:10-20:4.0` adds 4 times the direction that the Jacobian lens `name`
    gives the token; `^name: Paris:10-20:swap= Rome` exchanges it with another.
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
            raise error.at(option) from error
    return entries


def _parse_steer(text: str) -> tuple[str, dict[str, Any]]:
    """Return the part before the first colon, and the fields of an entry.

    Raises MidstreamError naming `--steer`.
    """
    source, *parts = _parts(text)
    is_reference = source[:1] in _REFERENCES
    hook = parts.pop(0) if not is_reference and parts and parts[0] in HOOK_NAMES else None
    field, places, names, description = _REFERENCES.get(
        source[:1], ("", ("layers", "scale"), tuple(STEER_NAMES), "there")
    )
    by_name = [part for part in parts if "=" in part]
    by_place = [part for part in parts if "=" not in part]
    if len(by_place) > len(places) or parts[: len(by_place)] != by_place or source in _REFERENCES:
        raise _unreadable(text, "is not valid")
    fields = dict(zip(places, by_place, strict=False)) | dict(
        part.split("=", 1) for part in by_name
    )
    layers = fields.pop("layers", "") if not is_reference else ""
    entry: dict[str, Any] = (
        {field: source[1:]} if is_reference else {"layers": parse_layers(layers)} if layers else {}
    )
    if hook is not None:
        entry["hook"] = hook
    for name, value in fields.items():
        if name not in names:
            suggested = suggestion(name, names)
            verb = "takes" if is_reference else "is"
            why = f"{description} {verb} no {name!r}: use {', '.join(names)}"
            raise _unreadable(text, why + (f"; {suggested}" if suggested else ""))
        if value:
            try:
                entry[name] = _READ[name](value)
            except (ValueError, KeyError) as error:
                raise _unreadable(text, f"invalid {name} {value!r}") from error
    return source, entry


def _parts(text: str) -> list[str]:
    """Split text at colons, except those of a range: `positions=5:9`, `positions=5::scale=2`."""
    parts: list[str] = []
    for part in text.split(":"):
        if parts and parts[-1].startswith("positions=") and "=" not in part:
            parts[-1] += f":{part}"
        else:
            parts.append(part)
    return parts


def _vector(path: str, text: str) -> dict[str, Tensor]:
    """Read the vector of a `.npy` file, for a patch."""
    with Translated((OSError, ValueError), lambda error: invalid("--patch", f"{text!r}: {error}")):
        return {"vector": numpy_file.read_npy(vectors.content(path)).tensor()}


def _unreadable(text: str, why: str) -> MidstreamError:
    return invalid(
        "--steer",
        f"{text!r}: {why}",
        allowed=f"{STEER}, such as joy.npy:15:4.0, joy.npy:mlp_out:15:op=ablate or @joy:2",
    )


# --- Readings


def parse_lens(text: str) -> dict[str, Any]:
    """Parse `0-5,9` or `all:3`: layers, and the number of tokens for each.

    Raises MidstreamError naming `--lens`.
    """
    layers, more = _with_top_k(text, "--lens", "LAYERS[:TOP_K], such as all or 0,10,-1:3")
    return {"layers": parse_layers(layers), **more}


def parse_features(text: str, option: str = "--features") -> dict[str, Any]:
    """Parse `words` or `words:3`: an autoencoder, and the number of features for each token.

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
    """Parse `probes` of a request from `PROBE` texts. Raises MidstreamError naming `--probe`."""
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

#: The metavar of `--patch`.
PATCH = "[HOOK:]LAYERS@POSITIONS=SOURCE[:NAME=VALUE]…"
_PATCH = re.compile(
    r"""(?:(?P<hook>[a-z_]+):)?(?P<layers>[^@:="]+)"""
    r"""@(?:"(?P<text>[^"]+)"(?:\#(?P<occurrence>all|-?[0-9]+))?|(?P<positions>[^="]+))"""
    r"""=(?P<source>.+)"""
)
#: Name in NAME=VALUE of `--patch` → the function that parses its value: fields of the patch, and of
#: a source run.
PATCH_NAMES: dict[str, Callable[[str], Any]] = {"alpha": float, "mask": str}
RUN_NAMES: dict[str, Callable[[str], Any]] = {"prompt": int, "positions": parse_positions}


def parse_patch(text: str) -> dict[str, Any]:
    """Parse a patch. `12@5=clean:5` replaces the row at position 5, at `post_block` of layer 12, by
    the row of run `clean` at position 5.

    The rows to replace are before `=`: `HOOK:` (default: `post_block`), layers, and positions as
    elsewhere, or a part of the prompt's text in double quotes, with `#N` after them for another
    occurrence than the first. The source is after `=`: a run (or a job's id) with one or several
    positions separated by commas, without positions for the same positions, or with `mean`; a
    `.npy` file; `@MODULE`; or `zeros`. Then follow by name `alpha`, `mask`, and for a run `prompt`
    and (for a mean) `positions`. Raises MidstreamError naming `--patch`.
    """
    match = _PATCH.fullmatch(text)
    if match is None:
        raise _no_patch(text, "is not valid")
    name, *parts = _parts(match["source"])
    entry: dict[str, Any] = {"layers": parse_layers(match["layers"]), "positions": _target(match)}
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


def _target(match: re.Match[str]) -> Any:
    """Return the positions to patch."""
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
    with Translated(ValueError, lambda error: _no_patch(text, f"invalid {name} {value!r}")):
        return read(value)


def _no_patch(text: str, why: str) -> MidstreamError:
    example = (
        "such as 12@5=clean:5, resid_pre:0-11@-1=clean:-1:alpha=0.5 or "
        'mlp_out:8@"Eiffel Tower"=zeros'
    )
    return invalid("--patch", f"{text!r}: {why}", allowed=f"{PATCH}, {example}")


def parse_patches(texts: Sequence[str]) -> list[Patch]:
    """Parse each text with `parse_patch`."""
    return [parse_patch(text) for text in texts]


_TEXTS = "give one prompt per line, or a JSON list of texts"


def read_prompts(path: Path) -> list[str]:
    """Read a file with one prompt per line, or with a JSON list of texts. Raises MidstreamError for
    other JSON.
    """
    text = path.read_text()
    try:
        result = json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith("["):
            raise invalid("--file", f"{path} is not JSON: {error}", hint=_TEXTS) from None
        return read_lines(path)
    if isinstance(result, dict) or (
        isinstance(result, list) and not all(isinstance(entry, str) for entry in result)
    ):
        detail = f"{path} holds JSON that is not a list of texts"
        raise invalid("--file", detail, hint="--body takes a whole request")
    return result if isinstance(result, list) else read_lines(path)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file that are not blank."""
    return [line for line in path.read_text().splitlines() if line.strip()]


def read_json(path: Path, kind: Any, option: str) -> Any:
    """Read a file's JSON as `kind`. Raises MidstreamError naming the option."""
    with (
        Translated(
            msgspec.DecodeError, lambda error: invalid(option, f"{path} is not JSON: {error}")
        ),
        Translated(
            msgspec.ValidationError,
            lambda error: invalid(option, f"{path}: {refusal(error, kind, whole='the file')}"),
        ),
    ):
        return msgspec.json.decode(path.read_bytes(), type=kind)


# --- How a job is handled


class HandlingOption(NamedTuple):
    """An option about the handling of a job."""

    field: str  # the field of a submission that it sets
    kind: Any  # typer's annotation
    read: Callable[[Any], Any] = lambda value: value


def optional(kind: Any, help: str, **settings: Any) -> Any:
    """Return the annotation of an option that may be omitted; `settings`: of `typer.Option`."""
    return Annotated[kind | None, typer.Option(help=help, **settings)]


_option = partial(optional, rich_help_panel="Handling")

#: Parameter's name → its option. `with_handling` adds all of them to each command that submits.
HANDLING: dict[str, HandlingOption] = {
    "lora": HandlingOption(
        "lora", _option(str, "Compute everything with this LoRA adapter.", metavar="NAME")
    ),
    "priority": HandlingOption("priority", _option(str, "high, normal (default) or low.")),
    "expires_in": HandlingOption(
        "expires_in",
        _option(
            str,
            "Abort if no worker has started it within this time: 30s, 10m, 2h or 600.",
            metavar="TIME",
        ),
        lambda text: seconds(text, "--expires-in"),
    ),
    "callback": HandlingOption(
        "callback_url",
        _option(str, "Send a signed webhook to this URL when the job ends.", metavar="URL"),
    ),
    "callback_event": HandlingOption(
        "callback_events",
        _option(
            list[str],
            "Event to send instead, such as job.running; repeatable.",
            metavar="EVENT",
        ),
    ),
}


def with_options(
    name: str, options: Mapping[str, inspect.Parameter], read: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of commands: it replaces the parameter `name` by `options`; the command
    gets what `read` makes of their values.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def takes_options(**arguments: Any) -> None:
            values = {option: arguments.pop(option) for option in options}
            command(**arguments, **{name: read(values)})

        signature = inspect.signature(command)
        parameters = [
            item
            for parameter in signature.parameters.values()
            for item in (options.values() if parameter.name == name else [parameter])
        ]
        vars(takes_options)["__signature__"] = signature.replace(parameters=parameters)
        return takes_options

    return decorate


def parameters(kinds: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    """Return name → option, for `with_options`. `kinds`: name → annotation, see `optional`."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in kinds.items()
    }


#: Decorates a command: replaces its parameter `handling`, the fields to submit, by the options in
#: `HANDLING`.
with_handling = with_options(
    "handling",
    parameters({name: option.kind for name, option in HANDLING.items()}),
    lambda values: {
        HANDLING[name].field: HANDLING[name].read(value)
        for name, value in values.items()
        if value not in (None, [])
    },
)


def overrides(pairs: list[str]) -> dict[str, str]:
    """Parse `--set name=value`, repeatedly. Raises SettingsError."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SettingsError(f"--set {pair!r}: write it as NAME=VALUE, such as kv_cache_gib=2")
        values[name.strip().lower()] = value
    return values
