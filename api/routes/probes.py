"""Routes of probes and policies: registration, listing, removal; versions of policies."""

from typing import Annotated, Any

import anyio.to_thread
import msgspec
from litestar import Response, patch, put
from litestar.params import JSONBody

from ...schemas.access.keys import Caller
from ...schemas.artifacts.probes import PROBES, Probe, ProbeRequest
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
from ..web.auth import needs
from .jobs import ERRORS, PROBLEM
from .registered import KindWords, name_parameter, name_routes, put_response, put_responses

ProbeParameter = Annotated[str, name_parameter("probe")]
PolicyName = Annotated[str, name_parameter("policy")]


@put(
    "/v1/probes/{name:str}",
    opt=needs("steer-global"),
    status_code=200,
    summary="Register or replace a probe",
    description="A linear map of a row to a score for each label. Requests accepted earlier "
    "keep the previous version, and so do policies.",
    responses=put_responses(Probe),
)
async def put_probe(
    name: ProbeParameter, data: JSONBody[ProbeRequest], context: AppContext
) -> Response[Probe]:
    info = await context.served.the_model(data.model)
    made, blobs = await anyio.to_thread.run_sync(resolve_probe, data, name, info)
    made, former = await context.probes.put(info.name, name, lambda _: made, blobs)
    return put_response(context, PROBES, made, former)


@put(
    "/v1/policies/{name:str}",
    opt=needs("steer-global"),
    status_code=200,
    summary="Register a policy, or a new version of it",
    description="Its probe and its modules stay those of its registration. Requests accepted "
    "earlier keep the version that they have.",
    responses=put_responses(Policy),
)
async def put_policy(
    name: PolicyName, data: JSONBody[PolicyRequest], context: AppContext, caller: Caller
) -> Response[Policy]:
    info = await context.served.the_model(data.model)
    found = await context.names.look_up(info, [(PROBES, data.probe)])
    probe = found.known(PROBES, data.probe, "probe")
    named = [action.module for action in data.actions if isinstance(action, Steer)]
    state = await context.names.state(info, named, caller)
    made = resolve_policy(data, info, probe, state, caller, context.settings)
    policy, former = await context.policies.put(
        info.name, name, lambda former: _with(former, made, info.name, name), {}
    )
    return put_response(context, POLICIES, policy.shown_to(caller), former)


@patch(
    "/v1/policies/{name:str}",
    opt=needs("steer-global"),
    status_code=200,
    summary="Change a policy's mode, or restore a version",
    description="Makes a new version, which applies to requests accepted from now on.",
    responses={**ERRORS, 409: PROBLEM, 415: PROBLEM},
)
async def change_policy(
    name: PolicyName,
    data: JSONBody[PolicyChange],
    context: AppContext,
    caller: Caller,
    info: ModelInfo,
) -> Policy:
    missing = await context.policies.unknown(info.name, name)

    def make(now: Policy | None) -> Policy:
        if now is None:
            raise missing
        made = changed(now, data)
        # the present version may stop applying to all traffic also where it fits no longer
        if data.version is not None or made.content.all_traffic:
            check_fit(made, info)
        return _with(now, made, info.name, name)

    policy, _ = await context.policies.put(info.name, name, make, {})
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


ROUTES: list[Any] = [
    put_probe,
    *name_routes(KindWords(PROBES, "a probe", "probes", "probe")),
    put_policy,
    change_policy,
    *name_routes(KindWords(POLICIES, "a policy", "policies", "policy")),
]
