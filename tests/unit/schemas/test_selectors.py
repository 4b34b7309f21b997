"""Selectors resolve to the numbers that they name, and say what is wrong when they cannot."""

import itertools
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from wait_kit import warn_if_late

from midstream.schemas.base.records import from_json, from_msgpack, to_json, to_msgpack
from midstream.schemas.prompts.selectors import (
    ALIASES,
    FORWARD,
    HOOKS,
    INSIDE,
    PositionWindow,
    RequestedPositions,
    SelectorError,
    Span,
    cut_positions,
    depends_on_prompt,
    lowest_position,
    resolve_layers,
    resolve_positions,
    resolve_sites,
    select,
)
from midstream.schemas.prompts.windows import Around, joined
from midstream.schemas.requests.specs import (
    StoredCapture,
    StoredSteering,
    hashable,
    steering_digest,
    steering_rows,
)

NAMES = ["last_prompt", "all_prompt", "all_generated", "all"]


def wishes(prompt: int) -> st.SearchStrategy[Any]:
    """Whatever a user may write for a prompt of so many tokens, texts left out."""
    place = st.integers(-prompt, prompt - 1)
    inside = st.tuples(st.integers(0, prompt - 1), st.integers(1, prompt)).filter(
        lambda ends: ends[0] < ends[1]
    )
    every = st.none() | st.integers(1, 9)
    one_range = st.builds(
        lambda ends, step: Span(start=ends[0], stop=ends[1], every=step), inside, every
    )
    open_range = st.tuples(st.integers(0, 2 * prompt), st.none() | st.integers(1, 30)).map(
        lambda ends: Span(start=ends[0], stop=None if ends[1] is None else ends[0] + ends[1])
    )
    return (
        st.sampled_from(NAMES)
        | st.lists(place | one_range, min_size=1, max_size=5)
        | open_range
        | place.map(lambda at: Span(start=at))
    )


