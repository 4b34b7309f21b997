"""Turns a dose into a request for the prompts of a cell, and the admitted job into that of all."""

from collections.abc import Sequence

import msgspec

from midstream.api.resolve.positions.captures import at_field
from midstream.api.resolve.prompts.request_parsing import ParsedPrompt, ParsedRequest
from midstream.schemas.base.errors import invalid
from midstream.schemas.base.limits import MAX_DOSE_WORK, MAX_JOB_EDITS, MAX_PROMPTS
from midstream.schemas.jobs.jobs import Job, Sampling
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.prompts.selectors import resolve_layers
from midstream.schemas.requests.specs import StoredSteering

from ..records.doses import DoseRequest, DoseWork, StoredDose


def parse_dose(body: DoseRequest) -> ParsedRequest:
    """Return the request for the prompts of one cell, steered at all layers."""
    texts = {"prompts": body.prompts, "held_out": body.held_out}
    if body.effect.target:
        whole = [f"{prompt}{body.effect.target}" for prompt in body.prompts]
        texts = {"prompts": body.prompts, "effect.target": whole, "held_out": body.held_out}
    return ParsedRequest(
        kind="dose",
        model=body.model,
        prompts=[
            ParsedPrompt(f"{field}[{index}]", text)
            for field, of_field in texts.items()
            for index, text in enumerate(of_field)
        ],
        sampling=Sampling(max_tokens=body.max_tokens),
        steering=[
            spec
            if spec.module or spec.layers is not None
            else msgspec.structs.replace(spec, layers=body.layers)
            for spec in body.steering
        ],
        scales=body.scales,
        probes=[] if body.effect.probe is None else [body.effect.probe],
        metadata=body.metadata,
        handling=body,
    )


def dose_layers(body: DoseRequest, model: ModelInfo) -> Sequence[int | None]:
    """Return the layer of each cell; None: all together. Raises a 400 naming `layers`."""
    with at_field("layers"):
        return [None] if body.layers is None else resolve_layers(body.layers, model.num_layers)


def expanded(job: Job, body: DoseRequest, layers: Sequence[int | None]) -> Job:
    """Return the job of all cells, with these `layers`. `job`: of the prompts of one. Raises a 400
    naming the field.
    """
    dose = StoredDose(
        cells=[(None, 0.0), *[(layer, scale) for layer in layers for scale in sorted(body.scales)]],
        effect=body.effect,
        prompts=len(body.prompts),
        requests=len(job.prompts),
        target_tokens=_target_tokens(job, body),
        max_loss=body.max_loss,
        max_repetition=body.max_repetition,
    )
    tokens = sum(len(prompt.token_ids) for prompt in job.prompts) + len(body.prompts) * (
        body.max_tokens
    )
    number = len(dose.cells)
    edits = sum(map(len, job.steering))
    for what, count, most in (
        ("prompts", len(job.prompts), MAX_PROMPTS),
        ("tokens", tokens, MAX_DOSE_WORK),
        ("edits", edits, MAX_JOB_EDITS),
    ):
        if number * count > most:
            detail = f"make {number} cells of {count} {what}"
            raise invalid("scales", detail, allowed=f"at most {most} {what} in all cells")
    for index, prompt in enumerate(job.prompts[-len(body.held_out) :]):
        if len(prompt.token_ids) < 2:
            detail = "has one token, and the loss of a text is that of its tokens after the first"
            raise invalid(f"held_out[{index}]", detail, allowed="texts of at least 2 tokens")
    probes = list(job.probes)
    if body.effect.probe is not None:  # the mean over the text, however requests aggregate it
        probes[0] = probes[0].averaged()
    return msgspec.structs.replace(
        job,
        work=DoseWork(dose=dose).packed,
        probes=probes,
        prompts=job.prompts * number,
        captures=job.captures * number,
        steering=[_at(entries, *cell) for cell in dose.cells for entries in job.steering],
    )


def _target_tokens(job: Job, body: DoseRequest) -> list[int]:
    """Return how many tokens the target adds to each prompt."""
    counts = []
    for index in range(len(body.prompts) if body.effect.target else 0):
        prompt = job.prompts[index].token_ids
        whole = job.prompts[len(body.prompts) + index]
        counts.append(len(whole.token_ids) - len(prompt))
        if counts[-1] < 1 or list(whole.token_ids[: len(prompt)]) != list(prompt):
            raise invalid(
                "effect.target",
                f"changes the tokens of prompts[{index}]",
                allowed="text that begins with a space",
            )
    return counts


def _at(entries: Sequence[StoredSteering], layer: int | None, scale: float) -> list[StoredSteering]:
    """Return a prompt's entries in a cell. The operator's are the same in every cell."""
    mine = [entry for entry in entries if entry.owner == "request"]
    own = [e for e in mine if scale and (layer is None or layer in e.layers)]
    if scale and not own:
        raise invalid("layers", f"steering has no entry at layer {layer}")
    return [
        msgspec.structs.replace(e.scaled(scale), layers=e.layers if layer is None else [layer])
        for e in own
    ] + [entry for entry in entries if entry.owner == "operator"]
