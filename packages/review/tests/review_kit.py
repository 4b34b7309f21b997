"""Receipts of ranks whose policies turned on, and the policy, for tests of reviews."""

from typing import Any

import msgspec
import numpy as np
from ledger_kit import EPOCH, MODEL, WORKER, claimed, make_job, receipt

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.ledger.named.registry import Registry
from midstream.schemas.artifacts.conditions import Condition, Decision, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeContent, ProbeScore, StoredProbe
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.requests.policies import POLICIES, Policy, PolicyRequest, PolicyVersion

CONDITION = Condition(at_least=1.0)
CONTENT = ProbeContent(hook="post_block", layer=0, tensors=[], labels=["x"], thresholds=[None])
PROBE = StoredProbe(name="p", digest="d", content=CONTENT)
GUARD = StoredPolicy(
    name="guard",
    version=1,
    digest="d",
    condition=CONDITION,
    actions=["flag"],
    mode="shadow",
    acts=False,
)


async def registered(ledger: Ledger, name: str = "guard") -> None:
    """Register the policy of the receipts."""
    content = PolicyRequest(model=MODEL, probe="p", condition=CONDITION, actions=["flag"])
    version = PolicyVersion(
        version=1,
        digest="d",
        created=1.0,
        content=content,
        probe=PROBE,
        modules=[],
        identity="",
        tenant="ops",
        key="",
    )
    policy = Policy(name=name, model=MODEL, digest="d", created=1.0, versions=[version])
    await Registry(ledger, POLICIES).put(MODEL, name, lambda _: policy, {})


def policed(**changes: Any) -> Job:
    """A job that the policy reads."""
    probe = msgspec.structs.replace(PROBE, name="policy:guard", policy=GUARD)
    return make_job(probes=[probe], **changes)


def told(
    job: Job, request: int = 0, *, score: float = 2.0, text: bool = True, **policy: Any
) -> Receipt:
    """The receipt of a rank whose policy turned on at token 2 of a prompt of 3."""
    ids = np.arange(4, dtype="<i4").tobytes()
    found = ProbeScore(
        name="policy:guard",
        digest="d",
        labels=["x"],
        score=[score],
        positions=3,
        crossed=[2],
        policy=msgspec.structs.replace(GUARD, **policy),
        decisions=[Decision(position=2, event="trigger", score=score)],
        triggers=1,
        text_ids=ids if text else b"",
        text_prompt=3,
    )
    return receipt(job, request, scores=[found])


async def hit(
    ledger: Ledger, settle: Settler, number: int, of_job: dict[str, Any], **changes: Any
) -> str:
    """Settle a hit as the stream's receipt of this number; return its id."""
    job = policed(**of_job)
    await claimed(ledger, job)
    settle.settle(WORKER, 0, EPOCH, [(number, told(job, **changes))])
    return f"{job.id}_0"
