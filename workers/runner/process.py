"""Process settings of a rank: its tie to the parent process, and its compute threads.

It ends when its parent does, because an orphan would hold the device and the outbox. And its helper threads stay off the
cores that vLLM binds the model's threads to.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends (prctl(2), PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    # Did it end before we asked? Perhaps long before, while this process still started: then another took us in, and is `parent`.
    starter = multiprocessing.parent_process()
    if os.getppid() != parent or (starter is not None and not starter.is_alive()):
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def threads_elsewhere(cores: set[int]) -> Iterator[None]:
    """Threads started in this block run on `cores`, less those that the calling thread is bound to if any others are left.

    On CPUs vLLM binds a rank's threads to cores, and new threads inherit the binding of the one that starts them: writing
    files would take time from the forward pass while other cores idle.
    """
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, (cores - bound) or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
