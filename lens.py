"""The TransformerLens-style facade: `HookedModel`, its cache, and the ops that its hooks take.

The package `midstream-bridges` offers it. See `docs/coming-from.md`.
"""

from typing import TYPE_CHECKING, Any

from .schemas.packages import facade

if TYPE_CHECKING:
    from midstream_bridges.lens import *  # noqa: F403 - so that its types are known

_facade = facade("lens", extra="bridges")


def __dir__() -> list[str]:
    return list(_facade.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_facade, name)
