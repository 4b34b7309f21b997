"""Index of captured rows of cached prompts; kept by the scheduler, which alone decides what ranks
store.

A capture whose prompt is served by the prefix cache would be short by what the hit skips. Rows of
full prompt blocks are therefore kept on the ranks, bounded, by the hash of their block (which
covers everything before it and the interventions in it); a hit may then reach as far as they do,
and the rows come from there. Everything is decided here, in the order of the schedule, and sent to
the ranks with the step: they never guess.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from ....schemas.requests.specs import RankSpec, StoredCapture

#: (hook, layer, at, kept on every rank of the stage, heads): one port of the model, over all
#: pipeline stages. `heads`: those asked for, where ranks hold different ones, and only those with
#: one of them keep rows; empty: all.
PortName = tuple[str, int, str, bool, tuple[int, ...]]
#: Different sets of ports kept for one block: a user who asks for other layers each time must not
#: fill the store.
PIECES = 4


class KeptBlock(NamedTuple):
    """Rows of one capture of a request, of the positions in one block, kept under a number of their
    own.
    """

    request_id: str
    capture: int  # index in `RankSpec.captures`
    first: int  # the block's first position
    stop: int
    number: int


@dataclass
class Keeping:
    """Orders to the ranks about stored rows, executed in this order, `keep` and `drop` after the
    forward.
    """

    # take these rows: the prefix cache skips their computation
    serve: list[KeptBlock] = field(default_factory=list)
    keep: list[KeptBlock] = field(default_factory=list)  # keep these rows of the request
    drop: list[int] = field(default_factory=list)  # numbers no longer kept


class Wanted:
    """Captures of a request: made once, used in every step of its prompt."""

    def __init__(self, spec: RankSpec, *, tensor_parallel: bool = False) -> None:
        """`tensor_parallel`: a stage has several ranks, most of which keep only rows that are
        recorded on all of them.
        """
        self.prompt_tokens, self.lowest_captured = spec.prompt_tokens, spec.lowest_captured
        self.captures = [
            (capture, _ports(capture, tensor_parallel=tensor_parallel)) for capture in spec.captures
        ]


class _Piece(NamedTuple):
    ports: frozenset[PortName]
    positions: frozenset[int]  # relative to the block
    number: int
    size: int


class RowIndex:
    """`limit`: bytes of kept rows; `row_bytes`: of one row of the hidden size; `item_bytes`: of one
    number; `block`: tokens of a block.
    """

    def __init__(self, limit: int, row_bytes: int, block: int, item_bytes: int = 4) -> None:
        self._limit, self._row_bytes, self._block, self._item_bytes = (
            limit,
            row_bytes,
            block,
            item_bytes,
        )
        self._blocks: OrderedDict[bytes, list[_Piece]] = OrderedDict()  # least recently used first
        self._held = 0
        self._last = 0
        self._dropped: list[int] = []

    def reach(self, needed: Wanted, hashes: list[bytes]) -> int:
        """Return how far the prefix cache may serve this prompt: up to the first captured position
        that is not kept.
        """
        reach = needed.prompt_tokens
        for capture, ports in needed.captures:
            reach = min(reach, self._reach(capture, ports, needed.prompt_tokens, hashes))
        return reach

    def _reach(
        self,
        capture: StoredCapture,
        ports: frozenset[PortName],
        prompt_tokens: int,
        hashes: list[bytes],
    ) -> int:
        for first in range(0, prompt_tokens, self._block):
            positions = capture.select(
                first, min(first + self._block, prompt_tokens), prompt_tokens
            )
            if not len(positions):
                continue
            place = first // self._block
            if (
                place >= len(hashes)
                or self._find(hashes[place], ports, frozenset(p - first for p in positions)) is None
            ):
                return int(positions[0])
        return prompt_tokens

    def serve(
        self, request_id: str, needed: Wanted, hashes: list[bytes], cached: int
    ) -> list[KeptBlock]:
        """The kept rows of captured positions below `cached`, as `reach` has promised them."""
        served = []
        for number, (capture, ports) in enumerate(needed.captures):
            for first in range(0, cached, self._block):
                positions = capture.select(
                    first, min(first + self._block, cached), needed.prompt_tokens
                )
                if len(positions):
                    key = hashes[first // self._block]
                    piece = self._find(key, ports, frozenset(p - first for p in positions))
                    self._blocks.move_to_end(key)
                    served.append(
                        KeptBlock(
                            request_id,
                            number,
                            first,
                            min(first + self._block, cached),
                            piece.number if piece else 0,
                        )
                    )
        return served

    def keep(
        self, request_id: str, needed: Wanted, hashes: list[bytes], start: int, stop: int
    ) -> list[KeptBlock]:
        """Return which rows to keep now that the tokens `start … stop` are scheduled: of full
        blocks of the prompt only.
        """
        kept: list[KeptBlock] = []
        if start >= needed.prompt_tokens:
            return kept
        last = min(min(stop, needed.prompt_tokens) // self._block, len(hashes))
        for number, (capture, ports) in enumerate(needed.captures):
            for place in range(start // self._block, last):
                first = place * self._block
                positions = capture.select(first, first + self._block, needed.prompt_tokens)
                if len(positions) and (
                    piece := self._add(
                        hashes[place],
                        ports,
                        frozenset(p - first for p in positions),
                        self._bytes_of(capture),
                    )
                ):
                    kept.append(
                        KeptBlock(request_id, number, first, first + self._block, piece.number)
                    )
        return kept

    @property
    def pending(self) -> bool:
        """Return whether the ranks must be notified even in a step without captures."""
        return bool(self._dropped)

    def dropped(self) -> list[int]:
        """Numbers freed since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def clear(self) -> None:
        """The prefix cache was emptied: nothing will be served from these rows."""
        for pieces in self._blocks.values():
            self._dropped += [piece.number for piece in pieces]
        self._blocks.clear()
        self._held = 0

    def _find(
        self, key: bytes, ports: frozenset[PortName], positions: frozenset[int]
    ) -> _Piece | None:
        for piece in self._blocks.get(key, ()):
            if ports <= piece.ports and positions <= piece.positions:
                return piece
        return None

    def _bytes_of(self, capture: StoredCapture) -> int:
        """Return the bytes of one row."""
        return self._row_bytes if capture.row is None else capture.row.size * self._item_bytes

    def _add(
        self, key: bytes, ports: frozenset[PortName], positions: frozenset[int], row_bytes: int
    ) -> _Piece | None:
        """None when the rows are kept already, or are too many."""
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
        self._held += size
        while self._held > self._limit:
            oldest = next(iter(self._blocks))
            for old in list(self._blocks[oldest]):
                if old is not piece:
                    self._forget(self._blocks[oldest], old)
            if self._blocks[oldest]:  # only the new piece is left of it
                self._blocks.move_to_end(oldest)
            else:
                del self._blocks[oldest]
        return piece

    def _forget(self, pieces: list[_Piece], piece: _Piece) -> None:
        pieces.remove(piece)
        self._held -= piece.size
        self._dropped.append(piece.number)


def _ports(capture: StoredCapture, *, tensor_parallel: bool) -> frozenset[PortName]:
    everywhere, heads = (
        tensor_parallel and capture.everywhere,
        tuple(capture.heads) if tensor_parallel else (),
    )
    return frozenset(
        (hook, layer, capture.at, everywhere, heads)
        for hook, layers in capture.sites.items()
        for layer in layers
    )
