"""Calls on named objects of the server: modules, LoRA adapters, SAEs, tuned lenses, probes and
source runs; also on global steering and rank agreement.

Steering is one entry, a list of entries, a mapping from site to array
(`{"post_block.12": vector}`), or a file in one of the formats of `client.vectors`. The mapping and
safetensors files name their tensors as `storage.formats.module_files` describes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from urllib.parse import quote

import numpy as np

from ...schemas.artifacts.loras import Lora, LoraPage, LoraRequest
from ...schemas.artifacts.probes import Action, Probe, ProbePage, ProbeRequest, WatchRequest
from ...schemas.artifacts.saes import Sae, SaePage, SaeRequest
from ...schemas.artifacts.tuned_lenses import TunedLens, TunedLensPage, TunedLensRequest
from ...schemas.base.errors import invalid
from ...schemas.base.limits import PathName
from ...schemas.requests.source_runs import RunPage, RunView
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

if TYPE_CHECKING:
    from ..probes import Fit

R = TypeVar("R")
#: The forms in which a module or global steering may be given.
SteeringInput = Steering | Sequence[Steering] | Mapping[str, np.ndarray | list[Any]] | Path | str

#: Timeout in seconds of a change to global steering: the server responds when every worker has
#: validated and applied it, or when one has timed out.
CHANGE_S = 120.0
_GLOBAL, _DYNAMIC, _RUNS = "/v1/steering/global", "/v1/steering/dynamic", "/v1/runs"


@dataclasses.dataclass(frozen=True)
class Kind(Generic[R]):
    """A kind of object that the server stores under a name, for each model."""

    path: str
    record: type[R]
    request: type  # the body that registers one
    page: type  # the body of a list
    member: str  # the field of `page` with the records
    timeout_s: float = 60.0
    register_s: float = 60.0  # the server reads, hashes and checks files meanwhile

    def call(self, method: str, name: str, model: str | None = None, more: str = "") -> Call:
        """Build a call on one object. Raises MidstreamError for an invalid name: it becomes part of
        the path.
        """
        path = f"{self.path}/{wire.checked(name, PathName, 'name')}{more}"
        return Call(method, path, params=of_model(model), timeout=self.timeout_s)


MODULES = Kind(
    "/v1/steering/modules", ModuleView, ModuleRequest, ModulePage, "modules", CHANGE_S, CHANGE_S
)
LORAS = Kind("/v1/loras", Lora, LoraRequest, LoraPage, "loras", register_s=300.0)
SAES = Kind("/v1/saes", Sae, SaeRequest, SaePage, "saes", register_s=600.0)
LENSES = Kind("/v1/lenses", TunedLens, TunedLensRequest, TunedLensPage, "lenses", register_s=600.0)
PROBES = Kind("/v1/probes", Probe, ProbeRequest, ProbePage, "probes")


def entries_of(steering: SteeringInput) -> list[SteeringSpec]:
    """Return the entries of steering in any of its forms, with their tensors packed.

    Raises MidstreamError naming the field, FileNotFoundError.
    """
    if not isinstance(steering, str | Path | Mapping) or (
        isinstance(steering, Mapping) and steering.keys() <= set(SteeringSpec.__struct_fields__)
    ):
        return wire.pack_steering(cast(Steering | Sequence[Steering], steering))
    from ...storage.formats.module_files import of_sites
    from .. import vectors

    try:
        if isinstance(steering, Mapping):
            return of_sites(
                {site: packed(values, f"steering.{site}") for site, values in steering.items()}
            )
        return vectors.read(steering)
    except ValueError as error:
        raise invalid(
            "steering", str(error) if isinstance(steering, Mapping) else f"{steering}: {error}"
        ) from error


def _run(method: str, name: str, model: str | None) -> Call:
    """Build a call on a source run; `name` may also be the id of its job."""
    return Call(method, f"{_RUNS}/{quote(name, safe='')}", params=of_model(model))


class RegisteredCalls(Calls):
    """Calls on named objects. `model` may be omitted if the server serves only one.

    Changes to modules and global steering apply to later requests; running requests keep the
    steering with which they began.
    """

    async def _register(self, kind: Kind[R], **fields: Any) -> R:
        """Register an object whose files are on the server."""
        body: Any = wire.checked(fields, kind.request, "")
        return await self._ask(
            Call("POST", kind.path, body=body, timeout=kind.register_s), kind.record
        )

    async def _every(self, kind: Kind[R], model: str | None) -> list[R]:
        call = Call("GET", kind.path, params=of_model(model), timeout=kind.timeout_s)
        return Listing(getattr(await self._ask(call, kind.page), kind.member))

    async def _named(self, kind: Kind[R], name: str, model: str | None) -> R:
        return await self._ask(kind.call("GET", name, model), kind.record)

    async def _forget(self, kind: Kind[Any], name: str, model: str | None) -> None:
        await self._do(kind.call("DELETE", name, model))

    async def _about(
        self, method: str, path: str, kind: type[R], model: str | None, body: Any = None
    ) -> R:
        """Send a call about the state of all ranks."""
        params = of_model(model)
        return await self._ask(Call(method, path, body, params, timeout=CHANGE_S), kind)

    @call
    async def register_module(
        self, name: str, steering: SteeringInput, model: str | None = None, description: str = ""
    ) -> ModuleView:
        """Store steering under a name; requests use it as `{"module": name, "scale": 2}`.

        An existing module of that name is replaced (`replaced` in the view).
        """
        call = MODULES.call("PUT", name)
        body = ModuleRequest(steering=entries_of(steering), model=model, description=description)
        return await self._ask(dataclasses.replace(call, body=body), ModuleView)

    @call
    async def modules(self, model: str | None = None) -> list[ModuleView]:
        """Return the modules of a model."""
        return await self._every(MODULES, model)

    @call
    async def module(self, name: str, model: str | None = None) -> ModuleView:
        """Return one module, with its entries. Raises `not_found`."""
        return await self._named(MODULES, name, model)

    @call
    async def export_module(
        self, name: str, path: str | Path, format: str | None = None, model: str | None = None
    ) -> str:
        """Write a module to a file, and return the format: `safetensors`, `gguf`, `npz`, `pt` or
        `vllm-lens`, by default the one of the file's suffix.

        Raises MidstreamError for entries that the format cannot hold (see `docs/vectors.md`),
        OSError.
        """
        from ...storage.formats.module_files import specs_of
        from .. import vectors

        answer = await self._send(MODULES.call("GET", name, model, "/file"))
        wire.raise_problem(answer)
        try:
            return vectors.write(
                path, specs_of(answer.content), format, answer.headers.get(MODEL_HEADER, "")
            )
        except ValueError as error:
            raise invalid("format", str(error)) from error

    @call
    async def unregister_module(self, name: str, model: str | None = None) -> None:
        """Remove a module. Requests that were accepted with it keep its edits."""
        await self._forget(MODULES, name, model)

    @call
    async def set_global(self, steering: SteeringInput, model: str | None = None) -> GlobalView:
        """Steer every request to the model that begins from now on; replaces earlier global
        steering.

        If a rank of any worker rejects it, raises an error with worker, rank and reason; nothing
        has changed on any worker then.
        """
        body = GlobalRequest(steering=entries_of(steering), model=model)
        return await self._about("PUT", _GLOBAL, GlobalView, None, body)

    @call
    async def clear_global(self, model: str | None = None) -> GlobalView:
        """End global steering for requests that begin from now on. Raises as `set_global` does."""
        return await self._about("DELETE", _GLOBAL, GlobalView, model)

    @call
    async def global_steering(self, model: str | None = None) -> GlobalView:
        """Return global steering, and whether every worker has applied it."""
        return await self._about("GET", _GLOBAL, GlobalView, model)

    @call
    async def dynamic(self, model: str | None = None) -> Dynamic:
        """Return the current state of each rank of each worker, and whether the ranks agree."""
        return await self._about("GET", _DYNAMIC, Dynamic, model)

    @call
    async def register_lora(
        self, name: str, path: str, model: str | None = None, description: str = ""
    ) -> Lora:
        """Register the adapter in the folder `path` below the server's `lora_dir`; requests use it
        as `lora=name`.

        An existing adapter of that name is replaced (`replaced` in the record).
        """
        return await self._register(
            LORAS, name=name, path=path, model=model, description=description
        )

    @call
    async def loras(self, model: str | None = None) -> list[Lora]:
        """Return the adapters of a model."""
        return await self._every(LORAS, model)

    @call
    async def lora(self, name: str, model: str | None = None) -> Lora:
        """Return one adapter. Raises `not_found`."""
        return await self._named(LORAS, name, model)

    @call
    async def unregister_lora(self, name: str, model: str | None = None) -> None:
        """Remove an adapter's name. Requests that were accepted with it keep the adapter."""
        await self._forget(LORAS, name, model)

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
        """Register the sparse autoencoder in the folder `path` below the server's `sae_dir`;
        requests use it as `"sae": name`.

        `hook` and `layer`: only for files that do not name them (Gemma Scope's). An existing SAE of
        that name is replaced (`replaced` in the record).
        """
        return await self._register(
            SAES,
            name=name,
            path=path,
            hook=hook,
            layer=layer,
            model=model,
            description=description,
        )

    @call
    async def saes(self, model: str | None = None) -> list[Sae]:
        """Return the sparse autoencoders of a model."""
        return await self._every(SAES, model)

    @call
    async def sae(self, name: str, model: str | None = None) -> Sae:
        """Return one sparse autoencoder. Raises `not_found`."""
        return await self._named(SAES, name, model)

    @call
    async def unregister_sae(self, name: str, model: str | None = None) -> None:
        """Remove an SAE's name. Requests that were accepted with it keep the SAE."""
        await self._forget(SAES, name, model)

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
        """Register the tuned lens in the folder `path` below the server's `lens_dir`; requests use
        it as `"tuned": name`.

        `hook`: the hook point whose rows h the lens maps. `residual`: the map is h + W h + b
        instead of W h + b. An existing lens of that name is replaced (`replaced` in the record).
        """
        return await self._register(
            LENSES,
            name=name,
            path=path,
            hook=hook,
            residual=residual,
            model=model,
            description=description,
        )

    @call
    async def tuned_lenses(self, model: str | None = None) -> list[TunedLens]:
        """Return the tuned lenses of a model."""
        return await self._every(LENSES, model)

    @call
    async def tuned_lens(self, name: str, model: str | None = None) -> TunedLens:
        """Return one tuned lens. Raises `not_found`."""
        return await self._named(LENSES, name, model)

    @call
    async def unregister_lens(self, name: str, model: str | None = None) -> None:
        """Remove a tuned lens's name. Requests that were accepted with it keep the lens."""
        await self._forget(LENSES, name, model)

    @call
    async def register_probe(self, /, name: str, fit: "Fit | None" = None, **fields: Any) -> Probe:
        """Store a probe under a name; requests use it as `probes=[name]`.

        `fields`: of `PUT /v1/probes/{name}`, tensors as arrays. `fit`: what `midstream.probes.fit`
        returned; sets `weight`, `bias`, `labels` and `thresholds`. An existing probe of that name
        is replaced (`replaced` in the record).
        """
        if fit is not None:
            names = ("weight", "bias", "labels", "thresholds")
            fields = {field: getattr(fit, field) for field in names} | fields
        body = wire.checked(fields, ProbeRequest, "")
        return await self._ask(dataclasses.replace(PROBES.call("PUT", name), body=body), Probe)

    @call
    async def probes(self, model: str | None = None) -> list[Probe]:
        """Return the probes of a model."""
        return await self._every(PROBES, model)

    @call
    async def probe(self, name: str, model: str | None = None) -> Probe:
        """Return one probe. Raises `not_found`."""
        return await self._named(PROBES, name, model)

    @call
    async def watch_probe(
        self, name: str, action: Action = "flag", model: str | None = None
    ) -> Probe:
        """Let the probe score every request to the model from now on."""
        call = PROBES.call("PUT", name, model, "/watch")
        return await self._ask(dataclasses.replace(call, body=WatchRequest(action=action)), Probe)

    @call
    async def unwatch_probe(self, name: str, model: str | None = None) -> Probe:
        """Let the probe score only requests that name it. Raises `not_found`."""
        return await self._ask(PROBES.call("DELETE", name, model, "/watch"), Probe)

    @call
    async def unregister_probe(self, name: str, model: str | None = None) -> None:
        """Remove a probe. Requests that were accepted with it keep it."""
        await self._forget(PROBES, name, model)

    @call
    async def source_runs(
        self, model: str | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> RunPage:
        """Return one page of named source runs, newest first; its `next` is the next `cursor`."""
        params = wire.given(model=model, limit=limit, cursor=cursor)
        return await self._ask(Call("GET", _RUNS, params=params), RunPage)

    @call
    async def source_run(self, name: str, model: str | None = None) -> RunView:
        """Return a source run's state, and the captured layers and positions of each prompt. Raises
        `not_found`.

        `name`: the run's name, or the id of a job with a capture.
        """
        return await self._ask(_run("GET", name, model), RunView)

    @call
    async def delete_run(self, name: str, model: str | None = None) -> None:
        """Delete a source run: its capture and its name.

        Raises `not_found`, and `conflict` while its job runs.
        """
        await self._do(_run("DELETE", name, model))
