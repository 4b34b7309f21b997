"""Sizes of two buffers: the ring, to which an accelerator writes a step's captured rows, and the
queue of rows that wait for the writers; and the number of these.
"""

from typing import NamedTuple

from .limits import MAX_REQUEST_POLICIES

#: The largest automatic size of the ring in bytes, both halves together; it is also at most 1 /
#: `SHARE` of the accelerator's memory.
MOST_BYTES = 2 << 30
SHARE = 32
#: Halves of the ring: one is filled while the other is copied to the host.
HALVES = 2
#: Rows of a token that the probes of policies read: of those of all traffic, and of those that its
#: request names. They have room of their own, so that no policy takes that of a request's captures.
POLICY_ROWS = 2 * MAX_REQUEST_POLICIES


class Ring(NamedTuple):
    rows: int  # the most rows `[hidden_size]` of one step, without those of `POLICY_ROWS`
    size: int  # bytes of these, in both halves, on every rank

    @property
    def step_rows(self) -> int:
        """The most rows that one step may capture."""
        return self.rows + POLICY_ROWS


def plan_ring(
    row_bytes: int,
    hooks: int,
    layers: int,
    *,
    step_tokens: int,
    requests: int,
    drafts: int = 0,
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
    if size_mib:
        rows = max(1, (size_mib << 20) // (row_bytes * HALVES))
    else:
        rows_per_request = hooks * layers * (1 + drafts)
        upper_bound = min(MOST_BYTES, memory_bytes // SHARE or MOST_BYTES) // (row_bytes * HALVES)
        rows = max(
            rows_per_request,
            min(upper_bound, max(rows_per_request * requests, layers * step_tokens)),
        )
    return Ring(rows, rows * HALVES * row_bytes)


#: Automatic size of the queue. On the CPU: `QUEUE_BYTES`. On an accelerator: `QUEUE_STEPS` full
#: steps, but at least `QUEUE_BYTES`, and at most a rank's part of 1 / `QUEUE_SHARE` of the host
#: memory.
QUEUE_BYTES = 512 << 20
QUEUE_STEPS = 4
QUEUE_SHARE = 16


def plan_queue(ring: Ring | None, *, host_bytes: int = 0, ranks: int = 1, size_mib: int = 0) -> int:
    """Return the most bytes of a rank's captured rows that may wait for the writers.

    `ring`: None on the CPU. `host_bytes`: memory of the machine, shared by its `ranks`; 0: unknown.
    `size_mib`: the setting `capture_queue_mib`; 0: automatic.
    """
    if size_mib:
        return size_mib << 20
    if ring is None:
        return QUEUE_BYTES
    needed = max(QUEUE_BYTES, QUEUE_STEPS * ring.size // HALVES)
    return (
        min(needed, max(QUEUE_BYTES, host_bytes // (QUEUE_SHARE * ranks))) if host_bytes else needed
    )


def plan_writers(*, accelerator: bool, cores: int, ranks: int = 1, threads: int = 0) -> int:
    """Return the threads of a rank that write captured rows.

    `cores`: of the machine, shared by its `ranks`; on CPUs the model needs them. `threads`: the
    setting `writer_threads`; 0: automatic.
    """
    return threads or (min(4, max(2, cores // (4 * ranks))) if accelerator else 2)
