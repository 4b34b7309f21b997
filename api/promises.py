"""When may an answer leave that says that something was accepted or changed? Once it stays so if Redis is killed.

(Answers that only look say how a job ended in the same way: `jobs.get_job`, `events.follow`.)
"""

from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from .hosts import SAFE


class KeepPromises(ASGIMiddleware):
    """What is not refused is answered after it was written; where that cannot be had, it is answered `unavailable`."""

    scopes = (ScopeType.HTTP,)

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        async def send_written(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                await scope["litestar_app"].state.edge.ledger.written()
            await send(message)

        await next_app(scope, receive, send if scope.get("method") in SAFE else send_written)
