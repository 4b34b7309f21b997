"""Readable descriptions of what sites do in one step, and the buffers that they become.

The rank's planner fills the buffers for many sites together; `SitePlan` does it for one, and
`build_group` for those of one launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from midstream.kernels.plan import (
    AFTER,
    ALIKE,
    ALIKE_FROM,
    BEFORE,
    COLUMNS,
    COUNTS,
    DEPTH,
    EDITS,
    EDITS_AT,
    LIMITED,
    NO_SLOT,
    ROWS_PER_TOKEN,
    SITE,
    Does,
    laid_out,
)
from midstream.schemas.requests.interventions import (
    EVERY,
    FAMILIES,
    INSTALLED,
    PLACE,
    SCALARS,
)


class OpInputs(NamedTuple):
    """Inputs of both ops after the ring, see `kernels.plan.Buffers`."""

    plan: torch.Tensor
    lists: torch.Tensor
    token_rows: torch.Tensor
    capture_slots: torch.Tensor
    site_rows: torch.Tensor
    pool: torch.Tensor
    scalars: torch.Tensor
    counts: torch.Tensor
    sizes: torch.Tensor


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
