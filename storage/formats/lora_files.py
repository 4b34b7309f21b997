"""Reads the files of a LoRA adapter as PEFT saves them, and checks whether they fit a model.

The API checks an adapter when it is registered, a worker before it loads the adapter: vLLM omits
tensors that it does not find a place for and truncates those that do not fit, and must never apply
an adapter in part. Members and tensors that are unknown here are refused by name.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...schemas.artifacts.loras import LoraModule, LoraSupport
from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.base.limits import MAX_LORA_BYTES, MAX_LORA_CONFIG
from ...schemas.prompts.selectors import as_ranges
from .capture_blobs import DamagedBlob
from .folders import bounded_file, folder_below
from .tensor_files import whole_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)

#: Members of adapter_config.json that have no effect after training, or that the weights repeat.
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
        "target_modules",
        "exclude_modules",
        "fan_in_fan_out",
        "layers_to_transform",
        "layers_pattern",
        "runtime_config",
        "eva_config",
        "lora_ga_config",
    }
)
#: Members that determine the arithmetic, and are checked one by one.
_CHECKED = frozenset(
    ["r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"]
)
#: Valid values of `init_lora_weights`: other initialisations change the base model's weights.
_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])\.weight")
_PATTERN = re.compile(r"\^?[\w.]+")
_NUMBER = re.compile(r"\.(\d+)\.")


class LoraError(ValueError):
    """Fault in an adapter; the message names the file and the member or tensor, then what is
    valid.
    """


class LoraContent(NamedTuple):
    """The content of an adapter's files."""

    config: dict[str, Any]
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
    return folder_below(root, path, "lora_dir", "adapters", [FILES])


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
    with Translated(
        (ValueError, RecursionError), lambda error: LoraError(f"{CONFIG} is not JSON: {error}")
    ):
        members = json.loads(config)
    if not isinstance(members, dict):
        raise LoraError(f"{CONFIG} is not a JSON object")
    return LoraContent(members, _shapes(weights), digest_of(config, weights), len(weights))


def _shapes(weights: bytes) -> dict[str, list[int]]:
    with Translated(DamagedBlob, lambda error: LoraError(f"{WEIGHTS}: {error}")):
        tensors = whole_file(lambda start, count: weights[start : start + count], len(weights))
    for name, place in tensors.items():
        if len(place.shape) != 2 or min(place.shape) < 1:
            raise LoraError(f"{WEIGHTS}: {name} has the shape {place.shape}; valid: two dimensions")
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
    modules, ranks = set(), []
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
    if max(ranks) > support.max_rank:
        raise LoraError(
            f"{CONFIG}: r is {max(ranks)}; the worker accepts at most {support.max_rank} "
            "(setting max_lora_rank)"
        )
    return LoraFacts(max(ranks), sorted(modules))


def _check_config(config: Mapping[str, Any]) -> None:
    def wrong(member: str, valid: str) -> LoraError:
        return LoraError(f"{CONFIG}: {member} is {str(config.get(member))[:100]!r}; valid: {valid}")

    if str(config.get("peft_type")).upper() != "LORA":
        raise wrong("peft_type", "LORA")
    if not _is_rank(config.get("r")):
        raise wrong("r", "a positive integer")
    if not _is_number(config.get("lora_alpha")):
        raise wrong("lora_alpha", "a finite number")
    if config.get("bias", "none") != "none":
        raise wrong("bias", "none")
    if not isinstance(config.get("use_rslora", False), bool):
        raise wrong("use_rslora", "true or false")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool | None) and str(init).lower() not in _INITS:
        raise wrong(
            "init_lora_weights",
            f"true, false, {', '.join(_INITS)}: others change the base model's weights",
        )
    for member, fits, valid in (
        ("rank_pattern", _is_rank, "positive integers"),
        ("alpha_pattern", _is_number, "finite numbers"),
    ):
        patterns = config.get(member) or {}
        if not isinstance(patterns, dict) or not all(
            _PATTERN.fullmatch(key) and fits(value) for key, value in patterns.items()
        ):
            raise wrong(
                member, f"an object from names of modules (no other regular expressions) to {valid}"
            )
    for member, value in config.items():
        if member not in _HARMLESS | _CHECKED and value:
            raise LoraError(
                f"{CONFIG}: {member} is {str(value)[:100]!r}, which is not served; valid: plain "
                "LoRA, without this member"
            )


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 4096


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6


def _rank(config: Mapping[str, Any], module: str) -> int:
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
    numbers: set[int] = set()
    for part in filter(None, ranges.replace(" ", "").split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


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
    with Translated(
        LoraError, lambda error: MidstreamError("invalid_request", str(error), field="path")
    ):
        content = read(folder)
        return content, check(content, support)
