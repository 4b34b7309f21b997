"""Calls on probes, of both clients."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import httpx

from ...schemas.limits import PathName
from ...schemas.probes import Action, Probe, ProbePage, ProbeRequest, WatchRequest
from . import wire
from .wire import Call, of_model

if TYPE_CHECKING:
    from ..probes import Fit

_PROBES = "/v1/probes"


def _register(name: str, fit: "Fit | None", fields: dict[str, Any]) -> Call:
    if fit is not None:
        fields = {"weight": fit.weight, "bias": fit.bias, "labels": fit.labels, "thresholds": fit.thresholds, **fields}
    return Call("PUT", _path(name), body=wire.checked(fields, ProbeRequest, ""))


def _path(name: str) -> str:
    """Raises MidstreamError for what cannot be a name: it is a part of the path."""
    return f"{_PROBES}/{wire.checked(name, PathName, 'name')}"


def _watch(name: str, action: Action, model: str | None) -> Call:
    return Call("PUT", f"{_path(name)}/watch", body=WatchRequest(action=action), params=of_model(model))


class ProbeCalls(ABC):
    """Of the blocking client. `model` may be left out where one is served."""

    @abstractmethod
    def _send(self, call: Call) -> httpx.Response: ...

    def register_probe(self, name: str, fit: "Fit | None" = None, **fields: Any) -> Probe:
        """Give a probe a name: requests say `probes=[name]`. A name that is taken is replaced (`replaced`).

        `fields`: of `PUT /v1/probes/{name}`, tensors as arrays; those of `fit` (see `midstream.probes.fit`) are taken from it.
        """
        return wire.decode(self._send(_register(name, fit, fields)), Probe)

    def probes(self, model: str | None = None) -> list[Probe]:
        return wire.decode(self._send(Call("GET", _PROBES, params=of_model(model))), ProbePage).probes

    def probe(self, name: str, model: str | None = None) -> Probe:
        return wire.decode(self._send(Call("GET", _path(name), params=of_model(model))), Probe)

    def watch_probe(self, name: str, action: Action = "flag", model: str | None = None) -> Probe:
        """Let it score every request to the model from now on."""
        return wire.decode(self._send(_watch(name, action, model)), Probe)

    def unwatch_probe(self, name: str, model: str | None = None) -> Probe:
        return wire.decode(self._send(Call("DELETE", f"{_path(name)}/watch", params=of_model(model))), Probe)

    def unregister_probe(self, name: str, model: str | None = None) -> None:
        """Forget the name. Requests that were accepted with it keep the probe."""
        wire.raise_problem(self._send(Call("DELETE", _path(name), params=of_model(model))))


class AsyncProbeCalls(ABC):
    """Of the awaiting client: the same, as coroutines."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    async def register_probe(self, name: str, fit: "Fit | None" = None, **fields: Any) -> Probe:
        return wire.decode(await self._send(_register(name, fit, fields)), Probe)

    async def probes(self, model: str | None = None) -> list[Probe]:
        return wire.decode(await self._send(Call("GET", _PROBES, params=of_model(model))), ProbePage).probes

    async def probe(self, name: str, model: str | None = None) -> Probe:
        return wire.decode(await self._send(Call("GET", _path(name), params=of_model(model))), Probe)

    async def watch_probe(self, name: str, action: Action = "flag", model: str | None = None) -> Probe:
        return wire.decode(await self._send(_watch(name, action, model)), Probe)

    async def unwatch_probe(self, name: str, model: str | None = None) -> Probe:
        return wire.decode(await self._send(Call("DELETE", f"{_path(name)}/watch", params=of_model(model))), Probe)

    async def unregister_probe(self, name: str, model: str | None = None) -> None:
        wire.raise_problem(await self._send(Call("DELETE", _path(name), params=of_model(model))))
