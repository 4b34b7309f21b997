"""Validation of a dose against the model: a request becomes the prompts of a job with the edits of
each, or a 400 names the field.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ....schemas.artifacts.probes import StoredProbe
from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.limits import MAX_DOSE_LAYERS, MAX_DOSE_WORK, MAX_PROMPTS
from ....schemas.jobs.doses import DoseRequest, StoredDose
from ....schemas.jobs.jobs import StoredPrompt
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import SelectorError, resolve_layers
from ....schemas.requests.specs import StoredCapture, StoredSteering, at_scale
from ..edits.model_state import ModelState
from ..edits.steering import check_number, resolve_edits
from ..positions.captures import Bounds, PromptFacts, has_text, resolve_captures
from ..prompts.request_parsing import ParsedPrompt
from ..prompts.tokenizer import Codec, TooLong
from ..readings.probes import check_step
from .admission import tokenise, too_long
from .continuations import ReadPrompt, continue_prompts


class DosePlan(NamedTuple):
    """The job of a dose."""

    dose: StoredDose
    prompts: list[StoredPrompt]  # of each cell in turn
    steering: list[list[StoredSteering]]
    captures: list[list[StoredCapture]]  # the operator's
    probes: list[StoredProbe]
    blobs: dict[str, bytes]


async def resolve_dose(
    body: DoseRequest,
    model: ModelInfo,
    codec: Codec,
    state: ModelState,
    probes: Sequence[StoredProbe],
) -> DosePlan:
    """Return what to store. `probes`: the effect's, then those that watch all traffic. Raises a 400
    naming the field and what is valid.
    """
    layers = _layers(body, model)
    if body.effect.label is not None and body.effect.label not in probes[0].content.labels:
        allowed = ", ".join(probes[0].content.labels)
        raise invalid("effect.label", f"unknown label {body.effect.label!r}", allowed=allowed)
    continued = await _tokens("prompts", body.prompts, model, codec)
    targets, count = await _with_target(body, continued, model, codec)
    held_out = await _tokens("held_out", body.held_out, model, codec)
    every = [*continued, *targets, *held_out]
    dose = StoredDose(
        layers=layers,
        scales=sorted(body.scales),
        effect=body.effect,
        prompts=len(continued),
        target_tokens=count,
        held_out=len(held_out),
        max_loss=body.max_loss,
        max_repetition=body.max_repetition,
    )
    _check_size(body, dose, every, model)
    cells, blobs = _steering(body, dose, every, model, state)
    if body.effect.probe is not None:  # the mean over the text, whatever it is used for elsewhere
        content = msgspec.structs.replace(probes[0].content, aggregation="mean")
        probes = [msgspec.structs.replace(probes[0], content=content), *probes[1:]]
    captures = resolve_captures(None, _bounds(every, model), [])
    check_step(probes, captures, model)
    number = len(dose.cells)
    return DosePlan(dose, every * number, cells, captures * number, list(probes), blobs)


def _bounds(every: Sequence[StoredPrompt], model: ModelInfo) -> Bounds:
    return Bounds(model, [PromptFacts(len(prompt.token_ids)) for prompt in every])


def _layers(body: DoseRequest, model: ModelInfo) -> list[int | None]:
    if body.steering.layers is not None:
        raise invalid("steering.layers", "is not valid in a dose", hint="give `layers`")
    if body.layers is None:
        if body.steering.module is None:
            raise invalid("layers", "is required without `steering.module`")
        return [None]
    try:
        layers = resolve_layers(body.layers, model.num_layers)
    except SelectorError as error:
        raise invalid("layers", str(error)) from error
    if len(layers) > MAX_DOSE_LAYERS:
        raise invalid("layers", f"are {len(layers)}", allowed=f"at most {MAX_DOSE_LAYERS}")
    return [*layers]


async def _tokens(
    field: str, values: Sequence[str | list[int]], model: ModelInfo, codec: Codec
) -> list[StoredPrompt]:
    parsed = [ParsedPrompt(f"{field}[{index}]", value) for index, value in enumerate(values)]
    prompts = await tokenise(parsed, model, codec)
    for prompt, part in zip(prompts, parsed, strict=True):
        if field == "held_out" and len(prompt.token_ids) < 2:
            raise invalid(part.field, "has one token", allowed="two or more: the first has no loss")
    return prompts


async def _with_target(
    body: DoseRequest, prompts: Sequence[StoredPrompt], model: ModelInfo, codec: Codec
) -> tuple[list[StoredPrompt], int]:
    """Return each prompt with the target after it, and the target's number of tokens."""
    if not body.effect.target:
        return [], 0
    # token ids of its own, so that the prompts' tokens are not changed
    asked = ("effect.target", body.effect.target, [ReadPrompt([], [])])
    (target,) = await continue_prompts([asked], model, codec)
    joined = [StoredPrompt(token_ids=[*prompt.token_ids, *target.ids]) for prompt in prompts]
    return joined, len(target.ids)


def _check_size(
    body: DoseRequest, dose: StoredDose, every: Sequence[StoredPrompt], model: ModelInfo
) -> None:
    cells = len(dose.cells)
    for index, prompt in enumerate(every):
        more = body.max_tokens if dose.continues(index) else 1
        if len(prompt.token_ids) + more > model.max_model_len:
            raise too_long(TooLong(0, len(prompt.token_ids)), "prompts", model)
    tokens = sum(len(prompt.token_ids) for prompt in every) + dose.prompts * body.max_tokens
    if cells * len(every) > MAX_PROMPTS or cells * tokens > MAX_DOSE_WORK:
        raise invalid(
            "scales",
            f"make {cells} cells of {len(every)} prompts and {tokens} tokens",
            allowed=f"at most {MAX_PROMPTS} prompts and {MAX_DOSE_WORK} tokens in all cells",
        )


def _steering(
    body: DoseRequest,
    dose: StoredDose,
    every: Sequence[StoredPrompt],
    model: ModelInfo,
    state: ModelState,
) -> tuple[list[list[StoredSteering]], dict[str, bytes]]:
    """Return the edits of each cell's prompts, and the tensors that came with them."""
    if has_text(body.steering.positions or "all"):
        raise invalid("steering.positions", "text is not valid in a dose")
    spec = body.steering
    if spec.module is None:
        spec = msgspec.structs.replace(spec, layers=body.layers)
    try:
        check_number([spec], state)
        resolved, blobs = resolve_edits([], [spec], _bounds(every, model), state)
    except MidstreamError as error:
        raise error.at((error.field or "steering").replace("steering[0]", "steering")) from error
    steering: list[list[StoredSteering]] = []
    for layer, scale in dose.cells:
        for entries in resolved:
            chosen = [entry for entry in entries if layer is None or layer in entry.layers]
            if not chosen and scale:
                raise invalid("layers", f"the module has no entry at layer {layer}")
            steering.append([_at(entry, layer, scale) for entry in chosen if scale])
    return steering, blobs


def _at(entry: StoredSteering, layer: int | None, scale: float) -> StoredSteering:
    scaled = at_scale(entry, scale)
    return scaled if layer is None else msgspec.structs.replace(scaled, layers=[layer])
