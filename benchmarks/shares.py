"""Time that the model's thread spends in our code, on the CPU and in all: an engine's ranks add it
up in a file where `FILE` is set.

A rank's process imports the benchmark's main module anew, which calls `begin`. The time of sites is
that of forwards that run as Python, so there is none on a GPU.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Variable with the path of the file: float64 seconds of each of `PARTS` on the CPU, then in all.
FILE = "BENCH_SHARES"
#: Methods of the data plane, and last the sites.
PARTS = ("begin", "choose", "plan", "drain", "sites")


def create(path: Path) -> dict[str, str]:
    """An empty file, and what an engine's environment needs."""
    np.zeros(2 * len(PARTS)).tofile(path)
    return {FILE: str(path)}


def read(path: Path) -> dict[str, float]:
    """Seconds so far: of each part on the CPU, and as `… in all` with what it waited for."""
    names = [*PARTS, *(f"{part} in all" for part in PARTS)]
    return dict(zip(names, np.fromfile(path).tolist(), strict=True))


def begin() -> None:
    """In a process of an engine: from now on its data plane is timed."""
    if FILE not in os.environ:
        return
    from midstream.workers.runner.hooks import sites
    from midstream.workers.runner.plane import data_plane as plane

    total = np.memmap(os.environ[FILE], dtype=np.float64, mode="r+", shape=2 * len(PARTS))

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        number = PARTS.index(part)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            start, began = time.thread_time(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total[number] += time.thread_time() - start
                total[len(PARTS) + number] += time.perf_counter() - began

        return run

    for name in PARTS[:-1]:
        setattr(plane.DataPlane, name, timed(name, getattr(plane.DataPlane, name)))
    if torch.cuda.is_available():  # compiled forwards must not call a clock
        return
    visit_of = sites.visit_of
    sites.visit_of = lambda *args, **kwargs: timed(PARTS[-1], visit_of(*args, **kwargs))
