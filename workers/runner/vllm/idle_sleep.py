"""Makes vLLM's processes on a CPU sleep while they wait for each other, so that the forward pass
can use all cores.

vLLM's scheduler and ranks spin for a second when they wait for each other, which takes a core: half
of a machine with two. `install` replaces that wait on CPUs; other platforms keep vLLM's.
"""

import ctypes
import time
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform

#: Length of a sleep as a share of the time waited so far, which bounds the delay of an answer.
SHARE = 0.02
SHORTEST_S = 20e-6
LONGEST_S = 1e-3
#: Linux wakes a sleeping thread up to 50 µs late unless configured otherwise
#: (prctl(2), PR_SET_TIMERSLACK).
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000

#: Attribute of a condition: when the current wait began.
_WAIT_BEGAN = "midstream_wait_began"


def install() -> None:
    """Replace the wait of this process once, and make this thread's sleeps exact, if on a CPU."""
    if not current_platform.is_cpu() or SpinCondition.wait.__module__ == __name__:
        return
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
    spin = SpinCondition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        now = time.monotonic()
        if now > self.last_read + self.busy_loop_s:
            # Wait for a notification only after the busy time: vLLM's socket may drop those that
            # follow each other closely, and the reader would sleep for five seconds.
            spin(self, timeout_ms)
            return
        began = getattr(self, _WAIT_BEGAN, 0.0)
        if began <= self.last_read:
            began = now
            setattr(self, _WAIT_BEGAN, now)
        time.sleep(min(max((now - began) * SHARE, SHORTEST_S), LONGEST_S))

    SpinCondition.wait = wait
