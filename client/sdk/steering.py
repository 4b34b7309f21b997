"""Calls on modules, global steering and rank agreement, of both clients.

Steering is given as a list of entries or as one, as a mapping from site to array (`{"post_block.12": vector}`), or as a safetensors
file: `schemas.module_files` says how both name their tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np

from ...schemas.errors import invalid
from ...schemas.limits import PathName
from ...schemas.specs import SteeringSpec
from ...schemas.steering import Dynamic, GlobalRequest, GlobalView, ModulePage, ModuleRequest, ModuleView
from ..values import packed
from . import wire
from .wire import Call, Steering, of_model

#: What a module or global steering may be given as.
Wanted = Steering | Sequence[Steering] | Mapping[str, np.ndarray | list[Any]] | Path | str

#: A change to global steering is answered when every worker has validated and applied it, or one of them took too long.
CHANGE_S = 120.0
_MODULES, _GLOBAL, _DYNAMIC = "/v1/steering/modules", "/v1/steering/global", "/v1/steering/dynamic"


def entries_of(wanted: Wanted) -> list[SteeringSpec]:
    """The entries in whatever was given, tensors packed. Raises MidstreamError naming the field, FileNotFoundError."""
    is_entry = isinstance(wanted, Mapping) and wanted.keys() <= set(SteeringSpec.__struct_fields__)
    if is_entry or not isinstance(wanted, str | Path | Mapping):
        return wire.pack_steering(cast(Steering | Sequence[Steering], wanted))
    from ...schemas.module_files import of_sites, specs_of

    try:
        if isinstance(wanted, Mapping):
            return of_sites({site: packed(values, f"steering.{site}") for site, values in wanted.items()})
        return specs_of(Path(wanted).read_bytes())
    except ValueError as error:
        raise invalid("steering", str(error) if isinstance(wanted, Mapping) else f"{wanted}: {error}") from error


def _module(method: str, name: str, model: str | None, body: Any = None) -> Call:
    """Raises MidstreamError for what cannot be a name: it is a part of the path."""
    return Call(method, f"{_MODULES}/{wire.checked(name, PathName, 'name')}", body=body, params=of_model(model), timeout=CHANGE_S)


def _register(name: str, wanted: Wanted, model: str | None, description: str) -> Call:
    return _module("PUT", name, None, ModuleRequest(steering=entries_of(wanted), model=model, description=description))


def _set(wanted: Wanted, model: str | None) -> Call:
    return Call("PUT", _GLOBAL, body=GlobalRequest(steering=entries_of(wanted), model=model), timeout=CHANGE_S)


def _about(method: str, path: str, model: str | None) -> Call:
    return Call(method, path, params=of_model(model), timeout=CHANGE_S)


class SteeringCalls(ABC):
    """Of the blocking client. `model` may be left out where one is served.

    Changes to modules and global steering apply to later requests: running ones keep
    what they began with.
    """

    @abstractmethod
    def _send(self, call: Call) -> httpx.Response: ...

    def register_module(self, name: str, steering: Wanted, model: str | None = None, description: str = "") -> ModuleView:
        """Give steering a name: requests say `{"module": name, "scale": 2}`. A name that is taken is replaced (`replaced`)."""
        return wire.decode(self._send(_register(name, steering, model, description)), ModuleView)

    def modules(self, model: str | None = None) -> list[ModuleView]:
        return wire.decode(self._send(_about("GET", _MODULES, model)), ModulePage).modules

    def module(self, name: str, model: str | None = None) -> ModuleView:
        return wire.decode(self._send(_module("GET", name, model)), ModuleView)

    def unregister_module(self, name: str, model: str | None = None) -> None:
        """Forget the name. Requests that were accepted with it keep what it was."""
        wire.raise_problem(self._send(_module("DELETE", name, model)))

    def set_global(self, steering: Wanted, model: str | None = None) -> GlobalView:
        """Steer every request to the model that begins from now on; instead of what was set before.

        Raises when a rank of any worker refuses it, with worker, rank and reason; nothing has changed anywhere then.
        """
        return wire.decode(self._send(_set(steering, model)), GlobalView)

    def clear_global(self, model: str | None = None) -> GlobalView:
        return wire.decode(self._send(_about("DELETE", _GLOBAL, model)), GlobalView)

    def global_steering(self, model: str | None = None) -> GlobalView:
        """Global steering, and whether every worker has applied it."""
        return wire.decode(self._send(_about("GET", _GLOBAL, model)), GlobalView)

    def dynamic(self, model: str | None = None) -> Dynamic:
        """What each rank of each worker says of itself now, and whether they agree."""
        return wire.decode(self._send(_about("GET", _DYNAMIC, model)), Dynamic)


class AsyncSteeringCalls(ABC):
    """Of the awaiting client: the same, as coroutines."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    async def register_module(self, name: str, steering: Wanted, model: str | None = None, description: str = "") -> ModuleView:
        return wire.decode(await self._send(_register(name, steering, model, description)), ModuleView)

    async def modules(self, model: str | None = None) -> list[ModuleView]:
        return wire.decode(await self._send(_about("GET", _MODULES, model)), ModulePage).modules

    async def module(self, name: str, model: str | None = None) -> ModuleView:
        return wire.decode(await self._send(_module("GET", name, model)), ModuleView)

    async def unregister_module(self, name: str, model: str | None = None) -> None:
        wire.raise_problem(await self._send(_module("DELETE", name, model)))

    async def set_global(self, steering: Wanted, model: str | None = None) -> GlobalView:
        return wire.decode(await self._send(_set(steering, model)), GlobalView)

    async def clear_global(self, model: str | None = None) -> GlobalView:
        return wire.decode(await self._send(_about("DELETE", _GLOBAL, model)), GlobalView)

    async def global_steering(self, model: str | None = None) -> GlobalView:
        return wire.decode(await self._send(_about("GET", _GLOBAL, model)), GlobalView)

    async def dynamic(self, model: str | None = None) -> Dynamic:
        return wire.decode(await self._send(_about("GET", _DYNAMIC, model)), Dynamic)
