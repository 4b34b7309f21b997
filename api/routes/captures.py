"""Routes of captures: list, describe, download and delete them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import anyio
import anyio.to_thread
from litestar import Response, delete
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import PathParameter, QueryParameter
from litestar.response import Stream

from ...broker.artifacts.headers import BlobPlace, place_in, read_headers
from ...broker.ledger.jobs.captures import LedgerCaptures, no_captures
from ...broker.ledger.jobs.ledger import not_found
from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError, invalid, suggestion
from ...schemas.base.limits import MAX_COUNT, MAX_LAYER_TEXT, MAX_NAME, MAX_TAG
from ...schemas.base.records import fields_of
from ...schemas.jobs.captures import (
    SEGMENT_SUFFIX,
    CaptureBlob,
    CaptureManifest,
    CapturePage,
    CaptureState,
    Manifest,
    ManifestFile,
)
from ...schemas.jobs.jobs import CaptureResults, FileEntry
from ...schemas.prompts.selectors import ALIASES, StoredSites, as_ranges, resolve_layers
from ...schemas.prompts.sites import hook_layers
from ...storage.store import Signing
from ..context import AppContext
from ..resolve.positions.captures import at_field
from ..responses import packed
from ..responses.outcome import matches, result_of
from ..web.auth import needs, tenant_asked
from .jobs import ERRORS, PROBLEM, CursorParameter, JobId, Known, PageSize, Whose, reads

T = TypeVar("T")

MEDIA_TYPE = "application/octet-stream"
CAPTURE_ERRORS = {**ERRORS, 409: PROBLEM, 410: PROBLEM}

#: More layers than any model has. Negative numbers would count from the last layer of the model: in
#: a query they are none that was captured.
MOST_LAYERS = 10_000

PromptParameter = Annotated[
    int, QueryParameter(name="request", ge=0, le=MAX_COUNT, description="Index of the prompt")
]
LayersParameter = Annotated[
    str | None,
    QueryParameter(
        max_length=MAX_LAYER_TEXT, description="For example `3`, `3,7` or `3-7`; default: all"
    ),
]
TagParameter = Annotated[
    str | None,
    QueryParameter(max_length=MAX_TAG, description="Tag of the capture; default: the job's own"),
]


def _sees(caller: Caller, owner: str | None) -> bool:
    return owner is not None and caller.sees(owner)


async def captured(context: AppContext, caller: Caller, job_id: str) -> tuple[str, CaptureResults]:
    """Return the job's model and the capture results from its receipts.

    Raises `not_found` if no capture was requested, `gone` if it was deleted.
    """
    captures = LedgerCaptures(context.ledger)
    if not _sees(caller, await context.waiting.patiently(lambda: captures.owner(job_id))):
        raise not_found(job_id)
    await context.waiting.patiently(lambda: captures.check(job_id))
    result = await result_of(context, job_id)
    if result.capture_results.status == "not_requested":
        raise MidstreamError("not_found", f"job {job_id} has no capture")
    return result.model, result.capture_results


def tag_of(entry: FileEntry) -> str:
    return entry.path.partition("/")[0]


def _name(entry: FileEntry) -> str:
    """Return the blob's name within its job, such as `mine.p0003.pp0.safetensors`. It does not
    depend on the file that holds the blob.
    """
    site = (
        [f".{hook}.{layer}" for hook, layers in entry.sites.items() for layer in layers]
        if entry.layout == "per_file"
        else []
    )
    return f"{tag_of(entry)}.p{entry.request:04d}.pp{entry.pp}{''.join(site)}.safetensors"


async def reading(
    context: AppContext,
    job_id: str,
    entries: Sequence[FileEntry],
    read: Callable[[AppContext, str, Sequence[FileEntry]], T],
    limiter: anyio.CapacityLimiter | None = None,
) -> T:
    """Run `read`, which reads files, in a thread, and return its result.

    Raises what `read` raises; `gone` if the captures were deleted meanwhile.
    """
    try:
        return await anyio.to_thread.run_sync(read, context, job_id, entries, limiter=limiter)
    except MidstreamError as error:
        if error.kind == "capture_damaged":  # blobs that were deleted from a segment read as zeros
            await context.waiting.patiently(lambda: LedgerCaptures(context.ledger).check(job_id))
        raise


def opened(context: AppContext, job_id: str, entries: Sequence[FileEntry]) -> list[packed.OpenBlob]:
    checksums = [entry.crc32 for entry in entries]
    return packed.open_blobs(
        context.store, job_id, list(zip(_places(context, job_id, entries), checksums, strict=True))
    )


def _places(context: AppContext, job_id: str, entries: Sequence[FileEntry]) -> list[BlobPlace]:
    """Return the places of the entries' blobs."""
    return [place_in(context.store, job_id, entry.request, entry) for entry in entries]


