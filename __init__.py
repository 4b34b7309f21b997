"""Midstream: activation steering, capture and patching on stock vLLM, as a job service."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .schemas.base.version import __version__ as __version__

if TYPE_CHECKING:
    from . import lens as lens
    from .client import Answer as Answer
    from .client import AsyncClient as AsyncClient
    from .client import AsyncPatchStudy as AsyncPatchStudy
    from .client import CaptureReader as CaptureReader
    from .client import CaptureSpec as CaptureSpec
    from .client import Client as Client
    from .client import Mapped as Mapped
    from .client import MidstreamError as MidstreamError
    from .client import PatchSource as PatchSource
    from .client import PatchSpec as PatchSpec
    from .client import PatchStudy as PatchStudy
    from .client import ServerTimeout as ServerTimeout
    from .client import ServerUnreachable as ServerUnreachable
    from .client import Span as Span
    from .client import SteeringSpec as SteeringSpec
    from .client import UnknownArgument as UnknownArgument
    from .client import VersionMismatch as VersionMismatch
    from .client import harvest as harvest
    from .client import matrix as matrix
    from .client import probes as probes
    from .client import returned_rows as returned_rows
    from .client import samples as samples

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
