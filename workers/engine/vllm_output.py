"""Translates sampling parameters to vLLM's, and vLLM's deltas to Midstream's output."""

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from ...schemas.artifacts.conditions import POLICY
from ...schemas.base.errors import MidstreamError, invalid, shortened
from ...schemas.base.limits import MAX_DETAIL
from ...schemas.jobs.jobs import Message, Output, Prompted, Sampling, TokenLogprob
from ...schemas.requests.specs import RankSpec
from ..runner.base.packed_spec import NOBODY, TenantShare, pack
from ..runner.probes.probe_news import SCORES, STOPPED_BY, Scored
from .prompts.tool_calls import ToolReader
from .protocol import EngineRequest, NewOutput

#: Stands for minus infinity, which JSON does not have; vLLM's server writes the same.
LEAST_LOGPROB = -9999.0


def sampling_params(
    sampling: Sampling, spec: RankSpec | None, share: TenantShare = NOBODY
) -> SamplingParams:
    """Returns vLLM's parameters, named as in `Sampling`, with the spec for the ranks, and whose
    share of the engine the request has.
    """
    if not sampling.max_tokens:
        # vLLM ends no request without a token: `OutputJoiner` leaves it out
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=sampling.prompt_logprobs,
            detokenize=sampling.prompt_logprobs is not None,
            output_kind=RequestOutputKind.DELTA,
            extra_args=pack(spec, share),
        )
    names = (name for name in sampling.__struct_fields__ if name != "structured_outputs")
    form = sampling.structured_outputs
    return SamplingParams(
        **{name: getattr(sampling, name) for name in names},
        structured_outputs=None
        if form is None
        else StructuredOutputsParams(**msgspec.structs.asdict(form)),
        output_kind=RequestOutputKind.DELTA,
        extra_args=pack(spec, share),
    )


def refusal(error: Exception, sampling: Sampling) -> MidstreamError:
    """Return a 400 for a request that vLLM rejects before running it. Some are rejected only inside
    its engine, such as a schema that does not compile.
    """
    field = "structured_outputs" if sampling.structured_outputs is not None else "sampling"
    return invalid(getattr(error, "parameter", None) or field, shortened(str(error), MAX_DETAIL))


def add(
    self: RequestOutput,
    next_output: RequestOutput,
    aggregate: bool,
    merge: Any = RequestOutput.add,
) -> None:
    """Replaces `RequestOutput.add`, with which vLLM joins outputs that are not read yet: it keeps
    only the last `kv_transfer_params`, but the scores of all outputs are needed.
    """
    scores = [
        item
        for output in (self, next_output)
        for item in (output.kv_transfer_params or {}).get(SCORES, ())
    ]
    merge(self, next_output, aggregate)
    if scores:
        self.kv_transfer_params = {**(self.kv_transfer_params or {}), SCORES: scores}


RequestOutput.add = add


class OutputJoiner:
    """Joins vLLM's deltas of one prompt into the whole output."""

    def __init__(
        self, ask: EngineRequest, reader: ToolReader | None = None, prompt: Prompted | None = None
    ) -> None:
        """`reader` parses tool calls. `prompt` is returned with the output; `add` fills in its
        log-probabilities.
        """
        self._request = ask.request
        self._stream = ask.stream
        self._silent = not ask.sampling.max_tokens
        self._reader = reader
        self._prompt = prompt
        self._begun = False
        self._constrained = ask.tools is not None or ask.sampling.structured_outputs is not None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._scored = -1  # the last position whose scores were passed on

    def add(self, output: RequestOutput) -> NewOutput | None:
        part = output.outputs[0]
        if self._silent:
            part.text = ""
            part.token_ids = []
        scores = self._scores(output)
        self._text.append(part.text)
        self._token_ids += part.token_ids
        logprobs = [] if part.logprobs is None else _logprobs(part)
        if part.logprobs is not None:
            self._logprobs = (self._logprobs or []) + logprobs
        if self._prompt is not None and self._prompt.logprobs is None and output.prompt_logprobs:
            # only the first delta has them
            prompt_logprobs = [
                None if choices is None else _logprob(token, choices, True)
                for token, choices in zip(
                    output.prompt_token_ids or [], output.prompt_logprobs, strict=True
                )
            ]
            self._prompt = msgspec.structs.replace(self._prompt, logprobs=prompt_logprobs)
        if not output.finished and not part.token_ids and not part.text:
            return None
        text = (
            self._reader.read(part.text, part.token_ids, output.finished)
            if self._reader is not None and self._stream
            else None
        )
        prompt = None if self._begun else self._prompt
        self._begun = True
        progress = NewOutput(
            request=self._request,
            text=part.text,
            token_ids=list(part.token_ids),
            finished=None,
            scores=scores,
            said=text,
            logprobs=logprobs,
            prompt=prompt,
        )
        if not output.finished:
            return progress
        stopped_by = str((output.kv_transfer_params or {}).get(STOPPED_BY, ""))
        return replace(progress, finished=self._finished(output, stopped_by), stopped_by=stopped_by)

    def _finished(self, output: RequestOutput, stopped_by: str) -> Output:
        """Return the whole output. `stopped_by`: the probe or the policy that ended the request, or
        "".
        """
        ended = stopped_by if stopped_by.startswith(POLICY) else f"probe:{stopped_by}"
        part = output.outputs[0]
        if part.finish_reason == "error" and self._constrained:
            raise invalid("structured_outputs", "the engine could not compile the constraint")
        if part.finish_reason not in ("stop", "length"):
            raise MidstreamError(
                "engine_failed", f"the engine ended the request with {part.finish_reason!r}"
            )
        text = "".join(self._text)
        reason = part.finish_reason
        message: Message | UnsetType = UNSET
        if self._reader is not None:
            message = (
                self._reader.streamed()
                if self._stream
                else self._reader.whole(text, self._token_ids)
            )
            reason = self._reader.finish_reason(message, reason)
        return Output(
            index=self._request,
            text=text,
            token_ids=self._token_ids,
            finish_reason=ended if stopped_by else reason,
            prompt_tokens=len(output.prompt_token_ids or []),
            cached_tokens=output.num_cached_tokens or 0,
            logprobs=self._logprobs,
            stop_reason=UNSET if stopped_by or part.stop_reason is None else part.stop_reason,
            message=message,
            prompt=UNSET if self._prompt is None else self._prompt,
        )

    def _scores(self, output: RequestOutput) -> list[Scored]:
        """Return the scores of new positions: a preempted request computes some again."""
        scores = [
            Scored(*item)
            for item in (output.kv_transfer_params or {}).get(SCORES, ())
            if item[0] > self._scored
        ]
        self._scored = max((item.position for item in scores), default=self._scored)
        return scores


def _logprobs(part: CompletionOutput) -> list[TokenLogprob]:
    return [
        _logprob(token_id, choices)
        for token_id, choices in zip(part.token_ids, part.logprobs or [], strict=True)
    ]


def _logprob(token_id: int, choices: dict[int, Logprob], ranked: bool = False) -> TokenLogprob:
    entries = {
        other: TokenLogprob(
            token_id=other,
            token=choice.decoded_token or "",
            logprob=max(choice.logprob, LEAST_LOGPROB),
            rank=choice.rank if ranked and choice.rank is not None else UNSET,
        )
        for other, choice in choices.items()
    }
    return msgspec.structs.replace(
        entries[token_id], top=sorted(entries.values(), key=lambda entry: -entry.logprob)
    )
