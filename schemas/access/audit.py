"""The audit log: who changed what, with the state before and after; never a secret."""

from typing import Any

from ..base.records import Record


class AuditEntry(Record):
    """One change."""

    id: str  # ascending
    at: float  # seconds since the epoch
    by: str  # id of the key; empty: the API required none; `redis`: somebody with access to Redis
    tenant: str  # of the key
    action: str  # such as `PUT /v1/tenants/{name}`, or a command
    what: str  # policies, modules, …; key, tenant, global steering, model, settings, service
    name: str
    # what was stored under the name; null: nothing. Of a large one only its digest and size
    before: Any = None
    after: Any = None


class AuditPage(Record):
    """Answer of `GET /v1/audit`: the newest entries first."""

    entries: list[AuditEntry]
    next: str | None = None  # the cursor of the following page
