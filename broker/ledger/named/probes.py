"""Which registered probes and policies fit the served model, and the policies of all traffic."""

from collections.abc import Sequence
from datetime import date, timedelta

import msgspec

from ....schemas.access.handling import Callback
from ....schemas.artifacts.conditions import POLICY, StoredPolicy
from ....schemas.artifacts.probes import Probe, StoredProbe
from ....schemas.base.errors import MidstreamError
from ....schemas.base.limits import POLICY_DAYS
from ....schemas.base.records import from_json, now
from ....schemas.jobs.jobs import Job
from ....schemas.jobs.models import ModelInfo
from ....schemas.requests.policies import POLICIES, Policy, PolicyDay, PolicyVersion, Webhook
from ..jobs.ledger import Ledger, of_each, reachable
from .registry import look_up

DAY_S = 24 * 3600
#: A day with fewer prompts warns of nothing.
ENOUGH_PROMPTS = 20
#: Day 0 of `ms:policy-days`.
EPOCH = date(1970, 1, 1)


def misfit(probe: Probe, model: ModelInfo) -> str | None:
    """Return why the probe cannot score rows of this model, which may have been restarted since;
    None: it can.
    """
    content = probe.content
    reasons = {
        f"reads rows of width {probe.hidden_size}; the model has rows of width "
        f"{model.hidden_size}": probe.hidden_size != model.hidden_size,
        f"reads layer {content.layer}; the model has layers 0 to {model.num_layers - 1}": (
            content.layer >= model.num_layers
        ),
        f"reads hook {content.hook}; the model has {', '.join(model.hooks)}": (
            content.hook not in model.hooks
        ),
    }
    return next((why for why, applies in reasons.items() if applies), None)


def unfit(version: PolicyVersion, model: ModelInfo) -> str | None:
    """Return why the policy cannot apply to requests to this model; None: it can."""
    at_once = {"stop", "steer", "capture"} & {*version.content.kinds}
    hook = version.probe.content.hook
    reasons = {
        f"was registered for a model with the identity {version.identity[:12]}; the one that is "
        f"served has {model.identity[:12]}: register it again": version.identity != model.identity,
        f"reads hook {hook}; the model has {', '.join(model.hooks)}": hook not in model.hooks,
        "is not served with speculative decoding, which scores tokens that it rejects later": (
            model.speculative_tokens > 0
        ),
        f"has an action ({', '.join(sorted(at_once))}) that is not served with pipeline "
        "parallelism: a stage does not have the scores of another": model.pp > 1 and at_once,
    }
    return next((why for why, applies in reasons.items() if applies), None)


async def watched_model(ledger: Ledger, name: str) -> tuple[ModelInfo | None, list[Policy]]:
    """Return the model and the policies that apply to all its traffic."""
    model, names = await ledger.watched_model(name)
    found = await look_up(ledger, name, ((POLICIES, policy) for policy in names))
    return model, found.present(POLICIES, names)


@reachable
async def with_days(ledger: Ledger, policies: Sequence[Policy]) -> list[Policy]:
    """Return the policies with the counts of their last days, oldest first, and a warning where
    the last one was triggered too often.
    """
    keys = [f"ms:policy-days:{policy.model}:{policy.name}" for policy in policies]
    found = await of_each(ledger.redis, keys, lambda pipe, key: pipe.hvals(key))
    most = ledger.settings.policy_warn_share
    return [
        msgspec.structs.replace(policy, days=days, warnings=_warnings(days, most))
        for policy, days in zip(policies, map(_days, found), strict=True)
    ]


def _days(packed: Sequence[bytes]) -> list[PolicyDay]:
    last = now() // DAY_S - POLICY_DAYS  # the slots of later days may hold days before it
    counted = sorted(from_json(raw, list[int]) for raw in packed)
    return [
        PolicyDay(day=str(EPOCH + timedelta(days=day)), prompts=read, triggered=on, acted=acted)
        for day, read, on, acted in counted
        if day > last
    ]


def _warnings(days: Sequence[PolicyDay], most: float) -> list[str]:
    """Return a warning if more than a share of the last day's prompts triggered a policy."""
    if not days or days[-1].prompts < ENOUGH_PROMPTS:
        return []
    last = days[-1]
    if last.triggered <= most * last.prompts:
        return []
    return [
        f"{last.triggered:,} of {last.prompts:,} prompts triggered it on {last.day}, more than "
        f"{most:.0%} (setting policy_warn_share): is its threshold too low, or does it read more "
        "than the content?"
    ]


def all_fitting(policies: Sequence[Policy], model: ModelInfo) -> Sequence[Policy]:
    """Return `policies`, which apply to all traffic of the model.

    Raises MidstreamError("unavailable") for one that cannot apply to the model that is served now:
    no traffic may pass without it.
    """
    for policy in policies:
        if (why := unfit(policy.current, model)) is not None:
            raise MidstreamError(
                "unavailable", f"the policy {policy.name!r}, which applies to all traffic, {why}"
            )
    return policies


def with_policies(job: Job, policies: Sequence[Policy]) -> Job:
    """Return a sweep or a part of a harvest with the scores that policies of all traffic need, and
    the webhooks of those that act. Nothing steers there: a policy without another action only
    records.
    """
    probes = [scores_of(policy, steers=False) for policy in policies]
    return msgspec.structs.replace(job, probes=probes, hooks=hooks_of(policies, probes))


def hooks_of(policies: Sequence[Policy], probes: Sequence[StoredProbe]) -> dict[str, Callback]:
    """Return the webhooks of those policies that act, by the `probes` that `scores_of` returned:
    name of the policy → webhook.
    """
    acting = {probe.policy.name for probe in probes if probe.policy and probe.policy.acts}
    return {
        policy.name: Callback(
            url=action.url,
            events=["job.decided"],
            key=policy.current.key,
            tenant=policy.current.tenant,
        )
        for policy in policies
        for action in policy.current.content.actions
        if isinstance(action, Webhook) and policy.name in acting
    }


def scores_of(policy: Policy, *, steers: bool = True) -> StoredProbe:
    """Return the scores that a policy needs in a request, and whether it acts there. Without
    `steers`, that action is left out.
    """
    version = policy.current
    content = policy.current.content
    actions = [kind for kind in content.kinds if steers or kind != "steer"]
    stored = StoredPolicy(
        name=policy.name,
        version=version.version,
        digest=version.digest,
        registered=version.registered,
        keep_texts=content.keep_texts,
        condition=content.condition,
        actions=actions,
        mode=policy.mode,
        acts=policy.mode == "active" and (steers or bool(actions)),
        told=content.told,
        column=version.probe.content.labels.index(content.condition.label)
        if content.condition.label is not None
        else 0,
    )
    return msgspec.structs.replace(
        version.probe,
        name=POLICY + policy.name,
        actions=actions if stored.acts else [],
        policy=stored,
    )
