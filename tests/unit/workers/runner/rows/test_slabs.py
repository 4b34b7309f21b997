"""Captured rows come out in position order, each position once; slab memory is bounded, and reused
when nobody looks at it.
"""

import ctypes
import gc
import os
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_kit import HIDDEN, Rank, Request, rows_of, stream_of, wanted_rows

from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.runner.base.host_memory import HostMemoryError
from midstream.workers.runner.base.process import begin_helper, threads_elsewhere
from midstream.workers.runner.rows.mover import Mover
from midstream.workers.runner.rows.overload import Overload
from midstream.workers.runner.rows.row_store import RowStore
from midstream.workers.runner.rows.slabs import SlabPool

ROW_BYTES = HIDDEN * 4


def request_of(number: int = 0, prompt: int = 6, total: int = 8, **options) -> Request:
    return Request(
        number,
        prompt,
        total,
        [StoredCapture(sites={"post_block": [0, 1]}, positions="all", tag="t", **options)],
    )


def test_a_position_computed_twice_is_there_once_as_it_was_computed_last() -> None:
    rank = Rank()
    request = rank.admit(request_of())
    rank.step((request, 0, 6))
    first = rank.finish(request_with(request, total=7))
    assert first.positions == list(range(6))
    request.number = 9  # what is computed from now on is something else
    rank.step((request, 2, 4))
    rank.step((request, 6, 1))
    finished = rank.finish(request)
    assert finished.positions == list(range(7))  # field case 6
    rows = rows_of(finished, "post_block", 1)
    request.number = 0
    assert (rows[:2] == wanted_rows(request, finished, "post_block", 1)[:2]).all()
    request.number = 9
    assert (rows[2:] == wanted_rows(request, finished, "post_block", 1)[2:]).all()


def request_with(request: Request, total: int) -> Request:
    """The same request, ended elsewhere."""
    other = Request(request.number, request.prompt_tokens, total, request.captures)
    other.tracked = request.tracked
    return other


def test_rows_beyond_the_last_fed_token_are_left_out() -> None:
    # field case 7
    """A step scheduled ahead, or a rejected draft token, computes rows that are nobody's."""
    rank = Rank()
    request = rank.admit(request_of())
    rank.step((request, 0, 6))
    rank.step((request, 6, 4))
    assert rank.finish(request).positions == list(range(7))


def test_a_row_that_is_missing_is_an_error_and_names_the_positions() -> None:
    rank = Rank()
    request = rank.admit(request_of())
    rank.step((request, 0, 4))
    with pytest.raises(RuntimeError, match=r"positions \[4, 5, 6\] were not recorded \(3 of 7\)"):
        rank.finish(request)


@pytest.mark.parametrize(
    ("stored", "numpy_dtype"),
    [("float16", "<f2"), ("bfloat16", "<u2"), ("float32", "<f4"), ("model", "<f4")],
)
def test_rows_are_stored_in_the_dtype_that_was_asked_for(stored: str, numpy_dtype: str) -> None:
    rank = Rank()
    request = rank.admit(request_of(prompt=1, total=2, dtype=stored))
    rank.step((request, 0, 1))
    finished = rank.finish(request)
    (part,) = finished.rows("post_block", 0)
    wanted = torch.from_numpy(wanted_rows(request, finished, "post_block", 0))
    dtype = torch.float32 if stored == "model" else getattr(torch, stored)
    assert finished.dtype == str(dtype).removeprefix("torch.")
    rounded = wanted.to(dtype)
    bits = rounded.view(torch.uint16) if dtype == torch.bfloat16 else rounded
    assert np.array_equal(np.frombuffer(part, numpy_dtype), bits.numpy().ravel())
    assert part.readonly, "the same memory may serve a later request"


def test_memory_is_reused_when_the_slab_is_gone_and_not_before() -> None:
    pool = SlabPool(1 << 20)
    first = pool.new_slab(16, 4, torch.float32)
    address = first.data_ptr()
    second = pool.new_slab(16, 4, torch.float32)
    assert second.data_ptr() != address
    del first
    gc.collect()
    assert pool.new_slab(14, 4, torch.float32).data_ptr() == address
    del second


class Late:
    """A landing that takes its time."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self) -> None:
        assert self.over.wait(10)

    def done(self) -> bool:
        return self.over.is_set()


class LateArea:
    """An accelerator's ring whose copies land when the test says so."""

    def __init__(self, ring: torch.Tensor) -> None:
        self.rows, self._ring = len(ring), ring
        self.flying: list[tuple[torch.Tensor, torch.Tensor, Late]] = []
        self._landing = Late()

    def next(self) -> tuple[int, Late]:
        self._landing = Late()
        return 0, self._landing

    def take(self, slab: torch.Tensor, rows: int) -> None:
        # As the device does: it writes to an address, and keeps nothing alive.
        there = torch.frombuffer(
            (ctypes.c_uint8 * slab.nbytes).from_address(slab.data_ptr()), dtype=slab.dtype
        )
        self.flying.append((there.view(slab.shape), self._ring[:rows].clone(), self._landing))

    def land(self) -> None:
        for there, rows, landing in self.flying:
            there.copy_(rows)
            landing.over.set()
        self.flying.clear()


