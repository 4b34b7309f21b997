"""Contents of configuration rows, laid out by a separate thread before a request needs them, and
kept while there is room.

Laying out 80 layers' vectors takes milliseconds, which the model thread does not have between two
steps. A prepared row equals what `RowTable.content` would return when it is needed, bit for bit, so
ranks agree no matter which thread laid it out. Rows with a source run's rows are not kept: each is
used once.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain

import torch

from ....schemas.requests.source_runs import is_row
from ....schemas.requests.specs import TENSORS, SteeringRow
from .vector_pool import JoinedRow

logger = logging.getLogger(__name__)

#: Limit of kept rows; the least recently used are dropped. On an accelerator they are in pinned
#: memory.
KEPT_BYTES = 64 << 20
#: Calls of `expect` that wait for the thread at most; further ones are dropped, as mere hints.
WAITING = 256


class PreparedRows:
    """Prepared rows of one rank. Only the model thread calls `get`."""

    def __init__(
        self,
        make: Callable[[SteeringRow], JoinedRow],
        missing: Callable[[set[str]], set[str]],
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`make` lays a row out, in any thread. `missing` returns which of some tensors this rank
        lacks.
        """
        self._make = make
        self._missing = missing
        self._room = kept_bytes
        self._kept: OrderedDict[str, JoinedRow] = OrderedDict()  # by `SteeringRow.key`
        self._size = 0  # bytes of all kept rows
        self._under_way = ""  # key of the row that the thread lays out now; empty: of none
        self._lock = threading.Condition()  # notified whenever the thread has laid a row out
        self._expected: queue.Queue[Callable[[], Sequence[SteeringRow]] | None] = queue.Queue(
            WAITING
        )
        self._thread = threading.Thread(
            target=self._run, name="midstream-row-preparer", daemon=True
        )

    def start(self) -> None:
        """Start the thread; without it, rows are laid out when they are needed."""
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._expected.put(None)
            self._thread.join()

    def expect(self, rows: Callable[[], Sequence[SteeringRow]]) -> None:
        """Have the thread prepare rows that requests will need soon. The thread calls `rows`.

        A row that cannot be laid out is refused only when it is needed.
        """
        if self._thread.is_alive() and not self._expected.full():
            self._expected.put(rows)

    def get(self, spec: SteeringRow) -> JoinedRow:
        """Return the row's content. Raises what `make` raises."""
        missing = self._missing(set(chain.from_iterable(map(TENSORS, spec.entries))))
        if any(map(is_row, missing)):
            return self._make(spec)
        if not missing:  # else `make` refuses the row, even if it is kept
            with self._lock:
                while self._under_way == spec.key:
                    self._lock.wait()
                if spec.key in self._kept:
                    self._kept.move_to_end(spec.key)
                    return self._kept[spec.key]
        joined = self._make(spec)
        self._keep(spec.key, joined)
        return joined

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._size = 0

    def _keep(self, key: str, joined: JoinedRow) -> None:
        with self._lock:
            if (previous := self._kept.pop(key, None)) is not None:
                self._size -= previous.size
            self._kept[key] = joined
            self._size += joined.size
            while len(self._kept) > 1 and self._size > self._room:
                self._size -= self._kept.popitem(last=False)[1].size

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (expected := self._expected.get()) is not None:
            try:
                rows = expected()
            except Exception as error:  # these rows are refused when they are needed
                logger.debug("cannot read expected rows: %s", error)
                continue
            for spec in rows:
                self._prepare(spec)

    def _prepare(self, spec: SteeringRow) -> None:
        if any(is_row(name) for entry in spec.entries for name in entry.tensors):
            return
        with self._lock:
            if spec.key in self._kept:
                return
            self._under_way = spec.key
        try:
            self._keep(spec.key, self._make(spec))
        except Exception as error:
            logger.debug("cannot prepare row %s: %s", spec.key, error)
        finally:
            with self._lock:
                self._under_way = ""
                self._lock.notify_all()
