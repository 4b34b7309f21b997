"""Backlog of a rank: the bytes of captured rows that its writers have not finished, in a file that
processes map, so that the scheduler reads it without a message.
"""

from pathlib import Path

import numpy as np

from ....broker.receipts.outbox_store import file_stem
from .config import PlaneConfig

#: A rank's writers: in a process of its own, and of what needs the model among the rank's threads.
FAR, NEAR = 0, 2


class Backlog:
    """For each writer two counters of bytes, each of which is added to by one process: what is over
    so far, because it is written or has failed, and what was sent.
    """

    def __init__(self, counts: memoryview | None = None, writer: int = FAR) -> None:
        """`counts`: uint64 `[4]`; None: counters at 0 that no other process reads. `writer`: whose
        counters are added to.
        """
        self.shared = np.zeros(4, dtype=np.uint64).data if counts is None else counts
        self._writer = writer

    @classmethod
    def begin(cls, config: PlaneConfig, rank: int) -> "Backlog":
        """Return a rank's counters, at 0; remove the files of its earlier starts. Raises
        OSError.
        """
        folder = Path(config.outbox_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob(_file(config, rank, "*").name):
            earlier.unlink(missing_ok=True)
        file = _file(config, rank, config.boot)
        return cls(np.memmap(file, dtype=np.uint64, mode="w+", shape=(4,)).data)

    @classmethod
    def of(cls, config: PlaneConfig, rank: int, *, frees: bool = False) -> "Backlog":
        """Return the counters of a rank that has begun, to be read, or by its far writer; of a rank
        on another machine, counters that stay 0.
        """
        file = _file(config, rank, config.boot)
        if not file.exists():
            return cls()
        return cls(np.memmap(file, dtype=np.uint64, mode="r+" if frees else "r").data)

    @property
    def counts(self) -> tuple[int, int]:
        """Return the bytes that are over, and those that were sent. Read in this order: else what
        is sent and over in between would make the backlog less than it ever was.
        """
        far, near = self.shared[FAR], self.shared[NEAR]
        return far + near, self.shared[FAR + 1] + self.shared[NEAR + 1]

    @property
    def size(self) -> int:
        """Return the bytes that wait or are being written."""
        freed, sent = self.counts
        return sent - freed

    def send(self, size: int) -> None:
        """Count what was sent, in the one process and thread that does."""
        self.shared[self._writer + 1] += size

    def free(self, size: int) -> None:
        self.shared[self._writer] += size


def _file(config: PlaneConfig, rank: int, boot: str) -> Path:
    return Path(config.outbox_dir) / f"{file_stem(config.worker)}.rank{rank}.{boot}.backlog"
