"""How long a call keeps its body, which the process's twin would need."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from midstream.api.context import AppContext
from midstream.api.web.request_context import CURRENT, ApiCall
from midstream.broker.telemetry.traces import TraceSpan

REPEAT = ("key", "hash")


class Ledger:
    """One that knows a job of one key and body."""

    async def repeated(self, idempotency: tuple[str, str]) -> str | None:
        return "job_x" if idempotency == REPEAT else None


@pytest.mark.parametrize(
    ("idempotency", "known", "kept"),
    [(REPEAT, "job_x", ()), (("key", "other"), None, [b"{}"]), (None, None, [b"{}"])],
)
async def test_a_repeat_lets_go_of_its_body_before_its_response_is_held(
    idempotency: tuple[str, str] | None, known: str | None, kept: Sequence[bytes]
) -> None:
    call = ApiCall(TraceSpan(""), 0.0, "POST", received=[b"{}"])
    CURRENT.set(call)
    context = cast("Any", SimpleNamespace(ledger=Ledger()))
    assert await AppContext.repeated(context, idempotency) == known
    assert call.received == kept
