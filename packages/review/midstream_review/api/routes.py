"""Routes of reviews: hits, marks, precision, and the deletion of texts."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from litestar import Router, delete, put
from litestar.di import Provide
from litestar.params import JSONBody, PathParameter, QueryParameter

from midstream.api.context import AppContext, context_of
from midstream.api.routes.jobs import (
    ERRORS,
    PROBLEM,
    CursorParameter,
    PageSize,
    Whose,
    reads,
)
from midstream.api.web.audit import audited
from midstream.api.web.auth import needs, tenant_asked
from midstream.api.web.request_context import AnyRequest
from midstream.broker.ledger.named.registry import Registry
from midstream.schemas.access.keys import Caller
from midstream.schemas.artifacts.conditions import Mode
from midstream.schemas.base.limits import MAX_COUNT, MAX_LABEL, MAX_NAME
from midstream.schemas.base.records import Record, now
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.requests.policies import POLICIES

from ..ledger import KeptHit, KeptText, LedgerHits, forget_texts, job_of, not_found
from ..records import Hit, HitPage, HitVerdict, HitWords, Mark, MarkRequest, PrecisionList
from .replay_routes import PolicyName, get_replay, post_replay
from .texts import around

HitId = Annotated[str, PathParameter(max_length=MAX_NAME, description="The hit's id")]
TokensParameter = Annotated[
    bool, QueryParameter(description="Also the ids of the tokens up to the hit's own")
]
#: Scores are finite numbers of 32 bits, as thresholds are.
_SCORE = 3e38
WITH_BODY = {**ERRORS, **dict.fromkeys((409, 413, 415), PROBLEM)}


class HitFilter(Record):
    """Which hits are listed; null: any."""

    label: str | None = None
    version: int | None = None
    mode: str | None = None
    mark: str | None = None
    at_least: float | None = None
    below: float | None = None
    tenant: str | None = None

    def takes(self, kept: KeptHit) -> bool:
        hit = kept.hit
        verdict = "none" if kept.mark is None else kept.mark.verdict
        return (
            self.label in (None, hit.label)
            and self.version in (None, hit.version)
            and self.mode in (None, hit.mode)
            and self.mark in (None, verdict)
            and self.tenant in (None, kept.tenant)
            and (self.at_least is None or hit.score >= self.at_least)
            and (self.below is None or hit.score < self.below)
        )


def filter_of(
    caller: Caller,
    label: Annotated[
        str | None, QueryParameter(max_length=MAX_LABEL, description="Of the probe")
    ] = None,
    version: Annotated[
        int | None, QueryParameter(ge=1, le=MAX_COUNT, description="Of the policy")
    ] = None,
    mode: Annotated[Mode | None, QueryParameter(description="Of the policy then")] = None,
    mark: Annotated[
        HitVerdict | Literal["none"] | None,
        QueryParameter(description="Only hits with this mark; `none`: those without one"),
    ] = None,
    at_least: Annotated[
        float | None,
        QueryParameter(ge=-_SCORE, le=_SCORE, description="Only hits with a score as high"),
    ] = None,
    below: Annotated[
        float | None,
        QueryParameter(ge=-_SCORE, le=_SCORE, description="Only hits with a score below"),
    ] = None,
    tenant: Whose = None,
) -> HitFilter:
    """Provide the dependency `chosen` of handlers: the hits that the query asks for, among those
    that the caller may see.
    """
    return HitFilter(
        label=label,
        version=version,
        mode=mode,
        mark=mark,
        at_least=at_least,
        below=below,
        tenant=tenant_asked(caller, tenant),
    )


class Review(NamedTuple):
    """The hits of a policy for a caller."""

    policy: str
    hits: LedgerHits
    context: AppContext
    caller: Caller
    info: ModelInfo

    async def seen(self, hit_id: str) -> KeptHit:
        """Return a hit. Raises `not_found`, also if it belongs to another tenant."""
        kept = await self.hits.get(hit_id)
        if kept is None or not self.caller.sees(kept.tenant):
            raise not_found(hit_id)
        return kept

    async def shown(self, found: Sequence[KeptHit], *, tokens: bool) -> list[Hit]:
        """Return hits as the caller sees them. `tokens`: with their ids."""
        texts = await self.hits.texts([kept.id for kept in found])
        words = await self._words(found, texts)
        return [
            Hit(
                id=kept.id,
                policy=self.policy,
                at=kept.at,
                job=job_of(kept.id),
                tenant=kept.tenant,
                **msgspec.structs.asdict(kept.hit),
                text=text,
                mark=_mark(kept.mark, self.caller),
                token_ids=_up_to(kept, ids) if tokens else None,
            )
            for kept, ids, text in zip(found, texts, words, strict=True)
        ]

    async def _words(
        self, found: Sequence[KeptHit], texts: Sequence[KeptText | None]
    ) -> list[HitWords | None]:
        """Return the text around the token of each hit."""
        if not any(texts):
            return [None] * len(found)
        codec = await self.context.served.codec(self.info)
        return [
            None
            if text is None
            else await around(codec, text.token_ids, kept.hit.position - text.first)
            for kept, text in zip(found, texts, strict=True)
        ]


async def review_of(
    name: PolicyName, context: AppContext, caller: Caller, info: ModelInfo
) -> Review:
    """Provide the dependency `review` of handlers: of the policy in the path."""
    await Registry(context.ledger, POLICIES).known(info.name, name)
    return Review(name, LedgerHits(context.ledger, info.name, name), context, caller, info)


@reads(
    "/v1/policies/{name:str}/hits",
    summary="List a policy's hits, newest first",
    description=(
        "The first token of each prompt at which the policy turned on. Admins see those of all "
        "tenants, others their own. `text`: with `keep_texts` of the policy."
    ),
)
async def list_hits(
    review: Review,
    chosen: HitFilter,
    tokens: TokensParameter = False,
    limit: PageSize = 50,
    cursor: CursorParameter = None,
) -> HitPage:
    found, following = await review.hits.page(chosen.takes, limit, cursor)
    return HitPage(hits=await review.shown(found, tokens=tokens), next=following)


@reads("/v1/policies/{name:str}/hits/{hit_id:str}", summary="Get a hit of a policy")
async def get_hit(hit_id: HitId, review: Review, tokens: TokensParameter = False) -> Hit:
    [shown] = await review.shown([await review.seen(hit_id)], tokens=tokens)
    return shown


async def marks_of(request: AnyRequest) -> dict[str, Any]:
    """Return the mark of the path's hit, by model: the query may name the model."""
    policy = request.path_params["name"]
    ledger = context_of(request).ledger
    found: dict[str, Any] = {}
    for info in await ledger.models():
        kept = await LedgerHits(ledger, info.name, policy).get(request.path_params["hit_id"])
        if kept is not None:
            found[info.name] = {"policy": policy, "mark": kept.mark}
    return found


