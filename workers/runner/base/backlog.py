"""Backlog of a rank: the bytes of captured rows that its writers have not finished, in a file that
processes map, so that the scheduler reads it without a message.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ....broker.receipts.outbox_store import file_stem

if TYPE_CHECKING:  # it imports torch, which other processes than ranks do not need
    from .config import PlaneConfig


class Backlog:
    """Two counters of bytes, each of which is added to by one process: what was sent to the writers
    so far, and what of it is over, because it is written or has failed.
    """

    def __init__(self, counts: np.ndarray | None = None) -> None:
        """`counts`: uint64 `[2]`; None: counters at 0 that no other process reads."""
        #: What is over, and what was sent. To be read in this order: else what is sent and over in
        #: between would make the backlog less than it ever was.
        self.counts = memoryview(np.zeros(2, dtype=np.uint64) if counts is None else counts)

    @classmethod
    def begin(cls, config: "PlaneConfig", rank: int) -> "Backlog":
        """Return a rank's counters, at 0; remove the files of its earlier starts. Raises
        OSError.
        """
        for earlier in Path(config.outbox_dir).glob(_file(config, rank, "*").name):
            earlier.unlink(missing_ok=True)
        file = _file(config, rank, config.boot)
        return cls(np.memmap(file, dtype=np.uint64, mode="w+", shape=(2,)))

    @classmethod
    def of(cls, config: "PlaneConfig", rank: int) -> "Backlog":
        """Return the counters of a rank that has begun, to be read; of a rank on another machine,
        counters that stay 0.
        """
        file = _file(config, rank, config.boot)
        return cls(np.memmap(file, dtype=np.uint64, mode="r") if file.exists() else None)

    @property
    def size(self) -> int:
        """Return the bytes that wait or are being written."""
        freed, sent = self.counts
        return int(sent - freed)

    def send(self, size: int) -> None:
        self.counts[1] += size

    def free(self, size: int) -> None:
        self.counts[0] += size


def _file(config: "PlaneConfig", rank: int, boot: str) -> Path:
    return Path(config.outbox_dir) / f"{file_stem(config.worker)}.rank{rank}.{boot}.backlog"
