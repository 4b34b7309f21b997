"""Translation of sampling parameters to vLLM's, and of vLLM's deltas to our output."""

from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from ...schemas.errors import MidstreamError
from ...schemas.jobs import Output, Sampling, TokenLogprob
from ...schemas.specs import RankSpec
from ..runner.probe_news import SCORES, STOPPED_BY, Scored
from .protocol import Progress


def sampling_params(sampling: Sampling, spec: RankSpec | None) -> SamplingParams:
    """vLLM's parameters, whose names ours are, with the spec for the ranks."""
    return SamplingParams(
        **msgspec.structs.asdict(sampling),
        output_kind=RequestOutputKind.DELTA,
        extra_args={"midstream": msgspec.to_builtins(spec, builtin_types=(bytes,))} if spec else None,
    )


def _merged(self: RequestOutput, following: RequestOutput, aggregate: bool, merge: Any = RequestOutput.add) -> None:
    """vLLM joins outputs that nobody has read yet, and keeps of what travels with them only the last: all scores are needed."""
    scores = [each for output in (self, following) for each in (output.kv_transfer_params or {}).get(SCORES, ())]
    merge(self, following, aggregate)
    if scores:
        self.kv_transfer_params = {**(self.kv_transfer_params or {}), SCORES: scores}


RequestOutput.add = _merged


class Parts:
    """Joins vLLM's deltas of one prompt into the whole output."""

    def __init__(self, request: int) -> None:
        self._request = request
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._scored = -1  # the last position whose scores were passed on

    def add(self, output: RequestOutput) -> Progress | None:
        part, scores = output.outputs[0], self._scores(output)
        self._text.append(part.text)
        self._token_ids += part.token_ids
        if part.logprobs is not None:
            self._logprobs = (self._logprobs or []) + _logprobs(part)
        if not output.finished:
            return Progress(self._request, part.text, list(part.token_ids), scores=scores) if part.token_ids or part.text else None
        stopped_by = str(part.stop_reason or "")
        if part.finish_reason not in ("stop", "length"):
            raise MidstreamError("engine_failed", f"the engine ended the request with {part.finish_reason!r}")
        finished = Output(
            index=self._request,
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=stopped_by if stopped_by.startswith(STOPPED_BY) else part.finish_reason,
            prompt_tokens=len(output.prompt_token_ids or []),
            cached_tokens=output.num_cached_tokens or 0,
            logprobs=self._logprobs,
        )
        return Progress(self._request, part.text, list(part.token_ids), finished, scores)

    def _scores(self, output: RequestOutput) -> list[Scored]:
        """Those that are new: a preempted request computes some again."""
        found = [Scored(*each) for each in (output.kv_transfer_params or {}).get(SCORES, ()) if each[0] > self._scored]
        self._scored = max((each.position for each in found), default=self._scored)
        return found


def _logprobs(part: CompletionOutput) -> list[TokenLogprob]:
    found = []
    for token_id, choices in zip(part.token_ids, part.logprobs or [], strict=True):
        entries = {
            other: TokenLogprob(token_id=other, token=choice.decoded_token or "", logprob=choice.logprob)
            for other, choice in choices.items()
        }
        chosen = entries[token_id]
        top = sorted(entries.values(), key=lambda entry: -entry.logprob)
        found.append(msgspec.structs.replace(chosen, top=top))
    return found
