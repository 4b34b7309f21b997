"""The routes of captures: what was captured, and the tensors themselves."""

import itertools
import re
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import msgspec
from litestar import Response, get
from litestar.datastructures import ETag
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import PathParameter, QueryParameter
from litestar.response import File, Stream

from ..schemas.base import from_json
from ..schemas.captures import CaptureManifest, ManifestFile, Sidecar
from ..schemas.errors import MidstreamError, invalid
from ..schemas.jobs import CaptureResults, FileEntry
from . import packed
from .body import JsonRequest
from .edge import Edge, edge_of
from .jobs import ERRORS, PROBLEM, JobId, Known
from .outcome import capture_url, matches, result_of

MEDIA_TYPE = "application/octet-stream"
CAPTURE_ERRORS = {**ERRORS, 409: PROBLEM, 410: PROBLEM}

#: What `?layers=` takes: `3`, `3,7`, `3-7`, and lists of these.
_LAYERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
MAX_LAYER_SPAN = 10_000


async def _captured(edge: Edge, job_id: str) -> CaptureResults:
    """What the job's receipts say. Raises `not_found` when nothing was to be captured."""
    results = (await result_of(edge, job_id)).capture_results
    if results.status == "not_requested":
        raise MidstreamError("not_found", f"job {job_id} did not ask for a capture")
    return results


def _located(edge: Edge, entry: FileEntry) -> Path:
    """Where the file is here. The path comes from a receipt, and is held inside the capture root nevertheless."""
    root = edge.settings.capture_root
    path = (root / entry.path).resolve()
    if not path.is_relative_to(root):
        raise MidstreamError("capture_failed", f"{entry.path!r} is not inside the capture root")
    if not path.is_file():
        raise MidstreamError("gone", f"{entry.path} is not in the capture root of this API: it was removed, or the worker writes elsewhere")
    return path


def _name(entry: FileEntry) -> str:
    return Path(entry.path).name


def _described(edge: Edge, job_id: str, entry: FileEntry) -> ManifestFile:
    """The entry with what its sidecar says. Raises `capture_failed` when the sidecar cannot be read."""
    path = _located(edge, entry)
    try:
        sidecar = from_json(path.with_suffix(".json").read_bytes(), Sidecar)
    except (OSError, msgspec.DecodeError) as error:
        raise MidstreamError("capture_failed", f"the manifest beside {entry.path} cannot be read: {error}") from error
    return ManifestFile(
        name=path.name,
        url=f"{capture_url(edge, job_id)}/files/{path.name}",
        path=entry.path,
        request=entry.request,
        rank=entry.rank,
        pp=entry.pp,
        bytes=entry.bytes,
        crc32=entry.crc32,
        rows=entry.rows,
        hook=sidecar.hook,
        dtype=sidecar.dtype,
        layers=sidecar.layers,
        positions=sidecar.positions,
        token_ids=sidecar.token_ids,
    )


@get("/v1/captures/{job_id:str}", summary="What a job captured", responses=CAPTURE_ERRORS)
async def get_manifest(job_id: JobId, request: JsonRequest) -> CaptureManifest:
    edge = edge_of(request)
    results = await _captured(edge, job_id)
    files = await anyio.to_thread.run_sync(lambda: [_described(edge, job_id, entry) for entry in results.files])
    return CaptureManifest(
        job=job_id,
        status=results.status,
        root=str(edge.settings.capture_root),
        bytes=results.bytes,
        rows=results.rows,
        files=files,
        detail=results.detail,
    )


@get(
    "/v1/captures/{job_id:str}/files/{name:str}",
    summary="One capture file as it lies on disk",
    description="The ETag is the file's CRC32, as 8 hexadecimal digits.",
    media_type=MEDIA_TYPE,
    responses={304: ResponseSpec(None, description="Unchanged since If-None-Match"), **CAPTURE_ERRORS},
)
async def get_file(
    job_id: JobId, name: Annotated[str, PathParameter(description="`name` of the manifest")], request: JsonRequest, known: Known = None
) -> Response[Any]:
    edge = edge_of(request)
    entries = [entry for entry in (await _captured(edge, job_id)).files if _name(entry) == name]
    if not entries:
        raise MidstreamError("not_found", f"job {job_id} has no file {name!r}")
    return _whole(edge, entries[0], known)


def _whole(edge: Edge, entry: FileEntry, known: str | None) -> Response[Any]:
    tag = ETag(value=f"{entry.crc32:08x}")
    if matches(known, f'"{tag.value}"'):
        return Response(b"", status_code=304, headers={"ETag": f'"{tag.value}"'})
    return File(_located(edge, entry), filename=_name(entry), etag=tag, media_type=MEDIA_TYPE)


@get(
    "/v1/captures/{job_id:str}/safetensors",
    summary="All layers of one prompt as one safetensors file",
    description="Joins the files of the pipeline stages. Tensors: `<hook>.<layer>` `[positions, hidden_size]`, `positions`, `token_ids`.",
    media_type=MEDIA_TYPE,
    responses=CAPTURE_ERRORS,
)
async def get_safetensors(
    job_id: JobId,
    request: JsonRequest,
    prompt: Annotated[int, QueryParameter(name="request", ge=0, description="Index of the prompt")] = 0,
    layers: Annotated[str | None, QueryParameter(description="Such as `3`, `3,7` or `3-7`; all captured layers if left out")] = None,
    known: Known = None,
) -> Response[Any]:
    edge = edge_of(request)
    wanted = None if layers is None else parse_layers(layers)
    results = await _captured(edge, job_id)
    entries = sorted((entry for entry in results.files if entry.request == prompt), key=lambda entry: entry.pp)
    if not entries:
        if results.status == "pending":
            raise MidstreamError("conflict", f"nothing of prompt {prompt} is durable yet", allowed=f"GET /v1/jobs/{job_id}?wait=30")
        raise MidstreamError("not_found", f"job {job_id} has no capture of prompt {prompt}", field="request")
    if wanted is not None and (missing := wanted - {layer for entry in entries for layer in entry.layers}):
        raise invalid(
            "layers", f"layer {min(missing)} was not captured", allowed=", ".join(str(x) for entry in entries for x in entry.layers)
        )
    if wanted is None and len(entries) == 1:
        return _whole(edge, entries[0], known)
    paths = [_located(edge, entry) for entry in entries]
    try:
        tensors = await anyio.to_thread.run_sync(packed.select, paths, wanted)
    except (OSError, ValueError) as error:
        raise MidstreamError("capture_failed", f"a capture file cannot be read: {error}") from error
    header, length = packed.joined(tensors)
    name = f"{job_id}.p{prompt:04d}.safetensors"
    return Stream(
        itertools.chain([header], packed.copied(tensors)),
        media_type=MEDIA_TYPE,
        headers={"Content-Length": str(length), "Content-Disposition": f'attachment; filename="{name}"'},
    )


def parse_layers(text: str) -> frozenset[int]:
    """`3,7-9` → {3, 7, 8, 9}. Raises a 400 naming `layers`."""
    wanted: set[int] = set()
    for part in text.split(","):
        match = _LAYERS.fullmatch(part.strip())
        if match is None:
            raise invalid("layers", f"{part[:40]!r} is not a layer or a range of layers", allowed="such as 3, 3,7 or 3-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < MAX_LAYER_SPAN:
            raise invalid("layers", f"the range {part[:40]!r} is empty or too long")
        wanted.update(range(first, last + 1))
    return frozenset(wanted)


ROUTES = [get_manifest, get_file, get_safetensors]