def test_a_copy_that_lands_late_does_not_reach_the_next_slab() -> None:
    """A request is cancelled right after a step: its slab is dropped while its rows are on their
    way.
    """
    rank = Rank(traced=True)
    area = rank.planner._staging._area = LateArea(rank.buffers.ring)  # type: ignore[assignment]
    cancelled = rank.admit(request_of())
    rank.step((cancelled, 0, 6))
    cancelled.tracked.recordings[0].forget()
    gc.collect()
    mine = rank.slabs.new_slab(12, HIDDEN, torch.float32)  # of the same size class
    mine.fill_(7.0)
    area.land()
    assert (mine == 7.0).all()
    held = rank.slabs.alive
    rank.mover.close()
    rank.slabs.collect()
    assert rank.slabs.alive < held, "once it has landed, the memory is free"


def test_memory_is_not_reused_while_a_view_of_the_slab_is_left() -> None:
    pool = SlabPool(1 << 20)
    slab = pool.new_slab(16, 4, torch.float32)
    view, address = slab[3:5].view(torch.uint8).numpy(), slab.data_ptr()
    del slab
    gc.collect()
    assert pool.new_slab(16, 4, torch.float32).data_ptr() != address
    del view
    gc.collect()
    assert pool.new_slab(16, 4, torch.float32).data_ptr() == address


def test_slabs_take_little_more_than_their_rows() -> None:
    pool = SlabPool(0)
    for size in (1 << 20, (1 << 20) + 1, 3 << 20, (5 << 20) + 4096, (8 << 20) - 1):
        slab = pool.new_slab(size, 1, torch.uint8)
        assert size <= pool.alive <= size * 9 / 8
        del slab
        gc.collect()
        pool.collect()


