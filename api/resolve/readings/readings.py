"""Resolution of readings: what a request wants computed from captured rows, as one capture per
prompt and reading.

Each kind of reading has its rules in `RULES`. How much may come back is limited together with what
the consumer `memory` returns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....schemas.artifacts.registered import NamedArtifact
from ....schemas.base.errors import invalid
from ....schemas.extensions import Extension, artifacts_named
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import Hook, PositionSelector, RequestedPositions
from ....schemas.readings.installed import ReaderSpec
from ....schemas.readings.readings import READINGS, AnyStoredReading
from ....schemas.readings.stored import READER
from ....schemas.requests.specs import StoredCapture
from ..positions.captures import Bounds
from ..prompts.request_parsing import ParsedRequest
from ..prompts.tokenizer import Codec
from .features import resolve_features
from .lens import resolve_lens, with_token_ids
from .readers import resolve_reader

#: Field of a request → what resolves a spec of its kind of reading, at its place in the body: it
#: returns the instruction to the ranks, hook → layers, and the positions of each prompt. A field
#: may hold a list of specs.
RULES: dict[
    str,
    Callable[
        [Any, Bounds, str],
        tuple[AnyStoredReading, Mapping[Hook, list[int]], Sequence[PositionSelector]],
    ],
] = {"lens": resolve_lens, "features": resolve_features, "readers": resolve_reader}


def readings_of(parsed: ParsedRequest) -> Iterator[tuple[str, str, Any]]:
    """Yield (field, place in the body, spec) of each reading."""
    for field, spec in parsed.readings.items():
        if isinstance(spec, list):
            yield from ((field, f"{field}[{index}]", one) for index, one in enumerate(spec))
        else:
            yield field, field, spec


def artifacts_read(parsed: ParsedRequest, extensions: Sequence[Extension]) -> list[NamedArtifact]:
    """Return the registered artifacts that readings name. `extensions`: those of the model."""
    found: list[NamedArtifact] = []
    for _, _, spec in readings_of(parsed):
        found += spec.references
        if isinstance(spec, ReaderSpec):
            found += [artifact for _, artifact in artifacts_named(spec, extensions)]
    return found


async def with_token_ids_of(parsed: ParsedRequest, codec: Codec) -> ParsedRequest:
    """Return the request with token ids in place of texts that its lens names.

    Raises a 400 naming the text that is not one token.
    """
    lens = parsed.readings.get("lens")
    if lens is None:
        return parsed
    encoded = await with_token_ids(lens, codec)
    return replace(parsed, readings=parsed.readings | {"lens": encoded})


def resolve_readings(
    parsed: ParsedRequest, bounds: Bounds
) -> list[tuple[str, list[StoredCapture]]]:
    """Return (place in the body, one capture per prompt) of each reading.

    Raises a 400 naming the field.
    """
    stored_captures: list[tuple[str, list[StoredCapture]]] = []
    for field, at, spec in readings_of(parsed):
        _check_served(READINGS[field].name, at, bounds.model)
        reading, sites, positions = RULES[field](spec, bounds, at)
        same: Any = {"tag": "", "at": spec.at, "consumers": [READER], "reading": reading}
        captures = [StoredCapture(sites=dict(sites), positions=each, **same) for each in positions]
        if twin := next((other for other, before in stored_captures if before == captures), ""):
            raise invalid(at, f"asks the same as {twin}", hint="omit one of them")
        stored_captures.append((at, captures))
    return stored_captures


def _check_served(kind: str, field: str, model: ModelInfo) -> None:
    why = model.readings.get(kind, "its workers run a version of Midstream without it")
    if why:
        raise invalid(field, f"{model.name} has none: {why}", hint="omit it")


def positions_asked(parsed: ParsedRequest) -> list[tuple[str, RequestedPositions]]:
    """Return (field, positions) of each reading."""
    return [(f"{at}.positions", spec.positions) for _, at, spec in readings_of(parsed)]