def _described(
    context: AppContext, job_id: str, entries: Sequence[FileEntry]
) -> tuple[list[ManifestFile], list[str], Manifest | None]:
    """Return the entries, completed from the blobs' manifests; the distinct caveats of all blobs;
    and the first manifest, because adapter and model are the same in all of them.
    """
    headers = read_headers(context.store, job_id, _places(context, job_id, entries))
    files = [
        ManifestFile(
            name=_name(entry),
            url=context.url(f"captures/{job_id}/files/{_name(entry)}"),
            link=_link(context, entry),
            at=header.manifest.at,
            dtype=header.manifest.dtype,
            positions=header.manifest.positions,
            token_ids=header.manifest.token_ids,
            images=header.manifest.images,
            **fields_of(entry, CaptureBlob),
        )
        for entry, header in zip(entries, headers, strict=True)
    ]
    caveats = list(
        dict.fromkeys(caveat for header in headers for caveat in header.manifest.caveats)
    )
    return files, caveats, next((header.manifest for header in headers), None)


def _link(context: AppContext, entry: FileEntry) -> str | None:
    """Return a presigned link if an object holds this blob alone: a link opens the whole object,
    and a segment also holds other blobs.
    """
    settings = context.settings
    store = context.store
    if (
        settings.artifact_links != "presigned"
        or not isinstance(store, Signing)
        or entry.path.endswith(SEGMENT_SUFFIX)
    ):
        return None
    # Links are in manifests, which are authorised; they are neither stored nor logged.
    return store.sign(entry.path, settings.artifact_link_s, settings.artifact_public_endpoint)


@reads(
    "/v1/captures",
    summary="List captures, newest first",
    description=(
        "Jobs with capture files that have not been deleted, including jobs whose "
        "results have expired."
    ),
)
async def list_captures(
    context: AppContext,
    caller: Caller,
    tag: Annotated[
        str | None,
        QueryParameter(max_length=MAX_TAG, description="Only jobs with captures under this tag"),
    ] = None,
    limit: PageSize = 50,
    cursor: CursorParameter = None,
    tenant: Whose = None,
) -> CapturePage:
    return await LedgerCaptures(context.ledger).list(
        tag=tag, limit=limit, cursor=cursor, tenant=tenant_asked(caller, tenant)
    )


@reads(
    "/v1/captures/{job_id:str}",
    summary="Get a job's capture manifest",
    responses=CAPTURE_ERRORS,
)
async def get_manifest(job_id: JobId, context: AppContext, caller: Caller) -> CaptureManifest:
    _, results = await captured(context, caller, job_id)
    files, caveats, first = await reading(context, job_id, results.files, _described)
    return CaptureManifest(
        files=files,
        caveats=caveats,
        lora=first.lora if first else None,
        identity=first.identity if first else "",
        **fields_of(results, CaptureState) | {"root": context.store.uri},
    )


@delete(
    "/v1/captures/{job_id:str}",
    opt=needs("submit"),
    summary="Delete a job's captures",
    description="Afterwards, a request for the manifest or a file is answered with 410. "
    "Downloads in progress complete. "
    "The job's record stays.",
    responses=CAPTURE_ERRORS,
)
async def delete_captures(job_id: JobId, context: AppContext, caller: Caller) -> None:
    captures = LedgerCaptures(context.ledger)
    if not _sees(caller, await captures.owner(job_id)):
        raise no_captures(job_id)
    await captures.delete(job_id)


@reads(
    "/v1/captures/{job_id:str}/files/{name:str}",
    summary="Download one blob: a whole safetensors file",
    description="The ETag is the blob's CRC32, as 8 hexadecimal digits.",
    media_type=MEDIA_TYPE,
    responses={
        304: ResponseSpec(None, description="Unchanged since If-None-Match"),
        **CAPTURE_ERRORS,
    },
)
async def get_file(
    job_id: JobId,
    name: Annotated[str, PathParameter(max_length=MAX_NAME, description="`name` in the manifest")],
    context: AppContext,
    caller: Caller,
    known: Known = None,
) -> Response[Any]:
    _, results = await captured(context, caller, job_id)
    entries = [entry for entry in results.files if _name(entry) == name]
    if not entries:
        raise MidstreamError("not_found", f"job {job_id} has no file {name!r}")
    return _known(entries[0], known) or _whole(
        entries[0], *await reading(context, job_id, entries[:1], opened)
    )


def _etag(entry: FileEntry) -> str:
    return f'"{entry.crc32:08x}"'


def _known(entry: FileEntry, known: str | None) -> Response[Any] | None:
    """Return 304 for a client that has the blob already."""
    return (
        Response(b"", status_code=304, headers={"ETag": _etag(entry)})
        if matches(known, _etag(entry))
        else None
    )


