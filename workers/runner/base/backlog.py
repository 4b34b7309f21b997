"""Backlog of a rank: the bytes of captured rows that its writers have not finished, in a file that
processes map, so that the scheduler reads it without a message.
"""

from pathlib import Path
from typing import get_args

import numpy as np

from ....schemas.base.file_names import file_stem
from ....schemas.requests.specs import WriterWork
from .config import PlaneConfig

#: Kinds of work, each with threads of its own, in the process that writes files or in the rank.
WORKS: tuple[WriterWork, ...] = get_args(WriterWork)
_COUNTS = 2 * len(WORKS)


class Backlog:
    """For each kind of work two counters of bytes, each of which is added to by one process: what
    is over so far, because it is written or has failed, and what was sent.
    """

    def __init__(self, counts: memoryview | None = None) -> None:
        """`counts`: uint64 `[2 × kinds]`; None: counters at 0 that no other process reads."""
        self.shared = np.zeros(_COUNTS, dtype=np.uint64).data if counts is None else counts

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
        return cls(np.memmap(file, dtype=np.uint64, mode="w+", shape=(_COUNTS,)).data)

    @classmethod
    def of(cls, config: PlaneConfig, rank: int, *, frees: bool = False) -> "Backlog":
        """Return the counters of a rank that has begun, to be read, or by its far writer; of a rank
        on another machine, counters that stay 0.
        """
        file = _file(config, rank, config.boot)
        if not file.exists():
            return cls()
        return cls(np.memmap(file, dtype=np.uint64, mode="r+" if frees else "r").data)

    def freed(self, work: WriterWork) -> int:
        """Return the bytes that are over."""
        return self.shared[2 * WORKS.index(work)]

    def waiting(self, work: WriterWork) -> int:
        """Return the bytes that wait or are being written."""
        at = 2 * WORKS.index(work)
        # in this order: else what is sent and over in between would make it less than it ever was
        freed = self.shared[at]
        return self.shared[at + 1] - freed

    @property
    def size(self) -> int:
        """Return the bytes that wait or are being written, of all kinds of work."""
        return sum(map(self.waiting, WORKS))

    def send(self, size: int, work: WriterWork = "writer") -> None:
        """Count what was sent, in the one process and thread that does."""
        self.shared[2 * WORKS.index(work) + 1] += size

    def free(self, size: int, work: WriterWork = "writer") -> None:
        self.shared[2 * WORKS.index(work)] += size


def _file(config: PlaneConfig, rank: int, boot: str) -> Path:
    return Path(config.outbox_dir) / f"{file_stem(config.worker)}.rank{rank}.{boot}.backlog"
