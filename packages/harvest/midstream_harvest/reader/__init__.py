"""`midstream.harvest`: datasets, exports."""

from typing import TYPE_CHECKING, Any

from midstream.client.extras import own

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
    "open": "files.shards",
    "Harvest": "files.shards",
    "verify": "reader.verification",
    "Verification": "reader.verification",
    "to_parquet": "reader.exports",
    "to_arrow": "reader.exports",
    "to_hidden_states": "reader.exports",
    "RowDataset": "reader.training",
    "activations": "reader.training",
}
__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a name on first use: only `RowDataset` and `activations` need torch, and only exports
    need pyarrow.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return own(f"midstream_harvest.{_HOMES[name]}", name)
