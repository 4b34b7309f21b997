"""The call for the service's status."""

from ...schemas.service.status import Status
from .calls import Calls, call
from .wire import Call

_STATUS = Call("GET", "/v1/status", timeout=10.0)


class ServiceCalls(Calls):
    @call
    async def status(self) -> Status:
        """Queues, workers, relay, webhooks and Redis.

        Raises `forbidden` without the scope `observe`.
        """
        return await self._ask(_STATUS, Status)
