"""Hits of policies: where one turned on, as receipts report it and the ledger keeps it."""

from collections.abc import Sequence

import msgspec
import numpy as np

from ..base.limits import MAX_HIT_AFTER, MAX_HIT_TOKENS
from ..base.records import Wire
from .conditions import StoredPolicy
from .probes import ProbeScore


class StoredHit(Wire):
    """The first token of a prompt at which a version of a policy turned on.

    Where only the latch of a conversation has turned it on, there is none.
    """

    request: int  # index of the prompt
    version: int
    digest: str  # of the version
    label: str
    position: int  # of the token, from the prompt's first
    score: float  # the aggregate that decided
    threshold: float  # the condition's `at_least`
    triggers: int  # how often it turned on in the prompt
    mode: str
    acted: bool
    actions: list[str]


class HitText(Wire):
    """The tokens up to a hit's own and a few after it."""

    token_ids: bytes  # int32, little-endian
    first: int = 0  # position of the first of them; 0: the text is whole up to the hit
    prompt_tokens: int = 0  # tokens of the prompt: those from there on were generated


def _first_trigger(score: ProbeScore) -> int | None:
    """Return the number of the first decision that turned the policy on."""
    triggers = (n for n, decision in enumerate(score.decisions) if decision.event == "trigger")
    return next(triggers, None)


def with_text(score: ProbeScore, token_ids: Sequence[int], prompt_tokens: int) -> ProbeScore:
    """Return a policy's score with the tokens around its first trigger, if the policy keeps them.
    `token_ids`: all tokens of the request, of which the first `prompt_tokens` are the prompt's.
    """
    number = _first_trigger(score)
    if score.policy is None or not score.policy.keep_texts or number is None:
        return score
    end = score.decisions[number].position + 1
    first = max(0, end - MAX_HIT_TOKENS)
    kept = np.array(token_ids[first : end + MAX_HIT_AFTER], "<i4")
    return msgspec.structs.replace(
        score, text_ids=kept.tobytes(), text_from=first, text_prompt=prompt_tokens
    )


def hit_of(request: int, score: ProbeScore, policy: StoredPolicy) -> StoredHit | None:
    """Return the hit of a policy that a rank reports on a prompt; None: it did not turn on."""
    number = _first_trigger(score)
    if number is None:
        return None
    decision = score.decisions[number]
    return StoredHit(
        request=request,
        version=policy.version,
        digest=policy.digest,
        label=score.labels[policy.column],
        position=decision.position,
        score=decision.score,
        threshold=policy.condition.at_least,
        triggers=score.triggers,
        mode=policy.mode,
        acted=policy.acts,
        actions=policy.actions,
    )


def text_of(score: ProbeScore) -> HitText | None:
    """Return the tokens around a hit, if its policy keeps them."""
    if not score.text_ids:
        return None
    return HitText(token_ids=score.text_ids, first=score.text_from, prompt_tokens=score.text_prompt)
