"""Sizes of the ring, the buffer that one step's captured rows are written to in compiled forward
passes and on accelerators, and of the queue of those that wait for the writers.
"""

from typing import NamedTuple

#: Automatic size, both halves together: at most this, and on an accelerator at most `SHARE` of its
#: memory.
MOST_BYTES = {True: 2 << 30, False: 512 << 20}  # on an accelerator; on the CPU
SHARE = 32


class Ring(NamedTuple):
    rows: int  # `[hidden_size]` each, that one step may capture
    halves: int  # one is filled while the other is copied from
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
    """The ring of a rank that holds `layers` with `hooks` hook points each.

    `row_bytes`: of one row. `step_tokens` and `requests`: of one step, at most. `drafts`:
    speculative tokens of a request in a step.
    `memory_bytes`: of the accelerator; 0: unknown. `size_mib`: the setting `capture_buffer_mib`; 0:
    automatic, which is room for every site of every request's next token and for one hook's layers
    of a whole step, as far as the bounds above allow. Always room for every site of one request's
    next token, unless the setting says less.
    """
    halves = 2 if accelerator else 1
    if size_mib:
        rows = max(1, (size_mib << 20) // (row_bytes * halves))
    else:
        one = hooks * layers * (1 + drafts)
        most = min(MOST_BYTES[accelerator], memory_bytes // SHARE or MOST_BYTES[accelerator]) // (
            row_bytes * halves
        )
        rows = max(one, min(most, max(one * requests, layers * step_tokens)))
    return Ring(rows, halves, rows * halves * row_bytes)


#: Automatic size of the queue: on the CPU; on an accelerator that many full steps, at least as on
#: the CPU, at most this share of the memory.
QUEUE_BYTES, QUEUE_STEPS, QUEUE_SHARE = 512 << 20, 4, 16


def plan_queue(
    ring: Ring | None, *, accelerator: bool, host_bytes: int = 0, ranks: int = 1, size_mib: int = 0
) -> int:
    """Bytes of a rank's captured rows that may wait for the writers.

    `host_bytes`: memory of the machine, which that many `ranks` share; 0: unknown. `size_mib`: the
    setting `capture_queue_mib`; 0: automatic.
    """
    if size_mib:
        return size_mib << 20
    if ring is None or not accelerator:
        return QUEUE_BYTES
    needed = max(QUEUE_BYTES, QUEUE_STEPS * ring.size // ring.halves)
    return (
        min(needed, max(QUEUE_BYTES, host_bytes // (QUEUE_SHARE * ranks))) if host_bytes else needed
    )
