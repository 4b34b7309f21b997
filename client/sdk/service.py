"""The call for the service's status, of both clients."""

from abc import ABC, abstractmethod

import httpx

from ...schemas.status import Status
from . import wire
from .wire import Call

_STATUS = Call("GET", "/v1/status", timeout=10.0)


class ServiceCalls(ABC):
    """Of the blocking client."""

    @abstractmethod
    def _send(self, call: Call) -> httpx.Response: ...

    def status(self) -> Status:
        """Queues, workers, relay, webhooks and Redis. Raises `forbidden` without the scope `observe`."""
        return wire.decode(self._send(_STATUS), Status)


class AsyncServiceCalls(ABC):
    """Of the client that awaits."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    async def status(self) -> Status:
        """As `ServiceCalls.status`."""
        return wire.decode(await self._send(_STATUS), Status)
