"""What a rank observes of a step: sites that did not do what was planned, and edits that leave rows
which are not finite, fail their requests before a receipt says otherwise; edits have a size.
"""

import contextlib
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from line_kit import python_lines
from plane_kit import Rig, capturing, run, steered
from rank_kit import Request, steering, stream_of, view_of

from midstream.kernels.plan import CAPTURED_AFTER, LARGEST_SIZE
from midstream.schemas.prompts.selectors import PositionWindow
from midstream.workers.runner.base.engine_step import Finish
from midstream.workers.runner.base.row_index import Keeping, KeptBlock
from midstream.workers.runner.files.edit_sizes import SPAN, CountedSizes
from midstream.workers.runner.hooks.sites import RankSite
from midstream.workers.runner.rows import finite_check
from midstream.workers.runner.rows.arena import Arena
from midstream.workers.runner.rows.edit_sizes import RequestSizes, SizeTable
from midstream.workers.runner.rows.finite_check import StepSizes, _Finding


def skip(
    monkeypatch: pytest.MonkeyPatch, rig: Rig, hook: str, layer: int, steps: Sequence[int] = (0,)
) -> None:
    """The op of one site is not called in these forwards: as where a model no longer calls the
    wrapped module.
    """
    forward = rig._rank.forward
    number = iter(range(1000))

    def without(*windows: Any) -> None:
        if next(number) in steps:
            site = next(
                site for site in rig._rank.sites if (site.hook, site.layer) == (hook, layer)
            )
            site.busy = False
        forward(*windows)

    monkeypatch.setattr(rig._rank, "forward", without)


def test_a_skipped_edit_fails_its_request_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    skip(monkeypatch, rig, "pre_attn", 0)
    other = Request(2, 6, 8, (), [steering(rig.vector(3.0), [1], "pre_attn")])
    run(rig, steered(1), other, capturing(3))
    run(rig, steered(4))  # nothing was set back, and the steps of this one are not blamed
    told = rig.told()
    assert told["j1"].status == "error"
    assert told["j1"].kind == "intervention_failed"
    assert (
        told["j1"].message == "step 1, edits at pre_attn of layer 0: 6 planned, 0 counted (rank 0)"
    )
    assert [told[job].status for job in ("j2", "j3", "j4")] == ["ok", "ok", "ok"]


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_skipped_capture_leaves_no_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    skip(monkeypatch, rig, "post_block", 1, steps=[1])
    run(rig, capturing(1, at=at), steered(2))
    told = rig.told()
    assert told["j1"].kind == "capture_failed"
    assert told["j1"].files == []
    assert (
        f"rows captured {at} edits at post_block of layer 1: 1 planned, 0 counted"
        in told["j1"].message
    )
    assert told["j2"].status == "ok"


@pytest.mark.parametrize(
    ("twice", "words"),
    [
        (True, "edits at pre_attn of layer 0: 6 planned, 12 counted"),
        (False, "rows captured after edits at post_block of layer 0: 0 planned, 1 counted"),
    ],
    ids=["a site that ran twice", "a site without a plan"],
)
def test_what_was_not_planned_and_happened_fails_the_requests_of_the_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, twice: bool, words: str
) -> None:
    forward = rig._rank.forward

    def astray(*windows: Any) -> None:
        forward(*windows)
        if twice:
            forward(*windows)
        else:
            rig._rank.buffers.counts[5, CAPTURED_AFTER] += 1

    monkeypatch.setattr(rig._rank, "forward", astray)
    run(rig, steered(1))
    assert words in rig.told()["j1"].message


