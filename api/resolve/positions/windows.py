"""Resolves positions that tokens decide: windows of captures and triggers of edits."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ....schemas.base.errors import invalid
from ....schemas.base.limits import MAX_AROUND, MAX_SEARCHED
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import Span
from ....schemas.prompts.windows import Occurrences, Trigger
from ....schemas.requests.specs import CaptureSpec, SteeringSpec
from ..prompts.tokenizer import Codec, check_vocabulary

#: Tensor-parallel ranks all have a probe's scores; the stages of a pipeline do not.
STAGES = "the model runs in pipeline stages, of which one alone has the probe's scores"


def window_of(positions: Any) -> Span | None:
    """Return the selector if it is a window."""
    return positions if isinstance(positions, Span) and positions.is_window else None


async def with_window_tokens(spec: CaptureSpec | None, codec: Codec) -> CaptureSpec | None:
    """Return the capture with token ids in place of the text that its window is around: those of
    the text alone, and those after a space.
    """
    span = None if spec is None else window_of(spec.positions)
    if spec is None or span is None or span.around is None or span.around.text is None:
        return spec
    (around,) = await _with_token_ids({"capture.positions.around": span.around}, codec)
    return msgspec.structs.replace(spec, positions=msgspec.structs.replace(span, around=around))


async def with_trigger_tokens(specs: Sequence[SteeringSpec], codec: Codec) -> list[SteeringSpec]:
    """Return steering with token ids in place of the texts of its triggers, likewise."""
    made = [*specs]
    named = {
        index: spec.trigger
        for index, spec in enumerate(specs)
        if spec.trigger is not None and spec.trigger.text is not None
    }
    by_field = {f"steering[{index}].trigger": trigger for index, trigger in named.items()}
    for index, trigger in zip(named, await _with_token_ids(by_field, codec), strict=True):
        made[index] = msgspec.structs.replace(made[index], trigger=trigger)
    return made


OccurrencesT = TypeVar("OccurrencesT", bound=Occurrences)


async def _with_token_ids(named: Mapping[str, OccurrencesT], codec: Codec) -> list[OccurrencesT]:
    """`named`: by the field; their texts are tokenised together."""
    if not named:
        return []
    # Here, because ranks have no tokenizer. Other tokenisations of the same letters are not found.
    texts = [f"{before}{found.text}" for found in named.values() for before in ("", " ")]
    encoded = iter(await codec.encode(texts, special_tokens=False))
    pairs = zip(encoded, encoded, strict=True)
    return [
        _spelled(at, found, pair) for (at, found), pair in zip(named.items(), pairs, strict=True)
    ]


def _spelled(
    at: str, found: OccurrencesT, encoded: tuple[Sequence[int], Sequence[int]]
) -> OccurrencesT:
    """Return what is to be found, by the tokens of its text alone and after a space."""
    sequences = [list(each) for each in dict.fromkeys(map(tuple, encoded)) if each]
    if not 0 < (longest := max(map(len, sequences), default=0)) <= MAX_AROUND:
        raise invalid(
            f"{at}.text",
            f"has {longest} tokens, alone or after a space",
            allowed=f"1 to {MAX_AROUND} tokens",
        )
    return msgspec.structs.replace(found, text=None, token_ids=sequences)


def check_trigger(trigger: Trigger | None, at: str, model: ModelInfo) -> None:
    """Raises a 400 below `at` for a trigger by a text that nothing has tokenised, or by tokens that
    the model lacks.
    """
    if trigger is not None and trigger.text is not None:
        detail = "is valid in requests, modules and global steering only"
        raise invalid(f"{at}.trigger.text", detail, allowed="token_ids instead of text")
    for number, sequence in enumerate((trigger and trigger.token_ids) or ()):
        check_vocabulary(sequence, f"{at}.trigger.token_ids[{number}]", model)


def check_window(
    window: Span | None, probes: Sequence[str], model: ModelInfo, at: str, tokens: int = 0
) -> None:
    """Raises a 400 below `at` for a window around tokens that the model lacks, that ranks would
    search for in too many, or of a probe whose scores its ranks lack. `probes`: those that score
    the request; `tokens`: of all its prompts, with those generated at most.
    """
    if window is None:
        return
    sequences = (window.around and window.around.token_ids) or ()
    for number, sequence in enumerate(sequences):
        check_vocabulary(sequence, f"{at}.around.token_ids[{number}]", model)
    if (searched := tokens * len(sequences)) > MAX_SEARCHED:
        raise invalid(
            f"{at}.around",
            f"searches {tokens} tokens for {len(sequences)} sequences: {searched} comparisons",
            allowed=f"at most {MAX_SEARCHED} in one request",
        )
    if window.when is None:
        return
    if window.when.probe not in probes:
        raise invalid(
            f"{at}.when.probe",
            f"{window.when.probe!r} does not score this request: it has "
            f"{', '.join(probes) or 'no probes'}; name it in probes",
        )
    if model.pp > 1:
        raise invalid(f"{at}.when", STAGES)