@put(
    "/v1/policies/{name:str}/hits/{hit_id:str}/mark",
    opt=needs("steer-global") | audited("mark", marks_of, "hit_id"),
    status_code=200,
    summary="Mark a hit of a policy",
    description="Replaces an earlier mark.",
    responses=WITH_BODY,
)
async def put_mark(hit_id: HitId, data: JSONBody[MarkRequest], review: Review) -> Hit:
    kept = await review.seen(hit_id)
    caller = review.caller
    mark = Mark(
        verdict=data.verdict, note=data.note, at=now(), tenant=caller.tenant, key=caller.key
    )
    await review.hits.mark(hit_id, mark)
    [shown] = await review.shown([kept._replace(mark=mark)], tokens=False)
    return shown


@delete(
    "/v1/policies/{name:str}/hits/{hit_id:str}/mark",
    opt=needs("steer-global") | audited("mark", marks_of, "hit_id"),
    summary="Take back the mark of a hit",
    responses=ERRORS,
)
async def delete_mark(hit_id: HitId, review: Review) -> None:
    await review.seen(hit_id)
    await review.hits.mark(hit_id, None)


@reads(
    "/v1/policies/{name:str}/precision",
    summary="Get the precision of a policy's versions",
    description="By the marks of the hits that the caller may see.",
)
async def get_precision(review: Review, chosen: HitFilter) -> PrecisionList:
    return PrecisionList(versions=await review.hits.precision(chosen.takes))


@delete(
    "/v1/hits/texts",
    opt=needs("submit"),
    summary="Delete the texts of hits",
    description=(
        "Of all policies of a model: of the caller's tenant, or of one of its jobs. The hits and "
        "their marks stay. Deleting a job's captures does the same for the job."
    ),
    responses=ERRORS,
)
async def delete_texts(
    context: AppContext,
    caller: Caller,
    info: ModelInfo,
    job: Annotated[
        str | None, QueryParameter(max_length=MAX_NAME, description="Only of this job")
    ] = None,
    tenant: Whose = None,
) -> None:
    owner = tenant_asked(caller, tenant or (caller.tenant if job is None else None))
    await forget_texts(
        context.ledger,
        info.name,
        lambda kept: owner in (None, kept.tenant) and job in (None, job_of(kept.id)),
    )


def _mark(mark: Mark | None, caller: Caller) -> Mark | None:
    if mark is None or caller.sees(mark.tenant):
        return mark
    return Mark(verdict=mark.verdict, at=mark.at)


def _up_to(kept: KeptHit, text: KeptText | None) -> list[int] | None:
    if text is None or text.first:
        return None
    return text.token_ids[: kept.hit.position + 1]


ROUTES: list[Any] = [
    Router(
        "",
        route_handlers=[
            *(list_hits, get_hit, put_mark, delete_mark, get_precision, delete_texts),
            *(post_replay, get_replay),
        ],
        dependencies={
            "chosen": Provide(filter_of, sync_to_thread=False),
            "review": Provide(review_of),
        },
    )
]
