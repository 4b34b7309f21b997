"""The one door to the engine: every engine request is made here, with all that the operator has set
for all traffic.

What a request is for comes from its kind: a prompt of a job, a sequence of a harvest, a unit of a
sweep. Watching probes, global capture, tenant and adapter come from its job, for every kind. Global
steering is that of the attempt (`Attempt.submit`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ...broker.ops.global_capture import count_skipped
from ...schemas.artifacts.loras import use_of
from ...schemas.jobs.jobs import Job, Sampling
from ...schemas.jobs.models import ModelInfo
from ...schemas.requests.specs import StoredCapture, probe_captures
from ...schemas.requests.steering import GlobalSteering
from ...schemas.service.global_capture import captures_of, step_rows
from .protocol import EngineRequest

RequestKind = Literal["prompt", "sequence", "unpatched", "patched", "trial"]

#: Kinds to which watching probes and global capture do not apply, with the reason. They apply to
#: all others.
EXEMPT: dict[RequestKind, str] = {
    "patched": (
        "a sweep's unpatched requests have the same tokens, and its patched ones "
        "return none: only log-probabilities"
    ),
    "trial": "it is made by the engine itself, before the worker takes jobs",
}


def prompt_request(
    job: Job, request: int, attempt: int, trace: str = "", files: Mapping[str, bytes] | None = None
) -> EngineRequest:
    """Return the request for one prompt of a job. `files`: the job's images by their digests."""
    prompt = job.prompts[request]
    return _made(
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
        echo=(prompt.text or "") if job.echo else None,
        fills=job.fills,
    )


def format_request(job: Job, sampling: Sampling) -> EngineRequest:
    """Return a request that has the format of all requests of a job, for `Engine.check`; it is not
    one to generate for.
    """
    return _made(
        "prompt", job, request=0, attempt=0, token_ids=[], sampling=sampling, tools=job.tools
    )


def sequence_request(
    job: Job, model: ModelInfo, capture: StoredCapture, **own: Any
) -> EngineRequest:
    """Return the request for one sequence of a harvest, whose rows are `capture`'s.

    `own`: further fields of `EngineRequest`.
    """
    return _made("sequence", job, model, captures=capture.split(model.inside), **own)


def unit_request(job: Job, model: ModelInfo, *, patched: bool, **own: Any) -> EngineRequest:
    """Return a request of a sweep's unit, which generates one token.

    `own`: further fields of `EngineRequest`.
    """
    return _made(
        "patched" if patched else "unpatched", job, model, sampling=Sampling(max_tokens=1), **own
    )


def trial_request(
    job: str, number: int, token_ids: list[int], max_tokens: int, **own: Any
) -> EngineRequest:
    """Return a request of the engine's own. `own`: further fields of `EngineRequest`."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(
        job=job,
        request=number,
        attempt=1,
        token_ids=token_ids,
        sampling=sampling,
        salt=f"{job}{number}",
        **own,
    )


def tensors_of(job: Job, global_steering: GlobalSteering) -> set[str]:
    """Return the names of the tensors that every request of a job needs on the ranks: of global
    steering and of its probes.
    """
    return {
        *global_steering.tensors,
        *(name for probe in job.probes for name in probe.content.tensors),
    }


def _made(
    kind: RequestKind,
    job: Job,
    model: ModelInfo | None = None,
    *,
    captures: Sequence[StoredCapture] = (),
    **own: Any,
) -> EngineRequest:
    """`model`: of a job whose prompts are made by the worker, so that the API could not add global
    capture to them.
    """
    probes = [] if kind in EXEMPT else job.probes
    if model is not None and kind not in EXEMPT:
        captures = _with_global(
            captures, job, model, len(own["token_ids"]), own["sampling"].max_tokens
        )
    return EngineRequest(
        job=job.id,
        captures=[*captures, *probe_captures(probes)],
        probes=probes,
        tenant=job.tenant,
        lora=use_of(job.lora),
        **own,
    )


def _with_global(
    captures: Sequence[StoredCapture], job: Job, model: ModelInfo, tokens: int, max_tokens: int
) -> list[StoredCapture]:
    """Return a request's captures and the operator's, where one step has room for both; as the API
    does for the prompts of a job.
    """
    joined = list(captures)
    for spec in job.global_captures:
        (more,) = captures_of(spec, model, [tokens])
        if more is None:
            continue
        if model.step_holds(
            step_rows([*joined, more, *probe_captures(job.probes)], model, tokens, max_tokens)
        ):
            joined += more.split(model.inside)
        else:
            count_skipped(
                "buffer",
                1,
                "one token has more rows than the worker's buffer holds (capture_buffer_mib)",
            )
    return joined


def _sampling_of(job: Job, request: int) -> Sampling:
    """Return the sampling of one of `n` outputs of a prompt: each has its own seed, as vLLM
    assigns them.
    """
    if job.n == 1 or job.sampling.seed is None:
        return job.sampling
    return msgspec.structs.replace(job.sampling, seed=job.sampling.seed + request % job.n)
