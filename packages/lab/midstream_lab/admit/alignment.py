"""Aligns clean and corrupt prompts: pairs their positions, and says why a token has no counterpart.

With `auto`, prompts of unequal length are never paired by position number: only tokens known to
correspond are, and all others are listed with the reason.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import NamedTuple

from midstream.schemas.prompts.selectors import SelectorError, as_ranges

from ..records.sweeps import Alignment
from .continuations import ReadPrompt

#: Pairs of equal tokens that a diff may have to compare; with more repetitions it takes long and
#: means little.
MOST_MATCHES = 1 << 16
#: Ranges of positions that a note or reason lists.
SHOWN_RANGES = 8
#: Notes about differing blocks of one pair; the others are counted.
SHOWN_BLOCKS = 16
CLEAN = "clean"
CORRUPT = "corrupt"


@dataclass
class Aligned:
    """`pairs`: (clean, corrupt) positions, in the order of the clean ones."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    # position → why it has no counterpart
    clean_alone: dict[int, str] = field(default_factory=dict)
    corrupt_alone: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what a reader of the result should know

    def counterparts(self, patched: str) -> dict[int, int]:
        """Map each position of the `patched` prompt, clean or corrupt, to one of the other.

        If there are several, the first.
        """
        if patched == CLEAN:
            return dict(reversed(self.pairs))
        return {corrupt: clean for clean, corrupt in reversed(self.pairs)}

    def alone(self, patched: str) -> dict[int, str]:
        return self.clean_alone if patched == CLEAN else self.corrupt_alone


def align(
    clean: ReadPrompt,
    corrupt: ReadPrompt,
    how: Alignment | Sequence[tuple[int, int]] = "auto",
    patched: str = CORRUPT,
) -> Aligned:
    """Return the counterparts of two prompts.

    `patched`: the prompt whose positions an explicit list may name only once.

    Raises SelectorError, whose `at` is the place in the list, for a position outside a prompt or
    named twice, and for prompts that differ too much for `auto`.
    """
    if not isinstance(how, str):
        return _listed(clean, corrupt, how, patched)
    if how == "auto" and len(clean.ids) != len(corrupt.ids):
        return _by_diff(clean, corrupt)
    made = _shifted(clean, corrupt, len(corrupt.ids) - len(clean.ids) if how == "right" else 0, how)
    if how == "auto":
        made.notes += _differences(clean, corrupt)
    return made


# --- The ways to align


def _shifted(clean: ReadPrompt, corrupt: ReadPrompt, shift: int, how: str) -> Aligned:
    """Pair clean position p with corrupt position p + shift where both exist."""
    made = Aligned(
        [
            (place, place + shift)
            for place in range(len(clean.ids))
            if 0 <= place + shift < len(corrupt.ids)
        ]
    )
    edge, names = ("end", "beginning") if how == "left" else ("beginning", "end")
    reason = (
        f"it lies beyond the {edge} of the other prompt, counted from the {names} (alignment {how})"
    )
    _leave_alone(made, clean, corrupt, reason)
    if made.clean_alone or made.corrupt_alone:
        longer, alone, tokens = (
            (CLEAN, made.clean_alone, clean)
            if made.clean_alone
            else (CORRUPT, made.corrupt_alone, corrupt)
        )
        made.notes.append(
            f"alignment {how}: {tokens.quoted(alone)}, {_at(alone)} of the {longer} prompt, lies "
            "beyond the other prompt and was left out"
        )
    return made


def _by_diff(clean: ReadPrompt, corrupt: ReadPrompt) -> Aligned:
    """Align equal tokens at both ends, and the tokens between them by a diff."""
    made = Aligned()
    for tag, ours, theirs in _blocks(clean.ids, corrupt.ids):
        if len(ours) == len(theirs):
            made.pairs += zip(ours, theirs, strict=True)
            if tag == "replace":
                made.notes.append(
                    f"{clean.quoted(ours)} (clean, {as_ranges(ours)}) was aligned with "
                    f"{corrupt.quoted(theirs)} (corrupt, {as_ranges(theirs)}), token by token"
                )
            continue
        why = _why_alone(clean, corrupt, ours, theirs)
        made.clean_alone |= dict.fromkeys(ours, why)
        made.corrupt_alone |= dict.fromkeys(theirs, why)
        made.notes.append(f"{why}; left out: {_places(ours, theirs)}")
    if more := len(made.notes[SHOWN_BLOCKS:]):
        made.notes[SHOWN_BLOCKS:] = [
            (
                f"and {more} more {'block differs' if more == 1 else 'blocks differ'}: these "
                "prompts have little in common"
            )
        ]
    return made


