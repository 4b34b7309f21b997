"""Resolves the windows of captures: positions that are known only when a request ends."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ....schemas.base.errors import invalid
from ....schemas.base.limits import MAX_AROUND, MAX_SEARCHED
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import Span
from ....schemas.requests.specs import CaptureSpec
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
    text = span.around.text
    # Here, because ranks have no tokenizer. Other tokenisations of the same letters are not found.
    encoded = await codec.encode([text, f" {text}"], special_tokens=False)
    sequences = [list(each) for each in dict.fromkeys(map(tuple, encoded)) if each]
    if not 0 < (longest := max(map(len, sequences), default=0)) <= MAX_AROUND:
        raise invalid(
            "capture.positions.around.text",
            f"has {longest} tokens, alone or after a space",
            allowed=f"1 to {MAX_AROUND} tokens",
        )
    around = msgspec.structs.replace(span.around, text=None, token_ids=sequences)
    return msgspec.structs.replace(spec, positions=msgspec.structs.replace(span, around=around))


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
