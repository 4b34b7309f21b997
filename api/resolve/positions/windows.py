"""Resolves the windows of captures: positions that are known only when a request ends."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ....schemas.base.errors import invalid
from ....schemas.prompts.selectors import SelectorError, Span
from ....schemas.prompts.windows import When
from ....schemas.requests.specs import CaptureSpec
from ..prompts.tokenizer import Codec

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
    encoded = await codec.encode([text, f" {text}"], special_tokens=False)
    sequences = [list(each) for each in dict.fromkeys(map(tuple, encoded)) if each]
    if not sequences:
        raise invalid("capture.positions.around.text", "has no tokens")
    around = msgspec.structs.replace(span.around, text=None, token_ids=sequences)
    positions = msgspec.structs.replace(span, around=around)
    return msgspec.structs.replace(spec, positions=positions)


def check_probe(when: When, probes: Sequence[str], stages: int) -> None:
    """Raises SelectorError for a window of a probe that ranks do not have. `probes`: those that
    score the request; `stages`: of the model's pipeline.
    """
    if when.probe not in probes:
        raise SelectorError(
            f"{when.probe!r} does not score this request: it has "
            f"{', '.join(probes) or 'no probes'}; name it in probes",
            ".when.probe",
        )
    if stages > 1:
        raise SelectorError(STAGES, ".when")
