"""How do people and programs use Midstream? The Python client, the CLI, and what starts the stack on one machine.

Importing this is light: no torch, no vLLM, no Celery.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .extras import explained

if TYPE_CHECKING:
    from ..schemas.errors import MidstreamError as MidstreamError
    from ..schemas.selectors import Span as Span
    from ..schemas.specs import CaptureSpec as CaptureSpec
    from ..schemas.specs import PatchSource as PatchSource
    from ..schemas.specs import PatchSpec as PatchSpec
    from ..schemas.specs import SteeringSpec as SteeringSpec
    from .http import AsyncClient as AsyncClient
    from .http import Client as Client
    from .patch_study import AsyncPatchStudy as AsyncPatchStudy
    from .patch_study import PatchStudy as PatchStudy
    from .plain import UnknownArgument as UnknownArgument
    from .reader import CaptureReader as CaptureReader
    from .row_matrix import matrix as matrix
    from .row_matrix import samples as samples
    from .wire import Answer as Answer
    from .wire import ServerUnreachable as ServerUnreachable
    from .wire import VersionMismatch as VersionMismatch
    from .wire import returned_rows as returned_rows

_HOMES = {
    "AsyncClient": ".http", "Client": ".http", "CaptureReader": ".reader", "Answer": ".wire", "VersionMismatch": ".wire",
    "ServerUnreachable": ".wire", "returned_rows": ".wire", "UnknownArgument": ".plain", "matrix": ".row_matrix", "samples": ".row_matrix",
    "PatchStudy": ".patch_study", "AsyncPatchStudy": ".patch_study", "CaptureSpec": "..schemas.specs", "PatchSource": "..schemas.specs",
    "PatchSpec": "..schemas.specs", "SteeringSpec": "..schemas.specs", "MidstreamError": "..schemas.errors", "Span": "..schemas.selectors",
}  # fmt: skip
__all__ = [
    "Answer", "AsyncClient", "AsyncPatchStudy", "CaptureReader", "CaptureSpec", "Client", "MidstreamError", "PatchSource", "PatchSpec",
    "PatchStudy", "ServerUnreachable", "Span", "SteeringSpec", "UnknownArgument", "VersionMismatch", "matrix", "returned_rows", "samples",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name], __name__), name)
    except ModuleNotFoundError as error:
        raise explained(error) from None
