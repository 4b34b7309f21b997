"""Packs the `RankSpec` of a request into vLLM's sampling parameters, and unpacks it: once in the
scheduler's process, and once on each rank. Beside it is whose request it is, which the scheduler
needs of every request.
"""

from typing import Any, NamedTuple

import msgspec

from ....schemas.base.records import Published, from_msgpack, to_msgpack
from ....schemas.requests.specs import RankSpec

_KEY = "midstream"
_SHARE = "midstream_share"


class TenantShare(NamedTuple):
    """The tenant of a request, and the weight of its share of the engine."""

    tenant: str = ""
    weight: int = 1


#: Of requests that no job makes.
NOBODY = TenantShare()


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


def pack(spec: RankSpec | None, share: TenantShare = NOBODY) -> dict[str, Any]:
    """Return `SamplingParams.extra_args` with both, which vLLM passes on unchanged."""
    shared: dict[str, Any] = {_SHARE: [*share]}
    return shared if spec is None else shared | {_KEY: to_msgpack(spec)}


def share_of(params: Any) -> TenantShare:
    """Return the share that `pack` put into vLLM's `SamplingParams`."""
    extra = params.extra_args if params is not None else None
    return TenantShare(*(extra or {}).get(_SHARE, ()))


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
