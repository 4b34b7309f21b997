"""What does a call say when Redis goes away under it, at a place that nobody thought of?"""

from typing import Any

import msgspec
import pytest
import redis.exceptions
from litestar.testing import RequestFactory

from midstream.api.web import problems
from midstream.broker.ledger.core.tenants import LedgerTenants
from midstream.schemas.access.keys import Tenant
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings

AWAY = redis.exceptions.ConnectionError("Connection refused")


class Away:
    """A client whose Redis is away, whatever is asked."""

    def __getattr__(self, command: str) -> Any:
        async def refused(*_: Any) -> None:
            raise AWAY

        return refused


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(AWAY, 503, "unavailable"), (redis.exceptions.ResponseError("wrong"), 500, "internal")],
)
def test_a_redis_that_is_away_is_503_and_any_other_error_500(
    error: redis.exceptions.RedisError, status: int, kind: str
) -> None:
    handler = problems.HANDLERS[redis.exceptions.RedisError]
    answer = handler(RequestFactory().post("/v1/harvests"), error)
    assert answer.status_code == status
    problem = msgspec.json.decode(answer.content)
    assert problem["type"] == f"urn:midstream:{kind}"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("put", [Tenant(name="t")]),
        ("delete", ["t"]),
        ("get", ["t"]),
        ("list", []),
        ("usage", ["t"]),
        ("view", ["t"]),
    ],
)
async def test_each_call_of_the_tenants_is_unavailable_without_redis(
    call: str, arguments: list[Any]
) -> None:
    tenants = LedgerTenants(Away(), Settings())
    with pytest.raises(MidstreamError) as told:
        await getattr(tenants, call)(*arguments)
    assert told.value.kind == "unavailable"
