"""Calls on LoRA adapters."""

from ...schemas.artifacts.loras import Lora, LoraPage, LoraRequest
from ...schemas.base.limits import PathName
from ..notebook import Listing
from . import wire
from .calls import Calls, call
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


class LoraCalls(Calls):
    """`model` may be left out where one is served."""

    @call
    async def register_lora(
        self, name: str, path: str, model: str | None = None, description: str = ""
    ) -> Lora:
        """Give the adapter in this folder below the server's `lora_dir` a name: requests say
        `lora=name`.

        A name that is taken is replaced (`replaced`).
        """
        return await self._ask(_register(name, path, model, description), Lora)

    @call
    async def loras(self, model: str | None = None) -> list[Lora]:
        """The adapters of a model."""
        return Listing(
            (await self._ask(Call("GET", _LORAS, params=of_model(model)), LoraPage)).loras
        )

    @call
    async def lora(self, name: str, model: str | None = None) -> Lora:
        """One adapter. Raises `not_found`."""
        return await self._ask(_about("GET", name, model), Lora)

    @call
    async def unregister_lora(self, name: str, model: str | None = None) -> None:
        """Forget the name. Requests that were accepted with it keep the adapter."""
        await self._do(_about("DELETE", name, model))
