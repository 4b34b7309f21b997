"""What must be true of any implementation of the site ops?

Random sites, the truth in float64, and checks that name their seed.

Used for the CPU reference, for the Triton kernels under the interpreter, and on a GPU by
`benchmarks/gpu/stage_kernels.py`. Needs torch alone. What a row should be: `site_truth.py`.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from site_plans import OpInputs, SitePlan
from site_truth import truth

from midstream.kernels.plan import (
    AFTER,
    ALIKE,
    ALIKE_FROM,
    BEFORE,
    COLUMNS,
    DEPTH,
    EDITS,
    EDITS_AT,
    LARGEST_SIZE,
    LIMITED,
    OVERFLOWED,
    ROWS_PER_TOKEN,
    SITE,
    UNSOUND,
    Does,
    lowrank,
)
from midstream.schemas.requests.interventions import FAMILIES, LIMIT, OWNER, PLACE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: (width, tokens); widths are one lane, odd, and a real model's that is not a power of two.
SHAPES = ((1, 33), (37, 1), (37, 7), (576, 7))

#: Unit roundoff: half the distance between 1 and the next number.
ROUNDOFF = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}

Op = Callable[..., None]
_draws = random.Random()
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def begin(name: str) -> None:
    """From here on all is drawn as it is each time for `name`; without it, anew in each process."""
    _draws.seed(name)
    torch.manual_seed(new_seed())


def new_seed() -> int:
    return _draws.getrandbits(32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: tells −0 from 0 and compares NaN."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(bits(first), bits(second))


@dataclass
class Case:
    """One site in one step, with poison wherever nothing may be read or written."""

    plan: SitePlan
    hidden: torch.Tensor | None  # `[tokens, width]`; None: a single site
    stream: torch.Tensor  # `[tokens, width]`: the residual of a pair, or the tensor itself
    ring_rows: int
    capacity: int
    name: str = ""
    planned: OpInputs = field(init=False)

    def __post_init__(self) -> None:
        self.planned = _poisoned(self.plan.build(self.capacity, self.stream.dtype), self.plan)

    @property
    def sum(self) -> torch.Tensor:
        return self.stream if self.hidden is None else self.hidden + self.stream


@dataclass
class Outcome:
    hidden: torch.Tensor | None
    stream: torch.Tensor
    ring: torch.Tensor
    counts: torch.Tensor
    sizes: torch.Tensor

    @property
    def sum(self) -> torch.Tensor:
        return self.stream if self.hidden is None else self.hidden + self.stream


def _poisoned(planned: OpInputs, plan: SitePlan) -> OpInputs:
    """Nonsense in every place that the contract leaves open, so that reading it shows."""
    columns = planned.plan[0]
    depth = int(columns[DEPTH])
    for column in set(range(COLUMNS)) - {
        EDITS,
        EDITS_AT,
        DEPTH,
        ALIKE,
        ALIKE_FROM,
        LIMITED,
        SITE,
        *BEFORE,
        *AFTER,
    }:
        columns[column] = -99
    if not columns[ALIKE]:
        columns[ALIKE_FROM] = 10**6
    for port in (BEFORE, AFTER):
        if not columns[port.COUNT]:
            columns[[port.AT, port.ROW, port.PLACES, port.PATTERN]] = 10**6
    if not columns[EDITS]:
        columns[DEPTH] = ROWS_PER_TOKEN
    lists = torch.cat([planned.lists, torch.full((5,), 2**30)])
    if plan.configurations:
        planned.token_rows[:, depth:] = 1
    used = torch.zeros_like(planned.scalars, dtype=torch.bool)
    for row, configuration in enumerate(plan.configurations, 1):
        for name, does in configuration.items():
            family = FAMILIES[PLACE[name]]
            entry = int(planned.site_rows[0, PLACE[name], row])
            used[entry, [*range(len(family.scalars)), LIMIT, OWNER]] = True
            for scalar in family.of_each_term:
                used[
                    entry : entry + len(does.vectors) : family.entries(), family.column(scalar)
                ] = True
    planned.pool[0] = math.nan
    planned.scalars[~used] = math.nan
    pool = torch.cat(
        [planned.pool, torch.full((3, plan.hidden_size), math.nan, dtype=planned.pool.dtype)]
    )
    scalars = torch.cat([planned.scalars, torch.full((3, planned.scalars.shape[1]), math.nan)])
    return planned._replace(lists=lists, pool=pool, scalars=scalars)


def run(case: Case, pair_site: Op, single_site: Op) -> Outcome:
    """Runs a copy of the case, its ring full of NaN; checks that what is only read keeps its
    bits.
    """
    ring = torch.full((case.ring_rows, case.stream.shape[1]), math.nan, dtype=case.stream.dtype)
    stream = case.stream.clone()
    hidden = None if case.hidden is None else case.hidden.clone()
    planned = OpInputs(*(tensor.clone() for tensor in case.planned))
    if hidden is None:
        single_site(stream, ring, *planned)
    else:
        pair_site(hidden, stream, ring, *planned)
    for name, after, before in zip(OpInputs._fields, planned, case.planned, strict=True):
        assert name in ("counts", "sizes") or same_bits(after, before), (
            f"{case.name}: {name} was written"
        )
    return Outcome(hidden, stream, ring, planned.counts, planned.sizes)


def check(case: Case, found: Outcome) -> None:
    """Every property of the ops that holds for any plan; the message names the case."""
    assert same_bits(
        case.sum[list(case.plan.before)], _rows(found, case.plan.before_row, case.plan.before)
    ), f"{case.name}: captured before the edits is not the stream as it came, bit for bit"
    assert same_bits(
        found.sum[list(case.plan.after)], _rows(found, case.plan.after_row, case.plan.after)
    ), f"{case.name}: captured after the edits is not the stream as it left, bit for bit"
    _check_ring(case, found)
    _check_counts(case, found)
    for token in range(len(case.stream)):
        _check_token(case, found, token, f"{case.name}, token {token}")
    check_sizes(case, found)


def checked(case: Case, pair_site: Op, single_site: Op) -> Outcome:
    """Runs the case, and checks every property of the ops that holds for any plan."""
    found = run(case, pair_site, single_site)
    check(case, found)
    return found


def _check_token(case: Case, found: Outcome, token: int, where: str) -> None:
    expected = truth(case.plan, case.hidden, case.stream, token)
    dtype = case.stream.dtype
    stream = found.stream[token]
    if expected.open:
        stream = found.sum[
            token
        ]  # a shift may lie in either of a pair, so only what they add up to is sure
        expected.error += ROUNDOFF[dtype] * (expected.row.abs() + case.stream[token].double().abs())
    else:
        if not (expected.rewritten or expected.shifted):
            assert same_bits(stream, case.stream[token]), (
                f"{where}: nothing edits it, its bits changed"
            )
        if case.hidden is not None and found.hidden is not None:
            if (
                expected.rewritten
                and same_bits(found.hidden[token], case.hidden[token])
                and same_bits(stream, case.stream[token])
            ):
                stream = found.sum[token]  # it came out as it was, and is left alone
            elif expected.rewritten:
                minus_zero = torch.full_like(found.hidden[token], -0.0)
                assert same_bits(found.hidden[token], minus_zero), (
                    f"{where}: rewritten, but hidden is not −0"
                )
            else:
                assert same_bits(found.hidden[token], case.hidden[token]), (
                    f"{where}: hidden changed without a rewrite"
                )
        if expected.exact is not None:
            assert same_bits(stream, expected.exact), (
                f"{where}: replaced or shifted once, but not bit for bit"
            )
    if expected.rewritten or expected.shifted:
        # Rounded once, from whatever float32 found.
        last = (
            ROUNDOFF[dtype] * (expected.row.abs() + expected.error)
            + torch.finfo(dtype).smallest_normal * ROUNDOFF[dtype]
        )
        worst = float(((stream.double() - expected.row).abs() / (expected.error + last)).max())
        assert worst <= 1, f"{where}: off by {worst:.2f} of what rounding explains"


def _rows(found: Outcome, first: int, tokens: Sequence[int]) -> torch.Tensor:
    return found.ring[first : first + len(tokens)]


def _check_ring(case: Case, found: Outcome) -> None:
    untouched = torch.ones(case.ring_rows, dtype=torch.bool)
    for first, tokens in (
        (case.plan.before_row, case.plan.before),
        (case.plan.after_row, case.plan.after),
    ):
        untouched[first : first + len(tokens)] = False
    rows = found.ring[untouched]
    assert same_bits(rows, torch.full_like(rows, math.nan)), (
        f"{case.name}: a ring row that nothing names was written"
    )


def _check_counts(case: Case, found: Outcome) -> None:
    """The site did what was planned, as far as the forward has these rows, and counted it as its
    own.
    """
    does = [len(configuration) > 0 for configuration in case.plan.configurations]
    tokens = range(min(len(case.stream), case.capacity))
    edited = sum(
        row > 0 and does[row - 1]
        for token, rows in case.plan.edits.items()
        if token in tokens
        for row in rows
    )
    captured = [
        sum(token in tokens for token in port) for port in (case.plan.before, case.plan.after)
    ]
    assert found.counts[-1].tolist() == [edited, *captured], (
        f"{case.name}: what it did is not what it counted"
    )
    assert not found.counts[:-1].any(), f"{case.name}: counted as another site's"


def check_sizes(case: Case, found: Outcome) -> None:
    """Each edited row has the relative size of what was done to it, or since when it is not finite,
    and no other row has one.
    """
    before = case.sum.double()
    after = found.sum.double()
    for token, size in enumerate(found.sizes[case.plan.site - 1].tolist()):
        rows = case.plan.edits.get(token, ()) if token < len(before) else ()
        edited = any(row and len(case.plan.configurations[row - 1]) for row in rows)
        assert edited != math.isnan(size), f"{case.name}: token {token} has the size {size}"
        if edited:
            came, left = (bool(torch.isfinite(rows[token]).all()) for rows in (case.sum, found.sum))
            exact = float((after[token] - before[token]).norm() / before[token].norm())
            if not came or not left:
                wanted = OVERFLOWED if came else UNSOUND
                assert abs(size) == wanted, f"{case.name}: token {token} has {size}, not {wanted}"
                continue
            wanted = exact if math.isfinite(exact) or size == 0 else LARGEST_SIZE
            assert math.isclose(abs(size), wanted, rel_tol=1e-5, abs_tol=1e-7), (
                f"{case.name}: token {token} has the size {size}, not {wanted}"
            )
            assert abs(size) <= LARGEST_SIZE, f"{case.name}: token {token} counts as not finite"


#: How often a configuration has a family.
OFTEN = 0.4


def _low_rank(choose: random.Random, width: int) -> Does:
    rank = choose.choice((1, 2, 5))
    rotation, weight = torch.randn(2, rank, width) / math.sqrt(width)
    return lowrank(choose.choice((0.0, 0.5, 1.0)), rotation, weight, torch.randn(rank))


def some_of(vector: torch.Tensor, share: float = 0.5) -> torch.Tensor:
    """`[1, width]` and a mask of that share of its dimensions, the first among them: `[2,
    width]`.
    """
    mask = (torch.rand(vector.shape) < share).float()
    mask[0, 0] = 1
    return torch.cat([vector, mask])


#: Family → what it does in a random plan of some width.
RANDOM: dict[str, Callable[[random.Random, int], Does]] = {
    "replace": lambda choose, width: Does(torch.randn(1, width), (choose.choice((0.0, 0.3, 1.0)),)),
    "replace_masked": lambda choose, width: Does(
        some_of(torch.randn(1, width)), (choose.choice((0.0, 0.3, 1.0)),)
    ),
    "lowrank": _low_rank,
    "add": lambda choose, width: Does(torch.randn(1, width)),
    "add_matched": lambda choose, width: Does(
        torch.randn(1, width), (choose.choice((0.0, 0.1, -0.7)),)
    ),
    "ablate": lambda choose, width: Does(torch.randn(1, width), (choose.choice((0.0, 0.5, 1.0)),)),
    "clamp": lambda choose, width: Does(
        torch.randn(1, width), (choose.choice((0.0, 0.5, 1.0)), *choose.choice(RANGES))
    ),
}
RANDOM["feature"] = lambda choose, width: Does(
    torch.stack([torch.randn(width) * size for size in (width**-0.5, 1e-3, 1e-6, 1.0)]),
    (
        choose.choice((0.0, 0.5, 1.0)),
        choose.choice((0.0, 0.7, 3.0)),
        choose.choice((0.0, 0.4, -0.2)),
        choose.choice((0.0, 0.5)),
        choose.choice((0.0, 1.0, 2.0) if width > 1 else (0.0, 2.0)),
    ),
)
RANGES = ((0.5, 0.5), (-0.3, 0.3), (-math.inf, 0.1), (0.2, math.inf), (-1e4, 1e4))
#: The families whose bits are the same on every device.
EXACT = tuple(family.name for family in FAMILIES if not family.sums)


def random_case(
    seed: int,
    *,
    dtype: torch.dtype,
    width: int,
    tokens: int,
    pair: bool,
    families: Sequence[str] = tuple(RANDOM),
) -> Case:
    """Any plan: tokens with 0 to 4 rows, some of them 0, captures contiguous, scattered or none,
    rows nobody names full of NaN.
    """
    choose = random.Random(seed)
    torch.manual_seed(seed)
    configurations = [
        {name: RANDOM[name](choose, width) for name in families if choose.random() < OFTEN}
        for _ in range(choose.randint(0, 6))
    ]
    edited = choose.sample(range(tokens), choose.randint(0, tokens)) if configurations else []
    edits = {
        token: [
            choose.randint(0, len(configurations)) for _ in range(choose.randint(0, ROWS_PER_TOKEN))
        ]
        for token in edited
    }
    before = _random_tokens(choose, tokens)
    after = _random_tokens(choose, tokens)
    gap = choose.randint(0, 3)
    first = (gap, gap + len(before) + choose.randint(0, 3))
    if choose.random() < 0.5:
        first = (gap + len(after) + 1, gap)
    plan = SitePlan(width, configurations, edits, before, after, *first)
    stream = torch.randn(tokens, width).to(dtype)
    hidden = torch.randn(tokens, width).to(dtype) if pair else None
    for token in set(range(tokens)) - edits.keys() - set(before) - set(after):
        stream[token] = math.nan
    name = f"seed {seed}, {dtype}, width {width}, {tokens} tokens, {'pair' if pair else 'single'}"
    return Case(plan, hidden, stream, max(first) + tokens + 2, tokens + choose.randint(0, 4), name)


def _random_tokens(choose: random.Random, tokens: int) -> list[int]:
    kind = choose.choice(("none", "run", "scattered"))
    if kind == "none":
        return []
    count = choose.randint(1, tokens)
    if kind == "scattered":
        return choose.sample(range(tokens), count)
    start = choose.randint(0, tokens - count)
    return list(range(start, start + count))
