"""Compares what two versions of a policy decided on the prompts of a replay."""

from collections.abc import Sequence

from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.schemas.access.keys import Caller
from midstream.schemas.artifacts.conditions import POLICY
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.base.records import fields_of
from midstream.schemas.jobs.jobs import Job, JobView

from ..replays import ReplayedHit, ReplayedPrompt, ReplayTurn, ReplayView, ReplayWork
from .replay_admission import NEW, OLD
from .texts import around


async def compared(
    view: JobView, job: Job, probes: Sequence[ProbeResult], codec: Codec, caller: Caller
) -> ReplayView:
    """Return a replay with the prompts at which only one version turned on. Texts of tenants that
    the caller does not see are left out.
    """
    work = job.work_as(ReplayWork)
    old, new = (_turns(probes, f"{POLICY}{work.policy}{end}") for end in (OLD, NEW))
    gained = sorted(new.keys() - old.keys(), key=lambda request: -new[request].score)
    lost = sorted(old.keys() - new.keys(), key=lambda request: -old[request].score)
    found = []
    for requests in (gained, lost):
        hits = []
        for request in requests:
            origin = work.origins[request]
            turn = new.get(request) or old[request]
            text = None
            if caller.sees(origin.tenant):
                text = await around(codec, job.prompts[request].token_ids, turn.position)
            hits.append(
                ReplayedHit(
                    **fields_of(origin, ReplayedPrompt),
                    old=old.get(request),
                    new=new.get(request),
                    text=text,
                )
            )
        found.append(hits)
    return ReplayView(
        id=view.id,
        state=view.state,
        policy=work.policy,
        old=work.old,
        new=work.new,
        changed=work.changed,
        prompts=len(work.origins),
        kept=len(new.keys() & old.keys()),
        gained=found[0],
        lost=found[1],
    )


def _turns(probes: Sequence[ProbeResult], name: str) -> dict[int, ReplayTurn]:
    """Return prompt → where a version first turned on."""
    result = {}
    for each in probes:
        triggers = (made for made in each.decisions if made.event == "trigger")
        first = next(triggers, None) if each.probe == name else None
        if first is not None:
            result[each.request] = ReplayTurn(position=first.position, score=first.score)
    return result
