"""Route of the audit log: what operators and tenants have changed."""

from typing import Any

from litestar import get

from ...broker.ledger.people.audit import LedgerAudit
from ...schemas.access.audit import AuditPage
from ..context import AppContext
from ..web.auth import needs
from .jobs import ERRORS, CursorParameter, PageSize


@get(
    "/v1/audit",
    opt=needs("admin"),
    summary="List changes, newest first",
    description="Who changed which artifact, key, tenant or global steering, with what was stored "
    "before and after. Secrets are never in it. The newest `tuning.audit_entries` are kept.",
    responses=ERRORS,
)
async def list_changes(
    context: AppContext, limit: PageSize = 50, cursor: CursorParameter = None
) -> AuditPage:
    return await LedgerAudit(context.ledger).page(limit, cursor)


ROUTES: list[Any] = [list_changes]
