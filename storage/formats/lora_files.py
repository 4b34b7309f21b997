"""Reads the files of a LoRA adapter as PEFT saves them, and checks whether they fit a model.

The API checks an adapter when it is registered, a worker before it loads the adapter: vLLM omits
tensors that it does not find a place for and truncates those that do not fit, and must never apply
an adapter in part. Members and tensors that are unknown here are refused by name.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from ...schemas.artifacts.loras import LoraModule, LoraSupport
from ...schemas.base.errors import Translated
from ...schemas.base.limits import MAX_LAYERS, MAX_LORA_BYTES, MAX_LORA_CONFIG
from ...schemas.base.records import JsonObject
from ...schemas.prompts.selectors import as_ranges, resolve_layers
from .capture_blobs import DamagedBlob
from .folders import bounded_file, folder_below, json_object, refused_path
from .tensor_files import whole_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)

#: Members of adapter_config.json that have no effect after training, that the weights repeat, or
#: that detail an initialisation.
_HARMLESS = frozenset(
    {
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "peft_version",
        "auto_mapping",
        "lora_dropout",
        "fan_in_fan_out",
        "runtime_config",
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
    }
)
_PLAIN = re.compile(r"\^?[\w.]+\Z")
_NAME = Annotated[str, msgspec.Meta(pattern=f"^{_PLAIN.pattern}")]
_RANK = Annotated[int, msgspec.Meta(gt=0, le=4096)]
_ALPHA = Annotated[float, msgspec.Meta(gt=-1e6, lt=1e6)]
_PATTERNS = "names (no other regular expressions), beside layers_to_transform and a list of modules"
_BY_NAME = "an object from names of modules (no other regular expressions) to"
#: Initialisations after which the base model's weights are the same.
_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
#: Members that decide what is adapted and how → their type, what is valid.
_CHECKED: dict[str, tuple[Any, str]] = {
    "r": (_RANK, "a positive integer"),
    "lora_alpha": (_ALPHA, "a finite number"),
    "target_modules": (
        str | list[str],
        "names of modules, a regular expression, or 'all-linear'",
    ),
    "bias": (Literal["none"], "none"),
    "use_rslora": (bool, "true or false"),
    "init_lora_weights": (
        bool | Annotated[str, msgspec.Meta(pattern=rf"(?i)^({'|'.join(_INITS)})\Z")] | None,
        f"true, false, {', '.join(_INITS)}: others change the base model's weights",
    ),
    "rank_pattern": (dict[_NAME, _RANK] | None, f"{_BY_NAME} positive integers"),
    "alpha_pattern": (dict[_NAME, _ALPHA] | None, f"{_BY_NAME} finite numbers"),
    "exclude_modules": (str | list[str] | None, "names of modules, or a regular expression"),
    "layers_to_transform": (int | list[int] | None, "numbers of layers"),
    "layers_pattern": (str | list[str] | None, _PATTERNS),
}
_TENSOR = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])\.weight")
_NUMBER = re.compile(r"\.(\d+)\.")
#: What matches an adapter's regular expression, in a process that is ended after so many seconds: a
#: match may take for ever, and within this process would keep all other threads waiting.
_MATCH = """import json, re, sys
expression, names = json.load(sys.stdin)
json.dump([name for name in names if re.fullmatch(expression, name)], sys.stdout)"""
_MATCH_S = 20


class LoraError(ValueError):
    """Fault in an adapter; the message names the file and the member or tensor, then what is
    valid.
    """


class LoraContent(NamedTuple):
    """The content of an adapter's files."""

    config: JsonObject
    shapes: dict[str, list[int]]  # tensor → its shape
    digest: str  # of both files' bytes
    bytes: int  # of the weights


class LoraFacts(NamedTuple):
    rank: int  # the largest of all modules
    modules: list[str]  # names with `*` for the layer's number


def folder_of(root: str, path: str) -> Path:
    """Returns the folder at `path` below `root`.

    Raises a 400 if it is missing, or outside `root`, also through a symbolic link.
    """
    return folder_below(root, path, "artifacts_dir/loras", [FILES])


def read(folder: Path) -> LoraContent:
    """Reads both files whole. Raises LoraError."""
    return parse(*raw_files(folder))


def raw_files(folder: Path) -> tuple[bytes, bytes]:
    """Returns the bytes of config and weights. Raises LoraError for a missing or too large file."""
    return (
        bounded_file(folder / CONFIG, MAX_LORA_CONFIG, LoraError),
        bounded_file(folder / WEIGHTS, MAX_LORA_BYTES, LoraError),
    )


