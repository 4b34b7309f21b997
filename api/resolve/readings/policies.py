"""Policies against a model: what a registration may hold, and the policies of a request."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ....broker.ledger.named.probes import Pinned, misfit, of_all_traffic, scores_of, unfit
from ....broker.webhooks.targets import url_fault
from ....schemas.access.handling import Callback
from ....schemas.access.keys import Caller
from ....schemas.artifacts.probes import Probe, StoredProbe
from ....schemas.base.errors import invalid
from ....schemas.base.records import now, to_msgpack
from ....schemas.base.settings import Settings
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import Span, When
from ....schemas.requests.policies import (
    Policy,
    PolicyChange,
    PolicyRequest,
    PolicyVersion,
    Steer,
    Webhook,
    Window,
)
from ....schemas.requests.specs import CaptureSpec, SteeringSpec
from ....schemas.requests.steering import Module
from ..edits.model_state import ModelState, unknown_module
from ..positions.gates import Gated
from ..prompts.request_parsing import ParsedRequest


def resolve_policy(
    content: PolicyRequest,
    model: ModelInfo,
    probe: Probe,
    model_state: ModelState,
    caller: Caller,
    settings: Settings,
) -> PolicyVersion:
    """Return the registered version, without number and digest. Raises a 400 naming the field."""
    if (why := misfit(probe, model)) is not None:
        raise invalid("probe", f"{probe.name!r} {why}", hint="register it again")
    label, labels = content.condition.label, probe.content.labels
    if label not in labels and (label is not None or len(labels) > 1):
        detail = f"{label!r} does not name a label of {probe.name!r}"
        raise invalid("condition.label", detail, allowed=", ".join(labels))
    modules = []
    for index, action in enumerate(content.actions):
        if isinstance(action, Webhook) and (
            fault := url_fault(action.url, settings.webhook_allow_private)
        ):
            raise invalid(f"actions[{index}].url", fault, allowed="http or https, public")
        if isinstance(action, Steer):
            modules.append(_module(action.module, f"actions[{index}].module", model, model_state))
    version = PolicyVersion(
        version=0,
        digest="",
        created=now(),
        content=content,
        probe=probe.stored("none"),
        modules=modules,
        identity=model.identity,
        tenant=caller.tenant,
        key=caller.key,
    )
    if (why := unfit(version, model)) is not None:
        raise invalid("actions", why)
    return version


def _module(name: str, at: str, model: ModelInfo, model_state: ModelState) -> Module:
    if (module := model_state.modules.get(name)) is None:
        raise unknown_module(at, name, model.name, model_state)
    for number, entry in enumerate(module.entries):
        if entry.positions not in ("all", "all_generated"):
            detail = f"entry {number} of {name!r} is at other positions than generated tokens"
            raise invalid(at, detail, allowed="entries at `all` or `all_generated`")
    return module


def changed(policy: Policy, change: PolicyChange) -> PolicyVersion:
    """Return the version that a change makes, without number and digest. Raises a 400."""
    kept = {version.version: version for version in policy.versions}
    number = policy.current.version if change.version is None else change.version
    if number not in kept:
        raise invalid("version", f"{number} is not kept", allowed=", ".join(map(str, kept)))
    given = {name: getattr(change, name) for name in ("mode", "share", "all_traffic")}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("mode", "canary") != "canary":
        given.setdefault("share", 0.0)
    try:
        content = msgspec.structs.replace(kept[number].content, **given)
        content.__post_init__()
    except ValueError as error:
        raise invalid("mode", str(error)) from error
    return msgspec.structs.replace(kept[number], content=content, created=now())


def digest_of(version: PolicyVersion) -> str:
    """Return the SHA-256, in hexadecimal, of everything that decides what the version does."""
    modules = [module.digest for module in version.modules]
    parts = [version.content, version.probe.digest, modules, version.identity]
    return hashlib.sha256(to_msgpack(parts)).hexdigest()


@dataclass(frozen=True)
class Applied:
    """The policies of a request: scores to compute, and what their actions add to it."""

    probes: list[StoredProbe] = field(default_factory=list)
    gated: list[Gated] = field(default_factory=list)
    modules: dict[str, Module] = field(default_factory=dict)  # by the names that `gated` uses
    captures: list[tuple[str, CaptureSpec]] = field(default_factory=list)  # field → capture
    hooks: dict[str, Callback] = field(default_factory=dict)  # policy → its webhook


NO_POLICIES = Applied()


async def policies_of(
    parsed: ParsedRequest,
    model: ModelInfo,
    policies: Pinned[Policy],
    watching: Sequence[bytes],
    job_id: str,
) -> Applied:
    """Return the policies that a request names, then those named `watching`, which apply to all
    traffic. Gradient rows have none: nothing is generated.

    Raises a 400 naming the field, and `unavailable` as `of_all_traffic`.
    """
    result, named, request = Applied(), parsed.policies, parsed.conversation or job_id
    if "capture" in parsed.readings:
        return result
    for index, name in enumerate(named):
        at = f"policies[{index}]"
        if name in named[:index]:
            raise invalid(at, f"{name!r} is listed twice")
        policy = await policies.known(model.name, name, at, "invalid_request")
        if (why := unfit(policy.current, model)) is not None:
            raise invalid(at, f"{name!r} {why}")
        _apply(policy, at, scores_of(policy, request), result)
    for policy in await of_all_traffic(policies, model, watching):
        if policy.name not in named:
            _apply(policy, "policies", scores_of(policy, request), result)
    tags = [capture.tag for _, capture in result.captures]
    tags += [parsed.capture.tag] if parsed.capture is not None else []
    if len(set(tags)) < len(tags):
        raise invalid("policies", f"the tags of captures are not distinct: {', '.join(tags)}")
    return result


def _apply(policy: Policy, at: str, scores: StoredProbe, result: Applied) -> None:
    """Add a policy, with what its actions need, to `result`."""
    result.probes.append(scores)
    version, modules = policy.current, iter(policy.current.modules)
    if scores.policy is None or not scores.policy.acts:
        return
    for number, action in enumerate(version.content.actions):
        if isinstance(action, Steer):
            key = f"{scores.name}:{number}"
            result.modules[key] = msgspec.structs.replace(next(modules), name=key)
            entry = SteeringSpec(module=key, scale=action.scale)
            result.gated.append(Gated(at, entry, scores.name))
        elif isinstance(action, Window):
            when = When(probe=scores.name, at_least=0, before=action.before, after=action.after)
            capture = CaptureSpec(
                hook=action.hook,
                layers=action.layers,
                positions=Span(when=when),
                tag=f"policy-{policy.name.replace('.', '-')}"[:64],
            )
            result.captures.append((at, capture))
        elif isinstance(action, Webhook):
            result.hooks[policy.name] = Callback(
                url=action.url, events=["job.decided"], key=version.key, tenant=version.tenant
            )
