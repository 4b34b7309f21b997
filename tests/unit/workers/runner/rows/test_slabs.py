"""Captured rows come out in position order, each position once; slab memory is bounded, and reused
when nobody looks at it. The scheduler promises exactly those rows that the ranks keep.
"""

import ctypes
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rank_kit import HIDDEN, Rank, Request, assert_whole, capture, rows_of, stream_of, wanted_rows

from midstream.schemas.model.banks import RowShape
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.workers.runner.base import row_index
from midstream.workers.runner.base.host_memory import HostMemoryError
from midstream.workers.runner.base.process import begin_helper, threads_elsewhere
from midstream.workers.runner.base.row_index import PIECES, RequestCaptures, RowIndex
from midstream.workers.runner.rows.extents import Extent
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


class Late:
    """A landing that takes its time."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self) -> None:
        assert self.over.wait(60)

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
    assert pool.new_slab(16, 4, torch.float32).data_ptr() != address
    del view
    assert pool.new_slab(16, 4, torch.float32).data_ptr() == address


def test_slabs_take_little_more_than_their_rows() -> None:
    pool = SlabPool(0)
    for size in (1 << 20, (1 << 20) + 1, 3 << 20, (5 << 20) + 4096, (8 << 20) - 1):
        slab = pool.new_slab(size, 1, torch.uint8)
        assert size <= pool.alive <= size * 9 / 8
        del slab
        pool.collect()


class Cuda:
    """The part of CUDA's runtime that locks pages; `answer` is its error."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.locked: dict[int, int] = {}  # address → bytes
        self.calls: list[tuple[str, int]] = []  # thread, MiB

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        ctypes.string_at(address, size)  # it is mapped
        self.locked[address] = size
        self.calls.append((threading.current_thread().name, size >> 20))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.locked.pop(address))
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_page_locked_memory_is_unregistered_before_it_is_unmapped(cuda: Cuda) -> None:
    pool = SlabPool(0, pinned=True)
    slab = pool.new_slab(5 << 20, 1, torch.uint8)
    assert cuda.locked == {slab.data_ptr(): 5 << 20}, "not the next power of two"
    del slab
    pool._recent.clear()  # it was in use a moment ago
    pool.collect()
    assert cuda.locked == {}


def test_pages_are_locked_by_the_mover_before_a_step_needs_them(cuda: Cuda) -> None:
    pool = SlabPool(64 << 20, pinned=True)
    mover = Mover(SlabPool(0))
    mover.submit(partial(pool.reserve, 48 << 20)).result(60)
    mover.close()
    assert cuda.calls == [("midstream-mover", size) for size in (32, 16, 8, 4)], (
        "no more than it keeps"
    )
    small = [pool.new_slab(1, size << 20, torch.uint8) for size in (1, 1, 20)]
    assert len(cuda.calls) == 4, "a larger memory rather than a step that waits"
    pool.collect()
    assert (pool.alive, pool._free_bytes) == (44 << 20, 16 << 20)
    del small


def test_memory_that_cannot_be_locked_is_an_error_that_says_so(cuda: Cuda) -> None:
    cuda.answer = 2  # cudaErrorMemoryAllocation
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
    assert mover.submit(lambda: os.sched_getaffinity(0)).result(60) == cores - {first}
    assert os.sched_getaffinity(0) == before
    mover.close()


def test_unused_memory_beyond_the_limit_is_given_back() -> None:
    pool = SlabPool(keep_bytes=1 << 15)
    slabs = [pool.new_slab(1 << 10, 4, torch.float32) for _ in range(8)]
    assert pool.alive == 8 << 14
    slabs.clear()
    pool.collect()
    assert (pool.alive, pool._free_bytes) == (0, 8 << 14), "as much as was just in use at one time"
    for _ in range(64):
        pool.new_slab(1 << 10, 4, torch.float32)
    pool.collect()
    assert (pool.alive, pool._free_bytes) == (0, 1 << 15)


