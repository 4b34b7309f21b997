"""Has vLLM's processes on a CPU sleep while they wait for each other, so that the forward pass may
have all cores.

vLLM's wait between scheduler and ranks spins for a second, and a core is reserved for that: half of
a machine of two. `install` replaces that wait on CPUs; the other platforms keep vLLM's.
"""

import ctypes
import time
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform

#: A nap takes this share of the time waited so far, which bounds the delay of an answer.
SHARE = 0.02
SHORTEST_S, LONGEST_S = 20e-6, 1e-3
#: Linux wakes a sleeping thread up to 50 µs late unless configured otherwise
#: (prctl(2), PR_SET_TIMERSLACK).
_PR_SET_TIMERSLACK, _SLACK_NS = 29, 1000

_BEGUN = "midstream_begun"


def install() -> None:
    """Replace the wait of this process once, and make this thread's naps exact, if on a CPU."""
    if not current_platform.is_cpu() or SpinCondition.wait.__module__ == __name__:
        return
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
    spin = SpinCondition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        now = time.monotonic()
        if now > self.last_read + self.busy_loop_s:
            # Only now is a message waited for: vLLM drops one that follows another closely.
            spin(self, timeout_ms)
            return
        begun = getattr(self, _BEGUN, 0.0)
        if begun <= self.last_read:
            begun = now
            setattr(self, _BEGUN, now)
        time.sleep(min(max((now - begun) * SHARE, SHORTEST_S), LONGEST_S))

    SpinCondition.wait = wait
