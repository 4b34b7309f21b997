"""CPU time that the model's thread spends in our code: an engine's ranks add it up in a file where
`FILE` is set.

A rank's process imports the benchmark's main module anew, which calls `begin`. Only for forwards
that run as Python.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

#: Variable with the path of the file: float64 seconds of each of `PARTS`.
FILE = "BENCH_SHARES"
#: Methods of the data plane, and last the sites.
PARTS = ("begin", "choose", "plan", "drain", "sites")


def create(path: Path) -> dict[str, str]:
    """An empty file, and what an engine's environment needs."""
    np.zeros(len(PARTS)).tofile(path)
    return {FILE: str(path)}


def read(path: Path) -> dict[str, float]:
    """Seconds so far, of each part."""
    return dict(zip(PARTS, np.fromfile(path).tolist(), strict=True))


def begin() -> None:
    """In a process of an engine: from now on its data plane is timed."""
    if FILE not in os.environ:
        return
    from midstream.workers.runner.hooks import sites
    from midstream.workers.runner.plane import data_plane as plane

    total = np.memmap(os.environ[FILE], dtype=np.float64, mode="r+", shape=len(PARTS))

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        number = PARTS.index(part)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                total[number] += time.thread_time() - start

        return run

    for name in PARTS[:-1]:
        setattr(plane.DataPlane, name, timed(name, getattr(plane.DataPlane, name)))
    visit_of = sites.visit_of
    sites.visit_of = lambda *args, **kwargs: timed(PARTS[-1], visit_of(*args, **kwargs))
