"""Calls on tuned lenses."""

from ...schemas.base.limits import PathName
from ...schemas.requests.lens import TunedLens, TunedLensPage, TunedLensRequest
from ..notebook import Listing
from . import wire
from .calls import Calls, call
from .wire import Call, of_model

_LENSES = "/v1/lenses"
#: The server reads, hashes and checks the files.
REGISTER_S = 600.0


def _register(
    name: str, path: str, hook: str, residual: bool, model: str | None, description: str
) -> Call:
    fields = {
        "name": name,
        "path": path,
        "hook": hook,
        "residual": residual,
        "model": model,
        "description": description,
    }
    return Call(
        "POST", _LENSES, body=wire.checked(fields, TunedLensRequest, ""), timeout=REGISTER_S
    )


def _about(method: str, name: str, model: str | None) -> Call:
    """Raises MidstreamError for what cannot be a name: it is a part of the path."""
    return Call(method, f"{_LENSES}/{wire.checked(name, PathName, 'name')}", params=of_model(model))


class TunedLensCalls(Calls):
    """`model` may be left out where one is served."""

    @call
    async def register_lens(
        self,
        name: str,
        path: str,
        hook: str = "post_block",
        residual: bool = False,
        model: str | None = None,
        description: str = "",
    ) -> TunedLens:
        """Give the tuned lens in this folder below the server's `lens_dir` a name: requests say
        `"tuned": name`.

        `hook`: whose rows its maps take. `residual`: h + W h + b instead of W h + b. A name that is
        taken is replaced (`replaced`).
        """
        return await self._ask(_register(name, path, hook, residual, model, description), TunedLens)

    @call
    async def tuned_lenses(self, model: str | None = None) -> list[TunedLens]:
        """The tuned lenses of a model."""
        return Listing(
            (await self._ask(Call("GET", _LENSES, params=of_model(model)), TunedLensPage)).lenses
        )

    @call
    async def tuned_lens(self, name: str, model: str | None = None) -> TunedLens:
        """One tuned lens. Raises `not_found`."""
        return await self._ask(_about("GET", name, model), TunedLens)

    @call
    async def unregister_lens(self, name: str, model: str | None = None) -> None:
        """Forget the name. Requests that were accepted with it keep the tuned lens."""
        await self._do(_about("DELETE", name, model))
