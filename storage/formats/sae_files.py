"""Reads files of sparse autoencoders, as SAELens and Gemma Scope save them, and checks whether they
fit a model.

SAELens: `cfg.json` and `sae_weights.safetensors`, in the layout of version 6 (`metadata`) or the
earlier flat layout. Gemma Scope: `params.npz`, always JumpReLU; it names neither hook nor layer. An
SAE that cannot be computed exactly as SAELens does is refused; the error has the reason. So is a
member of the configuration that is unknown here: SAELens ignores such members.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from ...schemas.artifacts.saes import Architecture, Normalisation, SaeForm
from ...schemas.base.errors import Translated, invalid
from ...schemas.base.limits import MAX_SAE_BYTES, MAX_SAE_CONFIG, MAX_SAE_WIDTH
from ...schemas.base.records import JsonObject
from ...schemas.prompts.selectors import ALIASES, HOOKS, Hook
from .folders import bounded_file, folder_below, json_object, refused_path
from .tensor_files import TensorFile, TensorFileError, opened

CONFIG = "cfg.json"
WEIGHTS = "sae_weights.safetensors"
GEMMA_SCOPE = "params.npz"
KINDS = ((CONFIG, WEIGHTS), (GEMMA_SCOPE,))

#: Architecture → its tensors apart from `W_enc`, `W_dec` and `b_dec`, with one number per feature.
PER_FEATURE: dict[Architecture, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "r_mag", "b_mag"),
    "topk": ("b_enc",),
}
#: Members of cfg.json that say how an SAE was trained, or repeat what the tensors contain.
_HARMLESS = frozenset(
    {
        "dtype",
        "device",
        "metadata",
        "model_name",
        "prepend_bos",
        "dataset_path",
        "dataset_trust_remote_code",
        "context_size",
        "sae_lens_version",
        "sae_lens_training_version",
        "neuronpedia_id",
        "seqpos_slice",
        "exclude_special_tokens",
        "model_class_name",
    }
)
#: Members that determine the arithmetic or the site, and are checked one by one.
_CHECKED = frozenset(
    {
        "architecture",
        "d_in",
        "d_sae",
        "apply_b_dec_to_input",
        "normalize_activations",
        "reshape_activations",
        "k",
        "rescale_acts_by_decoder_norm",
        "hook_name",
        "hook_point",
        "hook_layer",
        "hook_point_layer",
        "hook_head_index",
        "hook_point_head_index",
        "activation_fn_str",
        "activation_fn",
        "activation_fn_kwargs",
        "finetuning_scaling_factor",
        "model_from_pretrained_kwargs",
    }
)
#: TransformerLens' hooks with rows of the residual stream's width.
_PLACES = {
    name: hook for name, hook in ALIASES.items() if name.startswith("hook_") and hook in HOOKS
}
_HOOK_NAME = re.compile(r"blocks\.(?P<layer>\d{1,6})\.(?P<hook>hook_\w+)")


class SaeError(ValueError):
    """Fault in an SAE; the message names the file and the member or tensor, then what is valid."""


class SaeContent(NamedTuple):
    """The content of an SAE's files, without its tensors."""

    form: SaeForm
    hook: Hook | None  # None if the files name none
    layer: int | None  # None if the files name none
    trained_on: str  # the model that the files name
    digest: str  # of all files' bytes


class ThresholdFeature(NamedTuple):
    """One feature as a threshold rule: its activation is p = row · `encoder` + `bias` where p >
    `threshold`, else 0.

    If the SAE normalises rows, the row is normalised first.
    """

    encoder: np.ndarray  # float32 [d_in]
    decoder: np.ndarray  # float32 [d_in]: what one unit of activation adds to the reconstruction
    bias: float
    threshold: float  # 0 or more


def folder_of(root: str, path: str) -> Path:
    """Returns the folder at `path` below `root`.

    Raises a 400 if it is missing, or outside `root`, also through a symbolic link.
    """
    return folder_below(root, path, "artifacts_dir/saes", KINDS)


