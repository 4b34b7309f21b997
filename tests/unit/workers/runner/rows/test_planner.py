"""What is planned for one forward reaches that forward and no other; every row is labelled with
what it is.
"""

import gc
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from line_kit import python_lines
from rank_kit import (
    HIDDEN,
    Rank,
    Request,
    assert_whole,
    capture,
    make_buffers,
    rows_of,
    steering,
    wanted_rows,
)

from midstream.kernels.plan import AFTER, ALIKE, ALIKE_FROM, BEFORE, LIMITED, Buffers
from midstream.schemas.prompts.selectors import HOOKS, PositionWindow, select
from midstream.schemas.requests.specs import SteeringRow, columns_of
from midstream.workers.runner.base.engine_step import StepView
from midstream.workers.runner.rows import buffers
from midstream.workers.runner.rows.arena import Arena, BankRows, RecordedBlock
from midstream.workers.runner.rows.buffers import Staging
from midstream.workers.runner.rows.capture import Recording
from midstream.workers.runner.rows.slot_table import SlotTable, SlotValue, StepTokens
from midstream.workers.runner.rows.step_places import layout_of


def everything(layers: int = 2) -> dict[str, list[int]]:
    return {hook: list(range(layers)) for hook in HOOKS}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_captures_chunks_batches_and_repeats_give_every_row_its_own_place(
    seed: int, traced: bool
) -> None:
    # field case 1, 6
    """Random site sets, selectors, batch orders, chunk sizes and recomputed prefixes."""
    rng = np.random.default_rng(seed)
    rank = Rank(traced=traced)
    requests = []
    for number in range(12):
        prompt = int(rng.integers(1, 20))
        captures = []
        for _ in range(int(rng.integers(0, 3))):
            sites = {
                hook: sorted({int(layer) for layer in rng.integers(0, 2, 2)})
                for hook in HOOKS
                if rng.random() < 0.5
            }
            start = int(rng.integers(0, prompt))
            length = int(rng.integers(1, 9))
            written = [
                sorted({int(p) for p in rng.integers(0, prompt, 3)}),
                PositionWindow(start=start),
                PositionWindow(start=start, stop=start + length),
            ]
            choices = ["all", "all_prompt", "all_generated", "last_prompt", *written]
            chosen = choices[rng.integers(len(choices))]
            at = str(rng.choice(["before", "after"]))
            every_n = int(rng.integers(1, 4))
            captures.append(capture(chosen, at, every_n, **(sites or {"post_block": [1]})))
        requests.append(
            rank.admit(Request(number, prompt, prompt + int(rng.integers(2, 9)), captures))
        )
    done = dict.fromkeys(range(12), 0)
    while active := [r for r in requests if done[r.number] < r.total - 1]:
        windows = []
        room = 40
        for request in rng.permutation(np.array(active, dtype=object))[: rng.integers(1, 6)]:
            if rng.random() < 0.1:
                done[request.number] = 0  # preempted: everything is computed again
            left = request.prompt_tokens - done[request.number]
            count = min(int(rng.integers(1, 12)), left, room) if left > 0 else min(1, room)
            if count:
                windows.append((request, done[request.number], count))
                done[request.number] += count
                room -= count
        rank.step(*windows)
    for request in requests:
        for number in range(len(request.captures)):
            assert_whole(rank, request, number)


def test_two_captures_that_name_the_same_rows_share_them_in_the_step() -> None:
    """An accelerator's plan has one slot for each token and port."""
    rank = Rank()
    request = rank.admit(
        Request(
            1, 6, 8, [capture(post_block=[0, 1]), capture([1, 2, 5], post_block=[1], mlp_in=[0])]
        )
    )
    other = rank.admit(Request(2, 3, 5, [capture([1], post_block=[1])]))
    rank.plan((other, 0, 3), (request, 0, 6))
    # layer 0: 6 tokens; layer 1: those and the other request's one; mlp_in: 3
    assert rank.planner._places.layout.rows == 6 + 7 + 3
    rank.step((other, 0, 3), (request, 0, 6))
    for step in (6, 7):
        rank.step((request, step, 1), (other, step - 3, 1))
    for number in (0, 1):
        assert_whole(rank, request, number)
    assert_whole(rank, other)