@pytest.mark.parametrize(
    ("selector", "layers"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ("1-3", [1, 2, 3]),
        ("2-2", [2]),
        (3, [3]),
        (-1, [4]),
        ([4, 0, -5], [0, 4]),
        ("3", [3]),
        ("-1", [4]),
        ("0-1,4", [0, 1, 4]),
        (" 3 , 1-2, 2 ", [1, 2, 3]),
        ("-3--1", [2, 3, 4]),
        ("0--2", [0, 1, 2, 3]),
        ("-2-4", [3, 4]),
    ],
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


def test_overlapping_ranges_are_joined() -> None:
    assert joined(
        [range(4, 9), range(3), range(2, 5), range(7, 8), range(20, 21), range(30, 30)]
    ) == [*range(9), 20]
    assert resolve_layers(",".join(["0-99"] * 200 + ["5", "-1"]), 100) == list(range(100))


def test_sites_come_in_the_order_of_the_forward_under_our_names() -> None:
    # field case 8: 12 is the output of block 12 at resid_post and its input at resid_pre, and no
    # other name means either
    sites = resolve_sites(
        {"resid_post": [12], "hook_mlp_out": "0-1", "resid_pre": 12, "post_attn": -1}, 13
    )
    assert list(sites.items()) == [
        ("pre_attn", [12]),
        ("post_attn", [12]),
        ("mlp_out", [0, 1]),
        ("post_block", [12]),
    ]


def test_every_name_of_transformerlens_means_one_of_our_hooks() -> None:
    meanings = {name: list(resolve_sites({name: 0}, 1, FORWARD)) for name in ALIASES}
    assert {name.removeprefix("hook_"): hooks for name, hooks in meanings.items()} == {
        "resid_pre": ["pre_attn"],
        "resid_mid": ["post_attn"],
        "resid_post": ["post_block"],
        "attn_out": ["attn_out"],
        "mlp_out": ["mlp_out"],
        "rot_q": ["q"],
        "rot_k": ["k"],
        "mlp_post": ["mlp_act"],
        "q": ["q_proj"],
        "k": ["k_proj"],
        "v": ["v"],
        "z": ["z"],
        **{
            f"attn.hook_{name}": [hook]
            for name, hook in {
                "q": "q_proj",
                "k": "k_proj",
                "v": "v",
                "z": "z",
                "rot_q": "q",
                "rot_k": "k",
            }.items()
        },
        "mlp.hook_post": ["mlp_act"],
    }
    assert set(ALIASES.values()) <= {*HOOKS, *INSIDE}


@pytest.mark.parametrize(
    ("wanted", "at", "words"),
    [
        (
            {"post_block": "all", "resid_post": 1},
            ".resid_post",
            "post_block is given twice: as 'post_block' and as 'resid_post'",
        ),
        (
            {"attn_out": 0, "resid_mid": 0},
            ".resid_mid",
            "unknown hook 'resid_mid': the model has attn_out, post_block",
        ),
        ({"attn_out": 9}, ".attn_out", "layer 9 is out of range"),
    ],
)
def test_sites_that_the_model_does_not_have_are_refused_by_the_name_that_was_used(
    wanted, at, words
) -> None:
    with pytest.raises(SelectorError, match=words) as refused:
        resolve_sites(wanted, 5, ["attn_out", "post_block"])
    assert refused.value.at == at


def test_positions_for_prompts_of_every_length_lose_what_is_beyond_the_prompt() -> None:
    assert cut_positions([0, 7, -1, -8], 3) == [0, -1]
    assert cut_positions([7], 3) == []
    assert cut_positions("all", 3) == "all"


@pytest.mark.parametrize(
    ("wish", "positions"),
    [
        (Span(start=1), PositionWindow(start=1)),
        (Span(start=7), PositionWindow(start=7)),
        (Span(start=-8), PositionWindow(start=0)),
        (Span(start=-8, stop=-1), PositionWindow(start=0, stop=2)),
        (Span(start=1, stop=9), PositionWindow(start=1, stop=9)),
        (Span(stop=-3), None),
        ([Span(start=1, stop=9), 8], [1, 2]),
        ([Span(start=-9), 8], [0, 1, 2]),
        ([Span(start=3, stop=9), 8], None),
    ],
)
def test_ranges_for_prompts_of_every_length_are_cut_where_a_prompt_of_three_ends(
    wish, positions
) -> None:
    cut = cut_positions(wish, 3)
    assert (None if cut == [] else resolve_positions(cut, 3)) == positions


@pytest.mark.parametrize(
    ("wish", "positions"),
    [
        (Span(start=5), PositionWindow(start=5)),
        (Span(start=5, stop=9), PositionWindow(start=5, stop=9)),
        (Span(stop=4), PositionWindow(start=0, stop=4)),
        (Span(start=-3), PositionWindow(start=7)),
        (Span(start=-3, stop=-1), PositionWindow(start=7, stop=9)),
        (Span(start=2, stop=-2), PositionWindow(start=2, stop=8)),
        (Span(start=10), PositionWindow(start=10)),
        (Span(start=8, stop=14), PositionWindow(start=8, stop=14)),
        ([Span(start=2, stop=5)], [2, 3, 4]),
        ([0, Span(start=-2, stop=10), 8, Span(start=7, stop=-1)], [0, 7, 8, 9]),
    ],
)
def test_a_range_alone_may_go_on_behind_the_prompt_and_beside_others_is_written_out(
    wish, positions
) -> None:
    assert resolve_positions(wish, 10) == positions


@pytest.mark.parametrize(
    ("wish", "at", "words"),
    [
        (
            Span(start=-11),
            ".start",
            "position -11 is out of range: the prompt has positions 0 to 9",
        ),
        (Span(start=0, stop=-11), ".stop", "position -11 is out of range: the prompt"),
        ([3, 10], "[1]", "position 10 is out of range: the prompt has positions 0 to 9"),
        ([-11], "[0]", "position -11 is out of range"),
        ([0, Span(text="a")], "[1]", "do not decode to a text that encodes to them"),
        (Span(last=2), "", "known only when the request ends"),
        ([0, Span(last=2)], "[1]", "known only when the request ends"),
        (Span(start=8, stop=-2), "", "from 8 up to 8 is empty in a prompt of length 10"),
        ([0, Span(start=8, stop=-5)], "[1]", "is empty"),
        ([0, Span(start=8)], "[1]", "needs a `stop`; only a single range may"),
        ([Span(start=8, stop=11)], "[0].stop", "stops at 11, but the prompt has length 10"),
    ],
)
def test_positions_that_a_prompt_cannot_have_are_refused_with_their_place(wish, at, words) -> None:
    with pytest.raises(SelectorError, match=words) as refused:
        resolve_positions(wish, 10)
    assert refused.value.at == at


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("{}", "either `text`"),
        ('{"text": "a", "start": 1}', "either `text`"),
        ('{"start": 1, "occurrence": 1}', "either `text`"),
        ('{"start": 1, "occurrence": null}', "either `text`"),
        ('{"text": ""}', "text is empty"),
        ('{"start": 5, "stop": 5}', "range from 5 up to 5 is empty"),
        ('{"stop": 0}', "range from 0 up to 0 is empty"),
        ('{"start": -1, "stop": -1}', "is empty"),
        ('{"start": 99999999999}', "start"),
        ('{"start": 1, "end": 2}', "end"),
        ('{"last": 2, "text": "a"}', "give one of text, last"),
        ('{"last": 2, "start": 1}', "last takes neither start"),
        ('{"text": "a", "every": 2}', "every is valid for a range"),
        ('{"head_and_tail": {"head": 0, "tail": 0}}', "both 0"),
        ('{"around": {"before": 1}}', "give either text or token_ids"),
        ('{"around": {"token_ids": [[]]}}', "length >= 1"),
        ('{"last": 0}', ">= 1"),
    ],
)
def test_a_span_is_of_one_mind(raw: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        from_json(raw, RequestedPositions)


def test_a_span_is_sent_without_the_fields_that_it_does_not_use() -> None:
    """A server without images refuses `"image": null`."""
    assert [
        to_json(span)
        for span in (Span(text="a"), Span(text="a", occurrence=None), Span(stop=3), Span(image=0))
    ] == [
        b'{"text":"a"}',
        b'{"text":"a","occurrence":null}',
        b'{"stop":3}',
        b'{"image":0}',
    ]


def test_overlapping_ranges_are_written_out_once() -> None:
    wish = [Span(start=index % 7, stop=30_000) for index in range(65_536)]
    start = time.process_time()
    assert resolve_positions(wish, 30_000) == list(range(30_000))
    warn_if_late(time.process_time() - start, 10, "not 65,536 times 30,000")


_FEW = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(_FEW, min_size=1, max_size=5), st.lists(st.integers(0, 2), max_size=40))
def test_occurrences_are_those_of_the_definition(sequences, tokens) -> None:
    every = [
        range(at, at + len(sequence))
        for sequence in sequences
        for at in range(len(tokens))
        if tokens[at : at + len(sequence)] == sequence
    ]
    hits = Around(token_ids=sequences).hits(tokens)
    longest = {hit.stop: len(hit) for hit in sorted(every, key=len)}
    assert {hit.stop: len(hit) for hit in hits} == longest
    assert {at for hit in hits for at in hit} == {at for hit in every for at in hit}


