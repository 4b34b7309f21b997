"""Index of captured rows of cached prompts: which rows are kept for which block of a prompt, and
for how many choices of sites. Kept by the scheduler, which alone decides what ranks store.

A prefix cache hit skips tokens whose rows a capture needs. The ranks therefore keep captured rows
of full prompt blocks, up to a limit of bytes, under the hash of the block (which covers everything
before it and the interventions in it). A hit may then reach as far as such rows are kept, and the
capture takes them from there. The scheduler decides all of this, in the order of the schedule, and
sends it to the ranks with the step.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ....schemas.requests.specs import RankSpec, StoredCapture

#: (hook, layer, at, kept on every rank of the stage, heads): one port of the model, over all
#: pipeline stages. `heads`: the requested heads, where ranks hold different heads, and only ranks
#: that hold one of them keep rows; empty: all.
PortName = tuple[str, int, str, bool, tuple[int, ...]]
#: Different sets of ports kept for one block at most: a client that requests other layers each time
#: must not fill the store.
PIECES = 4


class KeptBlock(NamedTuple):
    """Rows of one capture of a request at the positions of one block, stored under `number`."""

    request_id: str
    capture: int  # index in `RankSpec.captures`
    first: int  # the block's first position
    stop: int
    number: int


@dataclass
class Keeping:
    """Commands to the ranks about stored rows, executed in the order of the fields; `keep` and
    `drop` after the forward.
    """

    # take these rows: the prefix cache skips their computation
    serve: list[KeptBlock] = field(default_factory=list)
    keep: list[KeptBlock] = field(default_factory=list)  # keep these rows of the request
    drop: list[int] = field(default_factory=list)  # numbers no longer kept


class RequestCaptures:
    """Captures of a request and their ports: made once, used in every step of its prompt."""

    def __init__(self, spec: RankSpec, *, tensor_parallel: bool = False) -> None:
        """`tensor_parallel`: a stage has several ranks, most of which keep only rows that all of
        them record.
        """
        self.prompt_tokens = spec.prompt_tokens
        self.lowest_captured = spec.lowest_captured
        self.captures = [
            (capture, _ports(capture, tensor_parallel=tensor_parallel)) for capture in spec.captures
        ]


class _Piece(NamedTuple):
    ports: frozenset[PortName]
    positions: frozenset[int]  # relative to the block
    number: int
    size: int


class RowIndex:
    """Kept rows of all blocks, within `limit` bytes; the least recently used are dropped.

    `row_bytes`, `item_bytes`: bytes of a row of the hidden size, and of one of its numbers;
    `block`: tokens of a block.
    """

    def __init__(self, limit: int, row_bytes: int, block: int, item_bytes: int = 4) -> None:
        self._limit = limit
        self._row_bytes = row_bytes
        self._block = block
        self._item_bytes = item_bytes
        self._blocks: OrderedDict[bytes, list[_Piece]] = OrderedDict()  # least recently used first
        self._held = 0
        self._last = 0
        # what was looked up last, until one of its blocks changes: the scheduler asks in each step
        # for the prompt that is first in its queue while the KV cache has no room
        self._known: tuple[RequestCaptures, list[bytes]] | None = None
        self._keys = set[bytes]()
        self._reached = 0
        self._dropped: list[int] = []

    def reach(self, request: RequestCaptures, hashes: list[bytes]) -> int:
        """Return how far the prefix cache may serve this prompt: up to the first captured position
        that is not kept.
        """
        asked = request, hashes[-1:]  # the last hash covers all others
        if asked != self._known:
            self._known = asked
            self._keys = set(hashes)
            self._reached = self._look_up(request, hashes)
        return self._reached

    def _look_up(self, request: RequestCaptures, hashes: list[bytes]) -> int:
        reach = request.prompt_tokens
        for capture, ports in request.captures:
            for first, positions in self._blocks_of(request, capture, 0, request.prompt_tokens):
                place = first // self._block
                if place >= len(hashes) or self._find(hashes[place], ports, positions) is None:
                    reach = min(reach, first + min(positions))
                    break
        return reach

    def _blocks_of(
        self, request: RequestCaptures, capture: StoredCapture, first: int, stop: int
    ) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield the first position of each block in `[first, stop)` with captured positions, and
        these, relative to the block.
        """
        for begin in range(first, stop, self._block):
            end = min(begin + self._block, stop)
            positions = capture.select(begin, end, request.prompt_tokens)
            if len(positions):
                yield begin, frozenset(position - begin for position in positions)

    def serve(
        self, request_id: str, request: RequestCaptures, hashes: list[bytes], cached: int
    ) -> list[KeptBlock]:
        """Return the kept rows of captured positions below `cached`, which `reach` allowed."""
        served = []
        for number, (capture, ports) in enumerate(request.captures):
            for first, positions in self._blocks_of(request, capture, 0, cached):
                key = hashes[first // self._block]
                stop = min(first + self._block, cached)
                piece = self._find(key, ports, positions)
                self._blocks.move_to_end(key)
                kept = piece.number if piece else 0
                served.append(KeptBlock(request_id, number, first, stop, kept))
        return served

    def keep(
        self,
        request_id: str,
        request: RequestCaptures,
        hashes: list[bytes],
        start: int,
        stop: int,
    ) -> list[KeptBlock]:
        """Return the rows to keep now that the tokens `start … stop` are scheduled: those of full
        blocks of the prompt.
        """
        kept: list[KeptBlock] = []
        if start >= request.prompt_tokens:
            return kept
        last = min(min(stop, request.prompt_tokens) // self._block, len(hashes)) * self._block
        begin = start // self._block * self._block
        for number, (capture, ports) in enumerate(request.captures):
            row = self._row_bytes if capture.row is None else capture.row.size * self._item_bytes
            for first, positions in self._blocks_of(request, capture, begin, last):
                if piece := self._add(hashes[first // self._block], ports, positions, row):
                    kept.append(
                        KeptBlock(request_id, number, first, first + self._block, piece.number)
                    )
        return kept

    @property
    def pending(self) -> bool:
        """Return whether the ranks need orders even in a step without captures."""
        return bool(self._dropped)

    def dropped(self) -> list[int]:
        """Return the numbers dropped since the last call."""
        dropped = self._dropped
        self._dropped = []
        return dropped

    def clear(self) -> None:
        """Drop all rows: the prefix cache was emptied, so none of them can be served."""
        for pieces in self._blocks.values():
            self._dropped += [piece.number for piece in pieces]
        self._blocks.clear()
        self._held = 0
        self._known = None

    def _find(
        self, key: bytes, ports: frozenset[PortName], positions: frozenset[int]
    ) -> _Piece | None:
        for piece in self._blocks.get(key, ()):
            if ports <= piece.ports and positions <= piece.positions:
                return piece
        return None

    def _add(
        self, key: bytes, ports: frozenset[PortName], positions: frozenset[int], row_bytes: int
    ) -> _Piece | None:
        """Keep the rows of a block; return None if they are already kept, or too many."""
        size = len(ports) * len(positions) * row_bytes
        if size > self._limit or self._find(key, ports, positions) is not None:
            return None
        self._last += 1
        piece = _Piece(ports, positions, self._last, size)
        pieces = self._blocks.setdefault(key, [])
        self._blocks.move_to_end(key)
        covered = [old for old in pieces if old.ports <= ports and old.positions <= positions]
        for old in covered or pieces[: max(0, len(pieces) + 1 - PIECES)]:
            self._forget(pieces, old)
        pieces.append(piece)
        self._changed(key)
        self._held += size
        while self._held > self._limit:
            oldest = next(iter(self._blocks))
            self._changed(oldest)
            for old in list(self._blocks[oldest]):
                if old is not piece:
                    self._forget(self._blocks[oldest], old)
            if self._blocks[oldest]:  # only the new piece is left of this block
                self._blocks.move_to_end(oldest)
            else:
                del self._blocks[oldest]
        return piece

    def _changed(self, key: bytes) -> None:
        if key in self._keys:
            self._known = None

    def _forget(self, pieces: list[_Piece], piece: _Piece) -> None:
        pieces.remove(piece)
        self._held -= piece.size
        self._dropped.append(piece.number)


def _ports(capture: StoredCapture, *, tensor_parallel: bool) -> frozenset[PortName]:
    # Rows that only the first rank recorded are of no use to a capture that needs every rank.
    everywhere = tensor_parallel and capture.everywhere
    heads = tuple(capture.heads) if tensor_parallel else ()
    return frozenset(
        (hook, layer, capture.at, everywhere, heads)
        for hook, layers in capture.sites.items()
        for layer in layers
    )
