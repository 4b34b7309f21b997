"""Selectors resolve to the numbers that they name, and say what is wrong when they cannot."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.schemas.selectors import lowest_position, resolve_layers, resolve_positions, select

NAMES = ["last_prompt", "all_prompt", "all_generated", "all"]


@pytest.mark.parametrize(
    ("selector", "layers"),
    [("all", [0, 1, 2, 3, 4]), ("1-3", [1, 2, 3]), ("2-2", [2]), (3, [3]), (-1, [4]), ([4, 0, -5], [0, 4])],
)
def test_layer_selectors_resolve_to_sorted_unique_layers(selector, layers) -> None:
    assert resolve_layers(selector, 5) == layers


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("some", "not a layer selector"),
        ("3-1", "is empty"),
        ("0-5", "layer 5 is out of range"),
        (5, "layers 0 to 4"),
        (-6, "-6"),
        ([], "at least one"),
    ],
)
def test_wrong_layer_selectors_are_refused_with_what_would_be_right(selector, words) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_layers(selector, 5)


def test_a_position_beyond_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="position 10 is beyond the prompt, which has 10 tokens"):
        resolve_positions([3, 10], 10)
    with pytest.raises(ValueError, match="-11"):
        resolve_positions([-11], 10)


@given(
    prompt=st.integers(1, 40),
    generated=st.integers(0, 20),
    cuts=st.lists(st.integers(1, 59), max_size=6),
    data=st.data(),
)
def test_windows_of_any_size_select_each_position_exactly_once(prompt: int, generated: int, cuts: list[int], data) -> None:
    """Chunked prefill and decode steps together select what one step over everything would."""
    selector = data.draw(st.sampled_from(NAMES) | st.lists(st.integers(-prompt, prompt - 1), min_size=1, max_size=5))
    resolved = resolve_positions(selector, prompt)
    total = prompt + generated
    edges = sorted({0, total, *(cut for cut in cuts if cut < total)})
    pieces = [p for a, b in itertools.pairwise(edges) for p in select(resolved, a, b, prompt)]
    assert pieces == list(select(resolved, 0, total, prompt))
    if pieces:
        assert pieces[0] == lowest_position(resolved, prompt)
