"""Selectors resolve to the numbers that they name, and say what is wrong when they cannot."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.schemas.selectors import (
    ALIASES,
    HOOKS,
    SelectorError,
    Span,
    cut_positions,
    lowest_position,
    resolve_layers,
    resolve_positions,
    resolve_sites,
    select,
)
from midstream.schemas.specs import StoredCapture

NAMES = ["last_prompt", "all_prompt", "all_generated", "all"]


@pytest.mark.parametrize(
    ("selector", "layers"),
    [
        ("all", [0, 1, 2, 3, 4]), ("1-3", [1, 2, 3]), ("2-2", [2]), (3, [3]), (-1, [4]), ([4, 0, -5], [0, 4]), ("3", [3]), ("-1", [4]),
        ("0-1,4", [0, 1, 4]), (" 3 , 1-2, 2 ", [1, 2, 3]), ("-3--1", [2, 3, 4]), ("0--2", [0, 1, 2, 3]), ("-2-4", [3, 4]),
    ],
)  # fmt: skip
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
        ("", "not a layer selector"),
        ("0,,2", "not a layer selector"),
        ("1-2-3", "not a layer selector"),
        ("0,7", "layer 7 is out of range"),
        ("-1-0", "is empty"),
        ("9" * 5000, "not a layer selector"),
        ("٣", "not a layer selector"),
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


def test_sites_come_in_the_order_of_the_forward_under_our_names() -> None:
    # field case 8: 12 is the output of block 12 at resid_post and its input at resid_pre, and no other name means either
    sites = resolve_sites({"resid_post": [12], "hook_mlp_out": "0-1", "resid_pre": 12, "post_attn": -1}, 13)
    assert list(sites.items()) == [("pre_attn", [12]), ("post_attn", [12]), ("mlp_out", [0, 1]), ("post_block", [12])]


def test_every_name_of_transformerlens_means_one_of_our_hooks() -> None:
    meanings = {name: list(resolve_sites({name: 0}, 1)) for name in ALIASES}
    assert {name.removeprefix("hook_"): hooks for name, hooks in meanings.items()} == {
        "resid_pre": ["pre_attn"],
        "resid_mid": ["post_attn"],
        "resid_post": ["post_block"],
        "attn_out": ["attn_out"],
        "mlp_out": ["mlp_out"],
    }
    assert set(ALIASES.values()) <= set(HOOKS)


@pytest.mark.parametrize(
    ("wanted", "at", "words"),
    [
        ({"post_block": "all", "resid_post": 1}, ".resid_post", "post_block is named twice: as 'post_block' and as 'resid_post'"),
        ({"attn_out": 0, "resid_mid": 0}, ".resid_mid", "the model has no hook 'resid_mid': it has attn_out, post_block"),
        ({"attn_out": 9}, ".attn_out", "layer 9 is out of range"),
    ],
)
def test_sites_that_the_model_does_not_have_are_refused_by_the_name_that_was_used(wanted, at, words) -> None:
    with pytest.raises(SelectorError, match=words) as refused:
        resolve_sites(wanted, 5, ["attn_out", "post_block"])
    assert refused.value.at == at


def test_a_span_of_a_prompt_without_text_is_refused() -> None:
    with pytest.raises(SelectorError, match="give text instead of token ids"):
        resolve_positions([0, Span(text="a")], 3)


def test_positions_for_prompts_of_every_length_lose_what_is_beyond_the_prompt() -> None:
    assert cut_positions([0, 7, -1, -8], 3) == [0, -1]
    assert cut_positions([7], 3) == []
    assert cut_positions("all", 3) == "all"


@given(prompt=st.integers(1, 20), generated=st.integers(0, 30), every=st.integers(1, 7), cuts=st.sets(st.integers(1, 49), max_size=6))
def test_every_nth_generated_token_is_the_same_in_steps_of_any_size(prompt: int, generated: int, every: int, cuts: set[int]) -> None:
    capture = StoredCapture(sites={"post_block": [0]}, positions="all", tag="t", every_n=every)
    total = prompt + generated
    edges = sorted({0, total, *(cut for cut in cuts if cut < total)})
    pieces = [p for a, b in itertools.pairwise(edges) for p in capture.select(a, b, prompt)]
    assert pieces == [*range(prompt), *range(prompt, total, every)]


@given(prompt=st.integers(1, 20), max_tokens=st.integers(1, 30), every=st.integers(1, 7), data=st.data())
def test_positions_are_counted_as_they_are_selected(prompt: int, max_tokens: int, every: int, data) -> None:
    selector = data.draw(st.sampled_from(NAMES) | st.lists(st.integers(-prompt, prompt - 1), min_size=1, max_size=5))
    capture = StoredCapture(sites={"post_block": [0]}, positions=resolve_positions(selector, prompt), tag="t", every_n=every)
    assert capture.count_positions(prompt, max_tokens) == len(capture.select(0, prompt + max_tokens - 1, prompt))


def test_positions_are_counted_without_listing_them() -> None:
    capture = StoredCapture(sites={"post_block": [0]}, positions="all", tag="t", every_n=2)
    start = time.monotonic()
    assert capture.count_positions(5_000_000, 5_000_001) == 7_500_000
    assert time.monotonic() - start < 0.05


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