def test_rows_of_a_miscounted_step_are_kept_for_no_other_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip(monkeypatch, rig, "post_block", 0, steps=[1])
    first = capturing(1)
    second = capturing(2)
    third = capturing(3)
    rig.step((first, 0, 6), new=[first], keeping=Keeping(keep=[KeptBlock("1", 0, 0, 4, 7)]))
    rig.step(
        (second, 4, 2), new=[second], cached=4, keeping=Keeping(serve=[KeptBlock("2", 0, 0, 4, 7)])
    )
    assert rig.plane.status()["kept_row_bytes"] == 0
    assert rig.plane.status()["unkept"] == 2, (
        "the scheduler is told to forget what it takes for kept"
    )
    rig.step(
        (third, 4, 2), new=[third], cached=4, keeping=Keeping(serve=[KeptBlock("3", 0, 0, 4, 7)])
    )
    kinds = {job: receipt.kind for job, receipt in rig.told().items()}
    assert kinds == {"j2": "capture_failed", "j3": "capture_failed"}


class LateEvent:
    """Copies that have landed only once they are waited for."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "a thread that waits must not spin"
        self.landed = False

    def record(self, stream: object) -> None:
        return

    def query(self) -> bool:
        return self.landed

    def synchronize(self) -> None:
        self.landed = True


def test_counts_that_arrive_late_are_read_before_the_receipt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where a step does not wait for them."""
    side = SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)
    monkeypatch.setattr(rig.plane.banks.first.finite, "_side", side)
    monkeypatch.setattr(finite_check, "locked_like", torch.empty_like)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    skip(monkeypatch, rig, "post_block", 1)
    request = capturing(1)
    other = steered(2)
    rig.step((request, 0, 6), (other, 0, 6), new=[request, other])
    assert not rig.plane._tracked["1"].reported, "nothing waited for the device"
    rig.step(finished=[request, other])
    receipts = rig.told()
    assert receipts["j1"].message == (
        "step 1, rows captured before edits at post_block of layer 1: 6 planned, 0 counted (rank 0)"
    )
    assert receipts["j2"].status == "ok"


def test_an_idle_step_is_not_observed(rig: Rig) -> None:
    request = Request(1, 6, 9, (), [steering(rig.vector(1.0), [0], "pre_attn", PositionWindow(20))])
    seen: list[Any] = []
    take = rig.plane.banks.first.finite.take
    rig.plane.banks.first.finite.take = lambda *given: [seen.append(given[2]), take(*given)][1]  # type: ignore[method-assign]
    rig.step((request, 0, 6), new=[request])
    assert seen == []
    assert not rig.plane.banks.first.finite.pending


# --- Rows that are not finite


def spoil(monkeypatch: pytest.MonkeyPatch, *positions: int) -> None:
    """Make the stream NaN at these positions of every request."""

    def spoiled(number: int, hook: str, layer: int, first: int, count: int) -> np.ndarray:
        rows = stream_of(number, hook, layer, first, count)
        rows[[position - first for position in positions if first <= position < first + count]] = (
            np.nan
        )
        return rows

    monkeypatch.setattr("rank_kit.stream_of", spoiled)


def clamping(
    rig: Rig, number: int, strength: float, positions: Any = "all", layers: Sequence[int] = (1,)
) -> Request:
    """Set to a large component; with a large strength that overflows."""
    numbers = [strength, 1e6, 1e6]
    entry = steering(
        rig.vector(2.0), list(layers), positions=positions, family="clamp", numbers=numbers
    )
    return Request(number, 6, 8, capturing(number).captures, [entry])


def test_an_edit_that_overflows_fails_its_request_alone(rig: Rig) -> None:
    run(
        rig,
        clamping(rig, 1, 3e38, PositionWindow(2)),
        clamping(rig, 2, 1.0, PositionWindow(2)),
        capturing(3),
    )
    receipts = rig.told()
    assert receipts["j1"].kind == "intervention_failed"
    assert (
        "clamp produced a non-finite row at post_block of layer 1, position 2"
        in receipts["j1"].message
    )
    assert [receipts[job].status for job in ("j2", "j3")] == ["ok", "ok"]


