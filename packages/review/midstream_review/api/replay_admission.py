"""Turns a replay into a job: the prompts of former jobs under two versions of a policy."""

from collections.abc import AsyncIterator
from itertools import islice
from typing import NamedTuple

import msgspec

from midstream.api.context import AppContext
from midstream.api.resolve.admission.admission import Admitted, admit
from midstream.api.resolve.admission.names import Referents
from midstream.api.resolve.prompts.request_parsing import ParsedPrompt, ParsedRequest
from midstream.api.resolve.readings.probes import changed, check_fit
from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.ledger.named.probes import scores_of
from midstream.schemas.access.keys import Caller
from midstream.schemas.artifacts.conditions import POLICY
from midstream.schemas.artifacts.probes import StoredProbe
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.limits import MAX_PAGE
from midstream.schemas.jobs.jobs import Sampling, StoredPrompt
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.requests.policies import POLICIES, Policy, PolicyChange, PolicyVersion

from ..ledger import LedgerHits, job_of
from ..replays import ReplayedPrompt, ReplayRequest, ReplayWork

#: Kinds of jobs whose prompts are those of users.
OF_USERS = ("generate", "completion", "chat")
#: Jobs that are looked at for prompts.
MOST_JOBS = 2000
#: Names of the two versions in the job. `@` is in no name of a registered policy: what they decide
#: counts as no hit of one.
OLD = "@old"
NEW = "@new"


class KeptPrompt(NamedTuple):
    """A prompt of a former job."""

    prompt: StoredPrompt
    origin: ReplayedPrompt


async def admitted(
    policy: Policy,
    body: ReplayRequest,
    info: ModelInfo,
    context: AppContext,
    caller: Caller,
    tenant: str | None,
) -> Admitted:
    """Return the job of a replay. `tenant`: whose prompts; None: all tenants'. Raises a 400 naming
    the field.
    """
    old = _version(policy, body.against, "against")
    new = _version(policy, body.version, "version")
    if body.condition is not None:
        new = changed(policy, PolicyChange(version=new.version, condition=body.condition))
        new = msgspec.structs.replace(new, version=body.version or policy.current.version)
    if old == new:
        raise invalid(
            "version",
            f"{new.version} would be compared with itself",
            allowed="another version than `against`, or a `condition`",
        )
    for version in (old, new):
        check_fit(version, info)
    found = await _prompts(policy.name, body, info, context.ledger, tenant)
    if not found:
        raise invalid(
            "of",
            f"no prompt of {body.of} is kept that is yours to see",
            allowed="hits, jobs",
            hint="prompts are kept with the results of their jobs (result_ttl_s)",
        )
    probes = [_scores(policy, version, end) for version, end in ((old, OLD), (new, NEW))]
    parsed = ParsedRequest(
        kind="replay",
        model=info.name,
        prompts=[
            ParsedPrompt(f"prompts[{index}]", list(each.prompt.token_ids))
            for index, each in enumerate(found)
        ],
        sampling=Sampling(max_tokens=0),
        policies=[policy.name],
        metadata=body.metadata,
        handling=body,
    )
    named = Referents(
        probes=probes, found=await context.names.look_up(info, (POLICIES, policy.name))
    )
    codec = await context.served.codec(info)
    made = await admit(parsed, info, codec, new_job_id(), named, caller)
    work = ReplayWork(
        policy=policy.name,
        old=old.version,
        new=new.version,
        changed=body.condition is not None,
        origins=[each.origin for each in found],
    )
    job = msgspec.structs.replace(
        made.job,
        title=work.facts.title,
        # with the turns of conversations, and without the text, which others of the tenant may read
        prompts=[msgspec.structs.replace(each.prompt, text=None) for each in found],
        work=work.packed,
    )
    return Admitted(job, made.blobs, made.pinned)


def _version(policy: Policy, number: int | None, field: str) -> PolicyVersion:
    kept = {each.version: each for each in policy.versions}
    if number is None:
        return policy.current
    if number not in kept:
        raise invalid(field, f"{number} is not kept", allowed=", ".join(map(str, kept)))
    return kept[number]


def _scores(policy: Policy, version: PolicyVersion, end: str) -> StoredProbe:
    """Return the scores of a version that only decides."""
    scores = scores_of(msgspec.structs.replace(policy, versions=[version]))
    assert scores.policy is not None, "they are those of a policy"
    decides = msgspec.structs.replace(
        scores.policy, name=policy.name + end, mode="shadow", acts=False, keep_texts=False
    )
    return msgspec.structs.replace(
        scores, name=POLICY + policy.name + end, actions=[], policy=decides
    )


async def _prompts(
    policy: str, body: ReplayRequest, info: ModelInfo, ledger: Ledger, tenant: str | None
) -> list[KeptPrompt]:
    """Return the newest prompts that are kept."""
    found: list[KeptPrompt] = []
    if body.of == "hits":
        hits, _ = await LedgerHits(ledger, info.name, policy).page(
            lambda kept: tenant in (None, kept.tenant), body.last, None
        )
        for kept in hits:
            origin = ReplayedPrompt(
                job=job_of(kept.id), request=kept.hit.request, tenant=kept.tenant
            )
            prompts = await _of_job(ledger, origin.job)
            if origin.request < len(prompts):
                found.append(KeptPrompt(prompts[origin.request], origin))
    else:
        async for job_id, owner in _jobs(ledger, info.name, tenant):
            prompts = await _of_job(ledger, job_id)
            found += (
                KeptPrompt(prompt, ReplayedPrompt(job=job_id, request=number, tenant=owner))
                for number, prompt in enumerate(prompts)
            )
            if len(found) >= body.last:
                break
    # what an image shows is in no prompt that is kept
    return [*islice((each for each in found if not each.prompt.images), body.last)]


async def _of_job(ledger: Ledger, job_id: str) -> list[StoredPrompt]:
    """Return the prompts of a job; none of one that is no longer kept."""
    try:
        job = await ledger.job(job_id)
    except MidstreamError as error:
        if error.kind == "not_found":
            return []
        raise
    return job.prompts if job.kind in OF_USERS else []


async def _jobs(ledger: Ledger, model: str, tenant: str | None) -> AsyncIterator[tuple[str, str]]:
    """Yield the ids of jobs, the newest first, and whose they are."""
    cursor: str | None = None
    for _ in range(MOST_JOBS // MAX_PAGE):
        page = await ledger.list(model=model, tenant=tenant, limit=MAX_PAGE, cursor=cursor)
        for view in page.jobs:
            if view.kind in OF_USERS:
                yield view.id, view.tenant
        cursor = page.next
        if cursor is None:
            return
