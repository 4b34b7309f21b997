"""The audit log in the ledger: a stream that is only appended to, and as long as the setting
`tuning.audit_entries` says.

A stream of Redis and not a file: every replica of the API appends to it, and it is as durable and
as backed up as what it tells of. Workers and the relay cannot reach its key.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ....schemas.access.audit import AuditEntry, AuditPage
from ....schemas.base.errors import invalid
from ....schemas.base.records import from_json, now, to_json
from ...telemetry.logs import redacted
from ..jobs.ledger import LedgerPart, reachable

STREAM = "ms:key-audit"
#: A state of more bytes as JSON is stored as its digest and size.
MAX_STATE = 16 << 10
#: Who acts without the API.
OF_REDIS = "redis"
#: What follows the path of an address in JSON: services that are called may have their keys there.
_QUERY = re.compile(r'(https?://[^\s"?#]+)[?#][^\s"]*')


def state_of(value: Any) -> Any:
    """Return what an entry stores of a record: plain values, addresses without passwords and
    without what follows their path; of a large one the digest and the size.
    """
    if value is None:
        return None
    raw = to_json(value)
    if len(raw) > MAX_STATE:
        return {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    return msgspec.json.decode(_QUERY.sub(r"\1?***", redacted(raw.decode())))


class LedgerAudit(LedgerPart):
    """The audit log of a ledger. Belongs to the ledger's event loop."""

    @reachable
    async def append(
        self,
        action: str,
        what: str,
        name: str,
        *,
        by: str = OF_REDIS,
        tenant: str = "",
        before: Any = None,
        after: Any = None,
    ) -> None:
        """Append an entry about a change that has been made."""
        entry = AuditEntry(
            id="",
            at=now(),
            by=by,
            tenant=tenant,
            action=action,
            what=what,
            name=name,
            before=state_of(before),
            after=state_of(after),
        )
        kept = self._settings.tuning.audit_entries
        await self._redis.xadd(STREAM, {"e": to_json(entry)}, maxlen=kept, approximate=True)

    @reachable
    async def page(self, limit: int, cursor: str | None = None) -> AuditPage:
        """Return entries, newest first; `cursor`: the `next` of a previous page. Raises
        MidstreamError("invalid_request") for an invalid cursor.
        """
        if cursor and not cursor.replace("-", "", 1).isdecimal():
            raise invalid("cursor", f"{cursor!r} is not a cursor", "the `next` of a previous page")
        newest = f"({cursor}" if cursor else "+"
        rows: list[tuple[bytes, Mapping[bytes, bytes]]] = await self._redis.xrevrange(
            STREAM, max=newest, min="-", count=limit + 1
        )
        entries = [
            msgspec.structs.replace(from_json(fields[b"e"], AuditEntry), id=id.decode())
            for id, fields in rows[:limit]
        ]
        return AuditPage(entries=entries, next=entries[-1].id if len(rows) > limit else None)
