"""Calls on sparse autoencoders."""

from ...schemas.artifacts.saes import Sae, SaePage, SaeRequest
from ...schemas.base.limits import PathName
from ..notebook import Listing
from . import wire
from .calls import Calls, call
from .wire import Call, of_model

_SAES = "/v1/saes"
#: The server reads, hashes and checks the files.
REGISTER_S = 600.0


def _register(
    name: str, path: str, hook: str | None, layer: int | None, model: str | None, description: str
) -> Call:
    fields = {
        "name": name,
        "path": path,
        "hook": hook,
        "layer": layer,
        "model": model,
        "description": description,
    }
    return Call("POST", _SAES, body=wire.checked(fields, SaeRequest, ""), timeout=REGISTER_S)


def _about(method: str, name: str, model: str | None) -> Call:
    """Raises MidstreamError for what cannot be a name: it is a part of the path."""
    return Call(method, f"{_SAES}/{wire.checked(name, PathName, 'name')}", params=of_model(model))


class SaeCalls(Calls):
    """`model` may be left out where one is served."""

    @call
    async def register_sae(
        self,
        name: str,
        path: str,
        hook: str | None = None,
        layer: int | None = None,
        model: str | None = None,
        description: str = "",
    ) -> Sae:
        """Give the sparse autoencoder in this folder below the server's `sae_dir` a name: requests
        say `"sae": name`.

        `hook` and `layer`: only for files that do not name them (Gemma Scope's). A name that is
        taken is replaced (`replaced`).
        """
        return await self._ask(_register(name, path, hook, layer, model, description), Sae)

    @call
    async def saes(self, model: str | None = None) -> list[Sae]:
        """The sparse autoencoders of a model."""
        return Listing((await self._ask(Call("GET", _SAES, params=of_model(model)), SaePage)).saes)

    @call
    async def sae(self, name: str, model: str | None = None) -> Sae:
        """One sparse autoencoder. Raises `not_found`."""
        return await self._ask(_about("GET", name, model), Sae)

    @call
    async def unregister_sae(self, name: str, model: str | None = None) -> None:
        """Forget the name. Requests that were accepted with it keep the autoencoder."""
        await self._do(_about("DELETE", name, model))
