"""Packs the `RankSpec` of a request into vLLM's sampling parameters, and unpacks it: once in the
scheduler's process, and once on each rank.
"""

from typing import Any, NamedTuple

import msgspec

from ....schemas.base.records import Published, from_msgpack, to_msgpack
from ....schemas.requests.specs import RankSpec

_KEY = "midstream"


class ReadSpec(NamedTuple):
    """A decoded spec. If decoding failed, `unreadable` is the reason, and the spec only names the
    request.
    """

    spec: RankSpec
    unreadable: str = ""


class _Names(Published):
    """The fields that an error receipt needs from a spec of another version."""

    version: str = ""
    job: str = ""
    request: int = 0
    attempt: int = 0


def pack(spec: RankSpec) -> dict[str, bytes]:
    """Return `SamplingParams.extra_args` with the spec, which vLLM passes on unchanged."""
    return {_KEY: to_msgpack(spec)}


def packed_spec(params: Any) -> bytes | None:
    """Return the spec that `pack` put into vLLM's `SamplingParams`; None: this request has none."""
    extra = params.extra_args if params is not None else None
    return extra.get(_KEY) if extra else None


def unpack(packed: bytes) -> ReadSpec:
    """Decode a spec; one of another version may be unreadable."""
    try:
        return ReadSpec(from_msgpack(packed, RankSpec))
    except msgspec.DecodeError as error:
        names = msgspec.structs.asdict(from_msgpack(packed, _Names))
        return ReadSpec(RankSpec(prompt_tokens=0, **names), str(error))
