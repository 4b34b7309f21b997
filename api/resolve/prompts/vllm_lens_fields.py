"""Translates into our `steering` and `capture` what other tools send: vllm-lens' request fields,
and modules named in the URL's parameter `module`, by tools that send only OpenAI's fields.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from ....schemas.base import (
    ITEM_BYTES,
    Excluded,
    MidstreamError,
    check_excluded,
    from_json,
    invalid,
)
from ....schemas.base.json_bounds import TooManyValues, check_json
from ....schemas.base.limits import MAX_ENTRIES, MAX_LAYERS, MAX_MODULE_TEXT, NAME_PATTERN, Index
from ....schemas.jobs.jobs import Job
from ....schemas.jobs.models import ModelInfo
from ....schemas.jobs.openai import OpenAIRequest
from ....schemas.requests.lens_vectors import (
    MAX_LENS_BYTES,
    REFUSED,
    LensArgs,
    LensVector,
    LensVectorError,
    LensVectors,
    specs_of,
)
from ....schemas.requests.specs import CaptureSpec, SteeringSpec
from ....schemas.service.choices import refusal
from .request_parsing import ParsedRequest

#: Tag of the captured rows.
TAG = "vllm-lens"
Layers = list[Index]


def with_lens_args(parsed: ParsedRequest, body: OpenAIRequest, most_mib: int) -> ParsedRequest:
    """Return the request with the steering and capture of `vllm_xargs` or `extra_args`, after its
    own steering.

    Raises a 400 naming the field.

    `most_mib`: setting `vllm_lens_mib`. Decodes tensors of up to 32 MiB: call it off the event
    loop.
    """
    at, args = (
        ("vllm_xargs", body.vllm_xargs)
        if body.vllm_xargs is not None
        else ("extra_args", body.extra_args)
    )
    if args is None:
        return parsed
    transport = args.activations_transport
    check_excluded(
        [
            Excluded(
                "extra_args",
                body.vllm_xargs is not None and body.extra_args is not None,
                "is given with vllm_xargs",
                hint="give one of them",
            ),
            Excluded(
                at,
                most_mib == 0,
                "vllm-lens' fields are turned off here (setting tuning.vllm_lens_mib)",
                hint="use steering and capture",
            ),
            *(
                Excluded(
                    f"{at}.{name}",
                    (raw := getattr(args, name)) is not msgspec.UNSET and bytes(raw) != b"null",
                    "is not supported",
                    hint=instead,
                )
                for name, instead in REFUSED.items()
            ),
            Excluded(
                f"{at}.activations_transport",
                transport not in (None, "base64"),
                f"{transport!r} is not supported",
                allowed="base64",
                hint="omit it",
            ),
        ]
    )
    return _captured(
        _steered(parsed, args, f"{at}.apply_steering_vectors"), args, f"{at}.output_residual_stream"
    )


def _steered(parsed: ParsedRequest, args: LensArgs, at: str) -> ParsedRequest:
    vectors = args.apply_steering_vectors
    if isinstance(vectors, str):
        vectors = _decoded(vectors, LensVectors, at)
    _check_size(vectors or [], at)
    steering, written = list(parsed.steering), dict(parsed.written)
    for index, vector in enumerate(vectors or []):
        specs = _specs(vector, f"{at}[{index}]")
        written |= {
            f"steering[{len(steering) + number}]": f"{at}[{index}]" for number in range(len(specs))
        }
        steering += specs
        if len(steering) > MAX_ENTRIES:
            raise invalid(
                f"{at}[{index}]",
                f"makes {len(steering)} entries of steering",
                allowed=f"at most {MAX_ENTRIES} in all",
            )
    return replace(parsed, steering=steering, written=written)


def _check_size(vectors: Sequence[LensVector], at: str) -> None:
    """Bound the shapes' total size as float32; a tensor that does not match its shape fails to
    decode.
    """
    numbers = sum(math.prod(vector.activations.shape) for vector in vectors)
    if numbers * ITEM_BYTES["float32"] > MAX_LENS_BYTES:
        raise invalid(
            at,
            f"has {numbers} numbers",
            allowed=f"at most {MAX_LENS_BYTES // ITEM_BYTES['float32']} in all",
        )


def _specs(vector: LensVector, at: str) -> list[SteeringSpec]:
    try:
        return specs_of(vector)
    except LensVectorError as error:
        raise invalid(f"{at}.{error.field}", error.detail, allowed=error.allowed or None) from error
    except ValueError as error:  # a number that no entry takes
        raise invalid(f"{at}.scale", str(error)) from error


def _captured(parsed: ParsedRequest, args: LensArgs, at: str) -> ParsedRequest:
    layers = args.output_residual_stream
    if isinstance(layers, str):
        layers = _decoded(layers, Layers | bool, at)
    if layers is None:
        return parsed
    count = len(layers) if isinstance(layers, list) else 1
    wishes = {"stream": parsed.stream, "n": parsed.n > 1, "prompt": len(parsed.prompts) > 1}
    several = next((name for name, given in wishes.items() if given), "")
    check_excluded(
        [
            Excluded(
                at,
                not layers,
                "names no layer",
                allowed="a list of layers, true for all of them, or omit it",
            ),
            Excluded(
                at, count > MAX_LAYERS, f"has {count} layers", allowed=f"at most {MAX_LAYERS}"
            ),
            Excluded(
                at,
                several,
                f"needs one complete answer, but {several} requests several or a stream",
                allowed="one prompt, n: 1, stream: false",
            ),
            Excluded(
                at,
                parsed.capture is not None,
                "is given with capture",
                hint="give one of them",
            ),
            Excluded(
                at,
                parsed.prompts[0].images,
                "is not available for prompts with images",
                hint="use capture instead",
            ),
        ]
    )
    capture = CaptureSpec(
        layers=sorted(set(layers)) if isinstance(layers, list) else "all",
        positions="all",
        at="after",
        tag=TAG,
    )
    return replace(
        parsed, capture=capture, returns_rows=True, written={**parsed.written, "capture": at}
    )


def _decoded(text: str, kind: Any, at: str) -> Any:
    """Decode what the client sent as JSON in a string."""
    try:
        check_json(text.encode())
        return from_json(text, kind)
    except msgspec.ValidationError as error:
        raise refusal(error, kind, at, at) from error
    except (TooManyValues, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(at, f"cannot be read as JSON of a list: {error}") from error


def check_answer(parsed: ParsedRequest, job: Job, model: ModelInfo, most_mib: int) -> None:
    """Raises a 400 if the returned rows may exceed what an answer holds."""
    if not parsed.returns_rows:
        return
    (capture,) = (capture for capture in job.captures[0] if capture.tag == TAG)
    positions = capture.count_positions(len(job.prompts[0].token_ids), job.sampling.max_tokens)
    size = positions * capture.num_sites * model.hidden_size * ITEM_BYTES[model.dtype]
    if size > most_mib << 20:
        raise invalid(
            parsed.written["capture"],
            f"{capture.num_sites} layers of up to {positions} positions are {size} bytes: "
            f"an answer holds {most_mib} MiB (setting "
            "vllm_lens_mib)",
            hint=(
                f"ask for fewer layers, or a smaller {parsed.max_tokens_at}; or use capture, whose "
                "rows are downloaded"
            ),
        )


@contextmanager
def as_written(parsed: ParsedRequest) -> Iterator[None]:
    """Make errors name the field that the client sent, where it was translated into another."""
    try:
        yield
    except MidstreamError as error:
        for key, value in parsed.written.items():
            if error.field is not None and (
                error.field == key or error.field.startswith((f"{key}.", f"{key}["))
            ):
                raise error.at(value) from error
        raise


FIELD = "module"
_SCALE = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?", re.ASCII)


def modules_of(texts: Sequence[str]) -> list[dict[str, str | float]]:
    """Return the equivalent entries of `steering`. Raises a 400 naming `module`."""
    return [_entry(text) for text in texts]


def _entry(text: str) -> dict[str, str | float]:
    if len(text) > MAX_MODULE_TEXT:
        raise invalid(FIELD, f"has {len(text)} characters", allowed=f"at most {MAX_MODULE_TEXT}")
    name, colon, scale = text.partition(":")
    if re.match(NAME_PATTERN, name) is None:
        raise invalid(
            FIELD,
            f"{text!r} does not begin with a module's name",
            allowed="NAME or NAME:SCALE, such as joy:2.5",
        )
    if not colon:
        return {"module": name}
    if _SCALE.fullmatch(scale) is None or not math.isfinite(float(scale)):
        raise invalid(
            FIELD,
            f"{scale!r} in {text!r} is not a scale",
            allowed="a finite number, such as 2.5 or -1",
        )
    return {"module": name, "scale": float(scale)}


def with_modules(parsed: ParsedRequest, entries: Sequence[dict[str, str | float]]) -> ParsedRequest:
    """Return the request with these modules after its own steering."""
    first = len(parsed.steering)
    specs = [
        SteeringSpec(
            module=str(entry["module"]),
            scale=entry.get("scale"),  # type: ignore[arg-type]
        )
        for entry in entries
    ]
    written = {f"steering[{first + index}]": FIELD for index in range(len(specs))}
    return replace(
        parsed, steering=[*parsed.steering, *specs], written={**parsed.written, **written}
    )
