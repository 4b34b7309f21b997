"""Route of a capture's norms: a number for each layer and position, for plots without the rows."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from litestar import get
from litestar.params import QueryParameter

from midstream.api.context import AppContext
from midstream.api.routes.captures import (
    CAPTURE_ERRORS,
    LayersParameter,
    PromptParameter,
    TagParameter,
    captured,
    entries_of,
    hook_of,
    layers_of,
    opened,
    reading,
    tag_of,
)
from midstream.api.routes.jobs import PROBLEM, JobId
from midstream.api.routes.steering import named_module, tensors_of
from midstream.api.web.auth import needs
from midstream.schemas.access.keys import Caller
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.limits import (
    MAX_COUNT,
    MAX_LAYER,
    MAX_MODULE_NAME,
    MAX_NORM_BYTES,
    MAX_NORM_ROWS,
    MAX_NORM_VALUES,
    MAX_TAG,
    NAME_PATTERN,
)
from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.jobs.captures import Manifest
from midstream.schemas.jobs.jobs import FileEntry
from midstream.schemas.prompts.selectors import as_ranges
from midstream.schemas.requests.interventions import FAMILY
from midstream.schemas.requests.steering import Module

from .records import CaptureNorms
from .row_norms import Measured, measured
from .state import MEASURED_OF_TENANT, STATE, PageState

#: Hook to measure if the request names none.
USUAL = "post_block"
MIB = 1 << 20


@get(
    "/v1/captures/{job_id:str}/norms",
    opt=needs("read"),
    summary="Norms of one prompt's captured rows, and cosines to a module",
    description="Computed in float32 from the stored rows, for each layer and position. With "
    "`module`, the cosine of each row to the "
    "vector that this steering module has at the layer, or at `module_layer`. Null "
    "where there is no finite number. "
    "Each call reads and checks the whole files: "
    f"an API process answers {MEASURED_OF_TENANT} of one tenant at the same time, "
    "and further ones with 429.",
    responses={**CAPTURE_ERRORS, 429: PROBLEM},
    dependencies=STATE,
)
async def get_norms(
    job_id: JobId,
    context: AppContext,
    page: PageState,
    caller: Caller,
    prompt: PromptParameter = 0,
    hook: Annotated[
        str | None,
        QueryParameter(
            max_length=MAX_TAG, description=f"Hook point; default: {USUAL}, or the first one"
        ),
    ] = None,
    layers: LayersParameter = None,
    tag: TagParameter = None,
    module: Annotated[
        str | None,
        QueryParameter(
            max_length=MAX_MODULE_NAME, pattern=NAME_PATTERN, description="A named steering module"
        ),
    ] = None,
    module_layer: Annotated[
        int | None,
        QueryParameter(
            gt=-1,
            le=MAX_LAYER,
            description=(
                "Compare all layers with the module's vector of this layer; default: their own"
            ),
        ),
    ] = None,
    start: Annotated[
        int,
        QueryParameter(
            ge=0, le=MAX_COUNT, description="Place of the first row among those captured"
        ),
    ] = 0,
    count: Annotated[
        int, QueryParameter(ge=1, le=MAX_NORM_ROWS, description="How many rows at most")
    ] = 512,
) -> CaptureNorms:
    if module_layer is not None and module is None:
        raise invalid("module_layer", "needs a module", hint="give module too")
    model, results = await captured(context, caller, job_id)
    if results.status == "pending":
        raise MidstreamError(
            "conflict",
            f"the capture of job {job_id} is not durable yet",
            hint=f"wait with GET /v1/jobs/{job_id}?wait=30",
        )
    name, entries = entries_of(job_id, results.files, prompt, tag)
    hooks = list(
        dict.fromkeys(key for entry in entries for key, some in entry.sites.items() if some)
    )
    if not hooks:
        raise MidstreamError(
            "not_found",
            f"prompt {prompt} of job {job_id} has no rows under the tag {name!r}",
            field="request",
        )
    usual = USUAL if USUAL in hooks else hooks[0]
    site = usual if hook is None else hook_of(hook, hooks)
    entries = [entry for entry in entries if entry.sites.get(site)]
    chosen = layers_of(layers, sorted({layer for entry in entries for layer in entry.sites[site]}))
    entries = [entry for entry in entries if set(entry.sites[site]) & set(chosen)]
    _check_bounds(entries, len(chosen), min(count, max(entry.positions for entry in entries)))
    vectors = (
        {}
        if module is None
        else await _vectors(
            context, caller, model, name=module, hook=site, layers=chosen, at=module_layer
        )
    )

    def rows(manifest: Manifest) -> range:
        return range(len(manifest.positions))[start : start + count]

    def read(context: AppContext, job_id: str, entries: Sequence[FileEntry]) -> Measured:
        return measured(
            context.store, opened(context, job_id, entries), site, chosen, rows, vectors
        )

    with page.measured.of(caller.tenant):
        result = await reading(context, job_id, entries, read, page.measuring)
    manifest = result.manifest
    listed = rows(manifest)
    ids = [manifest.token_ids[place] for place in listed]
    return CaptureNorms(
        job=job_id,
        model=model,
        request=prompt,
        tag=name,
        hook=site,
        at=manifest.at,
        dtype=manifest.dtype,
        width=result.width,
        hooks=hooks,
        requests=sorted({entry.request for entry in results.files if tag_of(entry) == name}),
        prompt_tokens=manifest.prompt_tokens,
        rows=len(manifest.positions),
        start=start,
        positions=[manifest.positions[place] for place in listed],
        token_ids=ids,
        tokens=await _read_tokens(context, model, ids),
        layers=chosen,
        norms=result.norms,
        module=module,
        cosines=None if module is None else result.cosines,
    )


def _check_bounds(entries: Sequence[FileEntry], layers: int, rows: int) -> None:
    """Raises a 400 naming `count` or `request`."""
    if layers * rows > MAX_NORM_VALUES:
        detail = f"{rows} rows of {layers} layers are {layers * rows} values"
        raise invalid(
            "count",
            detail,
            allowed=f"up to {MAX_NORM_VALUES} values",
            hint="ask for fewer rows or layers",
        )
    if (size := sum(entry.bytes for entry in entries)) > MAX_NORM_BYTES:
        detail = f"the files of this prompt have {size / MIB:.0f} MiB"
        raise invalid(
            "request",
            detail,
            allowed=f"up to {MAX_NORM_BYTES / MIB:.0f} MiB",
            hint="download the files instead",
        )


async def _vectors(
    context: AppContext,
    caller: Caller,
    model: str,
    name: str,
    hook: str,
    layers: Sequence[int],
    at: int | None,
) -> dict[int, np.ndarray]:
    """Return by layer the vector of the caller's module, as it was registered.

    Raises a 404, 409 or 400 naming `module` or `module_layer`.
    """
    tensors = _tensors(await named_module(context, caller, model, name, field="module"), hook)
    if not tensors:
        raise invalid(
            "module",
            f"module {name!r} has no vector",
            allowed="a module with an entry of op add, replace, ablate or clamp",
        )
    if at is not None and at not in tensors:
        raise invalid(
            "module_layer",
            f"module {name!r} has no vector at layer {at}",
            allowed=as_ranges(sorted(tensors), most=8),
        )
    vectors = {
        layer: tensors[at] if at is not None else tensors[layer]
        for layer in layers
        if at is not None or layer in tensors
    }
    result = await tensors_of(context, name, vectors.values(), field="module")
    read = {key: to_numpy(tensor).astype(np.float32) for key, tensor in result.items()}
    return {layer: read[tensor] for layer, tensor in vectors.items()}


def _tensors(module: Module, hook: str) -> dict[int, str]:
    """Map each layer to the content hash of the module's vector there, from the first entry that
    has one; entries at `hook` come first.
    """
    entries = [entry for entry in module.entries if FAMILY[entry.family].tensors == ("vector",)]
    tensors: dict[int, str] = {}
    for entry in sorted(entries, key=lambda entry: entry.hook != hook):
        for layer in entry.layers:
            tensors.setdefault(layer, entry.tensors[0])
    return tensors


async def _read_tokens(context: AppContext, model: str, ids: Sequence[int]) -> list[str] | None:
    try:
        info = await context.served.model(model)
    except MidstreamError as error:
        if error.kind == "not_found":
            return None
        raise
    return (await (await context.served.codec(info)).decode(ids))[1]


ROUTES = [get_norms]
