"""Calls on LoRA adapters, of both clients."""

from abc import ABC, abstractmethod

import httpx

from ...schemas.limits import PathName
from ...schemas.loras import Lora, LoraPage, LoraRequest
from . import wire
from .wire import Call, of_model

_LORAS = "/v1/loras"
#: The server reads and hashes the adapter's files.
REGISTER_S = 300.0


def _register(name: str, path: str, model: str | None, description: str) -> Call:
    fields = {"name": name, "path": path, "model": model, "description": description}
    return Call("POST", _LORAS, body=wire.checked(fields, LoraRequest, ""), timeout=REGISTER_S)


def _about(method: str, name: str, model: str | None) -> Call:
    """Raises MidstreamError for what cannot be a name: it is a part of the path."""
    return Call(method, f"{_LORAS}/{wire.checked(name, PathName, 'name')}", params=of_model(model))


class LoraCalls(ABC):
    """Of the blocking client. `model` may be left out where one is served."""

    @abstractmethod
    def _send(self, call: Call) -> httpx.Response: ...

    def register_lora(self, name: str, path: str, model: str | None = None, description: str = "") -> Lora:
        """Give the adapter in this folder below the server's `lora_dir` a name: requests say `lora=name`.

        A name that is taken is replaced (`replaced`).
        """
        return wire.decode(self._send(_register(name, path, model, description)), Lora)

    def loras(self, model: str | None = None) -> list[Lora]:
        return wire.decode(self._send(Call("GET", _LORAS, params=of_model(model))), LoraPage).loras

    def lora(self, name: str, model: str | None = None) -> Lora:
        return wire.decode(self._send(_about("GET", name, model)), Lora)

    def unregister_lora(self, name: str, model: str | None = None) -> None:
        """Forget the name. Requests that were accepted with it keep the adapter."""
        wire.raise_problem(self._send(_about("DELETE", name, model)))


class AsyncLoraCalls(ABC):
    """Of the awaiting client: the same, as coroutines."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    async def register_lora(self, name: str, path: str, model: str | None = None, description: str = "") -> Lora:
        return wire.decode(await self._send(_register(name, path, model, description)), Lora)

    async def loras(self, model: str | None = None) -> list[Lora]:
        return wire.decode(await self._send(Call("GET", _LORAS, params=of_model(model))), LoraPage).loras

    async def lora(self, name: str, model: str | None = None) -> Lora:
        return wire.decode(await self._send(_about("GET", name, model)), Lora)

    async def unregister_lora(self, name: str, model: str | None = None) -> None:
        wire.raise_problem(await self._send(_about("DELETE", name, model)))