def test_the_first_site_at_which_an_edit_overflows_is_named(rig: Rig) -> None:
    run(rig, clamping(rig, 1, 3e38, PositionWindow(2), layers=(0, 1)))
    assert "clamp produced a non-finite row at post_block of layer 0" in rig.told()["j1"].message


def test_what_earlier_steps_left_is_read_for_no_later_request(rig: Rig) -> None:
    """Rows of the step, at the site, which the later request does not edit."""
    run(rig, clamping(rig, 1, 3e38, PositionWindow(2)))
    run(rig, clamping(rig, 2, 1.0, [3]))
    assert rig.told()["j1"].kind == "intervention_failed"
    later = rig.told()["j2"]
    assert later.status == "ok"
    assert [size.rows for size in later.sizes] == [1]


def test_work_of_a_step_that_could_not_be_observed_is_blamed_on_no_later_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = steered(1)
    later = steered(2)
    with monkeypatch.context() as failing:
        failing.setattr(finite_check, "_flat", lambda parts: parts["nothing"])
        rig.step((first, 0, 6), new=[first])
    rig.step((later, 0, 6), new=[later], finished=[first])
    rig.step(finished=[later])
    assert [rig.told()[job].status for job in ("j1", "j2")] == ["error", "ok"]


def test_rows_of_the_unedited_model_are_counted_and_fail_no_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 1, 4)
    # of the second, position 1 precedes every edit
    plain = capturing(1)
    later = clamping(rig, 2, 1.0, PositionWindow(3))
    rig.step(
        (plain, 0, 6), (later, 0, 6), new=[plain, later], hidden=[0, np.nan, 0, 0, np.nan, 0] * 2
    )
    assert rig.plane.banks.found()() == [("1", 1), ("2", 1), ("2", 4)], (
        "the scheduler hears of all of them"
    )
    rig.step((plain, 6, 1), (later, 6, 1))
    rig.step(finished=[plain, later])
    for receipt in rig.receipts():
        assert receipt.status == "ok"
        assert sum(file.non_finite for file in receipt.files) == 2 * 2, "two layers, two positions"
        assert {size.largest for size in receipt.sizes} <= {LARGEST_SIZE}
    assert receipt.sizes


