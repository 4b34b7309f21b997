"""Work that captures add to the scheduler in one decode step: `python
benchmarks/capture_schedule.py`.

64 requests that capture every position; per step the ring's budget is asked about each, and the row
index which rows to keep.
"""

import statistics
import time

from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.workers.runner.base.row_index import RequestCaptures, RowIndex
from midstream.workers.runner.vllm.ring_budget import RingBudget

REQUESTS, PROMPT, STEPS = 64, 512, 200
HASHES = [number.to_bytes(32, "big") for number in range(PROMPT // 16)]


def measure(hooks: int, layers: int) -> tuple[float, float]:
    """(row index, ring budget): microseconds per step, medians."""
    capture = StoredCapture(
        sites={hook: list(range(layers)) for hook in HOOKS[:hooks]}, positions="all", tag="t"
    )
    spec = RankSpec(
        version="",
        job="j",
        request=0,
        attempt=1,
        prompt_tokens=PROMPT,
        captures=[capture],
        lowest_captured=0,
    )
    index, budget = RowIndex(1 << 28, 16384, 16), RingBudget(1 << 16, [range(layers)], 0)
    wanted = {str(number): RequestCaptures(spec) for number in range(REQUESTS)}
    for name in wanted:
        budget.join(name, spec.captures, PROMPT, STEPS)
    kept, taken = [], []
    for step in range(PROMPT, PROMPT + STEPS):
        began = time.perf_counter()
        for name, each in wanted.items():
            index.keep(name, each, HASHES, step, step + 1)
        kept.append(time.perf_counter() - began)
        began = time.perf_counter()
        budget.begin([(name, step) for name in wanted], [], 0)
        assert all(budget.take(name, step, 1) for name in wanted)
        taken.append(time.perf_counter() - began)
    return statistics.median(kept) * 1e6, statistics.median(taken) * 1e6


if __name__ == "__main__":
    print(f"{REQUESTS} requests; microseconds per decode step: row index, ring budget")
    for hooks, layers in ((1, 32), (1, 80), (6, 32), (6, 80)):
        print(
            f"{hooks * layers:4} sites: {measure(hooks, layers)[0]:8.0f} "
            f"{measure(hooks, layers)[1]:8.0f}"
        )
