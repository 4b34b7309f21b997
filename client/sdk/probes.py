"""Calls on probes."""

from typing import TYPE_CHECKING, Any

from ...schemas.artifacts.probes import Action, Probe, ProbePage, ProbeRequest, WatchRequest
from ...schemas.base.limits import PathName
from ..notebook import Listing
from . import wire
from .calls import Calls, call
from .wire import Call, of_model

if TYPE_CHECKING:
    from ..probes import Fit

_PROBES = "/v1/probes"


def _register(name: str, fit: "Fit | None", fields: dict[str, Any]) -> Call:
    if fit is not None:
        fields = {
            "weight": fit.weight,
            "bias": fit.bias,
            "labels": fit.labels,
            "thresholds": fit.thresholds,
            **fields,
        }
    return Call("PUT", _path(name), body=wire.checked(fields, ProbeRequest, ""))


def _path(name: str) -> str:
    """Raises MidstreamError for what cannot be a name: it is a part of the path."""
    return f"{_PROBES}/{wire.checked(name, PathName, 'name')}"


def _watch(name: str, action: Action, model: str | None) -> Call:
    return Call(
        "PUT", f"{_path(name)}/watch", body=WatchRequest(action=action), params=of_model(model)
    )


class ProbeCalls(Calls):
    """`model` may be left out where one is served."""

    @call
    async def register_probe(self, /, name: str, fit: "Fit | None" = None, **fields: Any) -> Probe:
        """Give a probe a name: requests say `probes=[name]`.

        A name that is taken is replaced (`replaced`).

        `fields`: of `PUT /v1/probes/{name}`, tensors as arrays; those of `fit` (see
        `midstream.probes.fit`) are taken from it.
        """
        return await self._ask(_register(name, fit, fields), Probe)

    @call
    async def probes(self, model: str | None = None) -> list[Probe]:
        """The probes of a model."""
        return Listing(
            (await self._ask(Call("GET", _PROBES, params=of_model(model)), ProbePage)).probes
        )

    @call
    async def probe(self, name: str, model: str | None = None) -> Probe:
        """One probe. Raises `not_found`."""
        return await self._ask(Call("GET", _path(name), params=of_model(model)), Probe)

    @call
    async def watch_probe(
        self, name: str, action: Action = "flag", model: str | None = None
    ) -> Probe:
        """Let it score every request to the model from now on."""
        return await self._ask(_watch(name, action, model), Probe)

    @call
    async def unwatch_probe(self, name: str, model: str | None = None) -> Probe:
        """Let it score only requests that name it. Raises `not_found`."""
        return await self._ask(
            Call("DELETE", f"{_path(name)}/watch", params=of_model(model)), Probe
        )

    @call
    async def unregister_probe(self, name: str, model: str | None = None) -> None:
        """Forget the name. Requests that were accepted with it keep the probe."""
        await self._do(Call("DELETE", _path(name), params=of_model(model)))
