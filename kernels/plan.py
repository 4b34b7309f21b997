"""The plan of a site for one step: its columns, and the buffers built from a readable description.

All buffers are persistent, and filled before the forward pass, so that a compiled or replayed
forward pass reads the current contents. The rank's planner fills them for many sites together;
`SitePlan` does it for one, for tests and benchmarks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..schemas.requests.interventions import (
    EVERY,
    FAMILIES,
    INSTALLED,
    LIMIT,
    OWNER,
    PLACE,
    SCALARS,
)

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


class OpInputs(NamedTuple):
    """Inputs of both ops, after the tensors that they write. int32 unless another dtype is given.

    The reference reads `lists`, the GPU kernels `capture_slots`; both read the rest.
    """

    plan: torch.Tensor  # [sites, COLUMNS] of one launch, in the order in which they are visited
    lists: torch.Tensor  # int64 [n]: token numbers, and ring rows
    # [capacity, ROWS_PER_TOKEN] configuration rows that edit each token; 0: none
    token_rows: torch.Tensor
    capture_slots: torch.Tensor  # [patterns, capacity] token → slot, or NO_SLOT
    # [sites, families, 1 + configurations] configuration row → pool entry; column 0 and entry 0:
    # nothing
    site_rows: torch.Tensor
    pool: torch.Tensor  # [1 + entries, hidden_size], the model's dtype
    scalars: torch.Tensor  # float32 [1 + entries, SCALARS]
    #: [all sites, COUNTS], incremented by the ops modulo 2³²: the work that each site ever did.
    counts: torch.Tensor
    #: float32 [all sites, capacity], written by the ops at each token that a site edits; other
    #: values are those of earlier steps: the relative size ‖edit‖₂ / ‖row before it‖₂ of all edits
    #: of a site at a token, at most LARGEST_SIZE; UNSOUND or OVERFLOWED if the row is not finite;
    #: minus that if its owner's edits exceed a limit that fails the request.
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


@dataclass
class SitePlan:
    """Readable description of one site's step; `build` converts it to buffers."""

    hidden_size: int
    #: Configuration row (from 1) → family name → its effect at this site, which may be none.
    configurations: Sequence[Mapping[str, Does]] = ()
    #: Token → the configuration rows that edit it, at most ROWS_PER_TOKEN; 0: none in this column.
    edits: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # tokens captured before the edits, in the order of their ring rows, each once
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    before_row: int = 0  # ring row of the first captured token
    after_row: int = 0
    site: int = 1  # its number, from 1

    def build(
        self, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> OpInputs:
        """Return buffers for up to `capacity` tokens.

        Raises ValueError if a token has more than ROWS_PER_TOKEN rows.
        """
        return build_group([self], capacity, dtype, device)

    def _columns(self, lists: list[int], capture_slots: torch.Tensor) -> list[int]:
        """Return this site's row of the plan. Appends its tokens to `lists`, and fills its two
        patterns of `capture_slots`.
        """
        plan = [0] * COLUMNS
        plan[EDITS] = len(self.edits)
        plan[EDITS_AT] = len(lists)
        plan[SITE] = self.site
        lists += self.edits
        plan[LIMITED] = any(
            does.limit for configuration in self.configurations for does in configuration.values()
        )
        plan[DEPTH] = max(map(len, self.edits.values()), default=0)
        named = [*set(map(tuple, self.edits.values()))]
        first = next(iter(self.edits), 0)
        if (
            len(named) == 1
            and len(named[0]) == 1
            and list(self.edits) == list(range(first, first + len(self.edits)))
        ):
            plan[ALIKE] = named[0][0]
            plan[ALIKE_FROM] = first
        captures = ((BEFORE, self.before, self.before_row), (AFTER, self.after, self.after_row))
        for slots, (port, tokens, row) in zip(capture_slots, captures, strict=True):
            plan[port.COUNT] = len(tokens)
            plan[port.AT] = len(lists)
            plan[port.ROW] = row
            lists += tokens
            plan[port.PLACES] = len(lists)
            lists += range(row, row + len(tokens))
            slots[list(tokens)] = torch.arange(len(tokens), dtype=torch.int32)
        return plan


def build_group(
    plans: Sequence[SitePlan], capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> OpInputs:
    """Return buffers of sites that share a launch, for up to `capacity` tokens.

    In one step a token has the same configuration rows at all sites, so `edits` must be equal; a
    configuration's effect may differ from site to site. Raises ValueError for unequal `edits`, or
    if a token has more than ROWS_PER_TOKEN rows.
    """
    first = plans[0]
    if any(plan.edits != first.edits for plan in plans):
        raise ValueError("the sites of one step must edit the same tokens with the same rows")
    token_rows = torch.zeros(capacity, ROWS_PER_TOKEN, dtype=torch.int32)
    for token, rows in first.edits.items():
        if len(rows) > ROWS_PER_TOKEN:
            raise ValueError(
                f"token {token} has {len(rows)} configuration rows; at most {ROWS_PER_TOKEN} fit"
            )
        token_rows[token, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
    lists: list[int] = []
    columns = []
    capture_slots = torch.full((len(plans), 2, capacity), NO_SLOT, dtype=torch.int32)
    installed = any(
        INSTALLED.name in configuration for plan in plans for configuration in plan.configurations
    )
    families = len(EVERY if installed else FAMILIES)
    site_rows = torch.zeros(
        len(plans), families, 1 + max(len(plan.configurations) for plan in plans), dtype=torch.int32
    )
    pool = [torch.zeros(1, first.hidden_size, dtype=torch.float32)]
    scalars = [torch.zeros(1, SCALARS, dtype=torch.float32)]
    entry = 1
    for number, plan in enumerate(plans):
        columns.append(plan._columns(lists, capture_slots[number]))
        columns[-1][BEFORE.PATTERN] = 2 * number
        columns[-1][AFTER.PATTERN] = 2 * number + 1
        for row, configuration in enumerate(plan.configurations, 1):
            for name, does in configuration.items():
                site_rows[number, PLACE[name], row] = entry
                for buffer, values in zip((pool, scalars), laid_out(name, does), strict=True):
                    buffer.append(values)
                entry += len(does.vectors)
    if not any(
        of_site[column] for of_site in columns for column in (EDITS, BEFORE.COUNT, AFTER.COUNT)
    ):
        for of_site in columns:
            of_site[SITE] = 0
    built = OpInputs(
        plan=torch.tensor(columns, dtype=torch.int32),
        lists=torch.tensor(lists or [0]),
        token_rows=token_rows,
        capture_slots=capture_slots.flatten(0, 1),
        site_rows=site_rows,
        pool=torch.cat(pool).to(dtype),
        scalars=torch.cat(scalars),
        counts=torch.zeros(max(plan.site for plan in plans), COUNTS, dtype=torch.int32),
        sizes=torch.full((max(plan.site for plan in plans), capacity), torch.nan),
    )
    return OpInputs(*(tensor.to(device) for tensor in built))
