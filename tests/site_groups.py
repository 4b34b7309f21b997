"""Groups of sites that share a launch: random ones, and the same sites launched one by one, which
must give the same bits.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from site_kit import DTYPES, EXACT, RANDOM, Op, new_seed, random_case, same_bits
from site_plans import OpInputs, SitePlan, build_group

#: (sites, those of them that are of `hidden` alone, whether the others are of a pair): what the
#: table of architectures can give.
KINDS = [(2, 1, True), (3, 1, True), (2, 0, True), (2, 0, False), (1, 0, True), (1, 0, False)]


@dataclass
class Group:
    plans: list[SitePlan]
    branches: int
    hidden: torch.Tensor | None  # `[tokens, width]`; None: single sites
    stream: torch.Tensor
    ring_rows: int
    capacity: int
    name: str

    def run(self, pair_site: Op, single_site: Op, *, together: bool) -> dict[str, torch.Tensor]:
        """What the sites wrote, launched `together` or one after the other."""
        width = self.stream.shape[1]
        dtype = self.stream.dtype
        ring = torch.full((self.ring_rows, width), math.nan, dtype=dtype)
        stream = self.stream.clone()
        hidden = None if self.hidden is None else self.hidden.clone()
        planned = build_group(self.plans, self.capacity, dtype)
        if together:
            self._launch(
                pair_site,
                single_site,
                hidden,
                stream,
                ring,
                planned=planned,
                branches=self.branches,
            )
        else:
            for number in range(len(self.plans)):
                one = slice(number, number + 1)
                mine = planned._replace(plan=planned.plan[one], site_rows=planned.site_rows[one])
                if number < self.branches:
                    assert hidden is not None
                    single_site(hidden, ring, *mine)
                else:
                    self._launch(
                        pair_site, single_site, hidden, stream, ring, planned=mine, branches=0
                    )
        wrote = {"stream": stream, "ring": ring, "counts": planned.counts, "sizes": planned.sizes}
        return wrote if hidden is None else wrote | {"hidden": hidden}

    def _launch(
        self,
        pair_site: Op,
        single_site: Op,
        hidden: torch.Tensor | None,
        stream: torch.Tensor,
        ring: torch.Tensor,
        planned: OpInputs,
        branches: int,
    ) -> None:
        if hidden is None:
            single_site(stream, ring, *planned)
        else:
            pair_site(hidden, stream, ring, *planned, branches)


def random_group(
    seed: int,
    *,
    dtype: torch.dtype,
    width: int,
    tokens: int,
    kind: tuple[int, int, bool],
    families: Sequence[str] = tuple(RANDOM),
    loud: bool = False,
) -> Group:
    """`loud`: some numbers are so large that edits overflow at some of the sites."""
    choose = random.Random(seed)
    sites, branches, pair = kind
    cases = [
        random_case(
            choose.getrandbits(31),
            dtype=dtype,
            width=width,
            tokens=tokens,
            pair=pair,
            families=families,
        )
        for _ in range(sites)
    ]
    edits = cases[0].plan.edits
    most = max(itertools.chain([0], *edits.values()))
    row = 0
    plans = []
    for number, case in enumerate(cases):
        known = [dict(each) if choose.random() < 0.7 else {} for each in case.plan.configurations]
        known = (known + [{}] * most)[:most]
        before, after = (
            port if choose.random() < 0.7 else () for port in (case.plan.before, case.plan.after)
        )
        plans.append(
            replace(
                case.plan,
                configurations=known,
                edits=edits,
                before=before,
                after=after,
                before_row=row,
                site=number + 1,
            )
        )
        row += len(before)
        plans[-1].after_row = row
        row += len(after)
    torch.manual_seed(seed)
    stream, hidden = (torch.randn(tokens, width).to(dtype) for _ in range(2))
    if loud:
        stream[:: 2 + tokens // 3] = torch.finfo(dtype).max
    name = f"seed {seed}, {dtype}, width {width}, {tokens} tokens, {kind}"
    return Group(
        plans=plans,
        branches=branches,
        hidden=hidden if pair else None,
        stream=stream,
        ring_rows=row + 2,
        capacity=tokens + choose.randint(0, 4),
        name=name,
    )


def check_groups(
    pair_site: Op,
    single_site: Op,
    *,
    rounds: int,
    widths: Sequence[int],
    families: Sequence[str] = tuple(RANDOM),
    tokens: int = 9,
) -> None:
    """Bit for bit, over all dtypes and kinds of groups: rows of the stream, the ring, marks and
    counts.
    """
    for kind, dtype, width, _ in itertools.product(KINDS, DTYPES, widths, range(rounds)):
        loud = new_seed() % 4 == 0
        group = random_group(
            new_seed(),
            dtype=dtype,
            width=width,
            tokens=tokens,
            kind=kind,
            families=families,
            loud=loud,
        )
        found, expected = (
            group.run(pair_site, single_site, together=together) for together in (True, False)
        )
        for name, values in expected.items():
            assert same_bits(found[name], values), (
                f"{group.name}: {name} is not what the sites write one by one"
            )


def check_groups_against(
    pair_site: Op, single_site: Op, reference: tuple[Op, Op], *, rounds: int, width: int
) -> None:
    """Groups without sums over rows have the bits of another implementation's groups. Sizes are
    sums over a row, whose order is each implementation's own.
    """
    for kind, dtype, _ in itertools.product(KINDS, DTYPES, range(rounds)):
        group = random_group(
            new_seed(), dtype=dtype, width=width, tokens=7, kind=kind, families=EXACT
        )
        found = group.run(pair_site, single_site, together=True)
        expected = group.run(*reference, together=True)
        for name, values in expected.items():
            if name == "sizes":
                same = torch.allclose(found[name], values, rtol=1e-5, atol=0, equal_nan=True)
            else:
                same = same_bits(found[name], values)
            assert same, f"{group.name}: {name} is not the reference's"
