"""`midstream.harvest`: datasets, exports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from midstream.client.extras import explained

if TYPE_CHECKING:
    from ..files.shards import Harvest as Harvest, open as open
    from .exports import (
        to_arrow as to_arrow,
        to_hidden_states as to_hidden_states,
        to_parquet as to_parquet,
    )
    from .training import RowDataset as RowDataset, activations as activations
    from .verification import Verification as Verification, verify as verify

_HOMES = {
    "open": "..files.shards",
    "Harvest": "..files.shards",
    "verify": ".verification",
    "Verification": ".verification",
    "to_parquet": ".exports",
    "to_arrow": ".exports",
    "to_hidden_states": ".exports",
    "RowDataset": ".training",
    "activations": ".training",
}
__all__ = [
    "Harvest",
    "RowDataset",
    "Verification",
    "activations",
    "open",
    "to_arrow",
    "to_hidden_states",
    "to_parquet",
    "verify",
]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """Import a name on first use: only `RowDataset` and `activations` need torch, and only exports
    need pyarrow.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name], __name__), name)
    except ModuleNotFoundError as error:
        raise explained(error) from None
