"""Admission of gradient rows: prompts of which the model's gradient worker captures gradients."""

from dataclasses import replace
from typing import Any

import msgspec

from midstream.api.resolve.admission.admission import Admitted, admit
from midstream.api.resolve.admission.names import Referents
from midstream.api.resolve.prompts.request_parsing import ParsedRequest
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.schemas.access.keys import EVERYBODY, Caller
from midstream.schemas.base.errors import invalid
from midstream.schemas.jobs.jobs import Sampling
from midstream.schemas.jobs.models import ModelInfo

from .gradient_rows import resolve_gradients, with_scalar_tokens


async def admit_gradients(
    parsed: ParsedRequest,
    model: ModelInfo,
    codec: Codec,
    job_id: str,
    named: Referents,
    caller: Caller = EVERYBODY,
) -> Admitted:
    """Return the parsed request as a job of `caller` with this id. Policies of all traffic and
    global capture do not apply: nothing is generated.

    Raises a 400 with the path of the field at fault.
    """
    assert parsed.capture is not None
    _check_alone(parsed)
    spec = await with_scalar_tokens(parsed.capture, codec)
    parsed = replace(parsed, capture=spec, sampling=Sampling(max_tokens=1))
    model = msgspec.structs.replace(model, global_captures=[])
    return await admit(
        parsed, model, codec, job_id=job_id, named=named, caller=caller, stored=resolve_gradients
    )


def _check_alone(parsed: ParsedRequest) -> None:
    """Raises a 400 for what a request of gradient rows may not have: the gradient worker runs the
    unedited model on texts, and generates nothing.
    """
    beside: dict[str, Any] = {
        name: getattr(parsed, name) for name in ("steering", "patch", "probes", "policies", "lora")
    }
    beside |= parsed.readings
    beside["messages"] = any(prompt.images for prompt in parsed.prompts)
    beside["sampling"] = msgspec.structs.asdict(parsed.sampling) != msgspec.structs.asdict(
        Sampling(max_tokens=parsed.sampling.max_tokens)
    )
    for field, present in beside.items():
        if present:
            detail = "not valid with capture.of = 'gradient', which generates nothing"
            raise invalid(field, detail, hint="omit it, or submit it as another job")
