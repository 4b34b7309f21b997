"""The share of each tenant in the places of running requests: a tenant whose requests hold all of
them, for as long as they generate, gives one to a tenant with fewer than its share.
"""

from collections.abc import Mapping
from typing import NamedTuple


class TenantPlaces(NamedTuple):
    """The places as they are before a step, of the tenants that are here."""

    held: Mapping[str, int]
    fair: Mapping[str, float]  # by weights

    @classmethod
    def of(cls, most: int, held: Mapping[str, int], weights: Mapping[str, int]) -> "TenantPlaces":
        """Return those of tenants with these weights. `most`: all places."""
        total = sum(weights.values())
        return cls(held, {tenant: most * weight / total for tenant, weight in weights.items()})

    @property
    def short(self) -> set[str]:
        """The tenants whose share has room for another request."""
        return {
            tenant for tenant, fair in self.fair.items() if self.held.get(tenant, 0) + 1 <= fair
        }

    def closed(self, free: int) -> set[str]:
        """Return the tenants that leave the last `free` places to others."""
        short = self.short
        return self.fair.keys() - short if free <= len(short) else set()

    @property
    def crowding(self) -> str:
        """The tenant with the most places for its share."""
        return max(self.fair, key=lambda tenant: self.held.get(tenant, 0) / self.fair[tenant])