@contextmanager
def reading(folder: Path) -> Iterator[tuple[SaeContent, TensorFile]]:
    """Yields an SAE whose files were checked, and the open file of its tensors (see `tensor_of`).

    Raises SaeError, also at the end if the files changed meanwhile.
    """
    gemma = not (folder / CONFIG).is_file()
    with Translated(TensorFileError, lambda error: SaeError(str(error))):
        config = b"" if gemma else bounded_file(folder / CONFIG, MAX_SAE_CONFIG, SaeError)
        with opened(folder / (GEMMA_SCOPE if gemma else WEIGHTS), MAX_SAE_BYTES) as file:
            digest = hashlib.sha256(hashlib.sha256(config).digest() + file.digest()).hexdigest()
            yield (
                (_of_gemma_scope(file, digest) if gemma else _of_saelens(config, file, digest)),
                file,
            )
            file.check_unchanged()


# --- The two formats


def _of_gemma_scope(file: TensorFile, digest: str) -> SaeContent:
    shape = file.shapes.get("W_enc") or file.shapes.get("w_enc") or []
    if len(shape) != 2:
        raise SaeError(
            f"{GEMMA_SCOPE} has no matrix W_enc; it has {', '.join(file.shapes) or 'nothing'}"
        )
    form = SaeForm(
        architecture="jumprelu",
        d_in=shape[0],
        d_sae=_width(shape[1], GEMMA_SCOPE, "W_enc"),
        apply_b_dec_to_input=False,
    )
    _check_tensors(form, file, GEMMA_SCOPE)
    return SaeContent(form, None, None, "", digest)


def _of_saelens(raw: bytes, file: TensorFile, digest: str) -> SaeContent:
    config = json_object(raw, CONFIG, SaeError)
    metadata = config.get("metadata") or config
    if not isinstance(metadata, dict):
        raise _wrong("metadata", metadata, "a JSON object")
    form = _form(config)
    _check_members(config, metadata)
    _check_tensors(form, file, WEIGHTS)
    hook, layer = _place(metadata)
    return SaeContent(form, hook, layer, str(metadata.get("model_name") or "")[:200], digest)


def _wrong(member: str, value: Any, valid: str) -> SaeError:
    return SaeError(f"{CONFIG}: {member} is {repr(value)[:100]}; valid: {valid}")


