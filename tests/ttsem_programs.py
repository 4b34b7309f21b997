"""What ttsem runs of the Triton kernels: each that there is, and faults that it has to find.

A program with one argument, a name of `PROGRAMS`.
"""

import itertools
import sys
from collections.abc import Callable

import torch
from site_groups import random_group
from site_kit import DTYPES, begin, check, new_seed, random_case, run

from midstream.kernels import triton_rows, triton_site
from midstream.kernels.ops import implementations

WIDTH = 37
KERNELS = implementations(triton_site.launch)


def kernels() -> None:
    """Random sites of each dtype, alone and in groups, and copies of rows of each width."""
    begin("kernels")
    for dtype, pair in itertools.product(DTYPES, (True, False)):
        case = random_case(new_seed(), dtype=dtype, width=WIDTH, tokens=7, pair=pair)
        check(case, run(case, *KERNELS))
    for kind in ((3, 0, False), (3, 1, True)):
        group = random_group(new_seed(), dtype=torch.bfloat16, width=WIDTH, tokens=7, kind=kind)
        group.run(*KERNELS, together=True)
    for dtype, width in itertools.product(DTYPES, (1, WIDTH, 3000)):
        ring = torch.randn(50, width).to(dtype)
        memory = torch.empty(90, width, dtype=dtype)
        rows = torch.randperm(50)[:20]
        places = torch.randperm(90)[:20]
        triton_rows.scatter(memory, ring, rows, places)
        assert torch.equal(memory[places], ring[rows])


def outside() -> None:
    """A row goes one place beyond the memory."""
    triton_rows.scatter(
        torch.zeros(4, WIDTH), torch.ones(4, WIDTH), torch.tensor([0]), torch.tensor([4])
    )


def race() -> None:
    """Two programs copy different rows to one place."""
    triton_rows.scatter(
        torch.zeros(4, WIDTH), torch.randn(4, WIDTH), torch.tensor([0, 1]), torch.tensor([2, 2])
    )


def unwritten() -> None:
    """A row that nobody wrote is copied."""
    memory = torch.zeros(4, WIDTH)
    ring = torch.empty(4, WIDTH)
    triton_rows.scatter(memory, ring, torch.tensor([0]), torch.tensor([0]))
    assert not memory.isnan().any(), "memory that nobody wrote"


def beyond_the_ring() -> None:
    """A site captures a row for which the ring has no room."""
    begin("ring")
    case = random_case(5, dtype=torch.float32, width=WIDTH, tokens=7, pair=False)
    while not case.plan.after:
        case = random_case(new_seed(), dtype=torch.float32, width=WIDTH, tokens=7, pair=False)
    case.ring_rows = case.plan.after_row + len(case.plan.after) - 1
    run(case, *KERNELS)


#: Fault → what is said of it.
PLANTED: dict[Callable[[], None], str] = {
    outside: "past the end of the tensor passed as `memory`",
    race: "race",
    unwritten: "memory that nobody wrote",
    beyond_the_ring: "past the end of the tensor passed as `ring`",
}
PROGRAMS = {each.__name__: each for each in (kernels, *PLANTED)}


def main() -> None:
    PROGRAMS[sys.argv[-1]]()
