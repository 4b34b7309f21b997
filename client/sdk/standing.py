"""What decides the results of a request next to itself: the model, the contents behind the names in
the request, and what applies to every request.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...schemas.artifacts.probes import ProbeUse
from ...schemas.base.errors import MidstreamError
from ...schemas.extensions import Extension, artifacts_named
from ...schemas.jobs.jobs import JobRequest
from ...schemas.jobs.openai import ChatRequest
from ...schemas.readings.installed import ReaderSpec
from ...schemas.readings.readings import READINGS
from ...schemas.requests.artifact_kinds import ARTIFACTS
from ...schemas.requests.policies import Policy
from ...schemas.requests.steering import GlobalView
from .calls import Awaits
from .registered import GlobalSteeringCalls, Policies, SourceRuns, calls_of
from .server import ServerCalls
from .transport import Transport

#: (kind, name) of an artifact that requests refer to by name.
ArtifactRef = tuple[str, str]
#: The requests whose names are looked up; both types have the same fields for them.
NamedRequest = JobRequest | ChatRequest


async def standing(
    io: Transport, request: NamedRequest
) -> tuple[str, dict[ArtifactRef, str], GlobalView]:
    """Return what decides the results of a request next to itself, now: the model's identity,
    the content of what it names and of what applies to every request, and global steering.
    Raises `not_found`.
    """
    model = request.model
    card = await ServerCalls[Awaits](io).model(model)
    watching = operators(card, await Policies[Awaits](io).list(model))
    found = sorted(set(named(request, card)))
    names = watching | {item: await _digest(io, item, model) for item in found}
    return identity(card), names, await GlobalSteeringCalls[Awaits](io).get(model)


async def _digest(io: Transport, named: ArtifactRef, model: str) -> str:
    """Return the digest of a name's present content. Raises `not_found`."""
    kind, name = named
    if kind == "run":
        return (await SourceRuns[Awaits](io).get(name, model)).job
    (row,) = (row for row in ARTIFACTS.values() if row.short == kind)
    return str((await calls_of(row)(io).get(name, model)).digest)


def named(request: NamedRequest, card: dict[str, Any]) -> Iterator[ArtifactRef]:
    """Yield what the request names: modules, autoencoders, source runs, tuned and Jacobian lenses,
    probes, policies, an adapter, and artifacts in options of installed readers. `card`: the
    model's, of `/v1/models`.
    """
    for entry in request.steering:
        yield from (("module", entry.module),) if entry.module else ()
    for patch in request.patch:
        yield from (("run", patch.source.run),) if patch.source.run else ()
        yield from (("module", patch.source.module),) if patch.source.module else ()
    for probe in request.probes:
        yield "probe", probe.probe if isinstance(probe, ProbeUse) else probe
        if isinstance(probe, ProbeUse) and probe.module:
            yield "module", probe.module
    yield from (("policy", name) for name in request.policies)
    specs: list[Any] = [*request.steering]
    for field in READINGS:
        asked = getattr(request, field) or []
        specs += asked if isinstance(asked, list) else [asked]
    yield from ((kind.short, name) for spec in specs for kind, name in spec.references)
    extensions = msgspec.convert(card.get("extensions", []), list[Extension])
    for spec in specs:
        if isinstance(spec, ReaderSpec):
            yield from ((kind.short, name) for _, (kind, name) in artifacts_named(spec, extensions))
    if request.lora:
        yield "lora", request.lora


def operators(card: dict[str, Any], policies: Sequence[Policy]) -> dict[ArtifactRef, str]:
    """Return the digests of what the operator applies to every request to the model: extensions,
    and policies of all traffic.
    """
    return {(item["kind"], item["name"]): item["digest"] for item in card.get("extensions", [])} | {
        ("policy", policy.name): policy.digest
        for policy in policies
        if policy.current.content.all_traffic
    }


def identity(card: dict[str, Any]) -> str:
    """Return the identity of the model on this card of `/v1/models`.

    Raises MidstreamError("version_mismatch") if the service reports none: stored results could then
    belong to another model.
    """
    result = card.get("identity")
    if not result:
        raise MidstreamError(
            "version_mismatch",
            (
                f"the service reports no identity of model {card.get('id')!r}: upgrade it, "
                "workers first"
            ),
        )
    return str(result)
