"""Steering digests whose cached prefix blocks may have been computed without the edit.

A request whose intervention failed continues in the engine, and its blocks enter the prefix cache
under a digest that includes the edit.
"""

from collections.abc import Collection

from ....schemas.requests.specs import RankSpec


class Taints:
    """Digests of failed requests; one instance per rank."""

    def __init__(self) -> None:
        # digest → the last step in which a failed request with this digest filled cache blocks
        self._failed: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._failed)

    def add(self, digest: str, step: int) -> bool:
        """Record a failure; return whether it is the digest's first in this step."""
        first = self._failed.get(digest) != step
        self._failed[digest] = step
        return first

    def renew(self, digest: str, step: int) -> None:
        """Record that a request with this digest still fills blocks in this step; no effect if no
        request with it failed.
        """
        if digest in self._failed:
            self._failed[digest] = step

    def affects(self, spec: RankSpec, cached_tokens: int) -> bool:
        """Return whether the cached blocks served to this request may lack its edit."""
        return spec.digest in self._failed and cached_tokens > spec.first_affected

    def forget(self, step: int, running: Collection[str]) -> None:
        """Drop failures up to `step`, after which the cache was reset, except digests in `running`,
        whose requests still fill blocks.
        """
        self._failed = {
            digest: failed
            for digest, failed in self._failed.items()
            if failed > step or digest in running
        }
