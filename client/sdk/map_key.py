"""What decides a result of `map`: the request, the model, and the content that names in the request stand for."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...schemas.errors import MidstreamError, invalid
from ...schemas.handling import Handling
from ...schemas.jobs import JobRequest, JobResult, JobView
from ...schemas.probes import ProbeUse
from ...schemas.version import __version__

#: Of the model's card, what says which model it is. `digest`: of the checkpoint's files.
MODEL_FACTS = ("id", "digest", "architecture", "num_layers", "hidden_size", "vocab_size", "dtype", "quantization")
#: Fields of a request that do not decide a result.
_ASIDE = {*Handling.__struct_fields__, "metadata", "model", "prompts", "messages"}

#: Kind and name of something that requests name.
Named = tuple[str, str]


def named(request: JobRequest) -> Iterator[Named]:
    """What the request names: modules, autoencoders, source runs, tuned lenses, probes and an adapter."""
    for entry in request.steering:
        yield from (("module", entry.module),) if entry.module else ()
        yield from (("sae", entry.sae),) if entry.sae else ()
    for patch in request.patch:
        yield from (("run", patch.source.run),) if patch.source.run else ()
        yield from (("module", patch.source.module),) if patch.source.module else ()
    for feature in request.features:
        yield "sae", feature.sae
    for probe in request.probes:
        yield "probe", probe.probe if isinstance(probe, ProbeUse) else probe
        if isinstance(probe, ProbeUse) and probe.module:
            yield "module", probe.module
    if request.lens is not None and request.lens.tuned:
        yield "tuned", request.lens.tuned
    if request.lora:
        yield "lora", request.lora


def used(view: JobView, result: JobResult) -> dict[Named, str]:
    """What names stood for when the job was accepted, as far as the server says so."""
    found = {("module", name): digest for name, digest in view.modules.items()} | {("run", name): job for name, job in view.runs.items()}
    found |= {("probe", each.probe): each.digest for each in result.probes}
    found |= {("sae", each.sae): each.digest for each in result.features or []}
    return found | ({("lora", result.lora.name): result.lora.digest} if result.lora else {})


def check(expected: dict[Named, str], found: dict[Named, str]) -> None:
    """Raises MidstreamError `conflict` where a name stands for other content than at the beginning."""
    for name, digest in expected.items():
        if found.get(name, digest) != digest:
            raise MidstreamError("conflict", f"{name[0]} {name[1]!r} was changed while its prompts were computed")


def base(request: JobRequest, facts: dict[str, Any], names: dict[Named, str], steering: str) -> bytes:
    """Digest of everything but the prompt. `facts`: of the model. `steering`: digest of global steering."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__ if name not in _ASIDE}
    content = {"request": fields, "model": facts, "names": sorted([*name, digest] for name, digest in names.items()), "global": steering}
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).digest()


def of_prompt(base: bytes, prompt: bytes) -> str:
    """The key of a result. `prompt`: as JSON."""
    return hashlib.sha256(base + prompt).hexdigest()


def of_job(base: bytes, keys: Sequence[str], attempt: int = 0) -> str:
    """Of a job over the prompts with these keys."""
    return hashlib.sha256(base + "\n".join([*keys, f"{attempt} {__version__}"]).encode()).hexdigest()


def checked_request(request: JobRequest) -> JobRequest:
    """Raises MidstreamError for what several jobs cannot have."""
    if request.capture is not None and request.capture.run:
        raise invalid("capture.run", "a source run holds the rows of one job", allowed="run() with all prompts of the source run")
    return request
