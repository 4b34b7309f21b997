"""Process settings of a rank: its tie to the parent process, and its compute threads.

It ends when its parent does, because an orphan would hold the device and the outbox. And its helper
threads stay off the cores that vLLM binds the model's threads to.
"""

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

_PR_SET_PDEATHSIG = 1
#: Of helper threads, from 0 to 19: an eighth of what a thread of the model gets, if they compete.
_NICE = 10


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends (prctl(2),
    PR_SET_PDEATHSIG).
    """
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    # Did it end before we asked? Perhaps long before, while this process still started: then
    # another took us in, and is `parent`.
    starter = multiprocessing.parent_process()
    if os.getppid() != parent or (starter is not None and not starter.is_alive()):
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def threads_elsewhere(cores: set[int]) -> Iterator[None]:
    """Threads started in this block run on `cores`, less those that a thread of the process is
    bound to if any others are left.

    On CPUs vLLM binds each of a rank's threads to a core, and new threads inherit the binding of
    the one that starts them: writing files would take time from the forward pass while other cores
    idle.
    """
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, (cores - _taken()) or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def begin_helper(device: torch.device, gives_way: bool) -> None:
    """To be called first in a helper thread of a rank.

    `device`: the rank's, as a new thread would open a context on the first one.

    `gives_way`: to the model's threads, because they use all cores; a thread of theirs that is
    interrupted makes the others wait for it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if gives_way:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _taken() -> set[int]:
    """The cores that one of this process's threads is bound to alone."""
    cores = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            cores |= pinned if len(pinned := os.sched_getaffinity(int(thread))) == 1 else set()
    return cores
