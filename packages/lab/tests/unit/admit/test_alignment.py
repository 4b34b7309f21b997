"""Does a row go to its counterpart's position and no other, and is every token without one named
with the reason?
"""

from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import assume, example, given, strategies as st

from midstream.schemas.prompts.selectors import SelectorError
from midstream_lab.admit import alignment
from midstream_lab.admit.alignment import Aligned, align, match_span, match_spans
from midstream_lab.admit.continuations import ReadPrompt
from midstream_lab.records.sweeps import Alignment

#: Few different tokens, so that they repeat.
IDS = st.lists(st.integers(0, 5), min_size=1, max_size=14)


def tokens(*words: str) -> ReadPrompt:
    ids = [sum(ord(sign) << 8 * place for place, sign in enumerate(word)) for word in words]
    return ReadPrompt(ids, [*words])


def numbered(ids: list[int]) -> ReadPrompt:
    return ReadPrompt(ids, [f" {token}" for token in ids])


EIFFEL = tokens("The", " Eiffel", " Tower", " is", " in", " the", " city", " of")
COLOSSEUM = tokens("The", " Colosseum", " is", " in", " the", " city", " of")


@given(IDS, IDS, st.sampled_from(get_args(Alignment)))
@example([0, 1], [1, 0, 1], "auto")
def test_counterparts_are_in_order_and_every_other_token_has_a_reason(
    clean: list[int], corrupt: list[int], how: Alignment
) -> None:
    made = align(numbered(clean), numbered(corrupt), how)
    assert all(
        one < next_one and other < next_other
        for (one, other), (next_one, next_other) in pairwise(made.pairs)
    )
    for side, ids, alone in ((0, clean, made.clean_alone), (1, corrupt, made.corrupt_alone)):
        assert sorted([*[pair[side] for pair in made.pairs], *alone]) == list(range(len(ids))), (
            "each position is paired or alone, never both"
        )
        assert all(alone.values())
    if made.clean_alone or made.corrupt_alone:
        assert made.notes, "loud about what is left out"


@given(IDS, IDS)
def test_unequal_prompts_pair_different_tokens_only_in_blocks_of_equal_length(
    clean: list[int], corrupt: list[int]
) -> None:
    # field case 34
    if len(clean) == len(corrupt):
        corrupt = [*corrupt, 9]
    pairs = set(align(numbered(clean), numbered(corrupt)).pairs)
    for one, other in pairs:
        if clean[one] != corrupt[other]:
            assert (one, other) == (0, 0) or (one - 1, other - 1) in pairs
            assert (one + 1, other + 1) == (len(clean), len(corrupt)) or (
                one + 1,
                other + 1,
            ) in pairs


@given(st.lists(st.integers(), min_size=2, max_size=20, unique=True), st.data())
def test_an_insertion_shifts_no_aligned_row(ids: list[int], data: st.DataObject) -> None:
    """Tokens that are all different leave no doubt about who is whose counterpart."""
    # field case 34
    start = data.draw(st.integers(0, len(ids) - 1))
    stop = data.draw(st.integers(start + 1, len(ids)))
    shorter = ids[:start] + ids[stop:]
    assume(shorter)
    made = align(numbered(ids), numbered(shorter))
    expected = [
        (place, place if place < start else place - (stop - start))
        for place in range(len(ids))
        if not start <= place < stop
    ]
    assert made.pairs == expected
    assert list(made.clean_alone) == list(range(start, stop))
    assert made.counterparts("corrupt") == {other: one for one, other in expected}


def test_tokens_without_a_counterpart_are_named_with_the_reason() -> None:
    made = align(EIFFEL, COLOSSEUM)
    assert made.pairs == [(0, 0), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6)]
    assert made.alone("corrupt").keys() == {1}
    for part in ("' Eiffel Tower'", "2 tokens", "' Colosseum'", "1 token"):
        assert part in made.corrupt_alone[1]
        assert part in made.clean_alone[2]
        assert part in made.notes[0]
    assert "clean 1-2, corrupt 1" in made.notes[0]
    made = align(tokens("The", " old", " tower"), tokens("The", " tower"))
    assert made.clean_alone == {1: "' old' is in the clean prompt only, so it has no counterpart"}
    assert align(tokens("a"), tokens("a", "b")).corrupt_alone == {
        1: "'b' is in the corrupt prompt only, so it has no counterpart"
    }


def test_equal_length_blocks_in_unequal_prompts_are_aligned_with_a_note() -> None:
    made = align(tokens("x", "A", "B", "y", "z"), tokens("x", "C", "D", "y", "z", "w"))
    assert made.pairs == [(place, place) for place in range(5)]
    assert "'AB' (clean, 1-2) was aligned with 'CD' (corrupt, 1-2)" in made.notes[0]


