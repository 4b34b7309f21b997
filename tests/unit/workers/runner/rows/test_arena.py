"""Captured rows come out in position order, each position once, from the memory where the forward
recorded them; that memory is bounded, lent again when nobody looks at it, and given back. The
scheduler promises exactly those rows that the ranks keep.
"""

import ctypes
import gc
import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import msgspec
import numpy as np
import pytest
import torch
from line_kit import python_lines
from rank_kit import HIDDEN, Rank, Request, assert_whole, capture, rows_of, stream_of, wanted_rows
from wait_kit import wait_until, warn_if_late

from midstream.schemas.base import machine
from midstream.schemas.base.dtypes import widened
from midstream.schemas.model.banks import RowShape
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.workers.runner.base import row_index
from midstream.workers.runner.base.backlog import Backlog
from midstream.workers.runner.base.process import begin_helper, threads_elsewhere
from midstream.workers.runner.base.ranges import FreeRanges
from midstream.workers.runner.base.row_index import PIECES, RequestCaptures, RowIndex
from midstream.workers.runner.base.shared_memory import VOID, HostMemoryError
from midstream.workers.runner.files.recorded import (
    CaptureShape,
    EndedCapture,
    Extent,
    Recorded,
    bytes_of,
)
from midstream.workers.runner.rows import overload
from midstream.workers.runner.rows.arena import Arena, BankRows, RecordedBlock
from midstream.workers.runner.rows.overload import Overload
from midstream.workers.runner.rows.row_store import RowStore

ROW_BYTES = HIDDEN * 4
PAGE = os.sysconf("SC_PAGESIZE")


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
    dtype = torch.float32 if stored == "model" else getattr(torch, stored)
    assert finished.dtype == str(dtype).removeprefix("torch.")
    rounded = torch.from_numpy(wanted_rows(request, finished, "post_block", 0)).to(dtype)
    bits = rounded.view(torch.uint16) if dtype == torch.bfloat16 else rounded
    assert np.array_equal(np.frombuffer(part, numpy_dtype), bits.numpy().ravel())
    assert part.readonly, "the same memory may serve a later request"


def test_a_copy_that_lands_late_does_not_reach_the_next_rows() -> None:
    """A request is cancelled right after a step, while its rows are on their way."""
    arena = Arena(0)
    landed = list[bool]()
    start, memory = arena.take(100, 1)
    arena.landing = SimpleNamespace(done=lambda: landed)  # type: ignore[assignment]
    del memory
    arena.landing = SimpleNamespace(done=lambda: False)  # type: ignore[assignment]  # of others
    other = arena.take(100, 1)
    assert other[0] >= start + 100
    landed.append(True)
    assert arena.take(100, 1)[0] == start, "once they have landed, the memory is free"


def test_rows_of_an_ended_request_are_read_once_they_have_landed() -> None:
    rank = Rank()
    request = rank.admit(request_of(prompt=1, total=2))
    rank.step((request, 0, 1))
    recording = request.tracked.recordings[0]
    found = list[np.ndarray]()
    (block,) = recording.held
    recording.landing = 7
    writer = threading.Thread(
        target=lambda: found.append(rows_of(rank.finish(request), "post_block", 1))
    )
    writer.start()
    for number in (6, 7):
        assert not found
        block.rows[:] = number
        rank.arena.memory.landed[0] = number
        time.sleep(0.02)
    writer.join()
    assert (found[0] == 7).all()


def block_of(arena: Arena, ports: int, positions: int, *kind: Any) -> RecordedBlock:
    memory = BankRows(arena, *(kind or (4, torch.float32)))
    return RecordedBlock(memory, np.arange(ports).tobytes(), range(positions), range(positions))


@pytest.mark.parametrize(
    "take",
    [
        lambda arena: arena.take(64, 1)[1][3:5].view(np.int8)[1:],
        lambda arena: torch.from_numpy(arena.take(64, 1)[1])[7:],
        lambda arena: bytes_of(arena.take(64, 1)[1].view("<f4").reshape(2, 8), *["float32"] * 2),
        lambda arena: block_of(arena, 2, 2),
        lambda arena: Extent(block_of(arena, 2, 2), 0, 0, 1),
    ],
)
def test_memory_is_not_lent_again_while_a_view_of_it_is_left(take: Any) -> None:
    arena = Arena(0)
    view = take(arena)
    assert arena.take(8, 1)[0] >= VOID + 64
    del view
    assert arena.take(8, 1)[0] == VOID


