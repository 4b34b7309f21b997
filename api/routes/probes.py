"""Makes probes and policies of registrations; versions of policies."""

from collections.abc import Callable, Mapping
from typing import Any

import anyio.to_thread
import msgspec

from ...broker.ledger.named.registry import Registry
from ...schemas.access.keys import Caller
from ...schemas.artifacts.probes import PROBES, ProbeRequest
from ...schemas.base.limits import MAX_POLICY_VERSIONS
from ...schemas.jobs.models import ModelInfo
from ...schemas.requests.policies import (
    POLICIES,
    Policy,
    PolicyChange,
    PolicyRequest,
    PolicyVersion,
    Steer,
)
from ..context import AppContext
from ..resolve.readings.probes import changed, check_fit, digest_of, resolve_policy, resolve_probe

#: Makes an artifact of the one that has its name; content hash → packed tensor.
Made = tuple[Callable[[Any], Any], Mapping[str, bytes]]


async def make_probe(
    data: ProbeRequest, name: str, info: ModelInfo, context: AppContext, caller: Caller
) -> Made:
    made, blobs = await anyio.to_thread.run_sync(resolve_probe, data, name, info)
    return lambda _: made, blobs


async def make_policy(
    data: PolicyRequest, name: str, info: ModelInfo, context: AppContext, caller: Caller
) -> Made:
    found = await context.names.look_up(info, [(PROBES, data.probe)])
    probe = found.known(PROBES, data.probe, "probe")
    named = [action.module for action in data.actions if isinstance(action, Steer)]
    state = await context.names.state(info, named, caller)
    made = resolve_policy(data, info, probe, state, caller, context.settings)
    return lambda former: _with(former, made, info.name, name), {}


async def change_policy(
    name: str, data: PolicyChange, context: AppContext, caller: Caller, info: ModelInfo
) -> Policy:
    policies = Registry(context.ledger, POLICIES)
    missing = await policies.unknown(info.name, name)

    def make(now: Policy | None) -> Policy:
        if now is None:
            raise missing
        made = changed(now, data)
        # the present version may stop applying to all traffic also where it fits no longer
        if data.version is not None or made.content.all_traffic:
            check_fit(made, info)
        return _with(now, made, info.name, name)

    policy, _ = await policies.put(info.name, name, make, {})
    return policy.shown_to(caller)


def _with(former: Policy | None, made: PolicyVersion, model: str, name: str) -> Policy:
    """Return the policy with one version more; the oldest ones are dropped."""
    kept = [] if former is None else former.versions
    number = kept[-1].version + 1 if kept else 1
    made = msgspec.structs.replace(made, version=number, digest=digest_of(made))
    versions = [*kept, made][-MAX_POLICY_VERSIONS:]
    return Policy(
        name=name,
        model=model,
        digest=made.digest,
        created=made.created,
        description=made.content.description,
        versions=versions,
    )
