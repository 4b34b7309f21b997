"""Midstream: activation steering, capture and patching on stock vLLM, as a job service."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Answer as Answer
    from .client import AsyncClient as AsyncClient
    from .client import CaptureReader as CaptureReader
    from .client import Client as Client
    from .client import VersionMismatch as VersionMismatch

__version__ = "0.1.0"
__all__ = ["Answer", "AsyncClient", "CaptureReader", "Client", "VersionMismatch", "__version__"]


def __getattr__(name: str) -> Any:
    """The client's names, loaded when first asked for: servers and ranks import this package without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import client

    return getattr(client, name)