def _form(config: JsonObject) -> SaeForm:
    architecture = config.get("architecture", "standard")
    k = config.get("k", 0)
    activation = config.get("activation_fn_str", config.get("activation_fn", "relu"))
    if activation == "topk":  # before SAELens 6
        architecture = "topk"
        k = (config.get("activation_fn_kwargs") or {}).get("k", 0)
    elif activation not in (None, "relu"):
        raise _wrong("activation_fn", activation, "relu, topk")
    if architecture not in get_args(Architecture):
        raise _wrong("architecture", architecture, ", ".join(get_args(Architecture)))
    for member in ("d_in", "d_sae"):
        if not _is_count(config.get(member)):
            raise _wrong(member, config.get(member), "a positive integer")
    d_in = int(config["d_in"])
    d_sae = _width(config["d_sae"], CONFIG, "d_sae")
    if architecture == "topk" and not (_is_count(k) and k <= d_sae):
        raise _wrong("k", k, f"a whole number, 1 to {d_sae}")
    normalised: Any = config.get("normalize_activations") or "none"
    if normalised not in get_args(Normalisation):
        raise _wrong(
            "normalize_activations",
            normalised,
            (
                f"{', '.join(get_args(Normalisation))}: others need statistics of the data it "
                "was trained on"
            ),
        )
    flags = {
        name: config.get(name, default)
        for name, default in (
            ("apply_b_dec_to_input", True),
            ("rescale_acts_by_decoder_norm", False),
        )
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
    if architecture != "topk" and flags["rescale_acts_by_decoder_norm"]:
        raise _wrong("rescale_acts_by_decoder_norm", True, f"false for {architecture}")
    return SaeForm(
        architecture=architecture,
        d_in=d_in,
        d_sae=d_sae,
        normalize_activations=normalised,
        k=k if architecture == "topk" else 0,
        **flags,
    )


def _check_members(config: JsonObject, metadata: JsonObject) -> None:
    """Refuse members that would change what sae-lens computes, or on which rows."""
    if (reshaped := config.get("reshape_activations") or "none") != "none":
        raise _wrong("reshape_activations", reshaped, "none")
    if scaled := config.get("finetuning_scaling_factor"):
        raise _wrong("finetuning_scaling_factor", scaled, "false")
    for member in ("hook_head_index", "hook_point_head_index"):
        if metadata.get(member) is not None:
            raise _wrong(member, metadata[member], "null: an SAE of all heads")
    loaded = metadata.get("model_from_pretrained_kwargs") or {}
    if (
        not isinstance(loaded, dict)
        or loaded.get("center_writing_weights")
        or loaded.get("fold_ln")
    ):
        raise _wrong(
            "model_from_pretrained_kwargs",
            loaded,
            "no centred or folded weights: rows are those of the model as it was published",
        )
    for member, value in config.items():
        if member not in _HARMLESS | _CHECKED and value:
            raise SaeError(
                f"{CONFIG}: {member} is {str(value)[:100]!r}, which is not served; valid: an "
                "SAE without this member"
            )


def _place(metadata: JsonObject) -> tuple[Hook, int]:
    """Returns the hook and layer that the config names."""
    named = metadata.get("hook_name", metadata.get("hook_point"))
    match = _HOOK_NAME.fullmatch(str(named))
    if match is None or match["hook"] not in _PLACES:
        raise _wrong("hook_name", named, ", ".join(f"blocks.<layer>.{name}" for name in _PLACES))
    layer = int(match["layer"])
    for member in ("hook_layer", "hook_point_layer"):
        if metadata.get(member) not in (None, layer):
            raise _wrong(member, metadata[member], f"{layer}, as hook_name says")
    if (written := metadata.get("hook_name_out")) not in (None, named):
        raise _wrong("hook_name_out", written, f"{named}, whose rows an SAE reconstructs")
    return _PLACES[match["hook"]], layer


def _check_tensors(form: SaeForm, file: TensorFile, name: str) -> None:
    needed: dict[str, list[int]] = {
        "W_enc": [form.d_in, form.d_sae],
        "W_dec": [form.d_sae, form.d_in],
        "b_dec": [form.d_in],
    }
    needed |= {item: [form.d_sae] for item in PER_FEATURE[form.architecture]}
    present = {_general(tensor): shape for tensor, shape in file.shapes.items()}
    for tensor, shape in needed.items():
        if tensor not in present:
            raise SaeError(
                f"{name} has no tensor {tensor}; {form.architecture} has {', '.join(needed)}"
            )
        if present[tensor] != shape:
            raise SaeError(
                f"{name}: {tensor} has the shape {present[tensor]}; d_in {form.d_in} and d_sae "
                f"{form.d_sae} need {shape}"
            )
    for tensor in present.keys() - needed.keys():
        if tensor != "scaling_factor" or not (tensor_of(file, tensor) == 1).all():
            # (files of earlier versions have a `scaling_factor` of ones)
            raise SaeError(
                f"{name}: the tensor {tensor!r} is not served; {form.architecture} has "
                f"{', '.join(needed)}"
            )


def _general(tensor: str) -> str:
    """Returns SAELens's name of a tensor; some names of Gemma Scope begin with a small letter."""
    return "W_" + tensor[2:] if tensor.startswith("w_") else tensor


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SAE_BYTES


def _width(value: int, file: str, member: str) -> int:
    if value > MAX_SAE_WIDTH:
        raise SaeError(f"{file}: {member} has {value} features; the limit is {MAX_SAE_WIDTH}")
    return value


# --- Tensors


def size_of(form: SaeForm) -> int:
    """Returns the bytes of an SAE's tensors in float32."""
    return 4 * (
        2 * form.d_in * form.d_sae + form.d_in + len(PER_FEATURE[form.architecture]) * form.d_sae
    )


def tensor_of(file: TensorFile, name: str) -> np.ndarray:
    """Returns the tensor that SAELens calls `name`, float32. Raises TensorFileError for numbers
    that are not finite.
    """
    tensor = file.read(next(tensor for tensor in file.shapes if _general(tensor) == name))
    bad = tensor.size - int(np.count_nonzero(np.isfinite(tensor)))
    if bad:
        raise TensorFileError(
            f"{name} has {bad} numbers that are not finite, of {tensor.size}; valid: finite numbers"
        )
    return tensor


def tensors_of(form: SaeForm, file: TensorFile) -> dict[str, np.ndarray]:
    """Return all tensors, float32, by SAELens's names. Raises TensorFileError."""
    return {
        name: tensor_of(file, name)
        for name in ("W_enc", "W_dec", "b_dec", *PER_FEATURE[form.architecture])
    }


def feature_of(form: SaeForm, tensors: Mapping[str, np.ndarray], feature: int) -> ThresholdFeature:
    """Returns a feature as a threshold rule. Raises SaeError for an SAE in which an activation
    depends on more than its own feature's weights.

    A gated SAE is JumpReLU with another threshold: its gate opens if x·w + b_gate > 0, that is p >
    b_mag − b_gate · exp(r_mag) (Rajamanoharan et al. 2024, arXiv:2404.16014, section 3.2).
    """
    check_ruled(form)
    encoder = tensors["W_enc"][:, feature].astype(np.float64)
    numbers = {name: float(tensors[name][feature]) for name in PER_FEATURE[form.architecture]}
    threshold = numbers.get("threshold", 0.0)
    bias = numbers.get("b_enc", 0.0)
    shift = (
        float(tensors["b_dec"].astype(np.float64) @ encoder) if form.apply_b_dec_to_input else 0.0
    )
    if form.architecture == "gated":
        opening = math.exp(numbers["r_mag"])
        encoder = encoder * opening
        shift = shift * opening
        bias = numbers["b_mag"]
        threshold = numbers["b_mag"] - numbers["b_gate"] * opening
    return ThresholdFeature(
        encoder.astype(np.float32),
        np.array(tensors["W_dec"][feature]),
        bias - shift,
        max(threshold, 0.0),
    )


def decoder_row(form: SaeForm, tensors: Mapping[str, np.ndarray], feature: int) -> np.ndarray:
    """Return what one unit of a feature's activation adds to the reconstruction of the normalised
    row: float32 [d_in].
    """
    row = tensors["W_dec"][feature]
    length = (
        float(np.linalg.norm(row.astype(np.float64))) if form.rescale_acts_by_decoder_norm else 1.0
    )
    unit: np.ndarray = (row / length).astype(np.float32)
    return unit


def check_ruled(form: SaeForm) -> None:
    """Raises SaeError if a feature's activation depends on more than its own weights."""
    if form.architecture == "topk":
        raise SaeError(
            "in a topk SAE, whether a feature is active depends on all other features of the "
            "token, which the forward pass does not compute; valid: op 'add', or a standard, "
            "jumprelu or gated SAE"
        )


# --- On a model


class Registrable(NamedTuple):
    content: SaeContent
    hook: Hook
    layer: int


def check_on(
    folder: Path,
    hook: Hook | None,
    layer: int | None,
    hooks: list[str],
    num_layers: int,
    hidden_size: int,
) -> Registrable:
    """Returns an SAE for a model with these hooks, layers and width; `hook` and `layer` are needed
    if the files name none.

    Reads all of its tensors. Raises a 400 naming `path`, `hook` or `layer`.
    """
    with refused_path(SaeError, TensorFileError), reading(folder) as (content, file):
        tensors_of(content.form, file)
    result: dict[str, Any] = {}
    for field, value, named in (("hook", hook, content.hook), ("layer", layer, content.layer)):
        if value is None and named is None:
            raise invalid(field, f"is required: {GEMMA_SCOPE} does not name it")
        if value is not None and named not in (None, value):
            raise invalid(
                field,
                f"is {value}, but the SAE was trained on {field} {named}",
                allowed=str(named),
                hint="omit it",
            )
        result[field] = named if value is None else value
    if result["hook"] not in (served := [hook for hook in HOOKS if hook in hooks]):
        raise invalid(
            "hook",
            f"autoencoders of {result['hook']} are not served on this model",
            allowed=", ".join(served),
        )
    if result["layer"] >= num_layers:
        raise invalid(
            "layer", f"this model has no layer {result['layer']}", allowed=f"0 to {num_layers - 1}"
        )
    if content.form.d_in != hidden_size:
        detail = f"d_in is {content.form.d_in}: the SAE was trained on another model"
        raise invalid(
            "path", detail, allowed=f"an SAE whose d_in is {hidden_size}, this model's hidden size"
        )
    return Registrable(content, result["hook"], result["layer"])
