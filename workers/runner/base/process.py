"""Process settings of a rank: its helper threads leave the model's cores alone.

They stay off the cores to which vLLM binds the model's threads.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

#: Added to the niceness of helper threads: each gets an eighth of the time of a model's thread that
#: it competes with.
_NICE = 10


@contextmanager
def threads_elsewhere(cores: set[int]) -> Iterator[None]:
    """Have threads that are started in this block run on `cores`, without the cores to which a
    thread of this process is bound; on all of `cores` if that leaves none.

    On CPUs vLLM binds each of a rank's threads to a core, and new threads inherit the binding of
    the thread that starts them: writing files would take time from the forward pass while other
    cores idle.
    """
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, (cores - _bound_cores()) or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def begin_helper(device: torch.device, gives_way: bool) -> None:
    """Prepare the calling thread, a helper thread of a rank. Must be its first call.

    `device`: the rank's device; without it a new thread would open a context on the first GPU.
    `gives_way`: lower the thread's priority, because the model's threads use all cores, and a model
    thread that is interrupted makes the others wait for it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if gives_way:
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICE  # beyond 19 the kernel takes 19
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _bound_cores() -> set[int]:
    """Return the cores to which a thread of this process is bound: it may run on no other."""
    cores = set[int]()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            allowed = os.sched_getaffinity(int(thread))
            if len(allowed) == 1:
                cores |= allowed
    return cores