def digest_of(config: bytes, weights: bytes) -> str:
    return hashlib.sha256(
        hashlib.sha256(config).digest() + hashlib.sha256(weights).digest()
    ).hexdigest()


def parse(config: bytes, weights: bytes) -> LoraContent:
    members = json_object(config, CONFIG, LoraError)
    return LoraContent(members, _shapes(weights), digest_of(config, weights), len(weights))


def _shapes(weights: bytes) -> dict[str, list[int]]:
    with Translated(DamagedBlob, lambda error: LoraError(f"{WEIGHTS}: {error}")):
        _, tensors = whole_header(lambda start, count: weights[start : start + count], len(weights))
    return {name: place.shape for name, place in tensors.items()}


def check(content: LoraContent, support: LoraSupport) -> LoraFacts:
    """Return an adapter's rank and modules, if this model applies all of it as PEFT would.

    Raises LoraError naming what does not fit.
    """
    _check_config(content.config)
    pairs: dict[str, dict[str, list[int]]] = {}
    for tensor, shape in content.shapes.items():
        named = _TENSOR.fullmatch(tensor)
        if named is None:
            raise LoraError(
                f"{WEIGHTS}: {tensor!r} is not served; valid: base_model.model.<linear "
                "layer>.lora_A.weight and .lora_B.weight "
                "(embeddings, lm_head, experts and whole modules are not)"
            )
        pairs.setdefault(named["module"], {})[named["side"]] = shape
    if not pairs:
        raise LoraError(f"{WEIGHTS} has no tensors")
    modules = set()
    ranks = []
    for module, sides in pairs.items():
        general, fits = _find(module, support)
        modules.add(general)
        if set(sides) != {"A", "B"}:
            raise LoraError(f"{WEIGHTS}: {module} has only lora_{next(iter(sides))}")
        rank = _rank(content.config, module)
        ranks.append(rank)
        needed = {"A": [rank, fits.inputs], "B": [fits.outputs, rank]}
        for side, shape in sides.items():
            if shape != needed[side]:
                raise LoraError(
                    f"{WEIGHTS}: lora_{side} of {module} has the shape "
                    f"{shape}; rank {rank} on this "
                    f"model needs {needed[side]}: "
                    "it was trained on another base model, or its rank is another one"
                )
    _check_targets(content.config, pairs, support)
    if max(ranks) > support.max_rank:
        raise LoraError(
            f"{CONFIG}: r is {max(ranks)}; the worker accepts at most {support.max_rank} "
            "(setting engine.max_lora_rank)"
        )
    return LoraFacts(max(ranks), sorted(modules))


def _check_config(config: JsonObject) -> None:
    def wrong(member: str, valid: str, _: Exception | None = None) -> LoraError:
        return LoraError(f"{CONFIG}: {member} is {repr(config.get(member))[:100]}; valid: {valid}")

    if str(config.get("peft_type")).upper() != "LORA":
        raise wrong("peft_type", "LORA")
    for member, (kind, valid) in _CHECKED.items():
        if member in config or member in ("r", "lora_alpha", "target_modules"):
            with Translated(msgspec.ValidationError, partial(wrong, member, valid)):
                msgspec.convert(config.get(member), kind)
    layers = config.get("layers_to_transform")
    if layers is not None and isinstance(config["target_modules"], str):
        raise wrong("layers_to_transform", "null, unless target_modules is a list")
    if _patterns(config) and not (
        layers is not None and all(map(_PLAIN.fullmatch, _patterns(config)))
    ):
        raise wrong("layers_pattern", _PATTERNS)
    for member, value in config.items():
        known = member in _HARMLESS or member in _CHECKED
        if value and not known and not _is_detail(config, member):
            raise LoraError(
                f"{CONFIG}: {member} is {str(value)[:100]!r}, which is not served; valid: plain "
                "LoRA, without this member"
            )


def _is_detail(config: JsonObject, member: str) -> bool:
    """Return whether a member details a feature that another member switches on or off: PEFT
    writes `qalora_group_size` beside `use_qalora`, and `megatron_core` beside `megatron_config`.
    """
    feature = member.partition("_")[0]
    switches = {f"use_{feature}", f"{feature}_config"}
    return member not in switches and not switches.isdisjoint(config)


