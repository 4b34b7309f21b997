"""Takes the receipts of a rank."""

from typing import Protocol

from ....schemas.jobs.receipts import Receipt


class ReceiptOutbox(Protocol):
    """Takes the receipts of a rank: the outbox on its disk, or a channel to it."""

    worker: str
    rank: int

    def append(self, receipt: Receipt) -> None:
        """Take a receipt, from any thread, without waiting for the disk."""

    def depth(self) -> int:
        """Return how many receipts the relay has not acknowledged yet."""

    def flush(self, timeout: float) -> object:
        """Wait until the relay has everything, for `timeout` seconds at most."""

    def close(self) -> None:
        """Make receipts durable, then stop."""
