"""Makes every engine request, with all that the operator has set for all traffic.

Each kind of request has a function: a prompt of a job, a sequence of a corpus, a unit of a sweep.
Policies of all traffic, global capture, global steering, tenant and adapter come from the request's
job, for every kind.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ...broker.artifacts.global_capture import count_skipped
from ...schemas.artifacts.loras import use_of
from ...schemas.artifacts.probes import StoredProbe
from ...schemas.jobs.jobs import Job, Sampling
from ...schemas.jobs.models import ModelInfo
from ...schemas.prompts.sight import TurnMap, sight_of
from ...schemas.requests.specs import Grade, StoredCapture, probe_captures
from ...schemas.service.global_capture import captures_of, step_rows
from .protocol import EngineRequest

RequestKind = Literal["prompt", "sequence", "unpatched", "patched", "trial"]

#: Kinds to which policies of all traffic and global capture do not apply, with the reason.
EXEMPT: dict[RequestKind, str] = {
    "patched": (
        "a sweep's unpatched requests have the same tokens, and its patched ones "
        "return none: only log-probabilities"
    ),
    "trial": "the engine makes it itself, before the worker takes jobs",
}


def prompt_request(
    job: Job, request: int, attempt: int, trace: str = "", files: Mapping[str, bytes] | None = None
) -> EngineRequest:
    """Return the request for one prompt of a job. `files`: the job's images by their digests."""
    prompt = job.prompts[request]
    return _build(
        "prompt",
        job,
        request=request,
        attempt=attempt,
        token_ids=prompt.token_ids,
        sampling=_sampling_of(job, request),
        steering=job.steering[request] if job.steering else [],
        captures=job.captures[request] if job.captures else [],
        captured=job.captured,
        stream=job.stream,
        trace=trace,
        images=prompt.images,
        files=[(files or {})[image.digest] for image in prompt.images],
        tools=job.tools,
        echo=(prompt.text or "") if job.echo or not job.opened.continues(request) else None,
        fills=job.fills,
        turns=prompt.turns,
    )


def format_request(job: Job, sampling: Sampling) -> EngineRequest:
    """Return a request with the format that all requests of a job have, for `Engine.check` only."""
    return _build(
        "prompt", job, request=0, attempt=0, token_ids=[], sampling=sampling, tools=job.tools
    )


def sequence_request(
    job: Job, model: ModelInfo, capture: StoredCapture, **fields: Any
) -> EngineRequest:
    """Return the request for one sequence of a corpus, which captures `capture`.

    `fields`: further fields of `EngineRequest`.
    """
    return _build("sequence", job, model, captures=capture.split(model.inside), **fields)


def unit_request(
    job: Job, model: ModelInfo, *, patched: bool, grade: Grade | None, **fields: Any
) -> EngineRequest:
    """Return a request of a sweep's unit, which computes one token to grade it, or none.

    `fields`: further fields of `EngineRequest`.
    """
    return _build(
        "patched" if patched else "unpatched",
        job,
        model,
        sampling=Sampling(max_tokens=0 if grade is None else 1),
        grade=grade,
        **fields,
    )


def trial_request(
    job: str, number: int, token_ids: list[int], max_tokens: int, **fields: Any
) -> EngineRequest:
    """Return a request that the engine makes to test itself, without a job.

    `fields`: further fields of `EngineRequest`.
    """
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(
        job=job,
        request=number,
        attempt=1,
        token_ids=token_ids,
        sampling=sampling,
        salt=f"{job}{number}",
        **fields,
    )


def tensors_of(job: Job) -> set[str]:
    """Return the names of the tensors that every request of a job needs on the ranks: those of
    global steering and of the job's probes.
    """
    return {
        *job.global_steering.tensors,
        *(name for probe in job.probes for name in probe.content.tensors),
    }


def _build(
    kind: RequestKind,
    job: Job,
    model: ModelInfo | None = None,
    *,
    captures: Sequence[StoredCapture] = (),
    turns: TurnMap | None = None,
    **fields: Any,
) -> EngineRequest:
    """Make a request of a job. `model`: given if the worker makes the job's prompts, to which the
    API could not add global capture. `turns`: of its prompt, where they are known.
    """
    probes = [] if kind in EXEMPT else [_looking(probe, turns) for probe in job.probes]
    if model is not None and kind not in EXEMPT:
        captures = _with_global(
            captures, job, model, len(fields["token_ids"]), fields["sampling"].max_tokens
        )
    return EngineRequest(
        job=job.id,
        captures=[*captures, *probe_captures(probes)],
        probes=probes,
        global_steering=job.global_steering,
        tenant=job.tenant,
        weight=job.weight,
        lora=use_of(job.lora),
        **fields,
    )


def _looking(probe: StoredProbe, turns: TurnMap | None) -> StoredProbe:
    """Return a probe whose policy knows what it reads of a prompt."""
    if probe.policy is None:
        return probe
    sight = sight_of(probe.policy.condition.schedule.tokens, turns)
    policy = msgspec.structs.replace(probe.policy, sight=sight)
    return msgspec.structs.replace(probe, policy=policy)


def _with_global(
    captures: Sequence[StoredCapture], job: Job, model: ModelInfo, tokens: int, max_tokens: int
) -> list[StoredCapture]:
    """Return a request's captures and those of the operator that fit into one step with them, as
    the API does for the prompts of a job.
    """
    joined = list(captures)
    for spec in job.global_captures:
        (more,) = captures_of(spec, model, [tokens])
        if more is None:
            continue
        # the probes are those of policies, which have room of their own
        if model.step_holds(step_rows([*joined, more], model, tokens, max_tokens)):
            joined += more.split(model.inside)
        else:
            count_skipped(
                "buffer",
                1,
                "one token has more rows than the worker's buffer holds "
                "(tuning.capture_buffer_mib)",
            )
    return joined


def _sampling_of(job: Job, request: int) -> Sampling:
    """Return the sampling of one of a prompt's `n` outputs; each has the seed that vLLM assigns. A
    dose's prompts are continued, or their own tokens count.
    """
    if not job.opened.continues(request):
        return Sampling(max_tokens=1, prompt_logprobs=0)
    if job.n == 1 or job.sampling.seed is None:
        return job.sampling
    return msgspec.structs.replace(job.sampling, seed=job.sampling.seed + request % job.n)