def _whole(entry: FileEntry, blob: packed.OpenBlob) -> Response[Any]:
    headers = {"ETag": _etag(entry), **_attachment(_name(entry), entry.bytes)}
    return Stream(blob.read(0, entry.bytes), media_type=MEDIA_TYPE, headers=headers)


def _attachment(name: str, length: int) -> dict[str, str]:
    return {"Content-Length": str(length), "Content-Disposition": f'attachment; filename="{name}"'}


@reads(
    "/v1/captures/{job_id:str}/safetensors",
    summary="Download the rows of one prompt as one safetensors file",
    description=(
        "Joins the files of the pipeline stages. Tensors: `<hook>.<layer>` "
        "`[positions, hidden_size]`, `positions`, `token_ids`."
    ),
    media_type=MEDIA_TYPE,
    responses=CAPTURE_ERRORS,
)
async def get_safetensors(
    job_id: JobId,
    context: AppContext,
    caller: Caller,
    prompt: PromptParameter = 0,
    layers: LayersParameter = None,
    hook: Annotated[
        str | None,
        QueryParameter(
            max_length=MAX_TAG, description="Only this hook point; default: all captured ones"
        ),
    ] = None,
    tag: TagParameter = None,
    known: Known = None,
) -> Response[Any]:
    _, results = await captured(context, caller, job_id)
    pending = MidstreamError(
        "conflict",
        f"prompt {prompt} is not durable yet",
        hint=f"wait with GET /v1/jobs/{job_id}?wait=30",
    )
    if results.status == "pending" and not any(
        entry.request == prompt and tag_of(entry) == (tag or tag_of(entry))
        for entry in results.files
    ):
        raise pending
    chosen_tag, entries = entries_of(job_id, results.files, prompt, tag)
    blobs = await reading(context, job_id, entries, opened)
    sites = _chosen(blobs[0].header.manifest.all_sites, layers, hook)
    if len(entries) == 1 and sites == entries[0].sites:
        return _known(entries[0], known) or _whole(entries[0], blobs[0])
    held = {site for entry in entries for site in hook_layers(entry.sites)}
    if results.status == "pending" and not held >= set(hook_layers(sites)):
        raise pending
    joined = packed.join(blobs, sites)
    name = f"{job_id}.{chosen_tag}.p{prompt:04d}.safetensors"
    return Stream(joined.chunks(), media_type=MEDIA_TYPE, headers=_attachment(name, joined.length))


def entries_of(
    job_id: str, files: Sequence[FileEntry], prompt: int, tag: str | None
) -> tuple[str, list[FileEntry]]:
    """Return the tag, and the files of the prompt under it by stage.

    Raises a 404 naming `request` or `tag`.
    """
    present = [entry for entry in files if entry.request == prompt]
    if not present:
        raise MidstreamError(
            "not_found",
            f"job {job_id} has no capture files of prompt {prompt}",
            field="request",
            allowed=as_ranges(sorted({entry.request for entry in files}), most=8) or None,
        )
    name = tag or tag_of(present[0])
    entries = sorted(
        (entry for entry in present if tag_of(entry) == name), key=lambda entry: entry.pp
    )
    if not entries:
        tags = list(dict.fromkeys(map(tag_of, present)))
        raise MidstreamError(
            "not_found",
            f"job {job_id} has no capture under the tag {tag!r}",
            field="tag",
            allowed=", ".join(tags),
            hint=suggestion(tag or "", tags),
        )
    return name, entries


def hook_of(name: str, hooks: Iterable[str]) -> str:
    """Return the captured hook of this name. Raises a 400 naming `hook`."""
    hook = str(ALIASES.get(name, name))
    if hook not in hooks:
        raise invalid(
            "hook",
            f"{name!r} was not captured",
            allowed=", ".join(hooks),
            hint=suggestion(name, hooks),
        )
    return hook


def layers_of(text: str | None, present: list[int]) -> list[int]:
    """Return the captured layers that a query names. Raises a 400 naming `layers`."""
    if text is None or text == "all":
        return present
    with at_field("layers"):
        layers = resolve_layers(text, MOST_LAYERS)
    if missing := sorted(set(layers) - set(present)):
        raise invalid(
            "layers", f"layer {missing[0]} was not captured", allowed=as_ranges(present, most=8)
        )
    return layers


def _chosen(captured: StoredSites, layers: str | None, hook: str | None) -> StoredSites:
    """Return the requested captured sites. Raises a 400 naming `hook` or `layers`."""
    hooks = captured if hook is None else [hook_of(hook, captured)]
    present = sorted({layer for name in hooks for layer in captured[name]})
    chosen = set(layers_of(layers, present))
    sites = {name: [layer for layer in captured[name] if layer in chosen] for name in hooks}
    return {name: kept for name, kept in sites.items() if kept}


ROUTES = [list_captures, get_manifest, delete_captures, get_file, get_safetensors]