def test_many_slabs_that_come_back_at_once_cost_little_each() -> None:
    """A long capture ends: thousands of steps' slabs are returned in one step."""
    pool = SlabPool(1 << 30)
    [pool.new_slab(2, 4, torch.float32) for _ in range(4000)].clear()
    start = time.process_time()
    pool.collect()
    assert time.process_time() - start < 1.0  # it was 2.4 s when each looked at all others


def test_a_long_capture_keeps_nothing_of_others_alive() -> None:
    rank = Rank(capacity=64)
    wide = {hook: [0, 1] for hook in HOOKS}
    long = rank.admit(Request(0, 2, 40, [capture(post_block=[1])]))
    rank.step((long, 0, 2))
    for at in range(2, 39):
        other = rank.admit(Request(at, 30, 31, [capture("all_prompt", **wide)]))
        rank.step((long, at, 1), (other, 0, 30))
    del other
    rank.repeated = None
    rank.planner.forget_step()
    rank.mover.close()
    rank.slabs.collect()
    rank.pieces.collect()
    assert rank.slabs.alive == 0
    assert rank.pieces.alive <= 2 << 14
    assert_whole(rank, long)


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
    rank.settle()
    sizes = [len(piece.rows.slab) // 2 for piece in recording.pieces()]
    assert sizes == [6, 3] if total == 8 else [6, 16, 16, 16, 10]
    assert_whole(rank, request)


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


def test_spilled_rows_take_no_memory_and_come_back_whole(tmp_path: Path) -> None:
    """Not of an accelerator either: they are copied once they have landed."""
    rank = Rank(policy="spill", spill_dir=tmp_path / "spill", traced=True)
    area = rank.planner._staging._area = LateArea(rank.buffers.ring)  # type: ignore[assignment]
    request = rank.admit(request_of())
    rank.backlog = 101
    rank.step((request, 0, 6))
    rank.step((request, 6, 1))
    assert rank.mover.waiting == 14 * ROW_BYTES, "in memory that the device can write to"
    area.land()
    assert_whole(rank, request)
    rank.mover.close()  # until then, its last action may still refer to a slab
    rank.slabs.collect()
    assert (rank.slabs.alive, rank.pieces.alive, rank.mover.waiting) == (0, 0, 0)
    assert rank.pieces.spilled >= 14 * ROW_BYTES
    # the file has no name: nothing is left when the process ends
    assert os.listdir(tmp_path / "spill") == []


def test_a_step_that_spills_waits_for_slabs_that_cannot_be_spilled() -> None:
    sizes = [300, 90]
    Overload("spill", 100, lambda: 1000, slabs=lambda: sizes.pop(0)).wait()
    assert sizes == []
    Overload("drop", 100, lambda: 1000, slabs=lambda: 1000).wait()


# --- Rows that the prefix cache serves

BLOCK = 4
HASHES = [b"a", b"b", b"c", b"d"]
ROW = 10  # bytes


def spec_of(
    *captures: StoredCapture, prompt: int = 14, tensor_parallel: bool = False
) -> RequestCaptures:
    spec = RankSpec(version="v", job="j", request=0, attempt=1, prompt_tokens=prompt)
    spec.captures.extend(captures)
    return RequestCaptures(spec, tensor_parallel=tensor_parallel)


def test_a_hit_reaches_as_far_as_the_kept_rows_and_no_further() -> None:
    index = RowIndex(1 << 20, ROW, BLOCK)
    spec = spec_of(capture("all_prompt"))
    assert index.reach(spec, HASHES) == 0
    kept = index.keep("r", spec, HASHES, 0, 9)
    # the third block is not full yet
    assert [(block.first, block.stop) for block in kept] == [(0, 4), (4, 8)]
    assert index.reach(spec, HASHES) == 8
    assert [block.first for block in index.keep("r", spec, HASHES, 9, 14)] == [8]
    assert index.reach(spec, HASHES) == 12  # of the last, unfinished block nothing is kept
    served = index.serve("s", spec, HASHES, 8)
    assert [(block.request_id, block.first, block.stop, block.number) for block in served] == [
        ("s", 0, 4, kept[0].number),
        ("s", 4, 8, kept[1].number),
    ]


def test_ranks_without_a_head_that_was_asked_for_have_kept_nothing_of_it() -> None:
    """One rank keeps its whole rows, and serves any heads of them; of several, only those with one
    of the heads keep theirs.
    """
    wanted = {
        heads: msgspec.structs.replace(
            capture("all_prompt", z=[0]), row=RowShape(heads=4, width=2), heads=list(heads)
        )
        for heads in ((), (0, 1), (2,))
    }
    for parallel, reaches in ((False, (8, 8, 8)), (True, (0, 8, 0))):
        index = RowIndex(1 << 20, ROW, BLOCK)
        index.keep("r", spec_of(wanted[0, 1], tensor_parallel=parallel), HASHES, 0, 8)
        assert (
            tuple(
                index.reach(spec_of(each, tensor_parallel=parallel), HASHES)
                for each in wanted.values()
            )
            == reaches
        )


@pytest.mark.parametrize(
    ("asked", "reach"),
    [
        (capture("all_prompt", post_block=[1]), 8),  # fewer layers
        (capture("all_prompt", post_block=[0, 1, 2]), 0),  # one layer more
        (capture("all_prompt", pre_attn=[0]), 0),
        (capture("all_prompt", "after"), 0),  # the site's other side
        (capture([1, 6]), 14),  # positions 1 and 6 are kept, and nothing above them is asked for
        (capture([6, 9]), 9),
        (capture("last_prompt"), 13),
        (capture("all_generated"), 14),
    ],
)
def test_only_rows_of_the_same_port_and_position_count(asked: StoredCapture, reach: int) -> None:
    index = RowIndex(1 << 20, ROW, BLOCK)
    index.keep("r", spec_of(capture("all_prompt")), HASHES, 0, 8)
    assert index.reach(spec_of(asked), HASHES) == reach


def test_the_oldest_rows_go_first_and_the_ranks_are_told() -> None:
    index = RowIndex(4 * BLOCK * ROW, ROW, BLOCK)
    spec = spec_of(capture("all_prompt"))
    first = index.keep("r", spec, HASHES, 0, 4)
    second = index.keep("r", spec, HASHES, 4, 8)
    index.serve("s", spec, HASHES, 4)  # the first block was used since
    third = index.keep("r", spec, HASHES, 8, 12)
    assert index.dropped() == [second[0].number]
    assert index.dropped() == []
    assert index.reach(spec, HASHES) == 4
    assert index.serve("s", spec, HASHES, 4)[0].number == first[0].number
    index.clear()
    assert sorted(index.dropped()) == sorted([first[0].number, third[0].number])
    assert index.reach(spec, HASHES) == 0


def test_rows_that_alone_exceed_the_limit_are_not_kept() -> None:
    index = RowIndex(2 * BLOCK * ROW - 1, ROW, BLOCK)
    assert index.keep("r", spec_of(capture("all_prompt")), HASHES, 0, 8) == []
    assert RowIndex(0, ROW, BLOCK).keep("r", spec_of(capture("all_prompt")), HASHES, 0, 8) == []


def test_wider_kept_rows_replace_narrower_ones() -> None:
    index = RowIndex(1 << 20, ROW, BLOCK)
    narrow = index.keep("r", spec_of(capture("all_prompt", post_block=[0])), HASHES, 0, 4)
    index.keep("r", spec_of(capture("all_prompt", post_block=[0, 1])), HASHES, 0, 4)
    assert index.dropped() == [narrow[0].number]
    for layer in range(2, 2 + PIECES):
        index.keep("r", spec_of(capture("all_prompt", post_block=[layer])), HASHES, 0, 4)
    assert len(index.dropped()) == 1


def test_ports_are_made_once_per_request_and_decode_steps_cost_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """480 sites take 0.1 ms, and a step has many requests."""
    made = []
    monkeypatch.setattr(
        row_index, "_ports", lambda capture, tensor_parallel: made.append(capture) or frozenset()
    )
    monkeypatch.setattr(StoredCapture, "select", lambda *window: made.append(window) or range(0))
    index, spec = RowIndex(1 << 20, ROW, BLOCK), spec_of(capture("all"))
    for start in range(14, 40):
        assert index.keep("r", spec, HASHES * 3, start, start + 1) == []
    assert len(made) == 1
    index.keep("r", spec, HASHES, 0, 8)
    index.keep("r", spec, HASHES, 8, 14)
    index.reach(spec, HASHES)
    assert [each for each in made if isinstance(each, StoredCapture)] == made[:1]


@pytest.mark.parametrize("seed", range(6))
def test_captures_served_by_kept_rows_equal_computed_ones(seed: int) -> None:
    # field case 14
    """Random captures of one prompt, one after the other, each cached as far as the index
    promises.
    """
    rng = np.random.default_rng(seed)
    rank = Rank()
    store = RowStore(rank.mover)
    index = RowIndex(40 * rank.buffers.ring.shape[1] * 4, rank.buffers.ring.shape[1] * 4, BLOCK)
    reused = 0
    for turn in range(30):
        prompt = int(rng.integers(5, 17))
        sites = {
            hook: [0, 1] if rng.random() < 0.5 else [1]
            for hook in ("post_block", "mlp_in")
            if rng.random() < 0.7
        }
        positions = (
            "all" if rng.random() < 0.6 else sorted({int(p) for p in rng.integers(0, prompt, 3)})
        )
        request = Request(0, prompt, prompt + 2, [capture(positions, **sites)])
        rank.admit(request)
        spec, hashes, recording = (
            RequestCaptures(request.tracked.spec),
            HASHES[: prompt // BLOCK],
            request.tracked.recordings[0],
        )
        cached = min(index.reach(spec, hashes), prompt - 1) // BLOCK * BLOCK
        for block in index.serve(str(turn), spec, hashes, cached):
            store.serve(block.number, recording, block.first, block.stop)
        at = cached
        while at < prompt + 1:
            count = min(int(rng.integers(1, 9)), prompt - at) if at < prompt else 1
            rank.step((request, at, count))
            for block in index.keep(str(turn), spec, hashes, at, at + count):
                store.keep(block.number, recording, block.first, block.stop)
            store.drop(index.dropped())
            at += count
        finished = assert_whole(rank, request)
        below = [position for position in finished.positions if position < cached]
        assert finished.reused == len(below) * request.captures[0].num_sites
        reused += finished.reused
        assert store.held <= 40 * rank.buffers.ring.shape[1] * 4
    assert reused > 0


def test_evicted_rows_are_a_typed_error() -> None:
    rank = Rank()
    request = rank.admit(Request(0, 6, 8, [capture("all_prompt")]))
    with pytest.raises(
        LookupError, match="positions 0 to 3, served by the prefix cache, are not available"
    ):
        RowStore(rank.mover).serve(7, request.tracked.recordings[0], 0, 4)


def test_a_long_prompts_reused_rows_are_found_in_linear_time() -> None:
    """A writer thread that tenants share does this; a copy of the rest for each block took 4 s."""
    rank, blocks = Rank(), range(0, 1 << 17, 16)
    recording = rank.admit(Request(0, 6, 8, [capture("all_prompt")])).tracked.recordings[0]
    rows: Any = None
    recording.reused = [Extent(rows, np.zeros(1, np.int64), at, 16) for at in blocks]
    began = time.process_time()
    assert len(recording.fill(set(range(1 << 17)))) == len(blocks)
    assert time.process_time() - began < 1.5