def _why_alone(clean: ReadPrompt, corrupt: ReadPrompt, ours: range, theirs: range) -> str:
    if not theirs:
        return f"{clean.quoted(ours)} is in the clean prompt only, so it has no counterpart"
    if not ours:
        return f"{corrupt.quoted(theirs)} is in the corrupt prompt only, so it has no counterpart"
    return (
        f"{clean.quoted(ours)} of the clean prompt has {_tokens(len(ours))} and "
        f"{corrupt.quoted(theirs)}, which takes its place in the corrupt prompt, has "
        f"{_tokens(len(theirs))}, so they have no counterparts (name them as a span, or give the "
        "alignment as a list)"
    )


def _blocks(clean: Sequence[int], corrupt: Sequence[int]) -> list[tuple[str, range, range]]:
    """Return `SequenceMatcher.get_opcodes`' blocks: tag, positions in clean and in corrupt;
    complete and in order.
    """
    shorter = min(len(clean), len(corrupt))
    head = next((place for place in range(shorter) if clean[place] != corrupt[place]), shorter)
    tail = next(
        (place for place in range(shorter - head) if clean[-1 - place] != corrupt[-1 - place]),
        shorter - head,
    )
    ends = len(clean) - tail, len(corrupt) - tail
    middles = clean[head : ends[0]], corrupt[head : ends[1]]
    if _matches(*middles) > MOST_MATCHES:
        raise SelectorError(
            f"the prompts differ in too many tokens (from token {head} on) to be aligned: "
            "use `left` or `right`, or give pairs of positions"
        )
    result = SequenceMatcher(None, *middles, autojunk=False).get_opcodes()
    return [
        ("equal", range(head), range(head)),
        *(
            (tag, range(head + first, head + last), range(head + other, head + end))
            for tag, first, last, other, end in result
        ),
        ("equal", range(ends[0], len(clean)), range(ends[1], len(corrupt))),
    ]


def _matches(some: Sequence[int], rest: Sequence[int]) -> int:
    """Return the number of pairs of equal tokens, which a diff compares."""
    counts = Counter(rest)
    return sum(count * counts[token] for token, count in Counter(some).items())


def _differences(clean: ReadPrompt, corrupt: ReadPrompt) -> list[str]:
    """Return notes on prompts of equal length that were aligned position by position."""
    differ = [
        place
        for place, (one, other) in enumerate(zip(clean.ids, corrupt.ids, strict=True))
        if one != other
    ]
    if not differ:
        return []
    separate = differ[-1] - differ[0] >= len(differ)
    moved = _moved(clean, corrupt, differ[0], differ[-1] + 1)
    if not separate and not moved:
        return []
    qualifier = (
        f"and {moved} occurs in both at different positions"
        if moved
        else "which are not contiguous"
    )
    return [
        "the prompts are equally long and differ at positions "
        f"{as_ranges(differ, SHOWN_RANGES)}, {qualifier}: they were aligned by "
        "position, which is wrong if one token was inserted and another removed "
        "elsewhere (then give the alignment as a list)"
    ]


def _moved(clean: ReadPrompt, corrupt: ReadPrompt, first: int, stop: int) -> str:
    """Return tokens that both prompts have, at different positions; empty if there are none, or too
    many to compare.
    """
    middles = clean.ids[first:stop], corrupt.ids[first:stop]
    if _matches(*middles) > MOST_MATCHES:
        return ""
    result = SequenceMatcher(None, *middles, autojunk=False).get_matching_blocks()
    return ", ".join(
        clean.quoted(range(first + one, first + one + size))
        for one, other, size in result
        if size and one != other
    )


