"""Calls on named objects of the server: modules, LoRA adapters, SAEs, tuned and Jacobian lenses,
probes, policies and source runs; also on global steering and rank agreement.

Steering is one entry, a list of entries, a mapping from site to array
(`{"post_block.12": vector}`), or a file in one of the formats of `client.vectors`. The mapping and
safetensors files name their tensors as `storage.formats.module_files` describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from ...schemas.artifacts.jacobian_lenses import JACOBIAN_LENSES, JacobianLens
from ...schemas.artifacts.loras import LORAS, Lora
from ...schemas.artifacts.probes import PROBES, Probe
from ...schemas.artifacts.registered import ArtifactKind
from ...schemas.artifacts.saes import SAES, Sae
from ...schemas.artifacts.tuned_lenses import TUNED_LENSES, TunedLens
from ...schemas.base.edit_sizes import EditLimit
from ...schemas.base.errors import Translated, invalid
from ...schemas.base.limits import PathName
from ...schemas.packages import part
from ...schemas.requests.policies import POLICIES, Policy, PolicyChange
from ...schemas.requests.source_runs import RunPage, RunView
from ...schemas.requests.specs import SteeringSpec
from ...schemas.requests.steering import (
    MODEL_HEADER,
    MODULES,
    Dynamic,
    GlobalRequest,
    GlobalView,
    ModuleRequest,
    ModuleView,
)
from ...storage.formats.module_files import of_sites, specs_of
from .. import vectors
from ..notebook import Listing
from ..values import checked, packed
from . import wire
from .calls import Calls, M, call
from .fields import Array, ProbeFields, Steering
from .wire import HttpCall, JobLike

if TYPE_CHECKING:
    from .typed import Fit

R = TypeVar("R")
#: The forms in which a module or global steering may be given.
SteeringInput = Steering | Sequence[Steering] | Mapping[str, Array] | Path | str

#: Timeout in seconds of a change to global steering: the server responds when every worker has
#: checked it, or when one has timed out.
CHANGE_S = 120.0
_GLOBAL = "/v1/steering/global"
_DYNAMIC = "/v1/steering/dynamic"


def entries_of(steering: SteeringInput) -> list[SteeringSpec]:
    """Return the entries of steering in any of its forms, with their tensors packed.

    Raises MidstreamError naming the field, FileNotFoundError.
    """
    if isinstance(steering, str | Path):
        with Translated(ValueError, lambda error: invalid("steering", f"{steering}: {error}")):
            return vectors.read(steering)
    if isinstance(steering, Mapping) and not steering.keys() <= set(SteeringSpec.__struct_fields__):
        arrays = {site: packed(values, f"steering.{site}") for site, values in steering.items()}
        with Translated(ValueError, lambda error: invalid("steering", str(error))):
            return of_sites(arrays)
    return checked(steering, list[SteeringSpec], "steering")


def _run(name: JobLike) -> str:
    """Return the path of a source run; `name` may also be its job."""
    return wire.path("runs", wire.id_of(name))


class NamedCalls(Calls[M], Generic[M, R]):
    """Calls on the objects of one kind, which the server stores under names, for each model.

    `model` may be omitted if the server serves only one.
    """

    _kind: ArtifactKind[Any]
    _timeout = 60.0
    _put_timeout = 60.0  # the server reads, hashes and checks files meanwhile

    @property
    def _path(self) -> str:
        return f"/v1/artifacts/{self._kind.plural}"

    def _call(
        self, method: str, name: str, model: str | None = None, more: str = "", body: Any = None
    ) -> HttpCall:
        """Build a call on one object. Raises MidstreamError for an invalid name: it becomes part of
        the path.
        """
        path = f"{self._path}/{wire.checked(name, PathName, 'name')}{more}"
        timeout = self._timeout if body is None else self._put_timeout
        return HttpCall(method, path, body, wire.given(model=model), timeout=timeout)

    async def _put(self, name: str, **fields: Any) -> R:
        """Register an object by the fields of its body."""
        body: Any = wire.checked(fields, self._kind.request, "")
        return await self._ask(self._call("PUT", name, body=body), self._kind.view)

    @call
    async def list(self, model: str | None = None) -> Listing[R]:
        """Return all of a model."""
        call = HttpCall("GET", self._path, params=wire.given(model=model), timeout=self._timeout)
        return Listing(getattr(await self._ask(call, self._kind.page), self._kind.plural))

    @call
    async def get(self, name: str, model: str | None = None) -> R:
        """Return one. Raises `not_found`."""
        return await self._ask(self._call("GET", name, model), self._kind.view)

    @call
    async def delete(self, name: str, model: str | None = None) -> None:
        """Remove a name. Requests that were accepted with it keep what it named."""
        await self._do(self._call("DELETE", name, model))


class Modules(NamedCalls[M, ModuleView]):
    """Steering modules (docs/client.md#names). Changes apply to later requests; running
    requests keep the steering with which they began.
    """

    _kind = MODULES
    _timeout = _put_timeout = CHANGE_S

    @call
    async def put(
        self,
        name: str,
        steering: SteeringInput,
        model: str | None = None,
        description: str = "",
        limit: EditLimit | None = None,
    ) -> ModuleView:
        """Store steering under a name; requests use it as `{"module": name, "scale": 2}`.

        `limit`: of the edits of every request that uses it. An existing module of that name is
        replaced (`replaced` in the view).
        """
        body = ModuleRequest(
            steering=entries_of(steering), model=model, description=description, limit=limit
        )
        return await self._ask(self._call("PUT", name, body=body), ModuleView)

    @call
    async def export(
        self, name: str, path: str | Path, format: str | None = None, model: str | None = None
    ) -> str:
        """Write a module to a file, and return the format: `safetensors`, `gguf`, `npz`, `pt` or
        `vllm-lens`, by default the one of the file's suffix.

        Raises MidstreamError for entries that the format cannot hold (see `docs/steering.md`),
        OSError.
        """
        answer = await self._send(self._call("GET", name, model, "/file"))
        wire.raise_problem(answer)
        with Translated(ValueError, lambda error: invalid("format", str(error))):
            return vectors.write(
                path, specs_of(answer.content), format, answer.headers.get(MODEL_HEADER, "")
            )


class GlobalSteeringCalls(Calls[M]):
    """Global steering, which applies to every request to a model that begins later
    (docs/client.md#global-steering), and the state of every rank
    (docs/client.md#checking-that-ranks-agree).
    """

    async def _about(self, method: str, path: str, kind: type[R], model: str | None) -> R:
        """Send a call about the state of all ranks."""
        return await self._ask(
            HttpCall(method, path, None, wire.given(model=model), timeout=CHANGE_S), kind
        )

    @call
    async def put(self, steering: SteeringInput, model: str | None = None) -> GlobalView:
        """Steer every request to the model that begins from now on; replaces earlier global
        steering.

        If a rank of any worker rejects it, raises an error with worker, rank and reason; nothing
        has changed on any worker then.
        """
        body = GlobalRequest(steering=entries_of(steering), model=model)
        return await self._ask(HttpCall("PUT", _GLOBAL, body, timeout=CHANGE_S), GlobalView)

    @call
    async def delete(self, model: str | None = None) -> GlobalView:
        """End global steering for requests that begin from now on. Raises as `put` does."""
        return await self._about("DELETE", _GLOBAL, GlobalView, model)

    @call
    async def get(self, model: str | None = None) -> GlobalView:
        """Return global steering."""
        return await self._about("GET", _GLOBAL, GlobalView, model)

    @call
    async def dynamic(self, model: str | None = None) -> Dynamic:
        """Return the current state of each rank of each worker, and whether the ranks agree."""
        return await self._about("GET", _DYNAMIC, Dynamic, model)


class Loras(NamedCalls[M, Lora]):
    """LoRA adapters (docs/vllm.md#lora-adapters)."""

    _kind = LORAS
    _put_timeout = 300.0

    @call
    async def put(
        self, name: str, path: str, model: str | None = None, description: str = ""
    ) -> Lora:
        """Register the adapter in the folder `path` below the server's `artifacts_dir/loras`;
        requests use it as `lora=name`.

        An existing adapter of that name is replaced (`replaced` in the record).
        """
        return await self._put(name, path=path, model=model, description=description)


class Saes(NamedCalls[M, Sae]):
    """Sparse autoencoders (docs/read.md#features-of-sparse-autoencoders)."""

    _kind = SAES
    _put_timeout = 600.0

    @call
    async def put(
        self,
        name: str,
        path: str,
        hook: str | None = None,
        layer: int | None = None,
        model: str | None = None,
        description: str = "",
    ) -> Sae:
        """Register the sparse autoencoder in the folder `path` below the server's
        `artifacts_dir/saes`; requests use it as `"sae": name`.

        `hook` and `layer`: only for files that do not name them (Gemma Scope's). An existing SAE of
        that name is replaced (`replaced` in the record).
        """
        return await self._put(
            name, path=path, model=model, description=description, hook=hook, layer=layer
        )


class Lenses(NamedCalls[M, TunedLens]):
    """Tuned lenses (docs/read.md#tuned-lenses)."""

    _kind = TUNED_LENSES
    _put_timeout = 600.0

    @call
    async def put(
        self,
        name: str,
        path: str,
        hook: str = "post_block",
        residual: bool = False,
        model: str | None = None,
        description: str = "",
    ) -> TunedLens:
        """Register the tuned lens in the folder `path` below the server's `artifacts_dir/lenses`;
        requests use it as `"tuned": name`.

        `hook`: the hook point whose rows h the lens maps. `residual`: the map is h + W h + b
        instead of W h + b. An existing lens of that name is replaced (`replaced` in the record).
        """
        return await self._put(
            name, path=path, model=model, description=description, hook=hook, residual=residual
        )


class Jacobians(NamedCalls[M, JacobianLens]):
    """Jacobian lenses (docs/read.md#jacobian-lenses)."""

    _kind = JACOBIAN_LENSES
    _put_timeout = 600.0

    @call
    async def put(
        self, name: str, path: str, model: str | None = None, description: str = ""
    ) -> JacobianLens:
        """Register the Jacobian lens in the folder `path` below the server's
        `artifacts_dir/lenses`; lenses use it as `"jacobian": name`, and steering with a `token`.

        `midstream convert` makes such a folder from other tools' files. An existing lens
        of that name is replaced (`replaced` in the record).
        """
        return await self._put(name, path=path, model=model, description=description)


class Probes(NamedCalls[M, Probe]):
    """Linear probes (docs/probes.md)."""

    _kind = PROBES

    @call
    async def put(
        self, /, name: str, fit: Fit | None = None, **fields: Unpack[ProbeFields]
    ) -> Probe:
        """Store a probe under a name; requests use it as `probes=[name]`.

        `fit`: what `midstream.probes.fit` returned; sets `weight`, `bias`, `labels`, `thresholds`,
        and the site of its rows, `layer` and `hook`, as far as known. `labels` may rename its
        scores, not exchange them. An existing probe of that name is replaced (`replaced` in the
        record).
        """
        if fit is not None and not hasattr(fit, "fields"):
            raise invalid(
                "fit",
                f"expected what midstream.probes.fit returned, got {type(fit).__name__}",
                hint="a vector is passed as weight=…",
            )
        known = {} if fit is None else fit.fields(fields.get("labels"))
        return await self._put(name, **known | wire.given(**fields))


class Named(NamedCalls[M, R]):
    """Calls on the objects of a kind whose body has no form of its own here."""

    @call
    async def put(self, /, name: str, **fields: Any) -> R:
        """Store one under a name, by the fields of its body. An existing one of that name is
        replaced (`replaced` in the record); other content of a policy makes a new version, which
        applies from then on.
        """
        return await self._put(name, **wire.given(**fields))


class Policies(Named[M, Policy]):
    """Policies, which act on the scores of probes (docs/probes.md#policies); requests use one as
    `policies=[name]`. `put` takes the fields of `PolicyRequest`.
    """

    _kind = POLICIES

    @call
    async def change(self, /, name: str, model: str | None = None, **fields: Any) -> Policy:
        """Make a version with another `mode`, `all_traffic`, `edits` or `told`, or other fields of
        the `condition`; `version`: whose content it restores. `fields`: those of `PolicyChange`.
        """
        body = wire.checked(wire.given(**fields), PolicyChange, "")
        return await self._ask(self._call("PATCH", name, model, body=body), Policy)


@cache
def calls_of(kind: ArtifactKind[Any]) -> Any:
    """Return the class of a kind's calls."""
    calls: Any = part(kind.calls)
    if hasattr(calls, "_kind"):
        return calls
    return type(kind.plural, (calls,), {"_kind": kind, "__doc__": calls.__doc__})


class SourceRuns(Calls[M]):
    """Source runs: captures under a name, or a job's id, from which later jobs are patched
    (docs/client.md#patching).
    """

    @call
    async def list(
        self, model: str | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> RunPage:
        """Return one page of named source runs, newest first; its `next` is the next `cursor`."""
        return await self._get("/v1/runs", RunPage, model=model, limit=limit, cursor=cursor)

    @call
    async def get(self, name: JobLike, model: str | None = None) -> RunView:
        """Return a source run's state, and the captured layers and positions of each prompt. Raises
        `not_found`.

        `name`: the run's name, or a job with a capture.
        """
        return await self._get(_run(name), RunView, model=model)

    @call
    async def delete(self, name: JobLike, model: str | None = None) -> None:
        """Delete a source run: its capture and its name.

        Raises `not_found`, and `conflict` while its job runs.
        """
        await self._do(HttpCall("DELETE", _run(name), params=wire.given(model=model)))
