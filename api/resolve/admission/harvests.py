"""Validation of a harvest against the model and the operator's folders.

Of a source's files, only the names are read here.
"""

from collections.abc import Sequence

import anyio.to_thread
import msgspec

from ....broker.artifacts.corpora import find, roots_of, store_of
from ....broker.ledger.recovery.harvests import new_harvest_id
from ....schemas.access.keys import Caller
from ....schemas.base.dtypes import ITEM_BYTES
from ....schemas.base.errors import invalid
from ....schemas.base.records import now
from ....schemas.base.settings import Settings
from ....schemas.jobs.harvests import HarvestRequest, HarvestStream, StoredHarvest
from ....schemas.jobs.models import ModelInfo
from ....schemas.model.banks import BANK, RESIDUAL
from ....schemas.prompts.selectors import Hook
from ....schemas.requests.specs import StoredCapture
from ....storage.store import below
from ..positions.captures import SITE_RULES, Bounds, PromptFacts
from ..prompts.formats import structured
from .admission import check_vocabulary


async def plan_harvest(
    body: HarvestRequest,
    info: ModelInfo,
    settings: Settings,
    steering: str,
    caller: Caller,
    sources: Sequence[str] | None,
) -> StoredHarvest:
    """Return the harvest to store.

    `steering`: digest of the global steering. `sources`: the tenant's limit `harvest_sources`.
    Raises a 400 naming the field and what is valid.
    """
    sites = _sites(body, info)
    generated = body.generate.max_tokens if body.generate is not None else 1
    if body.generate is not None:
        structured(body.generate.structured_outputs, "generate.structured_outputs")
    longest = info.max_model_len - generated
    if longest < 1:
        raise invalid(
            "generate.max_tokens",
            f"{generated} leaves no room for a document",
            allowed=f"at most {info.max_model_len - 1}",
        )
    if body.cut.max_length is not None and body.cut.max_length > longest:
        raise invalid(
            "cut.max_length",
            f"{body.cut.max_length} tokens are more than the model takes",
            allowed=f"at most {longest}",
        )
    for index, line in enumerate(body.source.lines or []):
        if isinstance(line, list):
            check_vocabulary(line, f"source.lines[{index}]", info)
    capture = StoredCapture(sites=sites, positions="all", tag="")
    if not info.step_holds(capture.num_sites * (1 + info.speculative_tokens)):
        raise invalid(
            "hooks",
            (
                f"{capture.num_sites} rows of one token are more than the worker's buffer holds "
                "(setting capture_buffer_mib)"
            ),
            allowed=f"at most {info.capture_row_limit} rows per step",
            hint="use fewer layers or hooks",
        )
    source, root = body.source, ""
    if source.path is not None:
        root, _, kind = await anyio.to_thread.run_sync(find, roots_of(settings, sources), source)
        source = msgspec.structs.replace(source, format=kind)
    base = store_of(settings, body.store)
    harvest_id = new_harvest_id()
    return StoredHarvest(
        id=harvest_id,
        model=info.name,
        created=now(),
        uri=below(base, harvest_id),
        sites=sites,
        source=source,
        root=root,
        cut=body.cut,
        max_length=body.cut.max_length or longest,
        positions=body.positions,
        at=body.at,
        generate=body.generate,
        dtype=body.dtype,
        row_bytes=sum(info.row_size(hook) * len(layers) for hook, layers in sites.items())
        * ITEM_BYTES[info.dtype],
        shards=body.shards,
        stream=body.to
        if isinstance(body.to, HarvestStream)
        else HarvestStream()
        if body.to == "stream"
        else None,
        max_tokens=body.max_tokens,
        tenant=caller.tenant,
        key=caller.key,
        priority=body.priority or "normal",
        metadata=body.metadata,
        steering=steering,
        identity=info.identity,
    )


def _sites(body: HarvestRequest, info: ModelInfo) -> dict[Hook, list[int]]:
    bounds, made = Bounds(info, [PromptFacts(1)]), {}
    for field, rule in SITE_RULES:
        try:
            made[field] = rule(body, bounds)
        except ValueError as error:
            raise invalid(f"{field}{getattr(error, 'at', '')}", str(error)) from error
    sites: dict[Hook, list[int]] = made["hooks"]
    hooks = [hook for hook in sites if BANK[hook] != RESIDUAL]
    if hooks and info.tp > 1:
        raise invalid(
            "hooks",
            f"{hooks[0]} cannot be harvested, because each of {info.tp} ranks has some columns",
            allowed="hooks of the residual stream and its branches",
        )
    return sites
