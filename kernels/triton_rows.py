"""Copies captured rows to page-locked memory, which a GPU writes through the bus.

It runs beside the next forward pass. A program that waits for the bus keeps its multiprocessor, so
there are few of them, and the forward has all others.
"""

import torch
import triton
import triton.language as tl

#: Programs of a launch at most.
PROGRAMS = 8


# One compilation for each width: what the number of rows changes may not select another.
@triton.jit(do_not_specialize=["rows", "places", "count"])
def _scatter(memory, ring, rows, places, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, BLOCK)
    inside = lanes < WIDTH
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(ring + tl.load(rows + number) * WIDTH + lanes, mask=inside)
        tl.store(memory + tl.load(places + number) * WIDTH + lanes, row, mask=inside)


def scatter(
    memory: torch.Tensor, ring: torch.Tensor, rows: torch.Tensor, places: torch.Tensor
) -> None:
    """Copy row `rows[i]` of `ring` to row `places[i]` of `memory`: both `[any number, width]` of
    one dtype. `rows`, `places`: int64 `[n]`; of rows with one place, any is there afterwards.
    """
    width = ring.shape[1]
    block = triton.next_power_of_2(ring.shape[1])
    _scatter[(min(PROGRAMS, len(rows)),)](
        memory, ring, rows, places, len(rows), WIDTH=width, BLOCK=block, num_warps=8
    )
