"""Request-independent state of a rank, which is its tensors, and checks of global steering.

Requests name tensors by content hash and bring all their steering in their own specs, so this state
changes no request.
"""

from collections.abc import Sequence

from ....schemas.base.limits import MAX_STEERING_ROWS
from ....schemas.requests.specs import steering_rows
from ....schemas.requests.steering import GlobalSteering
from ..hooks.sites import RankSite
from .steering_tables import Tables


class RankState:
    """State of one rank.

    Methods raise LookupError or ValueError to refuse a call, and then change nothing.
    """

    def __init__(self, sites: Sequence[RankSite], num_layers: int, table: Tables) -> None:
        """`num_layers`: layers of the whole model, of which this stage holds some."""
        self._hooks = list(dict.fromkeys(site.hook for site in sites))
        self._num_layers = num_layers
        self._table = table
        self.vectors = table.vectors

    def check_sites(self, hook: str, layers: Sequence[int]) -> None:
        """Raises ValueError for a hook or layer that the model does not have; sites of other stages
        are valid.

        The API accepts requests for the model that was published last; a worker with other hooks or
        layers must not skip an edit silently.
        """
        if hook not in self._hooks:
            raise ValueError(f"unknown hook {hook}; valid: {', '.join(self._hooks)}")
        for layer in (min(layers), max(layers)):
            if not 0 <= layer < self._num_layers:
                raise ValueError(
                    f"layer {layer} is out of range: the model has layers 0 to "
                    f"{self._num_layers - 1}"
                )

    def check_global(self, steering: GlobalSteering) -> None:
        """Check whether a request under `steering` could be steered: tensors, shapes, sites and
        sums. Rows that requests will need are laid out ahead.
        """
        for entry in steering.entries:
            self.check_sites(entry.hook, entry.layers)
        rows = steering.common_rows()
        if len(rows) > MAX_STEERING_ROWS:
            raise ValueError(
                f"it takes {len(rows)} rows of the steering table; the limit is {MAX_STEERING_ROWS}"
            )
        # A short prompt may have the listed positions of one entry only, so check each one alone.
        listed = [
            steering_rows([entry.stored([0])])[0]
            for entry in steering.entries
            if isinstance(entry.positions, list)
        ]
        for row in rows + listed:
            self._table.prepared.get(row)