@pytest.mark.parametrize("seed", range(4))
def test_lent_ranges_never_overlap_and_fit_wherever_there_is_room(seed: int) -> None:
    rng = np.random.default_rng(seed)
    end = VOID + (1 << 16)
    arena = Arena(end, room=end - VOID)
    lent = dict[int, np.ndarray]()
    for turn in range(500):
        if lent and rng.random() < 0.45:
            assert len(np.unique(lent.pop(sorted(lent)[rng.integers(len(lent))]))) == 1
            continue
        size = int(rng.integers(1, 9000))
        align = int(rng.choice([1, 20, 768, 4096]))
        stops = [VOID, *(start + len(lent[start]) for start in sorted(lent))]
        gaps = [b - a for a, b in zip(stops, [*sorted(lent), end], strict=True)]
        if max(gaps) < size:
            with pytest.raises(HostMemoryError, match=f"no room for {size} bytes"):
                arena.take(size, align)
        if max(gaps) < size + align - 1:  # none is sure to hold it
            continue
        first, lent[first] = arena.take(size, align)
        lent[first][:] = 1 + turn % 255
        assert first % align == 0
        assert arena.used == sum(map(len, lent.values()))
    lent.clear()
    assert arena.take(end - VOID, 1)[0] == VOID, "all of it is one range again"


def test_a_place_among_many_gaps_takes_as_many_lines_of_python_as_in_one() -> None:
    """All requests share the thread that this runs on."""
    whole = FreeRanges(0, 100_000)
    gaps = FreeRanges(0, 100_000)
    taken = [gaps.take(20) or 0 for _ in range(5_000)]
    for first in taken[::2]:
        gaps.give(first, first + 20)
    assert python_lines(lambda: gaps.take(64, 64)) <= python_lines(lambda: whole.take(64, 64))


def test_banks_of_any_width_share_the_memory() -> None:
    arena = Arena(1 << 24)
    arena.take(4096, 1)[1].fill(9)
    kinds = (5, torch.float32), (3, torch.bfloat16), (7, torch.float16)
    blocks = [block_of(arena, 2, 3, *kind) for kind in kinds]
    for number, block in enumerate(blocks):
        assert not block.runs(0, 4), "whatever was there before"
        block.all[block.row : block.row + 6] = number
        arena.bytes[block.place.mark :][:3] = number
    for number, block in enumerate(blocks):
        assert {*widened(block.rows, block.dtype).flat, *block._marks.tolist()} == {number}


