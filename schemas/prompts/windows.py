"""Positions that tokens and scores decide: windows, which are known only when a request has ended,
and triggers of edits, which are decided as the tokens are computed.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, Literal

import msgspec

from ..base.limits import MAX_AROUND, MAX_MARGIN, MAX_SEQUENCES, Index, Name
from ..base.records import Record

#: Positions before or after others.
Margin = Annotated[int, msgspec.Meta(ge=0, le=MAX_MARGIN)]
_Sequence = Annotated[list[Index], msgspec.Meta(min_length=1, max_length=MAX_AROUND)]


class HeadAndTail(Record):
    """The first `head` and the last `tail` positions of a request with its generated tokens."""

    head: Margin
    tail: Margin

    def __post_init__(self) -> None:
        if not self.head + self.tail:
            raise ValueError("head and tail are both 0: give at least one position")


class Occurrences(Record):
    """Occurrences of a text, or of any of some sequences of token ids, in the prompt and in what is
    generated.

    A text is found as the tokens that it has alone, or after a space.
    """

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_AROUND)] | None = None
    token_ids: (
        Annotated[list[_Sequence], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)] | None
    ) = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("give either text or token_ids")

    def hits(self, token_ids: Sequence[int]) -> list[range]:
        """Return the positions of each occurrence of its token ids; of those that end at one
        token, of the longest, which covers the others.
        """
        steps, lengths = _automaton(tuple(map(tuple, self.token_ids or ())))
        nodes = accumulate(token_ids, lambda node, token: steps[node].get(token, 0), initial=0)
        return [range(end - lengths[node], end) for end, node in enumerate(nodes) if lengths[node]]


class Around(Occurrences):
    """Occurrences with the positions `before` and `after` each of them."""

    before: Margin = 0
    after: Margin = 0


@lru_cache(maxsize=8)
def _automaton(
    sequences: tuple[tuple[int, ...], ...],
) -> tuple[list[dict[int, int]], dict[int, int]]:
    """Return the automaton of Aho and Corasick (1975), which finds all sequences with one step for
    each token, however they repeat: (of each node, the longest beginning of a sequence that was
    just read, token → next node, without those to node 0; node → the length of the longest
    sequence that ends there, or 0).
    """
    steps = [dict[int, int]()]
    lengths = dict[int, int]()
    back = {0: 0}
    for sequence in sequences:
        node = 0
        for token in sequence:
            node = steps[node].setdefault(token, len(steps))
            if node == len(steps):
                steps.append({})
        lengths[node] = len(sequence)
    queue = [0]
    for node in queue:  # grows: shorter beginnings come first
        queue += steps[node].values()
        # node → the longest beginning of a sequence that is a proper end of this one
        for token, after in steps[node].items():
            back[after] = steps[back[node]].get(token, 0) if node else 0
        lengths.setdefault(node, lengths.get(back[node], 0))
        steps[node] = steps[back[node]] | steps[node]
    return steps, lengths


class Trigger(Occurrences, omit_defaults=True):
    """Positions at which tokens let an edit be applied: the last of each occurrence, with the
    positions `after` it (`end`: all later ones). With `skip`, all other positions.
    """

    # Not `before`, nor the first tokens of an occurrence: an edit depends on no later token, so
    # that chunks, drafts and cached tokens do not change it.
    after: Margin | Literal["end"] = 0
    skip: bool = False


class When(Record):
    """Positions where the score of a probe of the request (of any label; not aggregated) is
    `at_least` this, with the positions `before` and `after` each of them.
    """

    probe: Name
    at_least: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
    before: Margin = 0
    after: Margin = 0


#: The fields of `Windowed`.
WINDOWS = ("last", "head_and_tail", "around", "when")


class Windowed(Record, omit_defaults=True):
    """The windows of a span, of which it has one or none: the `last` n positions of the request
    with its generated tokens, `head_and_tail`, `around` a text or token ids wherever they come, or
    `when` a probe's score is high.
    """

    last: Annotated[int, msgspec.Meta(ge=1, le=MAX_MARGIN)] | None = None
    head_and_tail: HeadAndTail | None = None
    around: Around | None = None
    when: When | None = None

    @property
    def is_window(self) -> bool:
        return any(getattr(self, name) is not None for name in WINDOWS)

    @property
    def ends(self) -> tuple[int, int]:
        """The numbers of first and last positions that it has; both are 0 for other windows."""
        if self.head_and_tail is not None:
            return self.head_and_tail.head, self.head_and_tail.tail
        return 0, self.last or 0

    def held(self, late: int) -> int:
        """Return the most positions whose rows a rank holds: also those that it may compute after
        the request's end, and whole pieces; 0: all. `late`: how many tokens the request may have
        ended before the ranks hear of it, beside those of steps under way.
        """
        return sum(self.ends) and sum(self.ends) + 256 + late

    # A filter once the request is over, when tokens, scores and rows are known: chunks, preemption,
    # drafts and ranks need no case of their own, and a window equals a slice of a whole capture.
    def keep(
        self, selected: Sequence[int], token_ids: Sequence[int], high: Sequence[bool] = ()
    ) -> set[int]:
        """Return the positions to store, of those `selected`, which ascend. `token_ids`: of prompt
        and generated text, all that are known; `high`: of each position, whether the probe's score
        is at least that high.
        """
        wide = self.around or self.when
        if wide is None:
            head, tail = self.ends
            return {*selected[:head], *selected[max(len(selected) - tail, 0) :]}
        hits = [range(at, at + 1) for at, is_high in enumerate(high) if is_high]
        # joined, because the surroundings of many occurrences overlap
        wanted = joined(
            range(max(hit.start - wide.before, 0), min(hit.stop + wide.after, len(token_ids)))
            for hit in (wide.hits(token_ids) if isinstance(wide, Around) else hits)
        )
        return set(wanted).intersection(selected)


def joined(ranges: Iterable[range]) -> list[int]:
    """Return the numbers in any of `ranges`, each once, ascending.

    The time grows with the number of ranges plus the number of distinct numbers: overlaps cost
    nothing.
    """
    numbers: list[int] = []
    reached = -sys.maxsize
    for part in sorted(ranges, key=lambda part: part.start):
        numbers += range(max(part.start, reached), part.stop)
        reached = max(reached, part.stop)
    return numbers