def test_a_captured_row_that_is_not_finite_behind_an_edit_fails_its_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen by the writer alone: no edit is at that row, and another stage has the last layer."""
    spoil(monkeypatch, 5)
    run(rig, clamping(rig, 1, 1.0, [3]))
    (receipt,) = rig.receipts()
    assert receipt.kind == "intervention_failed"
    assert "layer 0, position 5 is not finite, after edits" in receipt.message


def test_requests_that_reused_broken_blocks_fail(rig: Rig) -> None:
    """The one that came in the same step, on blocks that were to be filled, and one that comes
    later; not those that compute their own.
    """
    first, beside, later, own = (steered(number) for number in range(1, 5))
    rig.step(
        (first, 0, 6),
        (beside, 4, 2),
        new=[first, beside],
        cached=4,
        hidden=[0, 0, 0, np.nan, 0, 0, 0, 0],
    )
    rig.step((own, 0, 6), (later, 4, 2), new=[own, later], cached=4)
    rig.step(finished=[own])
    assert {receipt.job: receipt.kind for receipt in rig.receipts()} == {
        "j1": "intervention_failed",
        "j2": "intervention_failed",
        "j3": "intervention_failed",
        "j4": "",
    }


@pytest.mark.parametrize(("last", "waits"), [(6, True), (7, False)])
def test_an_ended_request_waits_for_the_steps_of_its_rows_alone(
    rig: Rig, last: int, waits: bool
) -> None:
    """A step that was under way when the request ended has computed a row of its last token, which
    was never to be fed back.
    """
    request = capturing(1)
    event = LateEvent(blocking=True)
    rig.step((request, 0, 6), new=[request])
    for position in range(6, last + 1):
        rig.step((request, position, 1))
    view = view_of(("1", last, 1))
    finding = _Finding(9, view, None, NONE, torch.empty(0), {}, event=event)  # type: ignore[arg-type]
    rig.plane.banks.first.finite.pending.append(finding)
    rig.plane.begin([], {"1": Finish(list(range(1000, 1008)), False)}, 0)
    assert event.landed == waits


# --- Relative sizes of edits

SITES = [RankSite("post_block", layer, "pair") for layer in range(4)]
NONE = np.zeros((0, 4), dtype=bool)
EDITED = np.ones(1, dtype=bool)
NAN = math.nan


def step(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def table() -> SizeTable:
    return SizeTable(SITES, Arena(1 << 20))


def one() -> RequestSizes:
    return begun(table(), 1)


def begun(sizes: SizeTable, slot: int) -> RequestSizes:
    assert not sizes.has(np.array([slot])).any()
    return sizes.begin(slot)


def counted(sizes: RequestSizes, stop: int) -> CountedSizes:
    """What is counted of a request that ends."""
    sizes.close(stop)
    return sizes.recorded.counted(sizes._table._memory.arena.bytes, stop)


def add(sizes: RequestSizes, position: int, site: int, values: np.ndarray) -> None:
    """A step of this request alone: `[sites, rows]` from these on."""
    sites = np.arange(site, site + len(values))
    step = StepSizes(view_of(("1", position, values.shape[1])), EDITED, sites, values)
    sizes._table.add(step, np.array([sizes.slot]), np.array([0]))


@pytest.mark.parametrize("number", [1001, 1000, 2, 1])
def test_the_median_and_the_largest_are_those_of_the_rows(number: int) -> None:
    values = np.random.default_rng(number).lognormal(sigma=9.0, size=number).astype(np.float32)
    sizes = one()
    for position, value in enumerate(values):
        add(sizes, position, 2, step([value]))
    (found,) = counted(sizes, number).report(0)
    assert found.hook == "post_block"
    assert found.layer == 2
    assert found.rows == number
    assert found.largest == values.max()
    assert found.median == np.median(values.astype(np.float64))


@pytest.mark.parametrize("wait", [0, 16, 300])
def test_positions_that_are_computed_again_count_once_as_they_were_last(wait: int) -> None:
    """`wait`: with so many steps more."""
    sizes = one()
    add(sizes, 0, 1, step([1, 2, 3], [NAN, 5, NAN]))
    add(sizes, 3, 1, step([4, 90, 91]))  # two drafts are rejected
    add(sizes, 4, 1, step([5, 92]))  # the next step never begins: preempted
    add(sizes, 0, 1, step([1, 2, 3, 4, 6, 7]))
    for number in range(wait):
        add(sizes, 6 + number, 1, step([0.5]))
    reports = counted(sizes, 6 + wait).report(0)
    assert not sizes.too_large
    assert [(each.layer, each.rows, each.largest) for each in reports] == [(1, 6 + wait, 7.0)]


def test_rows_after_the_end_do_not_count() -> None:
    sizes = one()
    add(sizes, 0, 0, step([1, 2, 9]))
    add(sizes, 3, 0, step([9]))
    assert counted(sizes, 2).report(0)[0].largest == 2.0


def test_the_first_edit_beyond_its_limit_is_found_by_position_once_it_counts() -> None:
    sizes = one()
    add(sizes, 0, 1, step([1, -3, -4], [1, 1, -2], [NAN, -8, 1]))
    assert not sizes.too_large, "it may be a draft"
    add(sizes, 3, 1, step([1], [1], [1]))
    assert "post_block of layer 1, position 1 is 3 times" in sizes.too_large
    rejected = one()
    add(rejected, 0, 0, step([1, -3]))
    add(rejected, 1, 0, step([1]))
    assert counted(rejected, 2).report(0)[0].largest == 1.0
    assert not rejected.too_large
    last = one()
    add(last, 0, 0, step([1, -3]))
    last.close(2)
    assert "position 1 is 3 times" in last.too_large


def test_an_unedited_row_replaces_the_size_that_a_draft_had_there() -> None:
    sizes = one()
    add(sizes, 0, 0, step([1, 2, -3]))  # two drafts
    add(sizes, 1, 0, step([NAN, NAN]))
    (found,) = counted(sizes, 3).report(0)
    assert found.rows == 1
    assert found.largest == 1.0
    assert not sizes.too_large


def test_rows_that_nothing_ever_edited_take_no_memory() -> None:
    sizes = one()
    add(sizes, 0, 0, step([1, 2]))
    add(sizes, 2, 0, step([NAN] * 3 * SPAN))
    assert len(sizes.blocks) == 1


def test_edits_beyond_a_limit_cost_as_many_lines_of_python_as_one() -> None:
    """All requests share the thread that this runs on."""

    def lines(rows: int) -> int:
        sizes = one()
        beyond = np.full((len(SITES), rows), -2.0, dtype=np.float32)
        add(sizes, 0, 0, beyond[:, :1])
        return python_lines(lambda: add(sizes, 1, 0, beyond))

    assert lines(SPAN - 1) == lines(1)


def test_equal_sizes_have_equal_checksums_however_they_are_computed() -> None:
    whole = one()
    parts = one()
    other = one()
    add(whole, 0, 0, step([1, 2, 3]))
    for number in range(3):
        add(parts, number, 0, step([number + 1.0]))
        add(other, number, 0, step([number + 1.5]))
    found = [counted(sizes, 3).checksum(0) for sizes in (whole, parts, other)]
    assert found[0] == found[1] != found[2]


def test_requests_of_one_step_have_the_sizes_that_each_has_alone() -> None:
    """Of prompts in chunks, drafts, preemptions, steps in which a request is absent, and rows of
    the table that ended requests leave to others.
    """
    draws = np.random.default_rng(7)
    together_in = table()
    live: list[tuple[RequestSizes, RequestSizes, int]] = []  # in the table, alone, next position
    ended = 0
    for _ in range(400):
        while len(live) < 5:
            free = set(range(1, 10)) - {together.slot for together, *_ in live}
            live.append((begun(together_in, min(free)), one(), 0))
        members = []
        windows = []
        first = int(draws.integers(len(SITES)))
        for index in np.flatnonzero(draws.random(len(live)) < 0.7).tolist():
            together, alone, position = live[index]
            if draws.random() < 0.05:
                position = 0  # it was preempted
            count = int(draws.integers(1, 6))
            windows.append((str(index), position, count))
            members.append(together)
            live[index] = (together, alone, position + int(draws.integers(1, count + 1)))
        view = view_of(*windows)
        values = draws.random((len(SITES) - first, view.num_rows)).astype(np.float32)
        values[draws.random(values.shape) < 0.3] = NAN
        slots = np.array([sizes.slot for sizes in members], dtype=np.int64)
        together_in.add(
            StepSizes(view, EDITED, np.arange(first, len(SITES)), values),
            slots,
            np.arange(len(members)),
        )
        for rows_, together in zip(view.requests, members, strict=True):
            alone = next(alone for other, alone, _ in live if other is together)
            stop = rows_.first_row + rows_.num_rows
            add(alone, rows_.first_position, first, values[:, rows_.first_row : stop])
        if draws.random() < 0.2:
            together, alone, position = live.pop(int(draws.integers(len(live))))
            found = [counted(sizes, position) for sizes in (together, alone)]
            assert found[0].report(0) == found[1].report(0)
            assert found[0].checksum(0) == found[1].checksum(0)
            del together, alone, found, members
            ended += 1
    assert ended > 50
    used = together_in._memory.arena.used
    assert used <= 5 * 4 * SPAN * together_in._memory.row_bytes, "memory returns"
