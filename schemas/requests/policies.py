"""Policies: registration, versions, and use in requests.

A policy reads the scores of a registered probe, and acts when its condition is met.
"""

from typing import Annotated, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from ..access.keys import Caller, scoped
from ..artifacts.conditions import Condition, Mode
from ..artifacts.probes import PROBES, StoredProbe
from ..artifacts.registered import ArtifactKind, Registered, Registration
from ..base.edit_sizes import EditLimit
from ..base.errors import refuse
from ..base.limits import (
    MAX_POLICIES,
    MAX_POLICY_ACTIONS,
    MAX_REQUEST_POLICIES,
    Factor,
    Index,
    Reference,
    UrlText,
)
from ..base.records import JsonObject, Record
from ..prompts.selectors import HookName, LayerSelector
from ..prompts.windows import Margin
from .steering import MODULES, Module


class Steer(Record, tag_field="action", tag="steer"):
    """A module, at `scale`, edits the generated tokens from the next one on, while the policy is
    on.
    """

    module: Reference
    # null: 1; where the module is `HIDDEN`, as `limit` then: not shown
    scale: Factor | None = 1.0
    limit: EditLimit | None = None  # of the relative size of its edits, beside the module's own


class CaptureWindow(Record, tag_field="action", tag="capture"):
    """The rows of `layers` at the token, and at those `before` and `after` it, are stored."""

    layers: LayerSelector
    hook: HookName = "post_block"
    before: Margin = 0
    after: Margin = 0


class Webhook(Record, tag_field="action", tag="webhook"):
    """The decision is sent to `url`."""

    url: UrlText


#: What happens when a policy turns on. `flag` marks the result, and sends the webhook
#: `job.flagged` to jobs whose `callback_events` ask for it; `stop` ends the request.
PolicyAction = Literal["flag", "stop"] | Steer | CaptureWindow | Webhook
#: Stands for a name or a URL that is another tenant's.
HIDDEN = "hidden"
#: Of requests, at the site of a policy's probe or before it in the forward pass.
EditsAllowed = Literal["refuse", "allow"]


class PolicyRequest(Registration, kw_only=True):
    """Body of `PUT /v1/artifacts/policies/{name}`."""

    probe: Reference
    condition: Condition
    # in their order; only `steer` several times
    actions: Annotated[list[PolicyAction], msgspec.Meta(max_length=MAX_POLICY_ACTIONS)]
    # null: `shadow`; required over a version that acts
    mode: Mode | None = None
    all_traffic: bool = False  # applies to every request to the model; otherwise to those naming it
    # of all traffic, while it may act: whether requests may edit rows that its probe reads
    edits: EditsAllowed = "refuse"
    keep_texts: bool = False  # whether its hits are kept with the tokens around them
    told: bool = False  # OpenAI-style answers say whether it was triggered, and whether it acted

    def __post_init__(self) -> None:
        once = [kind for kind in self.kinds if kind != "steer"]
        refuse(
            {
                "actions has one twice, which only steer may be": len({*once}) < len(once),
                "all_traffic is not valid with the action capture": self.all_traffic
                and "capture" in once,
            }
        )

    @property
    def kinds(self) -> list[str]:
        """The names of the actions."""
        return [
            item if isinstance(item, str) else str(item.__struct_config__.tag)
            for item in self.actions
        ]


#: Fields of a condition in place of the present ones; `schedule` as a whole.
ConditionChange = msgspec.defstruct(
    "ConditionChange",
    [(each.name, each.type | UnsetType, UNSET) for each in msgspec.structs.fields(Condition)],
    bases=(Record,),
)


class PolicyChange(Record):
    """Body of `PATCH /v1/artifacts/policies/{name}`: makes a version that differs in what is
    given.
    """

    version: Index | None = None  # whose content the new version has; null: the current one's
    condition: ConditionChange | None = None  # type: ignore[valid-type]  # a variable, to mypy
    mode: Mode | None = None
    all_traffic: bool | None = None
    edits: EditsAllowed | None = None
    keep_texts: bool | None = None
    told: bool | None = None


