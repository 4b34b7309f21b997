"""Keys of `map`'s results: the request, the model, and the contents behind the names in the
request.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from midstream.client.sdk.standing import ArtifactRef
from midstream.schemas.access.handling import Handling
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.version import __version__
from midstream.schemas.jobs.jobs import JobRequest, JobView

#: Fields that `base` does not digest with the rest of the request: some do not affect the results;
#: the model and the prompts are digested separately.
_NOT_IN_BASE = {*Handling.__struct_fields__, "metadata", "model", "prompts", "messages"}


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
