"""The blocking `Client` and the awaiting `AsyncClient`. Both have the same calls, each of which is
written once (`client.sdk.calls`).
"""

from .. import notebook
from . import discovery, wire
from .calls import Blocking
from .harvests import HarvestCalls
from .mapping.map import MapCalls
from .readings import ReadingCalls
from .service import ServiceCalls
from .sweeps import SweepCalls
from .transport import AwaitingTransport, BlockingTransport, Transport


class AllCalls(
    MapCalls,
    ReadingCalls,
    SweepCalls,
    HarvestCalls,
    ServiceCalls,
):
    """All calls of both clients, as coroutines."""

    def __init__(self, transport: Transport):
        self._io = transport


class Client(Blocking, AllCalls):
    """The blocking client.

    `url`: the address of the API; by default that of the running stack, as `client.sdk.discovery`
    finds it. `api_key`: by default the value of MIDSTREAM_API_KEY.

    Every call raises MidstreamError if the server rejects it or cannot carry it out (with its
    `kind` and `field`), VersionMismatch when the versions of client and server are incompatible,
    and ServerUnreachable when no server answers.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None):
        self.url, api_key = discovery.address(url, api_key)
        notebook.install()
        self._transport = BlockingTransport(self.url, wire.headers(api_key))
        self._awaited = AllCalls(self._transport)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


class AsyncClient(AllCalls):
    """The awaiting client: the calls of `Client`, as coroutines.

    Calls raise the same errors. Progress callbacks are called, not awaited.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None):
        self.url, api_key = discovery.address(url, api_key)
        notebook.install()
        self._transport = AwaitingTransport(self.url, wire.headers(api_key))
        super().__init__(self._transport)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()
