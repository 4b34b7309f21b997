"""Sizes of two buffers: the ring, to which compiled forward passes and accelerators write a step's
captured rows, and the queue of rows that wait for the writers; and the number of these.
"""

from typing import NamedTuple

#: Whether on an accelerator → the largest automatic size of the ring in bytes, all halves together.
#: On an accelerator the ring is also at most 1 / `SHARE` of the memory.
MOST_BYTES = {True: 2 << 30, False: 512 << 20}
SHARE = 32


class Ring(NamedTuple):
    rows: int  # the most rows `[hidden_size]` that one step may capture
    halves: int  # with two, one is filled while the other is copied to the host
    size: int  # bytes of all halves, on every rank


def plan_ring(
    row_bytes: int,
    hooks: int,
    layers: int,
    *,
    step_tokens: int,
    requests: int,
    drafts: int = 0,
    accelerator: bool,
    memory_bytes: int = 0,
    size_mib: int = 0,
) -> Ring:
    """Plan the ring of a rank that holds `layers` layers with `hooks` hook points each.

    `row_bytes`: of one row. `step_tokens` and `requests`: the most in one step. `drafts`:
    speculative tokens of a request in a step. `memory_bytes`: of the accelerator; 0: unknown.
    `size_mib`: the setting `capture_buffer_mib`; 0: automatic.

    The automatic size has room for every site of every request's next token, and for all layers at
    one hook for every token of a step, within the bounds above. It never has less room than every
    site of one request's next token needs.
    """
    halves = 2 if accelerator else 1
    if size_mib:
        rows = max(1, (size_mib << 20) // (row_bytes * halves))
    else:
        rows_per_request = hooks * layers * (1 + drafts)
        upper_bound = min(
            MOST_BYTES[accelerator], memory_bytes // SHARE or MOST_BYTES[accelerator]
        ) // (row_bytes * halves)
        rows = max(
            rows_per_request,
            min(upper_bound, max(rows_per_request * requests, layers * step_tokens)),
        )
    return Ring(rows, halves, rows * halves * row_bytes)


#: Automatic size of the queue. On the CPU: `QUEUE_BYTES`. On an accelerator: `QUEUE_STEPS` full
#: steps, but at least `QUEUE_BYTES`, and at most a rank's part of 1 / `QUEUE_SHARE` of the host
#: memory.
QUEUE_BYTES, QUEUE_STEPS, QUEUE_SHARE = 512 << 20, 4, 16


def plan_queue(
    ring: Ring | None, *, accelerator: bool, host_bytes: int = 0, ranks: int = 1, size_mib: int = 0
) -> int:
    """Return the most bytes of a rank's captured rows that may wait for the writers.

    `host_bytes`: memory of the machine, shared by its `ranks`; 0: unknown. `size_mib`: the setting
    `capture_queue_mib`; 0: automatic.
    """
    if size_mib:
        return size_mib << 20
    if ring is None or not accelerator:
        return QUEUE_BYTES
    needed = max(QUEUE_BYTES, QUEUE_STEPS * ring.size // ring.halves)
    return (
        min(needed, max(QUEUE_BYTES, host_bytes // (QUEUE_SHARE * ranks))) if host_bytes else needed
    )


def plan_writers(*, accelerator: bool, cores: int, ranks: int = 1, threads: int = 0) -> int:
    """Return the threads of a rank that write captured rows.

    `cores`: of the machine, shared by its `ranks`; on CPUs the model needs them. `threads`: the
    setting `writer_threads`; 0: automatic.
    """
    return threads or (min(4, max(2, cores // (4 * ranks))) if accelerator else 2)