@pytest.mark.parametrize(
    ("clean", "corrupt", "words"),
    [
        ("abcde", "abXde", None),
        ("abcde", "aXYde", None),
        ("abcde", "aXcYe", "which are not contiguous"),
        ("abcde", "aXbce", "'bc' occurs in both"),
    ],
)
def test_equal_length_prompts_align_by_position_with_a_note_where_doubtful(
    clean: str, corrupt: str, words: str | None
) -> None:
    made = align(tokens(*clean), tokens(*corrupt))
    assert made.pairs == [(place, place) for place in range(5)]
    assert not made.clean_alone
    assert (words is None and not made.notes) or (words is not None and words in made.notes[0])


def test_left_and_right_alignment_drop_the_overhang() -> None:
    left = align(EIFFEL, COLOSSEUM, "left")
    right = align(EIFFEL, COLOSSEUM, "right")
    assert left.pairs == [(place, place) for place in range(7)]
    assert right.pairs == [(place + 1, place) for place in range(7)]
    assert "' of', position 7 of the clean prompt" in left.notes[0]
    assert list(right.clean_alone) == [0]
    assert "beginning" in right.clean_alone[0]


def test_an_alignment_list_is_used_verbatim() -> None:
    made = align(EIFFEL, COLOSSEUM, [(-1, -1), (2, 1)])
    assert made.pairs == [(2, 1), (7, 6)]
    assert made.corrupt_alone[0] == "the alignment does not list it"
    shared = align(EIFFEL, COLOSSEUM, [(2, 1), (2, 2)], "corrupt")
    assert shared.counterparts("corrupt") == {1: 2, 2: 2}, (
        "a row may be written at several positions"
    )


@pytest.mark.parametrize(
    ("pairs", "patched", "at"),
    [
        ([(0, 0), (8, 1)], "corrupt", "[1][0]"),
        ([(0, 0), (1, 7)], "corrupt", "[1][1]"),
        ([(-9, 0)], "corrupt", "[0][0]"),
        ([(1, 1), (2, 1)], "corrupt", "[1]"),
        ([(1, 1), (1, 2)], "clean", "[1]"),
        ([(-1, 0), (7, 2)], "clean", "[1]"),
        ([], "corrupt", ""),
    ],
)
def test_a_list_with_a_position_that_is_not_there_or_patched_twice_is_refused(
    pairs: Any, patched: str, at: str
) -> None:
    # field case 34
    with pytest.raises(SelectorError) as refused:
        align(EIFFEL, COLOSSEUM, pairs, patched)
    assert refused.value.at == at


def test_prompts_that_repeat_themselves_endlessly_are_refused_and_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alignment, "SequenceMatcher", None)
    with pytest.raises(SelectorError, match="too many tokens"):
        align(numbered([1, 2] * 1000), numbered([2, 1] * 999))
    assert not align(numbered([1, 2, 3] * 900), numbered([2, 3, 1] * 900)).clean_alone, (
        "of equal length there is nothing to compare"
    )


def test_notes_on_dissimilar_prompts_are_bounded() -> None:
    made = align(
        numbered([token for place in range(40) for token in (place, 100 + place)]),
        numbered([token for place in range(40) for token in (place, 200 + place, 300 + place)]),
    )
    assert made.notes[-1] == "and 24 more blocks differ: these prompts have little in common"
    assert len(made.notes) == 17


# --- Spans
# --------------------------------------------------------------------------------------------------


def test_spans_are_matched_in_order_and_say_what_they_leave_out() -> None:
    found = match_spans("subject", [1, 2], [1], (EIFFEL, COLOSSEUM))
    assert found.pairs == [(2, 1)]
    assert "' Eiffel'" in found.note
    assert "left out" in found.note
    assert "clean prompt (position 1)" in found.note
    other = match_spans("subject", [2], [0, 1], (EIFFEL, COLOSSEUM))
    assert other.pairs == [(2, 1)]
    assert "'The' of the corrupt prompt" in other.note
    assert match_spans("s", [1, 4], [2, 3], (EIFFEL, COLOSSEUM)) == ([(1, 2), (4, 3)], "", "")
    assert match_span("s", [2], Aligned([(2, 1), (2, 2)]), EIFFEL).pairs == [(2, 1), (2, 2)]


def test_a_span_of_the_clean_prompt_is_found_in_the_other() -> None:
    aligned = align(EIFFEL, COLOSSEUM)
    assert match_span("rest", [3, 4], aligned, EIFFEL) == ([(3, 2), (4, 3)], "", "")
    part = match_span("mixed", [2, 3], aligned, EIFFEL)
    assert part.pairs == [(3, 2)]
    assert "' Tower' (position 2 of the clean prompt) was left out" in part.note
    alone = match_span("subject", [1, 2], aligned, EIFFEL)
    assert not alone.pairs
    assert "' Eiffel Tower'" in alone.reason
