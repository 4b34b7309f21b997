"""Calls on tuned lenses, of both clients."""

from abc import ABC, abstractmethod

import httpx

from ...schemas.lens import TunedLens, TunedLensPage, TunedLensRequest
from ...schemas.limits import PathName
from . import wire
from .wire import Call, of_model

_LENSES = "/v1/lenses"
#: The server reads, hashes and checks the files.
REGISTER_S = 600.0


def _register(name: str, path: str, hook: str, residual: bool, model: str | None, description: str) -> Call:
    fields = {"name": name, "path": path, "hook": hook, "residual": residual, "model": model, "description": description}
    return Call("POST", _LENSES, body=wire.checked(fields, TunedLensRequest, ""), timeout=REGISTER_S)


def _about(method: str, name: str, model: str | None) -> Call:
    """Raises MidstreamError for what cannot be a name: it is a part of the path."""
    return Call(method, f"{_LENSES}/{wire.checked(name, PathName, 'name')}", params=of_model(model))


class TunedLensCalls(ABC):
    """Of the blocking client. `model` may be left out where one is served."""

    @abstractmethod
    def _send(self, call: Call) -> httpx.Response: ...

    def register_lens(
        self, name: str, path: str, hook: str = "post_block", residual: bool = False, model: str | None = None, description: str = ""
    ) -> TunedLens:
        """Give the tuned lens in this folder below the server's `lens_dir` a name: requests say `"tuned": name`.

        `hook`: whose rows its maps take. `residual`: h + W h + b instead of W h + b. A name that is taken is replaced (`replaced`).
        """
        return wire.decode(self._send(_register(name, path, hook, residual, model, description)), TunedLens)

    def tuned_lenses(self, model: str | None = None) -> list[TunedLens]:
        return wire.decode(self._send(Call("GET", _LENSES, params=of_model(model))), TunedLensPage).lenses

    def tuned_lens(self, name: str, model: str | None = None) -> TunedLens:
        return wire.decode(self._send(_about("GET", name, model)), TunedLens)

    def unregister_lens(self, name: str, model: str | None = None) -> None:
        """Forget the name. Requests that were accepted with it keep the tuned lens."""
        wire.raise_problem(self._send(_about("DELETE", name, model)))


class AsyncTunedLensCalls(ABC):
    """Of the awaiting client: the same, as coroutines."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    async def register_lens(
        self, name: str, path: str, hook: str = "post_block", residual: bool = False, model: str | None = None, description: str = ""
    ) -> TunedLens:
        return wire.decode(await self._send(_register(name, path, hook, residual, model, description)), TunedLens)

    async def tuned_lenses(self, model: str | None = None) -> list[TunedLens]:
        return wire.decode(await self._send(Call("GET", _LENSES, params=of_model(model))), TunedLensPage).lenses

    async def tuned_lens(self, name: str, model: str | None = None) -> TunedLens:
        return wire.decode(await self._send(_about("GET", name, model)), TunedLens)

    async def unregister_lens(self, name: str, model: str | None = None) -> None:
        wire.raise_problem(await self._send(_about("DELETE", name, model)))