def resident(arena: Arena, start: int, stop: int) -> np.ndarray:
    """Which pages of the arena take memory, bool `[pages]`."""
    found = (ctypes.c_ubyte * ((stop - start) // PAGE))()
    address = ctypes.c_void_p(arena.bytes.ctypes.data + start)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(stop - start), found) == 0
    return np.array(found) & 1 == 1


def test_unused_memory_beyond_the_limit_is_given_back() -> None:
    arena = Arena(VOID + 8 * PAGE, rest_s=0)
    sizes = 8 * PAGE, 4 * PAGE + 100, 3 * PAGE
    kept, beyond, other = [arena.take(size, 1)[1] for size in sizes]
    arena.bytes[VOID : VOID + sum(sizes)] = 7
    assert resident(arena, VOID, VOID + 15 * PAGE).all()
    del kept, beyond
    assert resident(arena, VOID, VOID + 8 * PAGE).all()
    wait_until(lambda: not resident(arena, VOID + 8 * PAGE, VOID + 12 * PAGE).any())
    assert (other == 7).all(), "the page that it shared"


def cuda(monkeypatch: pytest.MonkeyPatch, answer: int) -> Mock:
    """Have CUDA lock mapped pages with this answer; return its function."""
    register = Mock(side_effect=lambda address, size, _: ctypes.string_at(address, size) and answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    return register


def test_pages_are_locked_once_and_come_first_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    register = cuda(monkeypatch, 0)
    arena = Arena(0, locked=(3 << 20) + 1, room=1 << 20, rest_s=0)
    first = arena.take(2 << 20, 1)
    second = arena.take(1 << 20, 1)
    assert first[0] == VOID
    assert second[0] == arena.locked
    assert arena.locked == (3 << 20) + PAGE
    second[1][:] = 7
    del first, second
    assert resident(arena, 0, arena.locked).all()
    wait_until(lambda: not resident(arena, arena.locked, arena.locked + (1 << 20)).any())
    assert register.mock_calls == [call(arena.bytes.ctypes.data, arena.locked, 0)]


def test_an_arena_has_as_much_room_as_the_container_has_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{4 << 20}\n")
    monkeypatch.setattr(machine, "_LIMITS", (limit,))
    arena = Arena(0)
    _, lent = arena.take(3 << 20, 1)
    with pytest.raises(HostMemoryError, match="no room"):
        arena.take(2 << 20, 1)
    assert len(lent) == 3 << 20


def test_pages_are_lent_again_without_being_given_back_first() -> None:
    """To touch new ones takes longer than to copy rows to them."""
    arena = Arena(0, rest_s=3600)
    start, lent = arena.take(1024 * PAGE, PAGE)
    lent[:] = 7
    del lent
    again, lent = arena.take(1024 * PAGE, PAGE)
    assert again == start
    assert resident(arena, start, start + 1024 * PAGE).all()
    assert (lent == 7).all()


def test_pages_that_are_lent_meanwhile_are_not_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread finds pages idle; before it gives them back, rows come to half of them."""
    arena = Arena(0, rest_s=0)
    found = threading.Event()
    taken = threading.Event()
    given = list[tuple[int, int]]()
    nonzero = np.flatnonzero

    def slowly(values: np.ndarray) -> np.ndarray:
        result = nonzero(values)
        if threading.current_thread().name == "midstream-arena" and not taken.is_set():
            found.set()
            assert taken.wait(30)
        return result

    def advise(start: int, stop: int, _: int) -> None:
        assert threading.current_thread().name == "midstream-arena", "whoever returned it waits"
        given.append((start, stop))

    monkeypatch.setattr(arena.memory, "advise", advise)
    start, lent = arena.take(1024 * PAGE, PAGE)
    monkeypatch.setattr(np, "flatnonzero", slowly)
    del lent
    assert found.wait(30)
    again, lent = arena.take(512 * PAGE, PAGE)
    taken.set()
    assert again == start
    wait_until(lambda: given and given[-1][1] == start + 1024 * PAGE)
    assert min(first for first, _ in given) == start + 512 * PAGE
    assert len(lent) == 512 * PAGE


def test_an_arenas_thread_ends_with_it() -> None:
    def threads() -> int:
        return sum(thread.name == "midstream-arena" for thread in threading.enumerate())

    gc.collect()
    before = threads()
    arena = Arena(0)
    assert threads() > 0
    del arena
    gc.collect()
    wait_until(lambda: threads() <= before)


def test_memory_that_cannot_be_locked_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda(monkeypatch, 2)  # cudaErrorMemoryAllocation
    with pytest.raises(HostMemoryError, match="2097152 bytes of page-locked memory"):
        Arena(0, locked=2 << 20)


def test_helper_threads_use_the_device_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: told.append((threading.current_thread().name, device)),
    )
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        helper = threading.Thread(target=begin_helper, args=(device, False), name=f"h-{device}")
        helper.start()
        helper.join()
    assert told == [("h-cuda:3", torch.device("cuda", 3))]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_helper_threads_stay_off_the_cores_that_model_threads_are_bound_to() -> None:
    cores = os.sched_getaffinity(0)
    before = os.sched_getaffinity(0)
    first = min(cores)
    found = list[set[int]]()
    ready = threading.Event()
    done = threading.Event()
    model = threading.Thread(
        target=lambda: (os.sched_setaffinity(0, {first}), ready.set(), done.wait(30))
    )
    model.start()
    assert ready.wait(30)
    helper = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    with threads_elsewhere(cores):
        helper.start()
    done.set()
    helper.join()
    model.join()
    assert found == [cores - {first}]
    assert os.sched_getaffinity(0) == before


def test_many_ranges_that_come_back_at_once_cost_little_each() -> None:
    arena = Arena(0)
    # a long capture ends: thousands of its blocks are returned in one step
    lent = [arena.take(100, 20) for _ in range(10000)]
    del lent[::2], lent[:]
    start = time.process_time()
    assert arena.take(1 << 20, 1)[0] == VOID
    warn_if_late(time.process_time() - start, 1.0, "each of 10,000 ranges costs little")


def taken(ports: int, *blocks: int) -> int:
    """The bytes of blocks with so many positions, and of a mark for each, in whole rows."""
    return sum(ports * count + -(-count // ROW_BYTES) for count in blocks) * ROW_BYTES


def test_a_long_capture_keeps_nothing_of_others_alive() -> None:
    rank = Rank(capacity=64)
    long = rank.admit(Request(0, 2, 40, [capture(post_block=[1])]))
    rank.step((long, 0, 2))
    for at in range(2, 39):
        other = rank.admit(
            Request(at, 30, 31, [capture("all_prompt", **{hook: [0, 1] for hook in HOOKS})])
        )
        rank.step((long, at, 1), (other, 0, 30))
        rank.planner.erase(other.tracked.slot)
    del other
    rank.arena.take(1, 1)
    blocks = [block.place.count for block in long.tracked.recordings[0].held]
    assert rank.arena.used == 1 + taken(1, *blocks)
    assert_whole(rank, long)


@pytest.mark.parametrize(
    ("total", "end"),
    [(8, 9), (60, 70)],  # 8: the request may end within a block; 60: with several blocks
)
def test_a_request_holds_its_rows_and_at_most_a_block_more(total: int, end: int) -> None:
    """Rows of tokens beyond the last one that it can have go nowhere."""
    rank = Rank()
    request = rank.admit(request_of(total=total))
    recording = request.tracked.recordings[0]
    recording.span = 16
    recording.end = end
    rank.step((request, 0, 6))
    for at in range(6, end):
        rank.step((request, at, 1))
    sizes = [block.place.count for block in recording.held]
    assert sizes == ([6, 3] if total == 8 else [6, 16, 16, 16, 16])
    assert rank.arena.used == taken(2, *sizes)
    before = rank.arena.bytes[VOID : VOID + (1 << 16)].copy()
    rank.step((request, end - 1, 20))  # of the first the row is needed, and equal
    rank.step((request, end, 2))
    assert (rank.arena.bytes[VOID : VOID + (1 << 16)] == before).all()
    nowhere = rank.buffers.ring[0, 1:].numpy()  # its first byte is the mark of no position
    assert (nowhere == stream_of(0, "post_block", 1, end + 1, 1)[0, 1:]).all()
    assert_whole(rank, request)


# --- Captures without a place


def without(arena: Arena, left: int) -> np.ndarray:
    """Take all memory, except for so many bytes at its end."""
    largest, _ = arena._parts[1]._sizes[-1]
    return arena.take(largest - left, 1)[1]


@pytest.mark.parametrize("disk", [False, True])
def test_a_capture_without_a_place_fails_alone(
    disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(policy="spill", spill_dir=tmp_path)
    early, late, after = (
        rank.admit(Request(number, 6, 7, [capture("all_prompt")])) for number in range(3)
    )
    late.tracked.recordings[0].block = 3
    rank.step((early, 0, 3))
    rest = None if disk else without(rank.arena, taken(2, 6) - 1)
    rank.backlog.send(101 if disk else 0)
    full = OSError("the disk is full")
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
    rank.step((early, 3, 3), (late, 0, 6))
    del rest
    monkeypatch.undo()
    rank.step((after, 0, 6))
    for whole in (early, after):
        assert_whole(rank, whole)
    with pytest.raises(RuntimeError, match="disk is full" if disk else "no room for"):
        rank.finish(late)
    free = rank.arena._disk
    spilled = taken(2, 6) if disk else 0
    assert late.tracked.recordings[0].nbytes == 0
    assert rank.arena.spilled == spilled
    assert not rank.arena.bytes[ROW_BYTES:VOID].any()
    assert sum(size for size, _ in free._sizes) == free.stop - free.start - spilled


@pytest.mark.parametrize("failing", [0, 1])
def test_a_capture_without_a_place_takes_no_rows_from_one_that_names_them_too(
    failing: int,
) -> None:
    rank = Rank()
    captures = [capture(post_block=[1])] * 2
    captures[failing] = capture(post_block=[0, 1])
    request = rank.admit(Request(1, 6, 7, captures))
    _rest = without(rank.arena, taken(1, 6) + ROW_BYTES)
    rank.step((request, 0, 6))
    with pytest.raises(RuntimeError, match="no room for"):
        rank.finish(request, failing)
    assert_whole(rank, request, 1 - failing)


# --- Kept rows


def test_kept_rows_do_not_change_when_their_positions_are_computed_again() -> None:
    """A later request is served them as they were when their block was kept, without a copy."""
    rank = Rank()
    request = rank.admit(request_of())
    later = rank.admit(request_of(1))
    recording = request.tracked.recordings[0]
    store = RowStore(rank.arena)
    recording.block = 4
    rank.step((request, 0, 6))
    store.keep(7, recording, 0, 4)
    assert store.held == 8 * ROW_BYTES
    assert rank.arena.used == taken(2, 4, 2)
    request.number = 9
    rank.planner.write(request.tracked)  # as when it resumes after a preemption
    rank.step((request, 2, 4))
    rank.step((request, 6, 1))
    rows = rows_of(rank.finish(request), "post_block", 1)
    assert (rows[:2] == stream_of(0, "post_block", 1, 0, 2)).all(), "computed once"
    assert (rows[2:] == stream_of(9, "post_block", 1, 2, 5)).all()
    recording.forget()
    store.serve(7, later.tracked.recordings[0], 0, 4)
    store.drop([7])
    rank.step((later, 4, 2))
    rank.step((later, 6, 1))
    rows = rows_of(rank.finish(later), "post_block", 1)
    assert (rows[:4] == stream_of(0, "post_block", 1, 0, 4)).all()


def test_captures_fail_once_the_writers_have_freed_nothing_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    backlog = Backlog()
    monkeypatch.setattr(overload.time, "monotonic", lambda: now[0])
    stuck, *others = (Overload(policy, 100, backlog) for policy in ("block", "spill", "drop"))
    steps = [  # (seconds later, sent, freed, room, behind)
        (0, 70, 0, 30, False),
        (40, 130, 0, -100, False),  # it was within the limit until now
        (29, 0, 0, -100, False),
        (2, 0, 1, -99, False),  # progress
        (30, 0, 0, -99, False),
        (1, 0, 0, sys.maxsize, True),
        (1, 0, 98, sys.maxsize, True),  # until it is within the limit
        (0, 0, 1, 0, False),
    ]
    for seconds, sent, freed, room, behind in steps:
        now[0] += seconds
        backlog.send(sent)
        backlog.free(freed)
        with (
            pytest.raises(TimeoutError, match=r"did not catch up within 30 s: 0 MiB")
            if behind
            else nullcontext()
        ):
            stuck.check()
        assert stuck.room == room
        assert stuck.behind == behind
        assert {(each.room, each.behind) for each in others} == {(sys.maxsize, False)}


def test_spilled_rows_take_no_memory_and_come_back_whole(tmp_path: Path) -> None:
    rank = Rank(policy="spill", spill_dir=tmp_path / "spill")
    request = rank.admit(request_of())
    rank.backlog.send(101)
    rank.step((request, 0, 6))
    rank.step((request, 6, 1))
    assert_whole(rank, request)
    assert rank.arena.used == 0
    assert rank.arena.spilled == taken(2, 6, 64)
    # the file has no name: nothing is left when the process ends
    assert os.listdir(tmp_path / "spill") == []
    lent = rank.arena.take(64 * PAGE, 1, spill=True)
    assert os.fstat(rank.arena.descriptors[1]).st_blocks * 512 >= 64 * PAGE, "it can be written to"
    del lent
    wait_until(lambda: os.fstat(rank.arena.descriptors[1]).st_blocks * 512 < 8 * PAGE)


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


def test_a_prompt_that_waits_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reach is asked for in every step: also while other prompts' rows come and go."""
    index = RowIndex(8 * BLOCK * ROW, ROW, BLOCK)
    spec = spec_of(capture("all_prompt"))
    find = index._find
    found = list[bytes]()
    monkeypatch.setattr(index, "_find", lambda key, *of: found.append(key) or find(key, *of))
    index.keep("r", spec, HASHES, 0, 8)
    found.clear()
    waiting = spec_of(capture("all_prompt"))
    assert index.reach(waiting, HASHES) == 8
    assert found == HASHES[:3]
    for number in range(8):
        index.serve("r", spec, HASHES, 8)  # its rows are used
        index.keep("other", spec_of(capture("all_prompt")), [b"%d" % number] * 4, 0, 4)
        found.clear()
        assert index.reach(waiting, HASHES) == 8
        assert found == []
    index.keep("r", spec, HASHES, 8, 12)
    assert index.reach(waiting, HASHES) == 12


@pytest.mark.parametrize("seed", range(4))
def test_the_reach_of_a_prompt_that_waits_is_that_of_one_that_arrives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = RowIndex(5 * BLOCK * ROW, ROW, BLOCK)
    kinds = [capture("all_prompt"), capture("all_prompt", post_block=[0]), capture([1, 6])]
    prompts = [HASHES, [b"a", b"b", b"x", b"y"]]
    waiting = spec_of(*kinds[:2])
    hashes = prompts[0]
    for turn in range(200):
        spec = spec_of(kinds[rng.integers(3)])
        named = prompts[rng.integers(2)]
        first = BLOCK * int(rng.integers(3))
        if rng.random() < 0.7:
            index.keep("r", spec, named, first, first + BLOCK)
        elif rng.random() < 0.9:
            index.serve("r", spec, named, index.reach(spec, named))
        else:
            index.clear()
        if turn % 20 == 19:  # as after a change of global steering
            hashes = prompts[rng.integers(2)]
        assert index.reach(waiting, hashes) == index._look_up(spec_of(*kinds[:2]), hashes)


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
    index = RowIndex(1 << 20, ROW, BLOCK)
    spec = spec_of(capture("all"))
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
    store = RowStore(rank.arena)
    index = RowIndex(40 * ROW_BYTES, ROW_BYTES, BLOCK)
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
        request = rank.admit(Request(0, prompt, prompt + 2, [capture(positions, **sites)]))
        spec = RequestCaptures(request.tracked.spec)
        hashes = HASHES[: prompt // BLOCK]
        recording = request.tracked.recordings[0]
        recording.block = BLOCK
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
        below = sum(position < cached for position in finished.positions)
        assert finished.reused == below * request.captures[0].num_sites
        reused += finished.reused
        assert store.held <= 40 * ROW_BYTES
    assert reused > 0


def test_evicted_rows_are_a_typed_error() -> None:
    rank = Rank()
    request = rank.admit(Request(0, 6, 8, [capture("all_prompt")]))
    with pytest.raises(
        LookupError, match="positions 0 to 3, served by the prefix cache, are not available"
    ):
        RowStore(rank.arena).serve(7, request.tracked.recordings[0], 0, 4)


def test_a_long_prompts_reused_rows_are_found_in_linear_time() -> None:
    """A writer thread that tenants share does this; a copy of the rest for each block took 4 s."""
    blocks = range(0, 1 << 17, 16)
    ended = EndedCapture(shape=CaptureShape(0, [], 8, "float32"), landing=0)
    recorded = Recorded(np.zeros(0), ended, set())
    recorded._reused = [Extent(None, 0, at, 16) for at in blocks]  # type: ignore[arg-type]
    began = time.process_time()
    assert len(recorded.fill(set(range(1 << 17)))[0]) == len(blocks)
    warn_if_late(time.process_time() - began, 1.5, "a copy of the rest for each block took 4 s")


def test_a_run_that_crosses_the_prompts_last_block_has_all_its_places() -> None:
    """A preempted request is computed again: a block, the prompt's last part, a generated one."""
    rank = Rank()
    number = 20
    request = rank.admit(Request(0, number, 32, [capture()]))
    request.tracked.recordings[0].block = 16
    for first, count in ((0, 15), (15, 16)):
        rank.step((request, first, count))
    assert_whole(rank, request)


def test_a_requests_own_kept_rows_are_not_reused_ones() -> None:
    rank = Rank()
    request = rank.admit(request_of())
    recording = request.tracked.recordings[0]
    store = RowStore(rank.arena)
    recording.block = 4
    rank.step((request, 0, 6))
    store.keep(7, recording, 0, 4)
    for first, count in ((2, 4), (6, 1)):
        rank.step((request, first, count))
    assert assert_whole(rank, request).reused == 0


def test_pages_left_while_another_thread_lets_the_table_grow_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Garbage collection leaves them once the old table is copied, and before the new one is in its
    place.
    """
    arena = Arena(0, rest_s=0)
    start, lent = arena.take(8 * PAGE, PAGE)
    lent[:] = 7
    held = [lent]
    del lent
    concatenate = np.concatenate

    def grown(tables: list[np.ndarray]) -> np.ndarray:
        result = concatenate(tables)
        held.clear()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(np, "concatenate", grown)
        _, kept = arena.take(64 * PAGE, PAGE)
    assert not held, "the table has grown"
    wait_until(lambda: not resident(arena, start, start + 8 * PAGE).any())
    assert len(kept) == 64 * PAGE