def _listed(
    clean: ReadPrompt, corrupt: ReadPrompt, pairs: Sequence[tuple[int, int]], patched: str
) -> Aligned:
    """Apply the user's list of pairs.

    A row may be written at several positions, but only one at each.
    """
    made = Aligned()
    named: dict[int, int] = {}
    for index, places in enumerate(pairs):
        resolved = []
        for side, (place, tokens, whose) in enumerate(
            zip(places, (clean, corrupt), (CLEAN, CORRUPT), strict=True)
        ):
            total = len(tokens.ids)
            if not -total <= place < total:
                raise SelectorError(
                    (
                        f"position {place} is out of range: the {whose} prompt has positions 0 to "
                        f"{total - 1}"
                    ),
                    f"[{index}][{side}]",
                )
            resolved.append(place % total)
        target = resolved[0] if patched == CLEAN else resolved[1]
        if target in named:
            raise SelectorError(
                f"position {target} of the {patched} prompt (the patched one) is listed twice",
                f"[{index}]",
            )
        named[target] = index
        made.pairs.append((resolved[0], resolved[1]))
    if not made.pairs:
        raise SelectorError(
            'no pair of positions given: give at least one, or "auto", "left" or "right"'
        )
    made.pairs.sort()
    _leave_alone(made, clean, corrupt, "the alignment does not list it")
    return made


def _leave_alone(made: Aligned, clean: ReadPrompt, corrupt: ReadPrompt, reason: str) -> None:
    """Record the reason for all positions without a counterpart."""
    ours = {*range(len(clean.ids))}.difference(one for one, _ in made.pairs)
    theirs = {*range(len(corrupt.ids))}.difference(other for _, other in made.pairs)
    made.clean_alone = dict.fromkeys(sorted(ours), reason)
    made.corrupt_alone = dict.fromkeys(sorted(theirs), reason)


# --- Spans


class Matched(NamedTuple):
    """The paired tokens of a span. `pairs`: (clean, corrupt), ascending."""

    pairs: list[tuple[int, int]]
    reason: str = ""  # why there are no pairs
    note: str = ""  # what was left out


def match_spans(
    name: str,
    clean: Sequence[int],
    corrupt: Sequence[int],
    texts: tuple[ReadPrompt, ReadPrompt],
) -> Matched:
    """Pair the tokens of two corresponding spans, given as ascending positions; spans of unequal
    length are paired from their ends.
    """
    length = min(len(clean), len(corrupt))
    pairs = list(zip(clean[len(clean) - length :], corrupt[len(corrupt) - length :], strict=True))
    if len(clean) == len(corrupt):
        return Matched(pairs)
    longer, text, left = (
        (CLEAN, texts[0], clean[:-length])
        if len(clean) > length
        else (CORRUPT, texts[1], corrupt[:-length])
    )
    return Matched(
        pairs,
        note=f"span {name!r} has {_tokens(len(clean))} in the clean prompt and {len(corrupt)} in "
        f"the corrupt one: they were aligned from the right, and {text.quoted(left)} of the "
        f"{longer} prompt ({_at(left)}) was left out",
    )


def match_span(name: str, clean: Sequence[int], aligned: Aligned, text: ReadPrompt) -> Matched:
    """Pair a span of the clean prompt with its counterparts in the corrupt one."""
    needed = set(clean)
    pairs = [(place, other) for place, other in aligned.pairs if place in needed]
    alone = sorted(needed.difference(place for place, _ in pairs))
    if not alone:
        return Matched(pairs)
    why = "; ".join(dict.fromkeys(aligned.clean_alone[place] for place in alone))
    if not pairs:
        return Matched([], reason=why)
    return Matched(
        pairs,
        note=(
            f"in span {name!r}, {text.quoted(alone)} ({_at(alone)} of the clean prompt) "
            f"was left out: {why}"
        ),
    )


def _at(places: Collection[int]) -> str:
    return f"position{'s' if len(places) > 1 else ''} {as_ranges(places, SHOWN_RANGES)}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _places(clean: range, corrupt: range) -> str:
    places_of = [
        f"{whose} {as_ranges(places)}"
        for whose, places in ((CLEAN, clean), (CORRUPT, corrupt))
        if places
    ]
    return ", ".join(places_of)
