"""Constants of a machine that a step depends on, without an engine: what the interpreter, a launch,
a helper thread, memory and files take, and a graph of site launches between matrix products.

Each measurement is a function that gives rows of (what, value, unit). What needs a GPU or root is
left out without one, and its row says so.
"""

import contextlib
import ctypes
import mmap
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kit
import torch

Row = tuple[str, float | str, str]
#: Short calls of torch that a step of the model's thread makes, and steps of the convoy.
CALLS, STEPS, GAP_S = 400, 60, 0.003
#: Rows of a step that a helper moves, and their width.
ROWS, WIDTH = 64, 4096
#: Threads that write files, and blocks of 8 MiB that they write together.
THREADS, BLOCKS = (1, 2, 4, 8), 48
#: Of the 8B: the MLPs' products, their inner width of its own, and site launches of a step with
#: hooks everywhere and at the stream alone.
PRODUCTS, INNER, SITES = 64, 14336, (97, 32, 0)
REPLAYS = 15
#: `unshare`, from <linux/sched.h>.
_OWN_MOUNTS = 0x20000
#: `CU_GRAPH_NODE_TYPE_KERNEL`, from <cuda.h>.
_KERNEL_NODE = 0


def interpreter(*, gpu: bool, tiny: bool) -> list[Row]:
    """A loop of Python, and launches of small operations."""
    found: list[Row] = []
    loops, launches = 30_000, 500 if tiny else 10_000
    held: dict[int, int] = {}
    used = time.thread_time()
    for number in range(loops):
        held[number & 1023] = held.get(number & 511, 0) + number
    found.append((f"{loops} turns of a Python loop", (time.thread_time() - used) * 1e3, "ms"))
    value = torch.zeros(64, device="cuda" if gpu else "cpu")
    value.add_(1)
    began = time.perf_counter()
    for _ in range(launches):
        value.add_(1)
    found.append(("launch of an operation", (time.perf_counter() - began) / launches * 1e6, "µs"))
    if gpu:
        torch.cuda.synchronize()
        event = torch.cuda.Event(blocking=True)
        began = time.perf_counter()
        for _ in range(launches):
            event.record()
        took = (time.perf_counter() - began) / launches * 1e6
        found.append(("record of an event", took, "µs"))
    return found


# --- A helper thread beside the model's


def convoy(*, tiny: bool) -> list[Row]:
    """A step of many short calls, each of which releases the interpreter, while a helper works once
    a step: ms of the step, and of the helper alone.
    """
    slab = torch.randn(ROWS, WIDTH).bfloat16()
    arena = torch.empty(ROWS * 64, WIDTH, dtype=torch.bfloat16)
    pieces, places = list(arena.view(ROWS, 64, WIDTH)), torch.arange(ROWS) * 64

    def views() -> None:
        for row, piece in enumerate(pieces):
            piece.narrow(0, 3, 1).copy_(slab.narrow(0, row, 1))

    def together() -> None:
        targets = [piece.narrow(0, 3, 1) for piece in pieces]
        torch._foreach_copy_(targets, list(slab.split(1)))

    def once() -> None:
        arena.index_copy_(0, places, slab)

    def python() -> None:
        for row in range(ROWS):
            dict.fromkeys(range(20), row)

    works = {"no helper": lambda: None, f"{ROWS} copies of views": views}
    works |= {"one call for them": together, "one indexed copy": once, "Python alone": python}
    found: list[Row] = []
    for name, work in works.items():
        alone = _milliseconds(work, 10 if tiny else 50)
        found.append((f"a step beside: {name}", _beside(work, tiny=tiny), "ms"))
        found.append((f"that helper's work alone: {name}", alone, "ms"))
    found.append((f"a step beside: {ROWS} copies in another process", _apart(tiny=tiny), "ms"))
    return found


