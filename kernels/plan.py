"""The plan of a site for one step: its columns, and the contents of the buffers.

All buffers are persistent, and filled before the forward pass by the rank's planner, so that a
compiled or replayed forward pass reads the current contents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..schemas.requests.interventions import EVERY, LIMIT, OWNER, PLACE, SCALARS

#: Columns of `token_rows`: the most configuration rows that may edit one token, for its request,
#: global steering, policies of all traffic and policies that the request names, together.
ROWS_PER_TOKEN = 16

#: Columns of a site's plan, int32. Columns that are not named are reserved.
COLUMNS = 17
EDITS = 0  # edited tokens in `lists`, each listed once; 0: none
EDITS_AT = 1  # index in `lists` at which they begin
DEPTH = 2  # columns of `token_rows` in use
# the only configuration row of all edited tokens, if the tokens are one contiguous run; else 0
ALIKE = 3
ALIKE_FROM = 14  # first token of that run
# number of this site, from 1, and therefore of its row in `counts` and `sizes`; 0: no site of the
# launch has anything to do
SITE = 15
# not 0: one of the edits may have a limit, for the GPU kernels
LIMITED = 16

# Counted like this, and not by tokens, edits are linear: the product of a vector and a boolean
# matrix is the expected count of each site of a step.
#: Columns of `counts`. An edit is one configuration row at one token: a token with two of them
#: counts twice.
COUNTS = 3
EDITED, CAPTURED_BEFORE, CAPTURED_AFTER = range(COUNTS)
#: In `capture_slots`: this token is not captured.
NO_SLOT = -1
#: The relative size that stands for one that is larger or not finite: the largest float32 but one.
LARGEST_SIZE = float.fromhex("0x1.fffffcp127")
#: What stands for the size if the row is not finite already before the edits; larger than every
#: size.
UNSOUND = float.fromhex("0x1.fffffep127")
#: The same if it is not finite only after them.
OVERFLOWED = math.inf
#: Edits are scaled to slightly less than their limit, so that rounding a float32 row does not carry
#: it beyond.
WITHIN = 1 - 2.0**-20


class CapturePort(NamedTuple):
    """The columns of one of a site's two captures."""

    COUNT: int  # captured rows; 0: none
    AT: int  # index in `lists` at which their tokens begin, in the order of the slots
    ROW: int  # ring row of slot 0, for the GPU kernels
    PLACES: int  # index in `lists` at which the ring rows of the slots begin, for the reference
    PATTERN: int  # row of `capture_slots`


BEFORE = CapturePort(4, 5, 6, 7, 8)
AFTER = CapturePort(9, 10, 11, 12, 13)


@dataclass
class Buffers:
    """Buffers that all sites of a bank share, filled before the forward pass, in the order of the
    ops' arguments; row, slot and entry 0 of the tables mean "nothing".

    Their addresses never change. On the CPU the ring is all memory for captured rows, which
    `workers.runner.rows.buffers` sets before the first forward; on an accelerator rows are copied
    from it. The reference reads `lists`, the GPU kernels `capture_slots`; both read the rest. int32
    unless another dtype is given.
    """

    ring: torch.Tensor  # [ring_rows, hidden_size], the model's dtype; written by the ops
    plan: torch.Tensor  # [sites, COLUMNS]; a launch has its own sites, in the order of their visits
    lists: torch.Tensor  # int64 [n]: token numbers, and ring rows
    # [capacity, ROWS_PER_TOKEN] configuration rows that edit each token; 0: none
    token_rows: torch.Tensor
    capture_slots: torch.Tensor  # [patterns, capacity] token → slot, or NO_SLOT
    # [sites, families, 1 + configurations] configuration row → pool entry; column 0 and entry 0:
    # nothing; a launch has its own sites
    site_rows: torch.Tensor
    pool: torch.Tensor  # [1 + entries, hidden_size], the model's dtype
    scalars: torch.Tensor  # float32 [1 + entries, SCALARS]
    #: [sites, COUNTS], incremented by the ops modulo 2³²: the work that each site ever did.
    counts: torch.Tensor
    #: float32 [sites, capacity], written by the ops at each token that a site edits; other values
    #: are those of earlier steps: the relative size ‖edit‖₂ / ‖row before it‖₂ of all edits of a
    #: site at a token, at most LARGEST_SIZE; UNSOUND or OVERFLOWED if the row is not finite; minus
    #: that if its owner's edits exceed a limit that fails the request.
    sizes: torch.Tensor


