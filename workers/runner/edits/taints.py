"""Digests whose cached prefixes may have been computed without the edit.

A request whose intervention failed continues in the engine and fills cache blocks that claim the
edit.
"""

from collections.abc import Collection

from ....schemas.requests.specs import RankSpec


class Taints:
    """One per rank."""

    def __init__(self) -> None:
        # digest → the last step in which a request that has it failed
        self._failed: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._failed)

    def add(self, digest: str, step: int) -> bool:
        """Return whether this is the step's first report of the digest."""
        first = self._failed.get(digest) != step
        self._failed[digest] = step
        return first

    def renew(self, digest: str, step: int) -> None:
        """Record that a request with this digest filled blocks until this step; no effect if none
        failed.
        """
        if digest in self._failed:
            self._failed[digest] = step

    def spoil(self, spec: RankSpec, cached_tokens: int) -> bool:
        """Return whether the cached blocks served to this request may lack its edit."""
        return spec.digest in self._failed and cached_tokens > spec.first_affected

    def forget(self, step: int, running: Collection[str]) -> None:
        """The cache was reset after `step`: earlier failures are no longer served, except those in
        `running`, which still fill blocks.
        """
        self._failed = {
            digest: failed
            for digest, failed in self._failed.items()
            if failed > step or digest in running
        }