@pytest.mark.parametrize(
    ("positions", "touched"),
    [
        (PositionWindow(start=2), 6),
        (PositionWindow(start=5, stop=7), 2),
        ([1, 4], 2),
        ("all_generated", 2),
    ],
)
def test_a_position_counts_as_applied_once_however_often_it_is_computed(
    positions, touched: int
) -> None:
    """Two chunks, a step of decode, a preemption in the middle of it all."""  # field case 9
    rank = Rank()
    edit = steering(rank.vector(np.ones(HIDDEN)), [0, 1], "post_block", positions)
    request = rank.admit(Request(0, 6, 9, (), [edit]))
    for first, count in ((0, 3), (3, 3), (6, 1), (0, 5), (5, 2), (7, 1)):
        rank.step((request, first, count))
    assert request.tracked.applied == 2 * touched


SELECTORS = st.one_of(
    st.sets(st.integers(0, 9), max_size=4).map(sorted),
    st.builds(
        PositionWindow, start=st.integers(0, 12), stop=st.one_of(st.none(), st.integers(0, 12))
    ),
    st.sampled_from(["all", "all_prompt", "last_prompt", "all_generated"]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(SELECTORS, max_size=8), st.lists(SELECTORS, max_size=8))
def test_rows_that_may_touch_one_token_have_places_of_their_own_in_their_order(
    everyones: list, own: list
) -> None:
    rows = [
        SteeringRow(key=str(number), positions=positions, entries=[])
        for number, positions in enumerate(everyones + own)
    ]
    columns = columns_of(rows)
    for later, row in enumerate(rows):
        for earlier in range(later):
            if set(select(row.positions, 0, 14, 10)) & set(
                select(rows[earlier].positions, 0, 14, 10)
            ):
                assert columns[earlier] < columns[later]
    alone = (
        max(columns_of(rows[: len(everyones)]), default=-1)
        + max(columns_of(rows[len(everyones) :]), default=-1)
        + 2
    )
    assert max(columns, default=-1) + 1 <= alone, (
        "what fits alone, as everyone's and as its own, fits together"
    )


def test_after_a_drain_that_fails_nothing_is_steered_or_recorded() -> None:
    rank = Rank()
    edit = steering(rank.vector(np.ones(HIDDEN)), [0])
    request = rank.admit(Request(0, 3, 4, [capture(post_block=[0])], [edit]))
    rank.plan((request, 0, 3))
    assert rank.buffers.plan.any()
    rank.planner._places.drain = None  # type: ignore[method-assign]
    with pytest.raises(TypeError):
        rank.planner.drain()
    assert not rank.buffers.plan.any()
    assert not rank.buffers.token_rows.any()
    assert not any(site.busy for site in rank.sites)
    assert rank.planner.due is None


def calls_of(layers: int) -> int:
    """Calls, of Python and C functions, that planning and draining one step of 16 capturing and
    steered requests makes.
    """
    rank = Rank(layers=layers, capacity=256)
    edit = steering(rank.vector(np.ones(HIDDEN)), list(range(layers)), "pre_attn")
    requests = [
        rank.admit(Request(n, 9, 20, [capture(**everything(layers))], [edit])) for n in range(16)
    ]
    return _calls(rank, [(request, 0, 9) for request in requests])


def calls_to_steer(requests: int, *, repeated: bool = False) -> int:
    """The same for a step of so many requests that decode, with two rows each; `repeated`: whose
    last steps were alike.
    """
    rank = Rank(layers=2, capacity=256)
    edits = [
        steering(rank.vector(np.ones(HIDDEN)), [0, 1], "pre_attn", positions)
        for positions in ("all", "all_generated")
    ]
    windows = [(rank.admit(Request(n, 9, 20, (), edits)), 9, 1) for n in range(requests)]
    return _calls(rank, windows, repeated=repeated)


def _calls(rank: Rank, windows: list[tuple[Request, int, int]], *, repeated: bool = False) -> int:
    rank.step(*windows)
    rank.step(*windows)
    counted = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal counted
        if event in ("call", "c_call"):
            counted += 1

    gc.disable()  # finalisers of what earlier tests left would be counted
    sys.setprofile(count)
    try:
        rank.plan(*windows, again=repeated)
        rank.planner.drain()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted


def test_step_cost_is_independent_of_layers() -> None:
    # field case 44
    """No loop over layers and requests, and no copy or synchronisation for each."""
    assert calls_of(40) <= calls_of(2) + 40


def test_a_further_steered_request_adds_no_array_to_a_step() -> None:  # field case 44
    assert calls_to_steer(100) - calls_to_steer(20) <= 80 * 2 * 14, (
        "a few calls for each row of each request"
    )
    assert calls_to_steer(100, repeated=True) - calls_to_steer(20, repeated=True) <= 80 * 6, (
        "a repeated plan only counts each request's edits"
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each upload to an accelerator, which needs no page-locked memory here."""
    sizes: list[int] = []

    def unlocked(values: torch.Tensor) -> torch.Tensor:
        sizes.append(values.nbytes)
        return values.clone()

    monkeypatch.setattr(buffers, "locked_copy", unlocked)
    return sizes


def elsewhere_of(of_bank: Buffers) -> Staging:
    """Buffers as on an accelerator, but for the ring."""
    staging = Staging(of_bank, BankRows(Arena(0), HIDDEN, torch.float32))
    staging._on_cpu = False
    staging._token_rows = np.zeros_like(staging._token_rows)
    return staging


RUNS = st.lists(
    st.tuples(
        st.sampled_from([b"\1\0\1\0", b"\1\1\0\0", b"\0\1\1\0"]),
        st.integers(0, 20),
        st.sampled_from([1, 1, 2, 7]),
    ),
    min_size=1,
    max_size=6,
)


def numbered(runs: list[tuple[bytes, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Runs as `layout_of` takes them, and the masks of their numbers."""
    masks = list(dict.fromkeys(wants for wants, _, _ in runs))
    rows = np.array([list(mask) for mask in masks], dtype=bool)
    return np.array([(masks.index(wants), *rest) for wants, *rest in runs]).T, rows


@given(RUNS)
def test_each_port_has_the_tokens_of_all_runs_that_it_captures(
    runs: list[tuple[bytes, int, int]],
) -> None:
    layout = layout_of(*numbered(runs))
    before = 0
    for port, pattern in enumerate(layout.pattern.tolist()):
        mine = [(token, count) for wants, token, count in runs if wants[port]]
        tokens = sorted({token + place for token, count in mine for place in range(count)})
        assert layout.tokens[pattern].tolist() == tokens
        assert layout.base[port] == before
        before += len(tokens)
    entries = layout.entries
    rows = {
        (int(entries.run[position]), int(entries.within[position]), ordinal): row
        for position, ordinal, row in np.stack(entries[3:], axis=1).tolist()
    }
    assert rows == {
        (run, within, ordinal): int(layout.base[port])
        + layout.tokens[layout.pattern[port]].tolist().index(token + within)
        for run, (wants, token, count) in enumerate(runs)
        for ordinal, port in enumerate(np.flatnonzero(np.frombuffer(wants, dtype=bool)).tolist())
        for within in range(count)
    }


def test_sets_of_sites_are_laid_out_in_as_many_lines_of_python_as_one_set() -> None:
    def lines(sets: int) -> int:
        masks = [np.arange(128) % sets == number for number in range(sets)]
        runs = [(masks[token % sets].tobytes(), token, 1) for token in range(64)]
        placed = numbered(runs)
        layout_of(*placed)  # the patterns of the same ports are remembered
        return python_lines(lambda: layout_of(*placed).entries)

    assert lines(64) == lines(1)


def test_a_step_reads_no_columns_that_only_an_ended_request_needed() -> None:
    table = SlotTable()
    for slot, columns in ((1, 2), (2, 64), (100, 1)):
        table.write(slot, [SlotValue(number, 7, 0, 9) for number in range(columns)])
    view = StepView(["a", "b", "c"], [1] * 3, [0] * 3, [1] * 3)
    tokens = StepTokens(view, np.array([1, 2, 100]))
    assert table.at(tokens).sum(axis=1).tolist() == [14, 7 * 64, 7]
    table.write(2)
    assert table.at(tokens).tolist() == [[7, 7], [0, 0], [7, 0]]


def test_only_rows_of_tokens_with_current_or_former_edits_go_to_an_accelerator(
    sent: list[int],
) -> None:
    made = make_buffers(2, capacity=64)
    rng = np.random.default_rng(0)
    staging = elsewhere_of(made)
    plan = np.zeros(tuple(made.plan.shape), dtype=np.int32)
    for _ in range(50):
        wanted = np.zeros((64, made.token_rows.shape[1]), dtype=np.int32)
        tokens = rng.integers(0, 65)
        depth = rng.integers(1, 4)
        wanted[:tokens, :depth] = rng.integers(0, 3, size=(tokens, depth))
        staging.set_rows(wanted[:tokens, :depth])
        staging.commit(plan, [])
        assert (made.token_rows.numpy() == wanted).all()
    staging.set_rows(wanted[:0])
    staging.commit(plan, [])
    sent.clear()
    staging.commit(plan, [])
    assert sum(sent) == plan.nbytes


def test_contiguous_single_row_edits_are_flagged_alike() -> None:
    rank = Rank()
    name = rank.vector(np.ones(HIDDEN))
    mine, same, other = (
        rank.admit(Request(number, 3, 9, (), [steering(name, [0], "pre_attn", scale=scale)]))
        for number, scale in enumerate((1.0, 1.0, 2.0))
    )
    plain = Request(9, 3, 9)

    def alike(*windows: tuple[Request, int, int]) -> tuple[int, int]:
        rank.plan(*windows)
        return int(rank.buffers.plan[0, ALIKE]), int(rank.buffers.plan[0, ALIKE_FROM])

    row = mine.tracked.rows[0][0]
    assert alike((plain, 0, 2), (mine, 0, 3), (same, 3, 1)) == (row, 2)
    assert alike((mine, 3, 1), (plain, 2, 1), (same, 4, 1)) == (0, 0), "a gap"
    assert alike((mine, 4, 1), (other, 0, 3)) == (0, 0), "another row"


def test_only_steps_with_limits_are_flagged_limited() -> None:
    rank = Rank()
    entry = steering(rank.vector(np.ones(HIDDEN)), [0], "pre_attn")
    free, bounded = (
        rank.admit(Request(number, 3, 9, (), [msgspec.structs.replace(entry, limit=limit)]))
        for number, limit in enumerate((0.0, -0.5))
    )
    flags = []
    for windows in ([(free, 0, 3)], [(free, 3, 1), (bounded, 0, 3)], [(free, 4, 1)]):
        rank.plan(*windows)
        flags.append(bool(rank.buffers.plan[0, LIMITED]))
    assert flags == [False, True, False]


def decoding(*, elsewhere: bool) -> tuple[Rank, list[Request]]:
    """Requests of every kind of selector that decode together on one rank, and a plain one."""
    rank = Rank(traced=elsewhere, policy="drop")
    if elsewhere:
        made = rank.buffers
        made.capture_slots = made.capture_slots.repeat(2 * len(rank.sites), 1)
        rank.planner._staging = elsewhere_of(made)
    name = rank.vector(np.ones(HIDDEN))
    kinds: list[tuple] = [
        ("all", "all_generated"),
        ("last_prompt", PositionWindow(start=8, stop=17)),
        ([2, 5], "all"),
        (PositionWindow(start=14), "last_prompt"),
    ]
    requests = []
    for number, (captured, edited) in enumerate(kinds):
        captures = [
            capture(captured, post_block=[0], pre_attn=[0, 1]),
            capture("all_prompt", post_block=[1]),
        ]
        edits = [
            steering(name, [0], "post_attn", edited, scale=1.0 + number),
            steering(name, [1], "mlp_in", "all_prompt"),
        ]
        requests.append(rank.admit(Request(number, 6, 36, captures, edits)))
    return rank, [*requests, Request(len(kinds), 6, 36)]


def planned(rank: Rank) -> tuple:
    """All that a forward and its checks read."""
    planner = rank.planner
    of_bank = rank.buffers
    due = rank.planner.due
    slots = [int(row) for row in of_bank.plan[:, [BEFORE.PATTERN, AFTER.PATTERN]].flatten()]
    on_cpu = planner._staging._on_cpu
    places = planner._places
    listed = sum(map(len, [planner._edited_tokens, *(places.layout.tokens if places else [])]))
    return (
        of_bank.plan.tolist(),
        of_bank.lists[:listed].tolist() if on_cpu else [],
        of_bank.token_rows.tolist() if due and due.edits else [],
        [] if on_cpu else of_bank.capture_slots[slots].tolist(),
        [site.busy for site in rank.sites],
        due and (due.counts.tolist(), due.edited.tolist(), due.edited_rows.tolist()),
        due and due.places and [(name, mask.tolist()) for name, mask in due.places.captures()],
        places
        and (
            places.positions.tolist(),
            places.layout.runs[1:].tolist(),
            places.layout.members[places.layout.group].tolist(),
            places.rows.tolist(),
            places.marks.tolist(),
        ),
    )


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_repeated_step_is_planned_as_a_new_one_would_be(elsewhere: bool, sent: list[int]) -> None:
    """Windows that begin and end, drafts that are rejected, a request that fails, one that leaves,
    dropped rows, and a batch that is put in another order.
    """
    twins = [decoding(elsewhere=elsewhere) for _ in range(2)]
    rank, requests = twins[0]

    def step(position: int, count: int = 1, *, numbers: Sequence[int] = range(4)) -> bool:
        """Whether the first rank repeats its last plan; the second one forgets its own."""
        found = []
        answers = []  # whether each rank repeats its last plan
        for twin, asked in twins:
            windows = [(asked[number], position, count) for number in numbers]
            answers.append(twin.plan(*windows, again=twin is rank))
            found.append(planned(twin))
            if not elsewhere:
                twin.forward(*windows)
                twin.buffers.counts.zero_()
            twin.planner.drain()
            found[-1] += tuple((each.tracked.applied, each.tracked.reached) for each in asked)
        assert found[0] == found[1]
        assert not answers[1]
        return answers[0]

    step(0, 6)
    # windows begin at 8 and 14, and one ends at 17
    assert [position for position in range(6, 21) if not step(position)] == [6, 8, 14, 17]
    assert not step(15), "it goes back"
    assert [step(position, 3) for position in (20, 22, 21, 24)] == [False, True, True, True]
    assert not step(24, 2)
    for twin, asked in twins:
        asked[0].tracked.reported = True
        twin.planner.write(asked[0].tracked)
        twin.tokens = None
    assert not step(26, 2)
    assert step(27, 2)
    for twin, _ in twins:
        twin.backlog.send(1000)
    assert not step(29, 2), "its captured rows are dropped"
    for twin, _ in twins:
        twin.backlog.free(1000)
    assert not step(31)
    assert not step(32, numbers=(3, 1, 0))
    assert not step(33, numbers=(1, 3, 0))
    assert not step(34, numbers=(4, 1, 3, 0))
    assert [step(35, count, numbers=[3]) for count in (1, 1, 2)] == [False, True, False]
    if not elsewhere:
        assert_whole(rank, requests[2])
        finished = rank.finish(requests[3])
        assert finished.positions == [*range(14, 29), *range(31, 35)], "two were dropped"
        found = rows_of(finished, "pre_attn", 1)
        assert (found == wanted_rows(requests[3], finished, "pre_attn", 1)).all()


def test_a_step_looks_for_blocks_of_the_request_that_begins_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank()
    captures = [capture(post_block=[1])]
    running = [rank.admit(Request(number, 4, 9, captures)) for number in range(8)]
    rank.step(*((request, 0, 4) for request in running))
    rank.step(*((request, 4, 1) for request in running))
    looked = list[Recording]()
    found = Recording.block_of

    def noted(recording: Recording, position: int, memory: BankRows) -> RecordedBlock | None:
        looked.append(recording)
        return found(recording, position, memory)

    monkeypatch.setattr(Recording, "block_of", noted)
    begins = rank.admit(Request(8, 4, 9, captures))
    rank.planner.erase(running.pop().tracked.slot)  # as when another ends
    rank.step(*((request, 5, 1) for request in running), (begins, 0, 4))
    assert {id(each) for each in looked} == {id(begins.tracked.recordings[0])}
