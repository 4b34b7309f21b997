"""Validation of a harvest against the model and the operator's folders.

Of a source's files, only the names are read here.
"""

from typing import Literal

import anyio.to_thread
import msgspec

from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.steering import check_number, limited, resolve_edits
from midstream.api.resolve.positions.captures import SITE_RULES, Bounds, PromptFacts, apply_rules
from midstream.api.resolve.positions.windows import check_window
from midstream.api.resolve.prompts.formats import structured
from midstream.api.resolve.prompts.tokenizer import check_vocabulary
from midstream.api.resolve.readings.saes import named_sae
from midstream.api.web.aside import call_aside
from midstream.broker.ledger.named.registry import Lookup
from midstream.schemas.access.keys import Caller, Limits
from midstream.schemas.artifacts.loras import StoredLora
from midstream.schemas.base.dtypes import ITEM_BYTES
from midstream.schemas.base.edit_sizes import EditLimit
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.limits import EXAMPLE_TOKEN_BYTES, MAX_SURVEY_BYTES
from midstream.schemas.base.records import now
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.model.banks import BANK, RESIDUAL
from midstream.schemas.prompts.selectors import Hook
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.schemas.settings.roots import allowed_roots
from midstream.schemas.settings.settings import Settings
from midstream.storage.store import below

from ..files.corpora import find, store_of
from ..ledger.harvests import SURVEYS, LedgerHarvests, new_harvest_id
from ..names import HarvestState
from ..records.harvests import (
    HarvestRequest,
    HarvestStream,
    HarvestView,
    StoredHarvest,
    SurveyRequest,
)
from ..records.work import SCALED, HarvestPart, Survey

#: Fields in which two harvests that are compared must agree.
SAME = ("sites", "cut", "positions", "max_length", "max_tokens", "shards", "root", "row_bytes")


async def plan_harvest(
    body: HarvestRequest,
    info: ModelInfo,
    settings: Settings,
    state: ModelState,
    steering: str,
    lora: StoredLora | None,
    caller: Caller,
    limits: Limits,
) -> StoredHarvest:
    """Return the harvest to store.

    `steering`: the digest of global steering; `limits`: the tenant's.
    Raises a 400 naming the field and what is valid.
    """
    sites = _sites(body, info)
    check_window(body.positions.window, (), info, "positions.window")
    generated = body.generate.max_tokens if body.generate is not None else 1
    if not generated:
        raise invalid("generate.max_tokens", "is 0", allowed="at least 1; or omit generate")
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
                "(setting tuning.capture_buffer_mib)"
            ),
            allowed=f"at most {info.capture_row_limit} rows per step",
            hint="use fewer layers or hooks",
        )
    source = body.source
    root = ""
    if source.path is not None:
        root, _, kind = await anyio.to_thread.run_sync(
            find, allowed_roots(settings.harvest_sources, limits.harvest_sources), source
        )
        source = msgspec.structs.replace(source, format=kind)
    edits = await call_aside(_edits, body, info, state, limits.edit_limit)
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
        stream=_stream(body.to),
        max_tokens=body.max_tokens,
        tenant=caller.tenant,
        key=caller.key,
        priority=body.priority or "normal",
        metadata=body.metadata,
        steering=steering,
        edits=edits,
        lora=lora,
        identity=info.identity,
        last_layer=info.num_layers - 1,
        exits=info.exits,
    )


def _stream(to: Literal["store", "stream"] | HarvestStream) -> HarvestStream | None:
    if isinstance(to, HarvestStream):
        return to
    return HarvestStream() if to == "stream" else None