def _check_targets(config: JsonObject, adapted: Collection[str], support: LoraSupport) -> None:
    """Check that the modules with tensors are those that PEFT adapts by this configuration.

    PEFT ignores tensors of other modules, and gives a module without tensors initial values.
    """
    names = [
        general.replace("*", str(layer), 1)
        for general, items in support.modules.items()
        for item in items
        for layer in _numbers(item.layers) or [""]
    ]
    allowed = {
        "target_modules": _matched(config, "target_modules", names),
        "exclude_modules": {*names} - _matched(config, "exclude_modules", names),
        "layers_to_transform": {name for name in names if _in_layers(config, name)},
    }
    for member, modules in allowed.items():
        if ignored := sorted({*adapted} - modules):
            raise LoraError(
                f"{CONFIG}: {member} is {str(config.get(member))[:100]!r}, so PEFT would ignore "
                f"the tensors of {ignored[0]}"
            )
    if missing := sorted(set.intersection(*allowed.values()) - {*adapted}):
        raise LoraError(
            f"{WEIGHTS} has no tensors of {missing[0]}, which target_modules of {CONFIG} includes"
        )


def _matched(config: JsonObject, member: str, names: list[str]) -> set[str]:
    """Return the names that a list of names, or a regular expression, matches as in PEFT."""
    rule = config.get(member) or []
    if not isinstance(rule, str):
        return {name for name in names if f".{name}".endswith(tuple(f".{part}" for part in rule))}
    if member == "target_modules" and rule.lower() == "all-linear":
        return {*names}
    with Translated(
        subprocess.SubprocessError,
        lambda _: LoraError(
            f"{CONFIG}: {member} is {rule[:100]!r}; valid: a regular expression that is matched "
            f"within {_MATCH_S} s"
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-IS", "-c", _MATCH],
            input=json.dumps([rule, names]).encode(),
            capture_output=True,
            timeout=_MATCH_S,
            check=True,
        )
    return set(json.loads(done.stdout))


def _patterns(config: JsonObject) -> list[str]:
    """Return the names of the lists of layers in `layers_pattern`."""
    pattern = config.get("layers_pattern") or []
    return [pattern] if isinstance(pattern, str) else pattern


def _in_layers(config: JsonObject, name: str) -> bool:
    """Return whether PEFT adapts the layer of a module that `target_modules` matches."""
    layers = config.get("layers_to_transform")
    if layers in (None, []) or name in config["target_modules"]:
        return True
    lists = [rf"(?:^|.*?\.){pattern}" for pattern in _patterns(config)] or [r".*?\.[^.]*"]
    found = next(filter(None, (re.match(rf"{each}\.(\d+)\.", name) for each in lists)), None)
    return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def _rank(config: JsonObject, module: str) -> int:
    """Return the rank as PEFT chooses it: of the first pattern that the module's name ends with."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return int(rank)
    return int(config["r"])


def _find(module: str, support: LoraSupport) -> tuple[str, LoraModule]:
    """Returns the module's name without its layer's number, and the model's module there.

    Raises LoraError if there is none.
    """
    general, layer = general_name(module)
    modules = support.modules.get(general)
    if modules is None:
        raise LoraError(
            f"{WEIGHTS}: this model has no {module} that an adapter may change; it has "
            f"{', '.join(sorted(support.modules))}"
        )
    for item in modules:
        if layer is None or layer in _numbers(item.layers):
            return general, item
    raise LoraError(
        f"{WEIGHTS}: this model has no {module}; its layers are "
        f"{', '.join(item.layers for item in modules)}"
    )


def _numbers(ranges: str) -> set[int]:
    return {*resolve_layers(ranges, MAX_LAYERS)} if ranges else set()


def general_name(module: str) -> tuple[str, int | None]:
    """Returns (name with `*` for the first number, that number or None)."""
    match = _NUMBER.search(module)
    return (
        (module, None)
        if match is None
        else (f"{module[: match.start()]}.*.{module[match.end() :]}", int(match[1]))
    )


def joined(first: Sequence[LoraModule], second: Sequence[LoraModule]) -> list[LoraModule]:
    """Returns the entries of one module from two ranks, which may have different layers."""
    layers: dict[tuple[int, int], set[int]] = {}
    for item in (*first, *second):
        layers.setdefault((item.inputs, item.outputs), set()).update(_numbers(item.layers))
    return [
        LoraModule(inputs=inputs, outputs=outputs, layers=as_ranges(value))
        for (inputs, outputs), value in layers.items()
    ]


def check_on(folder: Path, support: LoraSupport) -> tuple[LoraContent, LoraFacts]:
    """Returns an adapter, and its rank and modules on this model. Raises a 400 naming `path`."""
    with refused_path(LoraError):
        content = read(folder)
        return content, check(content, support)