def test_page_locked_memory_is_unregistered_before_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cuda:
        locked: dict[int, int] = {}

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            ctypes.string_at(address, size)  # it is mapped
            self.locked[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            ctypes.string_at(address, self.locked.pop(address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    pool = SlabPool(0, pinned=True)
    slab = pool.new_slab(5 << 20, 1, torch.uint8)
    assert Cuda.locked == {slab.data_ptr(): 5 << 20}, "not the next power of two"
    del slab
    pool._recent.clear()  # it was in use a moment ago
    gc.collect()
    pool.collect()
    gc.collect()
    assert Cuda.locked == {}


def test_pages_are_locked_by_the_mover_before_a_step_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: list[tuple[str, int]] = []

    class Cuda:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            locked.append((threading.current_thread().name, size >> 20))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    pool = SlabPool(64 << 20, pinned=True)
    mover = Mover(SlabPool(0))
    mover.submit(partial(pool.reserve, 48 << 20)).result(10)
    mover.close()
    assert locked == [("midstream-mover", size) for size in (32, 16, 8, 4)], "no more than it keeps"
    small = [pool.new_slab(1, size << 20, torch.uint8) for size in (1, 1, 20)]
    assert len(locked) == 4, "a larger memory rather than a step that waits"
    pool.collect()
    assert (pool.alive, pool._free_bytes) == (44 << 20, 16 << 20)
    del small


def test_memory_that_cannot_be_locked_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cuda:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return 2  # cudaErrorMemoryAllocation

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    pool = SlabPool(0, pinned=True)
    with pytest.raises(HostMemoryError, match="cannot allocate 16384 bytes of page-locked memory"):
        pool.new_slab(1, 1, torch.uint8)
    assert pool.alive == 0


def test_helper_threads_use_the_device_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: told.append((threading.current_thread().name, device)),
    )
    Mover(SlabPool(0), partial(begin_helper, torch.device("cuda", 3), False)).close()
    Mover(SlabPool(0), partial(begin_helper, torch.device("cpu"), False)).close()
    assert told == [("midstream-mover", torch.device("cuda", 3))]


@pytest.mark.parametrize(("gives_way", "nice"), [(True, 10), (False, 0)])
def test_helper_threads_give_way_where_the_model_uses_all_cores(gives_way: bool, nice: int) -> None:
    mover = Mover(SlabPool(0), partial(begin_helper, torch.device("cpu"), gives_way))
    assert (
        mover.submit(lambda: os.getpriority(os.PRIO_PROCESS, 0)).result(10)
        == os.getpriority(os.PRIO_PROCESS, 0) + nice
    )
    mover.close()


def test_helper_threads_stay_off_the_cores_that_model_threads_are_bound_to() -> None:
    cores, before = os.sched_getaffinity(0), os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    first = min(cores)
    ready, done = threading.Event(), threading.Event()

    def of_the_model() -> None:
        os.sched_setaffinity(0, {first})
        ready.set()
        done.wait(30)

    thread = threading.Thread(target=of_the_model)
    thread.start()
    assert ready.wait(30)
    with threads_elsewhere(cores):
        mover = Mover(SlabPool(0))
    done.set()
    thread.join()
    assert mover.submit(lambda: os.sched_getaffinity(0)).result(10) == cores - {first}
    assert os.sched_getaffinity(0) == before
    mover.close()


def test_unused_memory_beyond_the_limit_is_given_back() -> None:
    pool = SlabPool(keep_bytes=1 << 15)
    slabs = [pool.new_slab(1 << 10, 4, torch.float32) for _ in range(8)]
    assert pool.alive == 8 << 14
    slabs.clear()
    gc.collect()
    pool.collect()
    assert (pool.alive, pool._free_bytes) == (0, 8 << 14), "as much as was just in use at one time"
    for _ in range(64):
        pool.new_slab(1 << 10, 4, torch.float32)
    gc.collect()
    pool.collect()
    assert (pool.alive, pool._free_bytes) == (0, 1 << 15)


def test_many_slabs_that_come_back_at_once_cost_little_each() -> None:
    """A long capture ends: thousands of steps' slabs are returned in one step."""
    pool = SlabPool(1 << 30)
    slabs = [pool.new_slab(2, 4, torch.float32) for _ in range(4000)]
    slabs.clear()
    gc.collect()
    start = time.process_time()
    pool.collect()
    assert time.process_time() - start < 0.2  # it was 2.4 s when each looked at all others


def test_a_long_capture_keeps_nothing_of_others_alive() -> None:
    rank = Rank(capacity=64)
    wide = {hook: [0, 1] for hook in HOOKS}
    long = rank.admit(
        Request(0, 2, 40, [StoredCapture(sites={"post_block": [1]}, positions="all", tag="t")])
    )
    rank.step((long, 0, 2))
    for at in range(2, 39):
        other = rank.admit(
            Request(at, 30, 31, [StoredCapture(sites=wide, positions="all_prompt", tag="t")])
        )
        rank.step((long, at, 1), (other, 0, 30))
    del other
    rank.planner.forget_step()
    rank.mover.close()
    gc.collect()
    rank.slabs.collect()
    rank.pieces.collect()
    assert rank.slabs.alive == 0
    assert rank.pieces.alive <= 2 << 14
    finished = rank.finish(long)
    assert finished.positions == list(range(39))
    assert (
        rows_of(finished, "post_block", 1) == wanted_rows(long, finished, "post_block", 1)
    ).all()


@pytest.mark.parametrize(
    ("total", "end"),
    [(8, 9), (60, 70)],  # 8: the request may end within a piece; 60: with several pieces
)
def test_a_request_holds_its_rows_and_at_most_a_piece_more(total: int, end: int) -> None:
    rank = Rank()
    request = rank.admit(request_of(total=total))
    recording = request.tracked.recordings[0]
    recording.span, recording.end = 16, end
    rank.step((request, 0, 6))
    for at in range(6, total - 1):
        rank.step((request, at, 1))
    sizes = [len(piece.rows.slab) // 2 for piece in recording.pieces()]
    assert sizes == [6, 3] if total == 8 else [6, 16, 16, 16, 10]
    assert rank.finish(request).positions == list(range(total - 1))


def test_kept_rows_do_not_change_when_their_positions_are_computed_again() -> None:
    """A later request is served them as they were when their block was kept."""
    rank = Rank()
    request, later = rank.admit(request_of()), rank.admit(request_of(1))
    recording, store = request.tracked.recordings[0], RowStore(rank.mover)
    recording.block = 4
    rank.step((request, 0, 6))
    store.keep(7, recording, 0, 4)
    request.number = 9
    rank.step((request, 2, 4))
    rank.step((request, 6, 1))
    store.serve(7, later.tracked.recordings[0], 0, 4)
    rank.step((later, 4, 2))
    rank.step((later, 6, 1))
    rows = rows_of(rank.finish(later), "post_block", 1)
    assert (rows[:4] == stream_of(0, "post_block", 1, 0, 4)).all()
    rows = rows_of(rank.finish(request), "post_block", 1)
    assert (rows[:2] == stream_of(0, "post_block", 1, 0, 2)).all(), "computed once"
    assert (rows[2:] == stream_of(9, "post_block", 1, 2, 5)).all()


@pytest.mark.parametrize(("block", "shared"), [(4, True), (6, False)])
def test_kept_rows_take_no_more_memory_than_their_block(block: int, shared: bool) -> None:
    """Where a piece is the block, its rows are not copied."""
    rank = Rank()
    request = rank.admit(request_of())
    recording, store = request.tracked.recordings[0], RowStore(rank.mover)
    recording.block = block
    rank.step((request, 0, 6))
    store.keep(7, recording, 0, 4)
    rank.mover.close()
    assert store.held == 8 * ROW_BYTES
    slabs = [piece.rows.slab for piece in recording.pieces()]
    assert (store._kept[7].result()[0].step.slab is slabs[0]) == shared


def test_a_step_waits_while_the_writers_are_behind_and_only_then() -> None:
    behind = [300, 200, 100]
    Overload("block", 100, lambda: behind.pop(0)).wait()
    assert behind == []  # looked again until it was within the limit
    sizes = [300]
    stuck = Overload("block", 100, lambda: sizes[-1], patience_s=0.02)
    assert not stuck.behind
    with pytest.raises(TimeoutError, match=r"did not catch up within 0\.02 s"):
        # the other ranks do not wait for ever
        stuck.wait()
    assert stuck.behind
    sizes.append(100)
    assert not stuck.behind
    for policy in ("spill", "drop"):
        Overload(policy, 100, lambda: 300).wait()


@pytest.mark.parametrize("traced", [False, True])
def test_beyond_the_limit_rows_are_spilled_to_disk_and_come_back_whole(
    tmp_path: Path, traced: bool
) -> None:
    rank = Rank(policy="spill", spill_dir=tmp_path / "spill", traced=traced)
    request = rank.admit(request_of())
    request.tracked.recordings[0].block = 4
    rank.step((request, 0, 4))
    rank.backlog = 101
    rank.step((request, 4, 2))
    rank.backlog = 100
    rank.step((request, 6, 1))
    finished = rank.finish(request)
    assert rank.pieces.spilled == 4 * ROW_BYTES, "of positions 4 and 5"
    assert finished.dropped == ()
    for layer in (0, 1):
        assert (
            rows_of(finished, "post_block", layer)
            == wanted_rows(request, finished, "post_block", layer)
        ).all()
    # the file has no name: nothing is left when the process ends
    assert os.listdir(tmp_path / "spill") == []


def test_spilled_rows_take_no_memory(tmp_path: Path) -> None:
    """Not of an accelerator either: they are copied once they have landed."""
    rank = Rank(policy="spill", spill_dir=tmp_path / "spill", traced=True)
    area = rank.planner._staging._area = LateArea(rank.buffers.ring)  # type: ignore[assignment]
    request = rank.admit(request_of())
    rank.backlog = 101
    rank.step((request, 0, 6))
    rank.step((request, 6, 1))
    assert rank.mover.waiting == 14 * ROW_BYTES, "in memory that the device can write to"
    area.land()
    finished = rank.finish(request)
    gc.collect()
    rank.slabs.collect()
    assert (rank.slabs.alive, rank.pieces.alive, rank.mover.waiting) == (0, 0, 0)
    for layer in (0, 1):
        assert (
            rows_of(finished, "post_block", layer)
            == wanted_rows(request, finished, "post_block", layer)
        ).all()


def test_where_rows_cannot_be_spilled_the_capture_fails(tmp_path: Path) -> None:
    (tmp_path / "spill").write_text("a file where a folder is needed")
    rank = Rank(policy="spill", spill_dir=tmp_path / "spill")
    request, other = rank.admit(request_of()), rank.admit(request_of(1))
    rank.step((other, 0, 6))
    rank.backlog = 101
    rank.step((request, 0, 6), (other, 6, 1))
    rank.backlog = 0
    rank.step((request, 6, 1))
    with pytest.raises(OSError, match="spill"):
        rank.finish(request)
    with pytest.raises(OSError, match="spill"):
        rank.finish(other)


def test_a_step_that_spills_waits_for_slabs_that_cannot_be_spilled() -> None:
    sizes = [300, 90]
    Overload("spill", 100, lambda: 1000, slabs=lambda: sizes.pop(0)).wait()
    assert sizes == []
    Overload("drop", 100, lambda: 1000, slabs=lambda: 1000).wait()


def test_beyond_the_limit_rows_are_dropped_and_the_result_names_their_positions() -> None:
    rank = Rank(policy="drop")
    request = rank.admit(request_of())
    rank.step((request, 0, 4))
    rank.backlog = 101
    rank.step((request, 4, 2))
    rank.backlog = 0
    rank.step((request, 6, 1))
    finished = rank.finish(request)
    assert finished.positions == [0, 1, 2, 3, 6]  # field case 19
    assert finished.dropped == (4, 5)
    assert (
        rows_of(finished, "post_block", 0) == wanted_rows(request, finished, "post_block", 0)
    ).all()