class Does(NamedTuple):
    """Effect of a configuration at this site, in one family."""

    # [entries of the application, hidden_size], in the layout of
    # `schemas.requests.interventions.Intervention`
    vectors: torch.Tensor
    # scalars of the first entry, or of all: [entries, up to SCALARS]
    scalars: Sequence[float] | torch.Tensor = ()
    limit: float = 0.0  # see `schemas.requests.specs.StoredSteering`
    operator: bool = False  # the operator's edit, not a request's


def does_of(
    name: str, numbers: Sequence[float], tensors: Sequence[torch.Tensor], scale: float = 1.0
) -> Does:
    """Return the effect of an entry of the family `name`, from its numbers and its tensors in the
    family's order.

    `scale`: multiplies the vector, if the family has a scale.
    """
    family = EVERY[PLACE[name]]
    if family.ranked:
        return lowrank(*numbers, *tensors)
    first, *rest = tensors
    return Does(torch.stack([first if family.scale is None else first * scale, *rest]), numbers)


def lowrank(
    strength: float, rotation: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> Does:
    """Return the effect of `lowrank` from R and W, both `[rank, hidden_size]`, and b, `[rank]`."""
    rank, width = rotation.shape
    numbers = torch.zeros(2 * rank, 3, dtype=torch.float32)
    numbers[0, 0] = strength
    numbers[0, 1] = rank
    numbers[::2, 2] = bias
    return Does(torch.stack([rotation, weight], 1).reshape(2 * rank, width), numbers)


def laid_out(name: str, does: Does) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the contents of the entries of one application of the family `name`: pool
    `[entries, hidden_size]`, scalars `[entries, SCALARS]`.

    Both are float32; directions are normalised before the pool's dtype rounds them. Raises
    ValueError for a number of vectors or scalars that the family does not take, and for a direction
    that cannot be normalised.
    """
    family = EVERY[PLACE[name]]
    size = len(does.vectors)
    terms, rest = divmod(size, family.entries())
    if rest or not 1 <= terms <= family.most_terms:
        raise ValueError(
            f"{name} takes {family.entries()} vectors for each of 1 to {family.most_terms} "
            f"terms, not {size}"
        )
    numbers = torch.atleast_2d(torch.as_tensor(does.scalars, dtype=torch.float32))
    if numbers.shape[1] != len(family.scalars) or len(numbers) > size:
        raise ValueError(
            f"{name} takes {len(family.scalars)} scalars ({', '.join(family.scalars)}), not "
            f"{list(numbers.shape)}"
        )
    scalars = torch.zeros(size, SCALARS, dtype=torch.float32)
    scalars[: len(numbers), : numbers.shape[1]] = numbers
    scalars[0, LIMIT] = does.limit
    scalars[0, OWNER] = does.operator
    vectors = unit(does.vectors) if family.unit else does.vectors.float()
    # s + (−0) has the bits of s for every s; s + 0 does not if s is −0
    if family.effect == "shift":
        vectors = vectors.masked_fill(vectors == 0, -0.0)
    return vectors, scalars


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Return the rows `[n, hidden_size]` normalised to length 1, float32.

    Raises ValueError for a row whose norm is 0 or not finite.
    """
    wide = vectors.double()
    lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    if not bool((torch.isfinite(lengths) & (lengths > 0)).all()):
        raise ValueError("a direction must have a finite norm other than 0")
    return (wide / lengths).float()
