"""Midstream: activation steering, capture and patching on stock vLLM, as a job service."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .schemas.base.version import __version__ as __version__

if TYPE_CHECKING:
    from . import lens as lens
    from .client import (
        Answer as Answer,
        AsyncClient as AsyncClient,
        AsyncPatchStudy as AsyncPatchStudy,
        CaptureReader as CaptureReader,
        CaptureSpec as CaptureSpec,
        Client as Client,
        Mapped as Mapped,
        MidstreamError as MidstreamError,
        PatchSource as PatchSource,
        PatchSpec as PatchSpec,
        PatchStudy as PatchStudy,
        ServerTimeout as ServerTimeout,
        ServerUnreachable as ServerUnreachable,
        Span as Span,
        SteeringSpec as SteeringSpec,
        UnknownArgument as UnknownArgument,
        VersionMismatch as VersionMismatch,
        harvest as harvest,
        matrix as matrix,
        probes as probes,
        returned_rows as returned_rows,
        samples as samples,
    )

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncPatchStudy",
    "CaptureReader",
    "CaptureSpec",
    "Client",
    "Mapped",
    "MidstreamError",
    "PatchSource",
    "PatchSpec",
    "PatchStudy",
    "ServerTimeout",
    "ServerUnreachable",
    "Span",
    "SteeringSpec",
    "UnknownArgument",
    "VersionMismatch",
    "__version__",
    "harvest",
    "lens",
    "matrix",
    "probes",
    "returned_rows",
    "samples",
]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """The client's names, loaded when first asked for: servers and ranks import this package
    without it.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "lens":
        return import_module(".lens", __name__)
    from . import client

    return (
        import_module(f".client.{name}", __name__)
        if name in ("probes", "harvest")
        else getattr(client, name)
    )
