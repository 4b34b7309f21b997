"""Size of the ring: the buffer that one step's captured rows are written to, in compiled forward passes and on accelerators."""

from typing import NamedTuple

#: Automatic size, both halves together: at most this, and on an accelerator at most `SHARE` of its memory.
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

    `row_bytes`: of one row. `step_tokens` and `requests`: of one step, at most. `drafts`: speculative tokens of a request in a step.
    `memory_bytes`: of the accelerator; 0: unknown. `size_mib`: the setting `capture_buffer_mib`; 0: automatic, which is room for
    every site of every request's next token and for one hook's layers of a whole step, as far as the bounds above allow. Always room
    for every site of one request's next token, unless the setting says less.
    """
    halves = 2 if accelerator else 1
    if size_mib:
        rows = max(1, (size_mib << 20) // (row_bytes * halves))
    else:
        one = hooks * layers * (1 + drafts)
        most = min(MOST_BYTES[accelerator], memory_bytes // SHARE or MOST_BYTES[accelerator]) // (row_bytes * halves)
        rows = max(one, min(most, max(one * requests, layers * step_tokens)))
    return Ring(rows, halves, rows * halves * row_bytes)