def test_repetitive_tokens_are_looked_at_a_fixed_number_of_times() -> None:
    """16 sequences of 256 tokens with a common beginning, and a prompt that repeats it."""
    looks = 0

    class Token(int):
        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return int.__hash__(self)

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return int.__eq__(self, other)

    around = Around(token_ids=[[64] * 255 + [65 + number] for number in range(16)])
    assert around.hits([Token(64)] * 3000 + [Token(70)]) == [range(2745, 3001)]
    assert looks <= 2 * 3001


@settings(max_examples=50)
@given(prompt=st.integers(1, 20), data=st.data())
def test_only_prompt_end_selectors_depend_on_it(prompt: int, data) -> None:
    """What is cached of a prompt may serve a longer one, unless that one is touched elsewhere."""
    resolved = resolve_positions(data.draw(wishes(prompt)), prompt)
    assert depends_on_prompt(resolved) == (
        list(select(resolved, 0, 99, prompt)) != list(select(resolved, 0, 99, prompt + 3))
    )


def test_a_window_survives_the_way_to_the_ranks_and_has_a_digest_of_its_own() -> None:
    entry = StoredSteering(
        layers=[0],
        hook="post_block",
        positions=PositionWindow(start=5),
        family="add",
        tensors=["v"],
    )
    assert from_msgpack(to_msgpack(entry), StoredSteering) == entry
    assert msgspec.convert(msgspec.to_builtins(entry), StoredSteering) == entry
    positions: list[Any] = [
        PositionWindow(start=5),
        PositionWindow(start=5, stop=9),
        PositionWindow(start=6),
        [5, 6, 7, 8],
        "all",
    ]
    others = [msgspec.structs.replace(entry, positions=each) for each in positions]
    assert len({steering_digest([other]) for other in others}) == len(others)
    assert len({hashable(each) for each in positions}) == len(others)
    assert len(steering_rows([*others, *others])) == len(others), (
        "a row for each, not for each entry"
    )