class PolicyVersion(Record):
    """A version of a policy. Its probe and its modules are those of its registration, even if their
    names were registered again since.
    """

    version: int
    digest: str  # of everything that decides what it does
    created: float
    content: PolicyRequest
    probe: StoredProbe
    modules: list[Module]  # of its actions `steer`, in their order
    identity: str  # of the model that it was registered for
    # the tenant and the API key that its webhooks belong to and are signed for
    tenant: str
    key: str
    registered: float = 0.0  # when its content was; a changed mode or reach keeps it

    @property
    def acts_on_all(self) -> bool:
        """Return whether it may act on every request to the model."""
        return self.content.all_traffic and self.content.mode == "active"

    @property
    def named(self) -> set[tuple[str, str]]:
        """The kinds, in the plural, and stored names of its probe and its modules."""
        return {
            (PROBES.plural, self.probe.name),
            *((MODULES.plural, scoped(self.tenant, module.name)) for module in self.modules),
        }


class PolicyDay(Record):
    """The prompts that a policy read on one day; those of a repeated attempt count again."""

    day: str  # in UTC, such as 2026-11-29
    prompts: int
    triggered: int  # those at whose tokens it was on
    acted: int  # of these, those at which it acted; at the others it only recorded


class Policy(Registered, kw_only=True):
    """A registered policy, as the ledger stores it; without tensors. The API returns it so to the
    tenant that registered it and to admins, and to others as `shown_to` says.
    """

    versions: list[PolicyVersion]  # the newest `MAX_POLICY_VERSIONS`; the last one applies
    # in answers, of the last `POLICY_DAYS` days those on which it has read something
    days: list[PolicyDay] = []
    # in answers, what is questionable: of its registration, or of its last day
    warnings: list[str] = []

    @property
    def current(self) -> PolicyVersion:
        return self.versions[-1]

    def after(self, former: Self | None) -> Self:
        """Return the policy as it is stored in place of `former`. Of the same content, its version
        stays the current one, as a registration of its own.
        """
        if former is None or former.digest != self.digest:
            return self
        number = former.current.version
        created = former.current.created
        current = msgspec.structs.replace(self.current, version=number, created=created)
        return msgspec.structs.replace(
            self, created=former.created, versions=[*former.versions[:-1], current]
        )

    @property
    def mode(self) -> Mode:
        return self.current.content.mode or "shadow"

    def shown_to(self, caller: Caller) -> Self:
        """Return the policy without what belongs to other tenants than the caller's: modules,
        webhooks, days, warnings, and who registered it. Their actions have the name and the URL
        `HIDDEN`, and no scale.
        """
        versions = [
            each if caller.sees(each.tenant) else _without_owner(each) for each in self.versions
        ]
        seen = caller.sees(self.current.tenant)
        return msgspec.structs.replace(
            self,
            versions=versions,
            days=self.days if seen else [],
            warnings=self.warnings if seen else [],
        )

    @property
    def tensors(self) -> list[str]:
        """The content hashes of the tensors of all kept versions."""
        probes = [name for version in self.versions for name in version.probe.content.tensors]
        modules = [module for version in self.versions for module in version.modules]
        return sorted({*probes, *(name for module in modules for name in module.tensors)})


def _without_names(action: PolicyAction) -> PolicyAction:
    if isinstance(action, Steer):
        return Steer(module=HIDDEN, scale=None)
    return Webhook(url=HIDDEN) if isinstance(action, Webhook) else action


def _without_owner(version: PolicyVersion) -> PolicyVersion:
    actions = [_without_names(action) for action in version.content.actions]
    return msgspec.structs.replace(
        version,
        content=msgspec.structs.replace(version.content, actions=actions),
        modules=[],
        tenant="",
        key="",
    )


def _of_former(stored: JsonObject) -> JsonObject:
    """Return a policy as it is stored now. Earlier builds stored a `share` of the requests, on
    which a version of the mode `canary` acted; it becomes `shadow`, which changes no request.
    """
    for version in stored.get("versions", []):
        version["content"].pop("share", None)
        if version["content"]["mode"] == "canary":
            version["content"]["mode"] = "shadow"
    return stored


POLICIES = ArtifactKind(
    plural="policies",
    short="policy",
    noun="policy",
    record=Policy,
    request=PolicyRequest,
    takes="a new version, if the name exists with other content. Its probe and its modules stay "
    "those of its registration.",
    make="midstream.api.routes.registered:make_policy",
    check="midstream.api.resolve.readings.probes:check_beside",
    complete="midstream.broker.ledger.named.probes:with_days",
    warn="midstream.api.routes.registered:warned",
    calls="midstream.client.sdk.registered:Policies",
    acts={"change": "policies.change"},
    limit=MAX_POLICIES,
    of_former=_of_former,
)
#: The policies that a request names.
PolicyList = Annotated[list[Reference], msgspec.Meta(max_length=MAX_REQUEST_POLICIES)]
