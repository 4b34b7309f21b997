"""Probes and policies against a model: what a registration may hold, and those of a request."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import msgspec
import numpy as np

from ....broker.ledger.named.probes import all_fitting, hooks_of, misfit, scores_of, unfit
from ....broker.ledger.named.registry import Lookup
from ....schemas.access.handling import Callback
from ....schemas.access.keys import Caller
from ....schemas.artifacts.conditions import POLICY, Condition, Mode, decay_fault
from ....schemas.artifacts.probes import (
    PROBES,
    Probe,
    ProbeContent,
    ProbeRequest,
    ProbeUse,
    StoredProbe,
)
from ....schemas.base.errors import MidstreamError, Translated, invalid
from ....schemas.base.limits import (
    MAX_PROBE_LABELS,
    MAX_PROBE_TOKENS,
    MAX_REQUEST_PROBES,
    MAX_TAG,
)
from ....schemas.base.records import now, to_msgpack
from ....schemas.base.tensors import PackedTensors, Tensor, content_hash, from_numpy, to_numpy
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import HOOKS, Span, resolve_layers
from ....schemas.prompts.windows import When
from ....schemas.requests.policies import (
    POLICIES,
    CaptureWindow,
    Policy,
    PolicyChange,
    PolicyRequest,
    PolicyVersion,
    Steer,
    Webhook,
)
from ....schemas.requests.specs import CaptureSpec, SteeringSpec
from ....schemas.requests.steering import Module
from ....schemas.settings.settings import Settings
from ..edits.interventions import check_finite
from ..edits.model_state import ModelState, unknown_module
from ..edits.steering import check_policies
from ..positions.captures import (
    Bounds,
    PromptFacts,
    at_field,
    one_hook,
    resolve_captures,
    stored_captures,
)
from ..positions.gates import Gated, check_use
from ..prompts.callback_url import check_receiver
from ..prompts.request_parsing import ParsedRequest

#: Captures, each with its field of the request.
NamedCaptures = list[tuple[str, CaptureSpec]]


def resolve_probe(
    probe_request: ProbeRequest, name: str, model: ModelInfo
) -> tuple[Probe, PackedTensors]:
    """Return what should be registered, and its packed tensors by content hash.

    Raises a 400 naming the field and what is valid.
    """
    weight = _numbers("weight", probe_request.weight)
    weight = weight[None] if weight.ndim == 1 else weight
    width = model.hidden_size
    if weight.ndim != 2 or weight.shape[1] != width or not 1 <= len(weight) <= MAX_PROBE_LABELS:
        raise invalid(
            "weight",
            f"has shape {probe_request.weight.shape}",
            allowed=f"[k, {width}] with k from 1 to {MAX_PROBE_LABELS}, or [{width}]",
        )
    number = len(weight)
    bias = (
        np.zeros(number, dtype=np.float32)
        if probe_request.bias is None
        else _numbers("bias", probe_request.bias)
    )
    if bias.shape != (number,):
        raise invalid(
            "bias",
            f"has shape {list(bias.shape)}",
            allowed=f"[{number}], a number for each label, or null",
        )
    with at_field("hook"):
        hook = one_hook(probe_request.hook, Bounds(model, []))
    if hook not in HOOKS:
        raise invalid(
            "hook",
            f"{hook} does not belong to the residual stream: its rows have another width",
            allowed=", ".join(name for name in model.hooks if name in HOOKS),
        )
    with at_field("layer"):
        (layer,) = resolve_layers(probe_request.layer, model.num_layers)
    labels, thresholds = _of_labels(probe_request, number)
    if (fault := decay_fault(probe_request.aggregation, probe_request.decay)) is not None:
        raise invalid(
            "decay",
            fault,
            allowed="a number between 0 and 1, both excluded"
            if probe_request.decay is None
            else "null",
        )
    tensors = [from_numpy(weight), from_numpy(bias)]
    content = ProbeContent(
        hook=hook,
        layer=layer,
        tensors=[content_hash(tensor) for tensor in tensors],
        labels=labels,
        thresholds=thresholds,
        at=probe_request.at,
        aggregation=probe_request.aggregation,
        decay=probe_request.decay or 0.0,
    )
    return probe_request.registered(
        Probe,
        name,
        model.name,
        digest=content.digest,
        content=content,
        hidden_size=width,
        bytes=sum(len(tensor.data) for tensor in tensors),
        held_out=probe_request.held_out,
    ), {content_hash(tensor): to_msgpack(tensor) for tensor in tensors}


def _numbers(field: str, tensor: Tensor) -> np.ndarray:
    """Float32. Raises a 400 for values that are not finite, also once they are float32."""
    with np.errstate(over="ignore"):
        values: np.ndarray = to_numpy(tensor).astype(np.float32)
    with at_field(f"{field}.data"):
        check_finite(values)
    return values


def _of_labels(probe_request: ProbeRequest, number: int) -> tuple[list[str], list[float | None]]:
    """Return a label and a threshold for each row of the weight."""
    labels = probe_request.labels
    thresholds = probe_request.thresholds
    labels = [str(index) for index in range(number)] if labels is None else labels
    thresholds = thresholds if isinstance(thresholds, list) else [thresholds] * number
    for at, values, allowed in (
        ("labels", labels, "one for each row of weight, or null"),
        ("thresholds", thresholds, "one for each label, one number for all, or null"),
    ):
        if len(values) != number:
            detail = f"has {len(values)} entries"
            raise invalid(at, detail, allowed=f"{number}: {allowed}")
    if len(probe_request.held_out) not in (0, number):
        detail = f"has {len(probe_request.held_out)} entries"
        raise invalid("held_out", detail, allowed=f"{number}, one for each label, or none")
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise invalid(f"labels[{index}]", f"{label!r} is listed twice")
    return labels, thresholds


# --- Of a request
# --------------------------------------------------------------------------------------------------


def probes_of(
    request: Sequence[str | ProbeUse], model: ModelInfo, found: Lookup
) -> list[StoredProbe]:
    """Return those that a request names. Raises a 400 naming the field."""
    uses = [ProbeUse(probe=use) if isinstance(use, str) else use for use in request]
    if len(uses) > MAX_REQUEST_PROBES:
        raise invalid("probes", f"has {len(uses)} entries", allowed=f"up to {MAX_REQUEST_PROBES}")
    stored_probes: list[StoredProbe] = []
    for index, use in enumerate(uses):
        at = f"probes[{index}]"
        if use.probe in (earlier.probe for earlier in uses[:index]):
            raise invalid(at, f"{use.probe!r} is listed twice")
        probe = found.known(PROBES, use.probe, at)
        if (why := misfit(probe, model)) is not None:
            raise invalid(at, f"{use.probe!r} {why}", hint="register it again")
        check_use(use, probe, at, model)
        stored_probes.append(probe.stored(use.action, tokens=use.tokens))
    return stored_probes


def check_tokens(probes: Sequence[StoredProbe], lengths: Sequence[int]) -> None:
    """Raises a 400 where the scores of single tokens that come back are too many.

    `lengths`: tokens of each prompt at most.
    """
    needed = sum(len(probe.content.labels) for probe in probes if probe.tokens) * sum(lengths)
    if needed > MAX_PROBE_TOKENS:
        raise invalid(
            "probes",
            f"with `tokens` the job may return {needed} scores",
            allowed=f"up to {MAX_PROBE_TOKENS}",
            hint="use fewer prompts, tokens, probes or labels, or `tokens: false`",
        )


# --- Policies
# --------------------------------------------------------------------------------------------------


def resolve_policy(
    content: PolicyRequest,
    name: str,
    model: ModelInfo,
    probe: Probe,
    model_state: ModelState,
    caller: Caller,
    settings: Settings,
) -> PolicyVersion:
    """Return the registered version, without number and digest. Raises a 400 naming the field."""
    if (why := misfit(probe, model)) is not None:
        raise invalid("probe", f"{probe.name!r} {why}", hint="register it again")
    check_label(content.condition.label, probe.name, probe.content.labels)
    modules = []
    for index, action in enumerate(content.actions):
        if isinstance(action, Webhook):
            check_receiver(action.url, f"actions[{index}].url", settings)
        if isinstance(action, Steer):
            modules.append(_module(action.module, f"actions[{index}].module", model, model_state))
    registered = now()
    version = PolicyVersion(
        version=0,
        digest="",
        created=registered,
        registered=registered,
        content=msgspec.structs.replace(content, mode=content.mode or "shadow"),
        probe=probe.stored("none"),
        modules=modules,
        identity=model.identity,
        tenant=caller.tenant,
        key=caller.key,
    )
    if (why := unfit(version, model)) is not None:
        raise invalid("actions", why)
    gated, captures = _actions_of(name, version)
    check_policies(gated, model, "actions")
    bounds = Bounds(model, [PromptFacts(1)], probes=[POLICY + name])
    rows = [(at, stored_captures(spec, bounds, at)) for at, spec in captures]
    resolve_captures(None, bounds, rows)
    return version


def check_beside(model: ModelInfo, policy: Policy, others: Sequence[Policy]) -> None:
    """Raises a 400 for a policy of all traffic that acts, if the modules of all such policies need
    more room than they have: each request has all of them.
    """
    together = [policy, *(each for each in others if each.name != policy.name)]
    acting = [each for each in together if each.current.acts_on_all]
    if policy in acting:
        check_policies(_modules_of(acting, "all_traffic"), model, "all_traffic")


def _modules_of(policies: Sequence[Policy], at: str) -> list[Gated]:
    return [
        module for policy in policies for module in _actions_of(policy.name, policy.current, at)[0]
    ]


def check_label(label: str | None, probe: str, labels: Sequence[str]) -> None:
    """Raises a 400 for a condition's label that does not name one of the probe's `labels`."""
    if label not in labels and (label is not None or len(labels) > 1):
        raise invalid(
            "condition.label",
            f"{label!r} does not name a label of {probe!r}",
            allowed=", ".join(labels),
        )


def _module(name: str, at: str, model: ModelInfo, model_state: ModelState) -> Module:
    if (module := model_state.modules.get(name)) is None:
        raise unknown_module(at, name, model.name, model_state)
    for number, entry in enumerate(module.entries):
        if entry.positions not in ("all", "all_generated"):
            raise invalid(
                at,
                f"entry {number} of {name!r} is at other positions than generated tokens",
                allowed="entries at `all` or `all_generated`",
            )
    return module


def check_fit(version: PolicyVersion, model: ModelInfo) -> None:
    """Raises `conflict` if the version cannot apply to requests to the model that is served."""
    if (why := unfit(version, model)) is not None:
        raise MidstreamError("conflict", f"that version of the policy {why}", field="version")


def replaceable(former: Policy | None, content: PolicyRequest) -> Policy | None:
    """Return the policy that the content replaces. Raises a 400 for content without a mode, which
    would be `shadow`, over one that acts.
    """
    if former is not None and former.mode != "shadow" and content.mode is None:
        raise invalid(
            "mode",
            f"version {former.current.version} is {former.mode}: give mode",
            allowed=", ".join(get_args(Mode)),
        )
    return former


def changed(policy: Policy, change: PolicyChange) -> PolicyVersion:
    """Return the version that a change makes, without number and digest. Raises a 400."""
    kept = {version.version: version for version in policy.versions}
    number = policy.current.version if change.version is None else change.version
    if number not in kept:
        raise invalid("version", f"{number} is not kept", allowed=", ".join(map(str, kept)))
    given = {
        name: value
        for name in ("mode", "all_traffic", "edits", "keep_texts", "told")
        if (value := getattr(change, name)) is not None
    }
    former = kept[number]
    at = now()
    present, new = map(msgspec.to_builtins, (former.content.condition, change.condition or {}))
    with Translated(msgspec.ValidationError, lambda error: invalid("condition", str(error))):
        condition = msgspec.convert(present | new, Condition)
    check_label(condition.label, former.probe.name, former.probe.content.labels)
    with Translated(ValueError, _fault_of):
        content = msgspec.structs.replace(former.content, condition=condition, **given)
    return msgspec.structs.replace(
        former,
        content=content,
        created=at,
        registered=former.registered if condition == former.content.condition else at,
    )


def _fault_of(error: ValueError) -> MidstreamError:
    """Return the 400 for fields that are not valid together: `PolicyRequest` names one first."""
    field, _, why = str(error).partition(" ")
    return invalid(field, why)


def digest_of(version: PolicyVersion) -> str:
    """Return the SHA-256, in hexadecimal, of everything that decides what the version does."""
    modules = [module.digest for module in version.modules]
    return hashlib.sha256(
        to_msgpack([version.content, version.probe.digest, modules, version.identity])
    ).hexdigest()


@dataclass(frozen=True)
class Applied:
    """The policies of a request: scores to compute, and what their actions add to it."""

    probes: list[StoredProbe] = field(default_factory=list)
    gated: list[Gated] = field(default_factory=list)
    captures: NamedCaptures = field(default_factory=list)  # field → capture
    # captures of policies that do not act on this request, but may act on its like
    idle: NamedCaptures = field(default_factory=list)
    hooks: dict[str, Callback] = field(default_factory=dict)  # policy → its webhook


NO_POLICIES = Applied()


def policies_of(
    parsed: ParsedRequest,
    model: ModelInfo,
    found: Lookup,
    watching: Sequence[Policy],
) -> Applied:
    """Return the policies that a request names, then those `watching`, which apply to all traffic.
    Gradient rows have none: nothing is generated.

    Raises a 400 naming the field, and `unavailable` as `all_fitting`.
    """
    result = Applied()
    named = parsed.policies
    for index, name in enumerate(named):
        at = f"policies[{index}]"
        if name in named[:index]:
            raise invalid(at, f"{name!r} is listed twice")
        policy = found.known(POLICIES, name, at)
        if (why := unfit(policy.current, model)) is not None:
            raise invalid(at, f"{name!r} {why}")
        _apply(policy, at, result)
    of_all = {policy.name: policy for policy in all_fitting(watching, model)}
    for name, policy in of_all.items():
        if name not in named:
            _apply(policy, "policies", result)
    # As if all acted, so that no change of the mode decides.
    alone = [found.known(POLICIES, name, "policies") for name in named if name not in of_all]
    check_policies(_modules_of(alone, "policies"), model, "policies")
    acting = [policy for policy in of_all.values() if policy.current.acts_on_all]
    with Translated(MidstreamError, lambda error: MidstreamError("unavailable", error.detail)):
        check_policies(_modules_of(acting, "policies"), model, "policies")
    others = [*model.global_captures, *([parsed.capture] if parsed.capture is not None else [])]
    for at, capture in [*result.captures, *result.idle]:
        if capture.tag in (other.tag for other in others):
            raise invalid(
                at,
                f"captures under the tag {capture.tag!r}, which another capture has",
                hint="give the request's, or the operator's, another tag",
            )
    return result


def _tag_of(name: str) -> str:
    """Return the tag of a policy's captures: `policy-` and the name. A name that no tag can have
    follows `policy_` instead, with a hash of it, so that no two names have one tag.
    """
    tag = f"policy-{name}"
    if "." not in name and len(tag) <= MAX_TAG:
        return tag
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"policy_{name.replace('.', '-')}"[: MAX_TAG - 13] + f"-{digest}"


def _apply(policy: Policy, at: str, result: Applied) -> None:
    """Add a policy, with what its actions need, to `result`."""
    scores = scores_of(policy)
    result.probes.append(scores)
    result.hooks.update(hooks_of([policy], [scores]))
    gated, captures = _actions_of(policy.name, policy.current, at)
    if scores.policy is not None and scores.policy.acts:
        result.gated.extend(gated)
        result.captures.extend(captures)
    else:
        result.idle.extend(captures)


def _actions_of(
    policy: str, version: PolicyVersion, at: str = ""
) -> tuple[list[Gated], NamedCaptures]:
    """Return the modules that a version applies, and its captures with their fields. `at`: field of
    a request; by default those of its registration.
    """
    gated = list[Gated]()
    captures = NamedCaptures()
    modules = iter(version.modules)
    scores = POLICY + policy
    for number, action in enumerate(version.content.actions):
        field = at or f"actions[{number}]"
        if isinstance(action, Steer):
            module = msgspec.structs.replace(next(modules), name=f"{scores}:{number}")
            edit = SteeringSpec(module=module.name, scale=action.scale, limit=action.limit)
            gated.append(Gated(field, edit, scores, module))
        elif isinstance(action, CaptureWindow):
            when = When(probe=scores, at_least=0, before=action.before, after=action.after)
            capture = CaptureSpec(
                hook=action.hook,
                layers=action.layers,
                positions=Span(when=when),
                tag=_tag_of(policy),
            )
            captures.append((field, capture))
    return gated, captures
