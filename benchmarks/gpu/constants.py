"""Constants of a machine that a step depends on, without an engine: what the interpreter, a launch,
memory and files take, and a graph of site launches between matrix products.

Each measurement is a function that gives rows of (what, value, unit). What needs a GPU is left out
without one, and its row says so.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kit
import torch

Row = tuple[str, float | str, str]
#: Threads that write files, and blocks of 8 MiB that they write together.
THREADS = (1, 2, 4, 8)
BLOCKS = 48
#: Of the 8B: the MLPs' products, their inner width of its own, and site launches of a step with
#: hooks everywhere and at the stream alone.
PRODUCTS = 64
INNER = 14336
SITES = (97, 32, 0)
REPLAYS = 15


def interpreter(*, gpu: bool, tiny: bool) -> list[Row]:
    """A loop of Python, and launches of small operations."""
    found: list[Row] = []
    loops = 30_000
    launches = 500 if tiny else 10_000
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
    size = (1 << 20) if tiny else (256 << 20)
    found = list[Row]()
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


# --- Files


def files(folders: dict[str, Path], *, tiny: bool, left: Callable[[], float]) -> list[Row]:
    """Writing new files from several threads, each 8 MiB at a time after its CRC32, as a writer
    does; to a disk with fsync.
    """
    size = (BLOCKS if not tiny else 1) * kit.BLOCK
    found = list[Row]()
    for name, folder in folders.items():
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
    from site_plans import SitePlan

    from midstream.kernels.ops import pair_site
    from midstream.kernels.plan import Does

    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    width, tokens = (64, 2) if tiny else (4096, 64)
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
        # without sites, all plans are the same
        for name, plan in (plans if count else {"": plans["idle"]}).items():
            planned = plan.build(tokens, dtype, device)

            def forward(count: int = count, planned: Any = planned) -> None:
                middle = hidden
                launched = 0
                for number in range(PRODUCTS):
                    if number % 2:
                        hidden.copy_(middle @ down)
                    else:
                        middle = hidden @ up
                    while launched * PRODUCTS < count * (number + 1):
                        pair_site(hidden, residual, ring, *planned)
                        launched += 1

            what = f"a graph of {PRODUCTS} products"
            took = _seconds(forward, gpu=gpu, tiny=tiny)
            if not count:
                base = took
                found.append((what, took * 1e3, "ms"))
                continue
            found.append((f"{what} and {count} sites {name}", took * 1e3, "ms"))
            found.append((f"each of those {count} sites", (took - base) / count * 1e6, "µs"))
    return found


def _seconds(forward: Callable[[], None], *, gpu: bool, tiny: bool) -> float:
    """Median seconds of the device, of a graph that is replayed; a CPU has none."""
    if not gpu:
        return _milliseconds(forward, 1 if tiny else 3) / 1e3
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    times = []
    with torch.cuda.graph(graph):
        forward()
    for _ in range(REPLAYS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def table(title: str, rows: Sequence[Row]) -> dict[str, Any]:
    """A table for the page of results."""
    shown = [
        [what, f"{value:.4g}" if isinstance(value, float) else value, unit]
        for what, value, unit in rows
    ]
    return {"title": title, "columns": ["what", "value", "unit"], "rows": shown}
