"""Midstream: activation steering, capture and patching on stock vLLM, as a job service."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .schemas.base.version import __version__ as __version__

if TYPE_CHECKING:
    from midstream_harvest import reader as harvest  # noqa: F401
    from midstream_lab.client import probes as probes

    from . import lens as lens
    from .client import *  # noqa: F403 - all of its names

#: The names of `client`, which is loaded when one is first used.
_OF_CLIENT = (
    *("Answer", "AsyncClient", "AsyncPatchStudy", "CaptureReader", "CaptureSpec", "Client"),
    *("Mapped", "MidstreamError", "PatchSource", "PatchSpec", "PatchStudy", "ServerTimeout"),
    *("ServerUnreachable", "Span", "SteeringSpec", "UnknownArgument", "VersionMismatch"),
    *("matrix", "read_rows", "read_texts", "returned_rows", "samples"),
)
#: Room of a package beside this one → the extra that installs it.
_ROOMS = {"harvest": "harvest", "probes": "lab"}
__all__ = ["__version__", "lens", *_ROOMS, *_OF_CLIENT]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """The client's names, loaded when first asked for: servers and ranks import this package
    without it.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _ROOMS:
        from .schemas.packages import facade

        return facade(name, _ROOMS[name])
    if name == "lens":
        return import_module(".lens", __name__)
    return getattr(import_module(".client", __name__), name)
