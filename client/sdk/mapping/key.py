"""Keys of `map`'s results: the request, the model, and the contents behind the names in the
request.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ....schemas.access.handling import Handling
from ....schemas.artifacts.probes import ProbeUse
from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.version import __version__
from ....schemas.extensions import Extension, artifacts_named
from ....schemas.jobs.jobs import JobRequest, JobView
from ....schemas.jobs.openai import ChatRequest
from ....schemas.readings.installed import ReaderSpec
from ....schemas.readings.readings import READINGS
from ....schemas.requests.policies import Policy

#: Fields that `base` does not digest with the rest of the request: some do not affect the results;
#: the model and the prompts are digested separately.
_NOT_IN_BASE = {*Handling.__struct_fields__, "metadata", "model", "prompts", "messages"}

#: (kind, name) of an artifact that requests refer to by name.
ArtifactRef = tuple[str, str]
#: The requests whose names are looked up; both types have the same fields for them.
NamedRequest = JobRequest | ChatRequest


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


def used(view: JobView) -> dict[ArtifactRef, str]:
    """Return the digest of each artifact that the job used, as resolved when it was accepted."""
    result = {("module", name): digest for name, digest in view.modules.items()} | {
        ("run", name): job for name, job in view.runs.items()
    }
    for place, digest in view.contents.items():
        kind, _, name = place.partition("/")
        result[kind, name] = digest
    return result


def check(view: JobView, identity: str, names: dict[ArtifactRef, str], steering: int) -> None:
    """Check that the job was computed by the model `identity`, with the contents `names`, under the
    version `steering` of global steering.

    Raises MidstreamError `conflict` otherwise. Anything that the job does not report counts as
    different.
    """
    result = used(view)
    if view.identity != identity:
        raise MidstreamError(
            "conflict", f"the model {view.model!r} was changed while its prompts were computed"
        )
    for kind, name in sorted(names.keys() | result.keys()):
        if result.get((kind, name)) != names.get((kind, name)):
            raise MidstreamError(
                "conflict",
                (
                    f"{kind} {name!r} was changed while its prompts were computed, or the job does "
                    "not report it"
                ),
            )
    if view.global_version != steering:
        raise MidstreamError("conflict", "global steering was changed while prompts were computed")


def base(request: JobRequest, identity: str, names: dict[ArtifactRef, str], steering: str) -> bytes:
    """Return the digest of everything that decides a result, except the prompt.

    `identity`: that of the model. `steering`: the digest of global steering.
    """
    fields = {
        name: getattr(request, name)
        for name in request.__struct_fields__
        if name not in _NOT_IN_BASE
    }
    model = [request.model, identity]
    contents = sorted([*name, digest] for name, digest in names.items())
    content = {"request": fields, "model": model, "names": contents, "global": steering}
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).digest()


def of_prompt(base: bytes, prompt: bytes) -> str:
    """Return the key of a result. `prompt`: as JSON."""
    return hashlib.sha256(base + prompt).hexdigest()


def of_job(base: bytes, keys: Sequence[str], attempt: int = 0) -> str:
    """Return the idempotency key of a job for the prompts with these keys."""
    return hashlib.sha256(
        base + "\n".join([*keys, f"{attempt} {__version__}"]).encode()
    ).hexdigest()


def checked_request(request: JobRequest) -> JobRequest:
    """Return the request if it can be divided into several jobs.

    Raises MidstreamError if it names a source run, which belongs to one job, or a conversation, of
    which earlier requests decide later results.
    """
    if request.conversation:
        raise invalid("conversation", "its requests depend on each other", allowed="run()")
    if request.capture is not None and request.capture.run:
        raise invalid(
            "capture.run",
            "a source run holds the rows of one job",
            allowed="run() with all prompts of the source run",
        )
    return request
