"""Is this wish something the model can do? Turns a `Wish` into a `Job`, or says which field is wrong and what would be right.

Everything is checked here, against what the worker has published of its model, so that a bad request never reaches the engine.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..schemas.base import now, to_msgpack
from ..schemas.errors import MidstreamError, invalid
from ..schemas.jobs import Job, Sampling, StoredPrompt
from ..schemas.models import ModelInfo
from ..schemas.selectors import PositionSelector, resolve_layers, resolve_positions
from ..schemas.specs import MAX_STEERING_SELECTORS, CaptureSpec, SteeringSpec, StoredCapture, StoredSteering
from ..schemas.tensors import Tensor, content_hash, to_numpy
from .text import Codec
from .wishes import Wish, WishedPrompt

#: Largest finite value of each dtype that a model may run in; bfloat16 has float32's exponent.
LARGEST: dict[str, float] = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38}

#: torch takes seeds of 64 bits.
SEED_LIMIT = 2**63

#: As in OpenAI's API.
METADATA_KEY_LENGTH, METADATA_VALUE_LENGTH = 64, 512


@dataclass(frozen=True)
class Admitted:
    """A job that can be submitted, and the vectors it names: content hash → MessagePack `Tensor`."""

    job: Job
    blobs: dict[str, bytes]


@dataclass(frozen=True)
class Bounds:
    """What a spec is checked against."""

    model: ModelInfo
    lengths: list[int]  # tokens of each prompt


# --- The rules of steering and capture -------------------------------------------------------------------------------
# A rule reads the spec and returns the value to store; a ValueError's text becomes the problem's detail, at the rule's
# field. A new hook, family or option is a row here.


def _hook(spec: CaptureSpec | SteeringSpec, bounds: Bounds) -> str:
    if spec.hook not in bounds.model.hooks:
        raise ValueError(f"{bounds.model.architecture} has no hook {spec.hook!r}: it has {', '.join(bounds.model.hooks)}")
    return spec.hook


def _layers(spec: CaptureSpec | SteeringSpec, bounds: Bounds) -> list[int]:
    return resolve_layers(spec.layers, bounds.model.num_layers)


def _positions(spec: CaptureSpec | SteeringSpec, bounds: Bounds) -> list[PositionSelector]:
    """One resolved selector per prompt."""
    if isinstance(spec.positions, str):
        return [spec.positions] * len(bounds.lengths)
    resolved = []
    for index, length in enumerate(bounds.lengths):
        try:
            resolved.append(resolve_positions(spec.positions, length))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    return resolved


def _width(spec: SteeringSpec, bounds: Bounds) -> None:
    if spec.vector.shape != [bounds.model.hidden_size]:
        raise ValueError(f"{spec.vector.shape} is not the shape of a vector in this model: it is [{bounds.model.hidden_size}]")


def _finite(spec: SteeringSpec, bounds: Bounds) -> None:
    bad = np.flatnonzero(~np.isfinite(to_numpy(spec.vector)))
    if len(bad):
        raise ValueError(f"element {bad[0]} is not finite ({len(bad)} of {spec.vector.shape[0]} are not)")


def _strength(spec: SteeringSpec, bounds: Bounds) -> float:
    largest = float(np.max(np.abs(to_numpy(spec.vector)).astype(np.float64), initial=0.0)) * abs(spec.scale)
    limit = LARGEST.get(bounds.model.dtype, LARGEST["float32"])
    if not largest <= limit:
        raise ValueError(f"scale times vector reaches {largest:.3g}, beyond {bounds.model.dtype}'s {limit:.3g}")
    return spec.scale


Rule = tuple[str, Callable[[Any, Bounds], Any]]

CAPTURE_RULES: tuple[Rule, ...] = (("hook", _hook), ("layers", _layers), ("positions", _positions))
STEERING_RULES: tuple[Rule, ...] = (*CAPTURE_RULES, ("vector.shape", _width), ("vector.data", _finite), ("scale", _strength))


def _apply(rules: Sequence[Rule], spec: CaptureSpec | SteeringSpec, bounds: Bounds, at: str) -> dict[str, Any]:
    """Field → what its rule made of it. Raises a 400 naming the field of the first rule that refuses."""
    made = {}
    for field, rule in rules:
        try:
            made[field] = rule(spec, bounds)
        except ValueError as error:
            raise invalid(f"{at}.{field}", str(error)) from error
    return made


def resolve_capture(spec: CaptureSpec | None, bounds: Bounds) -> list[StoredCapture]:
    """One per prompt; empty when nothing is captured."""
    if spec is None:
        return []
    made = _apply(CAPTURE_RULES, spec, bounds, "capture")
    return [StoredCapture(layers=made["layers"], hook=made["hook"], positions=chosen, tag=spec.tag) for chosen in made["positions"]]


def resolve_steering(specs: Sequence[SteeringSpec], bounds: Bounds) -> tuple[list[list[StoredSteering]], dict[str, bytes]]:
    """One list per prompt, and the vectors by content hash; both empty when nothing is steered."""
    if (different := len({str(spec.positions) for spec in specs})) > MAX_STEERING_SELECTORS:
        raise invalid("steering", f"names {different} different positions: at most {MAX_STEERING_SELECTORS} in one request")
    blobs: dict[str, bytes] = {}
    per_prompt: list[list[StoredSteering]] = [[] for _ in bounds.lengths] if specs else []
    for index, spec in enumerate(specs):
        made = _apply(STEERING_RULES, spec, bounds, f"steering[{index}]")
        name = _keep(spec.vector, blobs)
        for entries, chosen in zip(per_prompt, made["positions"], strict=True):
            entries.append(StoredSteering(layers=made["layers"], vector=name, scale=made["scale"], hook=made["hook"], positions=chosen))
    return per_prompt, blobs


def _keep(vector: Tensor, blobs: dict[str, bytes]) -> str:
    name = content_hash(vector)
    blobs[name] = to_msgpack(vector)
    return name


# --- Prompts and sampling --------------------------------------------------------------------------------------------


async def tokenise(prompts: Sequence[WishedPrompt], model: ModelInfo, codec: Codec) -> list[StoredPrompt]:
    """Every prompt as token ids of this model. Raises a 400 naming the prompt that is empty or outside the vocabulary."""
    for prompt in prompts:
        if not prompt.value:
            raise invalid(prompt.field, "is empty: a prompt has at least one token")
    texts = [prompt.value for prompt in prompts if isinstance(prompt.value, str)]
    encoded = iter(await codec.encode(texts, special_tokens=True) if texts else [])
    stored = []
    for prompt in prompts:
        if isinstance(prompt.value, str):
            ids, text = next(encoded), prompt.value
            if not ids:
                raise invalid(prompt.field, "is empty once tokenised: a prompt has at least one token")
            stored.append(StoredPrompt(token_ids=ids, text=text))
        elif isinstance(prompt.value[0], dict):
            ids, text = await codec.encode_chat([message for message in prompt.value if isinstance(message, dict)])
            stored.append(StoredPrompt(token_ids=ids, text=text))
        else:
            ids = [token for token in prompt.value if isinstance(token, int)]
            _check_vocabulary(ids, prompt.field, model)
            stored.append(StoredPrompt(token_ids=ids))
    return stored


def _check_vocabulary(ids: Sequence[int], at: str, model: ModelInfo) -> None:
    for index, token in enumerate(ids):
        if not 0 <= token < model.vocab_size:
            raise invalid(f"{at}[{index}]", f"token id {token} is outside the vocabulary", allowed=f"0 to {model.vocab_size - 1}")


def check_lengths(wish: Wish, prompts: Sequence[StoredPrompt], model: ModelInfo) -> int:
    """How many tokens to generate. Raises a 400 when a prompt, or a prompt with what it generates, is longer than the model."""
    longest = 0
    for prompt, wished in zip(prompts, wish.prompts, strict=True):
        tokens = len(prompt.token_ids)
        if tokens >= model.max_model_len:
            raise invalid(wished.field, f"has {tokens} tokens and leaves none to generate: the model takes {model.max_model_len} in all")
        longest = max(longest, tokens)
    room = model.max_model_len - longest
    if wish.fill_max_tokens:
        return room
    if wish.sampling.max_tokens > room:
        raise invalid(
            wish.max_tokens_at,
            f"{wish.sampling.max_tokens} after a prompt of {longest} tokens is more than the model's {model.max_model_len}",
            allowed=f"1 to {room}",
        )
    return wish.sampling.max_tokens


def check_sampling(sampling: Sampling, at: str, model: ModelInfo) -> None:
    """What the types do not say of sampling parameters."""
    if sampling.seed is not None and not -SEED_LIMIT <= sampling.seed < SEED_LIMIT:
        raise invalid(f"{at}seed", "does not fit 64 bits", allowed=f"{-SEED_LIMIT} to {SEED_LIMIT - 1}")
    if sampling.max_tokens > sys.maxsize or sampling.top_k > model.vocab_size:
        name = "max_tokens" if sampling.max_tokens > sys.maxsize else "top_k"
        raise invalid(f"{at}{name}", "is too large", allowed=f"0 to {model.vocab_size}" if name == "top_k" else None)
    for index, text in enumerate(sampling.stop):
        if not text:
            raise invalid(f"{at}stop[{index}]", "is empty: a stop string has at least one character")
    _check_vocabulary(sampling.stop_token_ids, f"{at}stop_token_ids", model)


def check_metadata(metadata: dict[str, str]) -> None:
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_LENGTH:
            raise invalid("metadata", f"key {key[:20]!r}… is longer than {METADATA_KEY_LENGTH} characters")
        if len(value) > METADATA_VALUE_LENGTH:
            raise invalid(f"metadata.{key}", f"is longer than {METADATA_VALUE_LENGTH} characters")


async def admit(wish: Wish, model: ModelInfo, codec: Codec, job_id: str) -> Admitted:
    """The wish as a job under `job_id`. Raises a 400 with the path of the first field at fault."""
    check_metadata(wish.metadata)
    check_sampling(wish.sampling, wish.sampling_at, model)
    prompts = await tokenise(wish.prompts, model, codec)
    max_tokens = check_lengths(wish, prompts, model)
    bounds = Bounds(model, [len(prompt.token_ids) for prompt in prompts])
    captures = resolve_capture(wish.capture, bounds)
    steering, blobs = resolve_steering(wish.steering, bounds)
    job = Job(
        id=job_id,
        kind=wish.kind,
        model=model.name,
        prompts=prompts,
        sampling=msgspec.structs.replace(wish.sampling, max_tokens=max_tokens),
        created=now(),
        steering=steering,
        captures=captures,
        stream=wish.stream,
        metadata=wish.metadata,
    )
    return Admitted(job, blobs)


def unknown_model(name: str, served: Sequence[str]) -> MidstreamError:
    """The model is not one that a worker has ever served here; says which are."""
    if not served:
        return MidstreamError("unavailable", "no worker has published a model yet", field="model")
    return MidstreamError("not_found", f"there is no model {name!r}", field="model", allowed=", ".join(sorted(served)))