def plan_survey(
    body: SurveyRequest,
    view: HarvestView,
    harvest: StoredHarvest,
    uris: list[str],
    info: ModelInfo,
    found: Lookup,
) -> HarvestPart:
    """Return the work of a survey's job. `uris`: of the stores that it reads. `found`: what it
    names.

    Raises a 400 naming the field and what is valid, and `conflict` for a harvest that cannot be
    surveyed.
    """
    if view.state != "succeeded":
        raise MidstreamError("conflict", f"harvest {view.id} is {view.state}", allowed="succeeded")
    if body.sae is None and body.against is None:
        raise invalid("sae", "is required without `against`", allowed="a registered autoencoder")
    sae = None if body.sae is None else named_sae(body.sae, "sae", info, found)
    if sae is not None and sae.layer not in harvest.sites.get(sae.hook, []):
        kept = "; ".join(f"{hook} {layers}" for hook, layers in harvest.sites.items())
        raise invalid(
            "sae",
            f"{sae.name!r} reads {sae.hook} of layer {sae.layer}, which {harvest.id} does not have",
            allowed=f"one that reads {kept}",
        )
    features = 1 if sae is None or body.against is not None else sae.form.d_sae
    examples = features * body.top * (2 * body.context + 1) * EXAMPLE_TOKEN_BYTES
    divergences = 4 * view.rows if body.against is not None else 0
    size = examples + divergences
    if size > MAX_SURVEY_BYTES:
        raise invalid(
            "top",
            f"{body.top} examples of {features} features, and KL divergences, take {size} bytes",
            allowed=f"at most {MAX_SURVEY_BYTES} bytes, with `context`",
        )
    survey = Survey(
        uris=uris,
        sae=None if sae is None else sae.stored(),
        top=body.top,
        context=body.context,
        against=body.against or "",
    )
    return HarvestPart(
        harvest=view.id, part=SURVEYS, role="survey", tokens=max(1, view.rows), survey=survey
    )


async def check_comparable(
    first: StoredHarvest, second: StoredHarvest, state: HarvestState, harvests: LedgerHarvests
) -> None:
    """Raises a 400 naming `against` unless both harvests have the rows from which the predictions
    of their models at the same tokens follow. `state`: of the second harvest.
    """
    if state != "succeeded":
        raise invalid("against", f"{second.id} is {state}, not succeeded")
    for harvest in (first, second):
        last = harvest.last_layer
        edited = bool(harvest.steering or harvest.edits)
        for wrong, applies in {
            f"lacks post_block of layer {last}": last not in harvest.sites.get("post_block", []),
            "has rows from before its steering: `at` must be after": edited
            and harvest.at != "after",
            f"has rows rounded to {harvest.dtype}": harvest.dtype in SCALED,
            "has generated tokens": harvest.generate is not None,
        }.items():
            if applies:
                raise invalid("against", f"{harvest.id} {wrong}")
    differing = [name for name in SAME if getattr(first, name) != getattr(second, name)]
    plans = [(await harvests.plan(harvest.id)).crc32 for harvest in (first, second)]
    if differing or plans[0] != plans[1]:
        raise invalid(
            "against",
            f"{second.id} differs in {', '.join(differing) or 'the documents of its source'}",
            allowed="the same request",
        )


def _edits(
    body: HarvestRequest, info: ModelInfo, state: ModelState, limit: EditLimit | None
) -> list[StoredSteering]:
    """Return the entries of the named modules, which apply at all positions, within the tenant's
    limit.
    """
    for index, spec in enumerate(body.steering):
        if spec.module is None:
            raise invalid(f"steering[{index}].module", "is required", allowed="a named module")
    check_number(body.steering, state)
    edits, _ = resolve_edits([], body.steering, Bounds(info, [PromptFacts(1)]), state)
    found = edits[0] if edits else []
    # The API does not know the lengths of the documents.
    if any(edit.positions != "all" for edit in found):
        raise invalid("steering", "has entries at some positions only", allowed='positions "all"')
    return [limited(edit, limit, "steering") for edit in found]


def _sites(body: HarvestRequest, info: ModelInfo) -> dict[Hook, list[int]]:
    made = apply_rules(SITE_RULES, body, Bounds(info, [PromptFacts(1)]), "")
    sites: dict[Hook, list[int]] = made["hooks"]
    hooks = [hook for hook in sites if BANK[hook] != RESIDUAL]
    if hooks and info.tp > 1:
        raise invalid(
            "hooks",
            f"{hooks[0]} cannot be harvested, because each of {info.tp} ranks has some columns",
            allowed="hooks of the residual stream and its branches",
        )
    return sites