def _steps(wake: Callable[[], Any], *, tiny: bool) -> float:
    """Median ms of the model's step, before each of which the helper is woken."""
    few = [torch.ones(64) for _ in range(4)]
    times = []
    for _ in range(10 if tiny else STEPS):
        time.sleep(GAP_S)
        began = time.perf_counter()
        wake()
        for _ in range(CALLS // 4):
            few[0].add_(1)
            few[1].mul_(1.0)
            few[2].copy_(few[3])
            few[0][:8]
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def _beside(work: Callable[[], Any], *, tiny: bool) -> float:
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run() -> None:
        while asked.get():
            work()

    helper = threading.Thread(target=run)
    helper.start()
    try:
        return _steps(lambda: asked.put(True), tiny=tiny)
    finally:
        asked.put(False)
        helper.join()


_HELPER = f"""
import os, torch
torch.set_num_threads(1)
slab, arena = torch.randn({ROWS}, {WIDTH}).bfloat16(), torch.empty({ROWS * 64}, {WIDTH}).bfloat16()
pieces = list(arena.view({ROWS}, 64, {WIDTH}))
os.write(1, b"r")
while os.read(0, 1):
    for row, piece in enumerate(pieces):
        piece.narrow(0, 3, 1).copy_(slab.narrow(0, row, 1))
"""


def _apart(*, tiny: bool) -> float:
    helper = subprocess.Popen(
        [sys.executable, "-c", _HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    try:
        helper.stdout.read(1)
        write, to = os.write, helper.stdin.fileno()
        return _steps(lambda: write(to, b"x"), tiny=tiny)
    finally:
        helper.stdin.close()
        helper.wait()


def _milliseconds(work: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


# --- Memory


def copies(*, gpu: bool, tiny: bool) -> list[Row]:
    """Copies between host and device, from memory that is page-locked and that is not."""
    if not gpu:
        return [("copies between host and device", "needs a GPU", "")]
    size, found = (1 << 20) if tiny else (256 << 20), list[Row]()
    on_device = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name, locked in (("page-locked", True), ("pageable", False)):
        on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=locked)
        for way, to, of in (("to", on_device, on_host), ("from", on_host, on_device)):

            def copy(to: torch.Tensor = to, of: torch.Tensor = of) -> None:
                to.copy_(of, non_blocking=True)
                torch.cuda.synchronize()

            copy()
            rate = size / _milliseconds(copy, 5) / 1e6
            found.append((f"{name} memory {way} the device", rate, "GB/s"))
    return found


def pages(*, gpu: bool, tiny: bool) -> list[Row]:
    """First touch of new memory with small and with huge pages, and page-locking it."""
    size, found = (8 << 20) if tiny else (1 << 30), list[Row]()
    for name, advice in (("4K pages", mmap.MADV_NOHUGEPAGE), ("huge pages", mmap.MADV_HUGEPAGE)):
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(advice)
        values = torch.frombuffer(memory, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart() if gpu else None
        at, per_gib = values.data_ptr(), (1 << 30) / size / 1e3
        works: dict[str, Callable[[], Any]] = {"first touch of": values.zero_}
        if gpu:
            works["page-locking"] = partial(runtime.cudaHostRegister, at, size, 0)
            works["unlocking"] = partial(runtime.cudaHostUnregister, at)
        found += [
            (f"{what} a GiB, {name}", _milliseconds(work, 1) * per_gib, "s")
            for what, work in works.items()
        ]
        works.clear()
        del values
        memory.close()
    return found


# --- Files


def huge_folder(at: Path) -> Path | None:
    """A folder of files in memory with huge pages; None where it cannot be mounted.

    From then on the calling thread and what it starts have mounts of their own, which end with
    them.
    """
    if ctypes.CDLL(None).unshare(_OWN_MOUNTS):
        return None
    at.mkdir(parents=True, exist_ok=True)
    commands = [["mount", "--make-rprivate", "/"]]
    commands.append(["mount", "-t", "tmpfs", "-o", "huge=always", "midstream-why", str(at)])
    try:
        done = [subprocess.run(each, capture_output=True, check=False) for each in commands]
    except OSError:  # no such program
        return None
    return None if any(each.returncode for each in done) else at


def files(folders: dict[str, Path | None], *, tiny: bool, left: Callable[[], float]) -> list[Row]:
    """Writing new files from several threads, each 8 MiB at a time after its CRC32, as a writer
    does; to a disk with fsync.
    """
    size, found = (BLOCKS if not tiny else 1) * kit.BLOCK, list[Row]()
    for name, folder in folders.items():
        if folder is None:
            found.append((f"files in {name}", "cannot be mounted here", ""))
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for threads in THREADS:
            if left() < 0:
                found.append((f"files in {name}, {threads} threads", "no time was left", ""))
                continue
            rate = kit.disk_rate(folder, size, threads, checked=True)
            found.append((f"files in {name}, {threads} threads", rate / 1e9, "GB/s"))
    return found


# --- A graph of sites


def sites(*, gpu: bool, tiny: bool) -> list[Row]:
    """A forward's matrix products in a graph, with site launches between them: idle ones and ones
    that capture or add. On a CPU without a graph, which measures nothing.
    """
    from midstream.kernels.ops import pair_site
    from midstream.kernels.plan import Does, SitePlan

    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    width, tokens = (64, 2) if tiny else (WIDTH, 64)
    inner = 2 * width if tiny else INNER
    up = torch.randn(width, inner, device=device, dtype=dtype) / width**0.5
    down = torch.randn(inner, width, device=device, dtype=dtype) / inner**0.5
    hidden, residual, ring = (
        torch.zeros(tokens, width, device=device, dtype=dtype) for _ in range(3)
    )
    plans = {
        "idle": SitePlan(width),
        "that capture": SitePlan(width, before=range(tokens)),
        "that add": SitePlan(
            width, [{"add": Does(torch.zeros(1, width))}], {token: [1] for token in range(tokens)}
        ),
    }
    found: list[Row] = []
    base = 0.0
    for count in sorted(SITES):
        for name, plan in plans.items() if count else [("", plans["idle"])]:
            planned = plan.build(tokens, dtype, device)

            def forward(count: int = count, planned: Any = planned) -> None:
                middle, launched = hidden, 0
                for number in range(PRODUCTS):
                    if number % 2:
                        hidden.copy_(middle @ down)
                    else:
                        middle = hidden @ up
                    while launched * PRODUCTS < count * (number + 1):
                        pair_site(hidden, residual, ring, *planned)
                        launched += 1

            what = f"a graph of {PRODUCTS} products"
            for how, took in _timed(forward, gpu=gpu, tiny=tiny, sites=count):
                if isinstance(took, str):
                    found.append((f"{what} and {count} sites {name}{how}", took, ""))
                    continue
                if not count:
                    base = took
                    found.append((what, took * 1e3, "ms"))
                    continue
                found.append((f"{what} and {count} sites {name}{how}", took * 1e3, "ms"))
                found.append((f"each of those {count} sites", (took - base) / count * 1e6, "µs"))
    return found


def _timed(
    forward: Callable[[], None], *, gpu: bool, tiny: bool, sites: int
) -> Iterator[tuple[str, float | str]]:
    """Yield how a graph was replayed, and the median seconds of the device: as it is, with launches
    that begin before the previous one has ended, and with the sites' launches switched off, or why
    they could not be.
    """
    if not gpu:
        yield "", _milliseconds(forward, 1 if tiny else 3) / 1e3
        return
    from midstream.kernels.triton_site import can_depend

    graph = _captured(forward)
    yield "", _replayed(graph.replay)
    if sites and can_depend():
        with kit.launches(dependent=True):
            yield ", dependent launches", _replayed(_captured(forward).replay)
    if sites:
        try:
            yield ", switched off", _replayed(without_sites(graph, sites))
        except (OSError, RuntimeError, AttributeError) as error:
            yield ", switched off", str(error)


def _captured(forward: Callable[[], None]) -> torch.cuda.CUDAGraph:
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        forward()
    graph.instantiate()
    return graph


def _replayed(replay: Callable[[], None]) -> float:
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def without_sites(
    graph: torch.cuda.CUDAGraph, sites: int, driver: Any = None
) -> Callable[[], None]:
    """Return what launches the graph with its `sites` launches of sites switched off, as they could
    be while nobody needs them. `driver`: CUDA's library. Raises OSError and RuntimeError.
    """
    cuda = driver or ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if error := getattr(cuda, name)(*arguments):
            raise RuntimeError(f"{name}: error {error} of CUDA")

    raw, many = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    call("cuGraphGetNodes", raw, None, ctypes.byref(many))
    nodes = (ctypes.c_void_p * many.value)()
    call("cuGraphGetNodes", raw, nodes, ctypes.byref(many))
    named = []
    for node in map(ctypes.c_void_p, nodes):
        kind, name = ctypes.c_int(), ctypes.c_char_p()
        parameters = (ctypes.c_void_p * 16)()  # the first is the function; more than there are
        call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value == _KERNEL_NODE:
            call("cuGraphKernelNodeGetParams_v2", node, parameters)
            call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(parameters[0]))
            named += [node] if b"_sites" in (name.value or b"") else []
    if len(named) != sites:
        raise RuntimeError(f"{len(named)} of {len(nodes)} nodes launch sites, not {sites}")
    ready = ctypes.c_void_p()
    call("cuGraphInstantiateWithFlags", ctypes.byref(ready), raw, ctypes.c_ulonglong(0))
    for node in named:
        call("cuGraphNodeSetEnabled", ready, node, ctypes.c_uint(0))

    def launch() -> None:
        call("cuGraphLaunch", ready, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

    return launch


def table(title: str, rows: Sequence[Row]) -> dict[str, Any]:
    """A table for the page of results."""
    shown = [
        [what, f"{value:.4g}" if isinstance(value, float) else value, unit]
        for what, value, unit in rows
    ]
    return {"title": title, "columns": ["what", "value", "unit"], "rows": shown}