@settings(max_examples=50)
@given(
    prompt=st.integers(1, 20),
    generated=st.integers(0, 30),
    every=st.integers(1, 7),
    cuts=st.sets(st.integers(1, 49), max_size=6),
)
def test_every_nth_generated_token_is_the_same_in_steps_of_any_size(
    prompt: int, generated: int, every: int, cuts: set[int]
) -> None:
    capture = StoredCapture(sites={"post_block": [0]}, positions="all", tag="t", every_n=every)
    total = prompt + generated
    edges = sorted({0, total, *(cut for cut in cuts if cut < total)})
    pieces = [p for a, b in itertools.pairwise(edges) for p in capture.select(a, b, prompt)]
    assert pieces == [*range(prompt), *range(prompt, total, every)]


@settings(max_examples=50)
@given(
    prompt=st.integers(1, 20),
    max_tokens=st.integers(1, 30),
    every=st.integers(1, 7),
    data=st.data(),
)
def test_positions_are_counted_as_they_are_selected(
    prompt: int, max_tokens: int, every: int, data
) -> None:
    capture = StoredCapture(
        sites={"post_block": [0]},
        positions=resolve_positions(data.draw(wishes(prompt)), prompt),
        tag="t",
        every_n=every,
    )
    assert capture.count_positions(prompt, max_tokens) == len(
        capture.select(0, prompt + max_tokens - 1, prompt)
    )


def test_positions_are_counted_without_listing_them() -> None:
    capture = StoredCapture(sites={"post_block": [0]}, positions="all", tag="t", every_n=2)
    tracemalloc.start()
    try:
        assert capture.count_positions(5_000_000, 5_000_001) == 7_500_000
        assert tracemalloc.get_traced_memory()[1] < 100_000, (
            "bytes: a list would be some hundred times as large"
        )
    finally:
        tracemalloc.stop()


@settings(max_examples=50)
@given(
    prompt=st.integers(1, 40),
    generated=st.integers(0, 20),
    cuts=st.lists(st.integers(1, 59), max_size=6),
    data=st.data(),
)
def test_windows_of_any_size_select_each_position_exactly_once(
    prompt: int, generated: int, cuts: list[int], data
) -> None:
    # field case 9
    """Chunked prefill and decode steps together select what one step over everything would."""
    resolved = resolve_positions(data.draw(wishes(prompt)), prompt)
    total = prompt + generated
    edges = sorted({0, total, *(cut for cut in cuts if cut < total)})
    pieces = [p for a, b in itertools.pairwise(edges) for p in select(resolved, a, b, prompt)]
    assert pieces == list(select(resolved, 0, total, prompt))
    if pieces:
        assert pieces[0] == lowest_position(resolved, prompt)


def test_a_hook_that_is_not_served_is_refused_with_its_reason() -> None:
    absent = {"mlp_in": "the certification run did not prove it"}
    with pytest.raises(
        SelectorError,
        match="not served: the certification run did not prove it; the model has pre_attn",
    ):
        resolve_sites({"mlp_in": "all"}, 4, ["pre_attn", "post_block"], absent)


def test_every_nth_position_of_a_range_is_selected() -> None:
    chosen = resolve_positions(Span(start=3, every=4), 10)
    assert [*select(chosen, 0, 30, 10)] == [3, 7, 11, 15, 19, 23, 27]
    assert resolve_positions([Span(stop=9, every=4), 9], 10) == [0, 4, 8, 9]
    assert cut_positions(Span(start=-20, every=3), 10) == Span(start=0, every=3)
