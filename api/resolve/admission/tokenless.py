"""Jobs without tokens, whose `sampling.max_tokens` is 0: they ask for rows, scores or readings."""

from collections.abc import Sequence

from ....schemas.artifacts.probes import StoredProbe
from ....schemas.base.errors import Excluded, check_excluded
from ....schemas.jobs.jobs import Sampling, StoredPrompt
from ....schemas.jobs.models import ModelInfo
from ....schemas.requests.specs import StoredCapture, depth_of, probe_captures
from ..prompts.request_parsing import ParsedRequest

#: Sampling parameters that ask something of a generated token. The others only say how tokens are
#: chosen and written, and have no effect on a job without any.
OF_TOKENS = (
    "logprobs",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)
#: What a job may ask for in place of tokens.
WITHOUT_TOKENS = "capture, probes, policies, lens, features, readers or sampling.prompt_logprobs"


def check_tokenless(parsed: ParsedRequest) -> None:
    """Raises a 400 for a request without tokens that asks for nothing else, or for something of a
    token.
    """
    sampling = parsed.sampling
    if sampling.max_tokens:
        return
    asked = (
        parsed.capture,
        parsed.probes,
        parsed.policies,
        parsed.readings,
        sampling.prompt_logprobs is not None,
    )
    at = parsed.sampling_at
    neutral = Sampling()
    check_excluded(
        [
            Excluded(
                f"{at}max_tokens",
                not any(asked),
                "is 0, and nothing is asked for but tokens",
                allowed=f"at least 1; 0 with {WITHOUT_TOKENS}",
            ),
            *(
                Excluded(
                    f"{at}{name}",
                    getattr(sampling, name) != getattr(neutral, name),
                    "asks something of a generated token, and max_tokens is 0",
                    hint="omit it, or set max_tokens to 1 or more",
                )
                for name in OF_TOKENS
            ),
        ]
    )


def layers_of(
    sampling: Sampling,
    prompts: Sequence[StoredPrompt],
    captures: Sequence[Sequence[StoredCapture]],
    probes: Sequence[StoredProbe],
    model: ModelInfo,
) -> int | None:
    """Return the value of `Job.layers` of a job with these captures of each prompt."""
    if sampling.reads_logits or not model.exits:
        return None
    scored = probe_captures(probes)
    return max(
        depth_of([*own, *scored], len(prompt.token_ids))
        for prompt, own in zip(prompts, captures or [[]] * len(prompts), strict=True)
    )
