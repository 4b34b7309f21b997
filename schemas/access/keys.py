"""API keys and their scopes, callers, tenants and limits."""

from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from ..base.edit_sizes import EditLimit
from ..base.limits import MAX_INT64, MAX_SCOPES, MAX_SOURCES, MAX_TAG, FolderPath
from ..base.records import Record
from .handling import Priority

#: `submit`: submit and cancel jobs and sweeps, change modules and source runs, delete the tenant's
#: own objects. `read`: read the tenant's own objects. `steer-global`: change global steering,
#: register adapters. `observe`: read service-wide status, metrics and workers. `admin`: everything,
#: for every tenant, and manage keys.
Scope = Literal["submit", "read", "steer-global", "observe", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

#: Owner of everything if authentication is off.
DEFAULT_TENANT = "default"
TENANT_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}(?!\n)$"
TenantName = Annotated[str, msgspec.Meta(max_length=MAX_TAG, pattern=TENANT_PATTERN)]
KeyName = Annotated[
    str, msgspec.Meta(max_length=MAX_TAG, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@-]{0,62}(?!\n)$")
]
KeyId = Annotated[str, msgspec.Meta(max_length=MAX_TAG, pattern=r"^[0-9a-z]{12}(?!\n)$")]

#: A key has the form `ms_<id>_<secret>`; the secret has 256 bits, so its SHA-256 is as good as a
#: slow hash.
KEY_PREFIX = "ms_"

#: The longest lifetime of a key: dates beyond it may not be representable.
MAX_KEY_EXPIRES_S = 100 * 365 * 24 * 3600

NaturalInt64 = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]
Sources = Annotated[list[FolderPath], msgspec.Meta(max_length=MAX_SOURCES)]


class Limits(Record, omit_defaults=True):
    """Limits of a tenant; null means the setting `limit_*` of the same name; 0 means no limit."""

    requests_per_minute: NaturalInt64 | None = None  # submissions
    # prompt tokens plus `max_tokens`, summed over all submitted prompts
    tokens_per_minute: NaturalInt64 | None = None
    jobs_in_flight: NaturalInt64 | None = None  # jobs that have been accepted and have not ended
    capture_mib: NaturalInt64 | None = None  # capture files and harvests that are not deleted
    sweep_cells: NaturalInt64 | None = None  # cells of sweeps that have not ended
    modules: NaturalInt64 | None = None  # named steering modules, of all models
    module_mib: NaturalInt64 | None = None  # vectors and entries of those modules
    harvests: NaturalInt64 | None = None  # harvests that have not ended
    # entries of the setting of this name, or folders below them, that may be harvested; null: all
    harvest_sources: Sources | None = None
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1  # weight of its share of the engine
    highest_priority: Priority = "high"  # higher requested priorities become this
    # of its requests' own edits; the stricter counts where a request or module has its own
    edit_limit: EditLimit | None = None


class Tenant(Record):
    """A stored tenant. A tenant that is not stored has the settings' limits."""

    name: TenantName
    limits: Limits = Limits()


class StoredKey(Record):
    """Stored API key, without its secret."""

    id: KeyId
    name: str
    tenant: TenantName
    scopes: list[Scope]
    sha256: str  # of the secret, hex
    created: float
    expires: float | None = None  # seconds since the epoch


class KeyRequest(Record):
    """Body of `POST /v1/keys`."""

    name: KeyName
    tenant: TenantName = DEFAULT_TENANT
    scopes: Annotated[list[Scope], msgspec.Meta(min_length=1, max_length=MAX_SCOPES)] = (
        msgspec.field(default_factory=lambda: ["submit", "read"])
    )
    # seconds; null: never
    expires_in: Annotated[float, msgspec.Meta(gt=0, le=MAX_KEY_EXPIRES_S)] | None = None


class KeyView(Record, kw_only=True):
    """A key as admins see it."""

    id: str
    name: str
    tenant: str
    scopes: list[Scope]
    created: float
    expires: float | None = None


class CreatedKey(KeyView, kw_only=True):
    """Answer of `POST /v1/keys`: the only response that contains the key itself."""

    key: str


class KeyList(Record):
    keys: list[KeyView]


class TenantUsage(Record):
    """A tenant's current usage."""

    jobs_in_flight: int
    sweep_cells: int
    capture_bytes: int  # harvests included
    tokens_this_minute: int
    requests_this_minute: int
    modules: int = 0
    module_bytes: int = 0
    harvests: int = 0


class TenantView(Record):
    """Answer of `GET /v1/tenants/{name}` (own tenant: `GET /v1/tenant`)."""

    name: str
    limits: Limits  # in effect: settings filled in
    usage: TenantUsage


class TenantList(Record):
    """Answer of `GET /v1/tenants`, by name."""

    tenants: list[TenantView]


class Caller(NamedTuple):
    """The caller of a request. With authentication off: the default tenant, all scopes."""

    tenant: str = DEFAULT_TENANT
    key: str = ""  # id of the key
    scopes: frozenset[Scope] = frozenset(SCOPES)
    # name of the page's session that authenticated the request; empty: the key itself did
    session: str = ""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def sees(self, tenant: str) -> bool:
        """Return whether the caller may read the objects of `tenant`."""
        return tenant == self.tenant or "admin" in self.scopes


#: The caller of every request if authentication is off.
EVERYBODY = Caller()


#: Separates tenant and name; does not occur in tenants' names.
SCOPE_SEPARATOR = "/"


def scoped(tenant: str, name: str) -> str:
    """Return the name under which a tenant's module, source run or Idempotency-Key is stored.

    The default tenant's names are unchanged, unless they could be read as another tenant's.
    """
    return (
        name
        if tenant == DEFAULT_TENANT and SCOPE_SEPARATOR not in name
        else f"{tenant}{SCOPE_SEPARATOR}{name}"
    )


def unscoped(stored: str) -> tuple[str, str]:
    """Return (tenant, name) of a `scoped` name."""
    tenant, separator, name = stored.partition(SCOPE_SEPARATOR)
    return (tenant, name) if separator else (DEFAULT_TENANT, stored)


def shown(stored: str) -> str:
    """Return a `scoped` name without its tenant."""
    return unscoped(stored)[1]


def own(tenant: str, stored: Iterable[str]) -> list[str]:
    """Return the tenant's names among `scoped` names, without the tenant, in the same order."""
    return [name for owner, name in map(unscoped, stored) if owner == tenant]
