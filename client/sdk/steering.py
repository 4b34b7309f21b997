"""Calls on modules, global steering and rank agreement.

Steering is given as a list of entries or as one, as a mapping from site to array
(`{"post_block.12": vector}`), or as a file in one of the formats of `client.vectors`:
`schemas.module_files` says how the mapping and safetensors files name their tensors.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np

from ...schemas.base.errors import invalid
from ...schemas.base.limits import PathName
from ...schemas.requests.specs import SteeringSpec
from ...schemas.requests.steering import (
    MODEL_HEADER,
    Dynamic,
    GlobalRequest,
    GlobalView,
    ModulePage,
    ModuleRequest,
    ModuleView,
)
from ..notebook import Listing
from ..values import packed
from . import wire
from .calls import Calls, call
from .wire import Call, Steering, of_model

#: What a module or global steering may be given as.
Wanted = Steering | Sequence[Steering] | Mapping[str, np.ndarray | list[Any]] | Path | str

#: A change to global steering is answered when every worker has validated and applied it, or one of
#: them took too long.
CHANGE_S = 120.0
_MODULES, _GLOBAL, _DYNAMIC = "/v1/steering/modules", "/v1/steering/global", "/v1/steering/dynamic"


def entries_of(needed: Wanted) -> list[SteeringSpec]:
    """Return the entries of any accepted form of steering, with packed tensors.

    Raises MidstreamError naming the field, FileNotFoundError.
    """
    is_entry = isinstance(needed, Mapping) and needed.keys() <= set(SteeringSpec.__struct_fields__)
    if is_entry or not isinstance(needed, str | Path | Mapping):
        return wire.pack_steering(cast(Steering | Sequence[Steering], needed))
    from ...storage.formats.module_files import of_sites
    from .. import vectors

    try:
        if isinstance(needed, Mapping):
            return of_sites(
                {site: packed(values, f"steering.{site}") for site, values in needed.items()}
            )
        return vectors.read(needed)
    except ValueError as error:
        raise invalid(
            "steering", str(error) if isinstance(needed, Mapping) else f"{needed}: {error}"
        ) from error


def _module(method: str, name: str, model: str | None, body: Any = None) -> Call:
    """Raises MidstreamError for what cannot be a name: it is a part of the path."""
    return Call(
        method,
        f"{_MODULES}/{wire.checked(name, PathName, 'name')}",
        body=body,
        params=of_model(model),
        timeout=CHANGE_S,
    )


def _register(name: str, needed: Wanted, model: str | None, description: str) -> Call:
    return _module(
        "PUT",
        name,
        None,
        ModuleRequest(steering=entries_of(needed), model=model, description=description),
    )


def _file(name: str, model: str | None) -> Call:
    call = _module("GET", name, model)
    return dataclasses.replace(call, path=f"{call.path}/file")


def _written(answer: httpx.Response, path: str | Path, format: str | None) -> str:
    from ...storage.formats.module_files import specs_of
    from .. import vectors

    wire.raise_problem(answer)
    try:
        return vectors.write(
            path, specs_of(answer.content), format, answer.headers.get(MODEL_HEADER, "")
        )
    except ValueError as error:
        raise invalid("format", str(error)) from error


def _set(needed: Wanted, model: str | None) -> Call:
    return Call(
        "PUT",
        _GLOBAL,
        body=GlobalRequest(steering=entries_of(needed), model=model),
        timeout=CHANGE_S,
    )


def _about(method: str, path: str, model: str | None) -> Call:
    return Call(method, path, params=of_model(model), timeout=CHANGE_S)


class SteeringCalls(Calls):
    """`model` may be left out where one is served.

    Changes to modules and global steering apply to later requests: running ones keep
    what they began with.
    """

    @call
    async def register_module(
        self, name: str, steering: Wanted, model: str | None = None, description: str = ""
    ) -> ModuleView:
        """Give steering a name: requests say `{"module": name, "scale": 2}`.

        A name that is taken is replaced (`replaced`).
        """
        return await self._ask(_register(name, steering, model, description), ModuleView)

    @call
    async def modules(self, model: str | None = None) -> list[ModuleView]:
        """The modules of a model."""
        return Listing((await self._ask(_about("GET", _MODULES, model), ModulePage)).modules)

    @call
    async def module(self, name: str, model: str | None = None) -> ModuleView:
        """One module, with its entries. Raises `not_found`."""
        return await self._ask(_module("GET", name, model), ModuleView)

    @call
    async def export_module(
        self, name: str, path: str | Path, format: str | None = None, model: str | None = None
    ) -> str:
        """Write a module to a file; returns the format: `safetensors`, `gguf`, `npz`, `pt` or
        `vllm-lens`, by default that of the suffix.

        Raises MidstreamError for what the format cannot hold (see `docs/vectors.md`), OSError.
        """
        return _written(await self._send(_file(name, model)), path, format)

    @call
    async def unregister_module(self, name: str, model: str | None = None) -> None:
        """Forget the name. Requests that were accepted with it keep what it was."""
        await self._do(_module("DELETE", name, model))

    @call
    async def set_global(self, steering: Wanted, model: str | None = None) -> GlobalView:
        """Steer every request to the model that begins from now on; instead of what was set before.

        Raises when a rank of any worker refuses it, with worker, rank and reason; nothing has
        changed anywhere then.
        """
        return await self._ask(_set(steering, model), GlobalView)

    @call
    async def clear_global(self, model: str | None = None) -> GlobalView:
        """End global steering, for requests that begin from now on. Raises as `set_global`."""
        return await self._ask(_about("DELETE", _GLOBAL, model), GlobalView)

    @call
    async def global_steering(self, model: str | None = None) -> GlobalView:
        """Global steering, and whether every worker has applied it."""
        return await self._ask(_about("GET", _GLOBAL, model), GlobalView)

    @call
    async def dynamic(self, model: str | None = None) -> Dynamic:
        """Return the current status of every rank of every worker, and whether they agree."""
        return await self._ask(_about("GET", _DYNAMIC, model), Dynamic)
