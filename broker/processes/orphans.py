"""A process that ends with its parent, however that ends: an orphan would hold a device or an
outbox, or compute a result that no process awaits.
"""

import ctypes
import multiprocessing
import os
import signal


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when the thread that started it ends, as it does with its
    process (prctl(2), PR_SET_PDEATHSIG). `parent`: the starter's pid, as the starter passed it; by
    default the current parent's.
    """
    # 1: PR_SET_PDEATHSIG
    expected = os.getppid() if parent is None else parent
    if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    # The starter may have ended before this call, even while this process was starting. Then
    # another process has adopted this one.
    starter = multiprocessing.parent_process()
    if os.getppid() != expected or (starter is not None and not starter.is_alive()):
        os.kill(os.getpid(), signal.SIGKILL)
