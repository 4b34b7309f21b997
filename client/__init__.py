"""The Python client and the command line; loads no torch, vLLM or Celery."""

from typing import TYPE_CHECKING, Any

from . import notebook as notebook  # so that results can be drawn, wherever they come from
from .extras import FACADES, added, own

if TYPE_CHECKING:
    from ..schemas.base.errors import MidstreamError as MidstreamError
    from ..schemas.prompts.selectors import Span as Span
    from ..schemas.requests.specs import (
        CaptureSpec as CaptureSpec,
        PatchSource as PatchSource,
        PatchSpec as PatchSpec,
        SteeringSpec as SteeringSpec,
    )
    from .captures.reader import CaptureReader as CaptureReader
    from .captures.row_matrix import matrix as matrix, samples as samples
    from .sdk.client import AsyncClient as AsyncClient, Client as Client
    from .sdk.typed import (
        AsyncPatchStudy as AsyncPatchStudy,
        Mapped as Mapped,
        PatchStudy as PatchStudy,
    )
    from .sdk.wire import (
        Answer as Answer,
        ServerTimeout as ServerTimeout,
        ServerUnreachable as ServerUnreachable,
        VersionMismatch as VersionMismatch,
        returned_rows as returned_rows,
    )
    from .texts import read_rows as read_rows, read_texts as read_texts
    from .values import UnknownArgument as UnknownArgument

_MODULES = {  # module → its public names, loaded on first use
    ".sdk.client": "AsyncClient Client",
    ".captures.reader": "CaptureReader",
    ".sdk.wire": "Answer VersionMismatch ServerTimeout ServerUnreachable returned_rows",
    ".texts": "read_rows read_texts",
    ".values": "UnknownArgument",
    ".captures.row_matrix": "matrix samples",
    "..schemas.requests.specs": "CaptureSpec PatchSource PatchSpec SteeringSpec",
    "..schemas.base.errors": "MidstreamError",
    "..schemas.prompts.selectors": "Span",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted([*_HOMES, *FACADES])


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return added(name)
    return own(_HOMES[name], name)
