"""Registered probes and policies of a ledger, per model and shared by all tenants.

The ledger's side of `schemas.artifacts.probes` and `schemas.requests.policies`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from ....schemas.artifacts.conditions import POLICY, StoredPolicy
from ....schemas.artifacts.probes import Probe, StoredProbe
from ....schemas.artifacts.registered import Kind
from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.limits import MAX_REQUEST_POLICIES
from ....schemas.jobs.models import ModelInfo
from ....schemas.requests.policies import Policy, PolicyVersion
from ..core import scripts
from ..jobs.ledger import Ledger, reachable
from .registry import Names

P = TypeVar("P", bound=Probe | Policy)


class Pinned(Names[P]):
    """Names of one kind, whose tensors are stored with them."""

    def __init__(self, ledger: Ledger, kind: Kind[P]) -> None:
        super().__init__(ledger, kind)
        self._scripts = scripts.Scripts(ledger.redis)

    @reachable
    async def put(
        self, model: str, name: str, make: Callable[[P | None], P], blobs: Mapping[str, bytes]
    ) -> tuple[P, P | None]:
        """Point the name at what `make` makes of its present content (None: the name is new);
        return both.

        Accepted jobs keep the content that they have.

        `blobs`: content hash → packed tensor, of all that might not be stored yet. Raises a 400
        if the model has as many names as the kind's limit, or `MAX_REQUEST_POLICIES` others that
        apply to all traffic, and `conflict` if another change came in between.
        """
        packed = await self._redis.hget(self._key(model), name)
        former = None if packed is None else self._read(packed, name)
        record = make(former)
        await self._ledger.check_room(sum(map(len, blobs.values())))
        arguments = scripts.put_pinned(self._ledger.settings, self._kind, record, packed, blobs)
        outcome, *count = scripts.text(await self._scripts.put_pinned(args=arguments))
        plural = self._kind.plural
        if outcome == "full":
            raise invalid(
                "name",
                f"{model!r} has {count[0]} {plural}",
                allowed=f"up to {self._kind.limit}",
                hint="delete one first",
            )
        if outcome == "crowded":
            raise invalid(
                "name",
                f"{count[0]} {plural} apply to all traffic of {model!r}",
                allowed=f"up to {MAX_REQUEST_POLICIES}",
            )
        if outcome != "stored":
            detail = f"the {self._kind.noun} {name!r} was changed or deleted meanwhile: try again"
            raise MidstreamError("conflict", detail)
        return record, former

    @reachable
    async def named(self, model: str, names: Sequence[bytes]) -> list[P]:
        """Return those with these names, in this order, without those that do not exist."""
        result = await self._redis.hmget(self._key(model), names) if names else []
        return [
            self._read(packed, name.decode())
            for name, packed in zip(names, result, strict=True)
            if packed is not None
        ]

    @reachable
    async def delete(self, model: str, name: str) -> bool:
        settings, kind = self._ledger.settings, self._kind.plural
        arguments = scripts.pack(settings, kind=kind, model=model, name=name)
        return bool(await self._scripts.delete_pinned(args=arguments))


def misfit(probe: Probe, model: ModelInfo) -> str | None:
    """Return why the probe cannot score rows of this model, which may have been restarted since;
    None: it can.
    """
    content = probe.content
    if probe.hidden_size != model.hidden_size:
        return (
            f"reads rows of width {probe.hidden_size}; the model has rows of width "
            f"{model.hidden_size}"
        )
    if content.layer >= model.num_layers:
        return f"reads layer {content.layer}; the model has layers 0 to {model.num_layers - 1}"
    if content.hook not in model.hooks:
        return f"reads hook {content.hook}; the model has {', '.join(model.hooks)}"
    return None


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


async def of_all_traffic(
    policies: Pinned[Policy], model: ModelInfo, names: Sequence[bytes]
) -> list[Policy]:
    """Return the policies that apply to all traffic of the model. `names`: those that
    `Ledger.watched_model` returns.

    Raises MidstreamError("unavailable") for one that cannot apply to the model that is served now:
    no traffic may pass without it.
    """
    result = await policies.named(model.name, names)
    for policy in result:
        if (why := unfit(policy.current, model)) is not None:
            detail = f"the policy {policy.name!r}, which applies to all traffic, {why}"
            raise MidstreamError("unavailable", detail)
    return result


def recorded(policies: Sequence[Policy], request: str) -> list[StoredProbe]:
    """Return the scores that policies of all traffic need in a sweep or a harvest, where one that
    steers only records.
    """
    scores = [scores_of(policy, request) for policy in policies]
    return [
        msgspec.structs.replace(
            score, action="none", policy=msgspec.structs.replace(score.policy, acts=False)
        )
        if score.policy is not None and score.policy.takes("steer")
        else score
        for score in scores
    ]


def scores_of(policy: Policy, request: str) -> StoredProbe:
    """Return the scores that a policy needs in a request, and whether it acts there.

    `request`: the conversation, or else the id of the job: a canary acts in the share of them whose
    hash is low.
    """
    version, content = policy.current, policy.current.content
    lot = int.from_bytes(hashlib.sha256(f"{policy.name}\0{request}".encode()).digest()[:6]) / 2**48
    stored = StoredPolicy(
        name=policy.name,
        version=version.version,
        digest=version.digest,
        condition=content.condition,
        actions=content.kinds,
        mode=content.mode,
        acts=content.mode == "active" or lot < content.share,
        column=version.probe.content.labels.index(content.condition.label)
        if content.condition.label is not None
        else 0,
    )
    return msgspec.structs.replace(
        version.probe,
        name=POLICY + policy.name,
        action="steer" if stored.takes("steer") else "stop" if stored.takes("stop") else "none",
        policy=stored,
    )
