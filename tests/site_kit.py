"""What must be true of any implementation of the site ops? Random sites, the truth in float64, and checks that name their seed.

Used for the CPU reference, for the Triton kernels under the interpreter, and on a GPU by `benchmarks/gpu/kernels.py`. Needs torch alone.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from midstream.kernels.plan import AFTER, BEFORE, COLUMNS, DEPTH, EDITS, ROWS_PER_TOKEN, Does, Planned, SitePlan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: One lane; odd; a size of a real model that is not a power of two.
WIDTHS = (1, 37, 576)
TOKENS = (1, 7, 33)

#: Unit roundoff: half the distance between 1 and the next number.
ROUNDOFF = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}
#: Against float64, a stream is rounded at most this often: the sum read, a rewrite, a shift, the sum stored; each in float32
#: first, where the arithmetic is (six roundings of 2^-24), which fp32 feels in full. Relative to all that went into an element.
ROUNDINGS = {torch.float32: 10, torch.bfloat16: 5, torch.float16: 5}

Op = Callable[..., None]
_BITS = {2: torch.int16, 4: torch.int32}


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
    planned: Planned = field(init=False)

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

    @property
    def sum(self) -> torch.Tensor:
        return self.stream if self.hidden is None else self.hidden + self.stream


def _poisoned(planned: Planned, plan: SitePlan) -> Planned:
    """Nonsense in every place that the contract leaves open, so that reading it shows."""
    columns, depth = planned.plan, int(planned.plan[DEPTH])
    for column in set(range(COLUMNS)) - {0, 1, 2, *BEFORE, *AFTER}:
        columns[column] = -99
    for port in (BEFORE, AFTER):
        if not columns[port.COUNT]:
            columns[[port.AT, port.ROW, port.START, port.PATTERN]] = 10**6
    if not columns[EDITS]:
        columns[DEPTH] = ROWS_PER_TOKEN
    lists = torch.cat([planned.lists, torch.full((5,), 2**30, dtype=torch.int32)])
    if plan.configurations:
        planned.token_rows[:, depth:] = 1
    planned.pool[0] = math.nan
    planned.scalars[0] = math.nan
    return planned._replace(lists=lists)


def run(case: Case, pair_site: Op, single_site: Op) -> Outcome:
    """Runs a copy of the case, its ring full of NaN; checks that what is only read keeps its bits."""
    width = case.stream.shape[1]
    ring = torch.full((case.ring_rows, width), math.nan, dtype=case.stream.dtype)
    stream = case.stream.clone()
    hidden = None if case.hidden is None else case.hidden.clone()
    planned = Planned(*(tensor.clone() for tensor in case.planned))
    if hidden is None:
        single_site(stream, ring, *planned)
    else:
        pair_site(hidden, stream, ring, *planned)
    for name, after, before in zip(Planned._fields, planned, case.planned, strict=True):
        assert same_bits(after, before), f"{case.name}: {name} was written"
    return Outcome(hidden, stream, ring)


@dataclass
class Truth:
    """What a token's row should be, in float64."""

    row: torch.Tensor
    scale: torch.Tensor  # the sum of the magnitudes that went into it
    rewritten: bool = False
    shifted: bool = False
    exact: torch.Tensor | None = None  # its bits, where a full replacement was the last thing that happened


def truth(case: Case, token: int) -> Truth:
    """A loop over what the plan says about `token`, written from the definition in design terms, not from the code."""
    hidden = torch.zeros_like(case.stream[token]) if case.hidden is None else case.hidden[token]
    row = hidden.double() + case.stream[token].double()
    result = Truth(row, hidden.double().abs() + case.stream[token].double().abs())
    rows = [case.plan.configurations[number - 1] for number in case.plan.edits.get(token, ()) if number]
    for does in (row["replace"] for row in rows if "replace" in row):
        alpha = torch.tensor(does.scalars[0], dtype=torch.float32).double()  # as the buffers hold it
        target = does.vectors[0].to(case.stream.dtype)
        if alpha == 0:
            continue
        result.rewritten = True
        result.exact = target if alpha == 1 else None
        if alpha == 1:
            result.row, result.scale = target.double(), target.double().abs()
        else:
            result.row = (1 - alpha) * result.row + alpha * target.double()
            result.scale = result.scale + target.double().abs()
    for does in (row["add"] for row in rows if "add" in row):
        vector = does.vectors[0].to(case.stream.dtype).double()
        result.row, result.scale = result.row + vector, result.scale + vector.abs()
        result.shifted, result.exact = True, None
    return result


def check(case: Case, found: Outcome) -> None:
    """Every property of the ops that holds for any plan; the message names the case."""
    assert same_bits(case.sum[list(case.plan.before)], _rows(found, case.plan.before_row, case.plan.before)), (
        f"{case.name}: captured before the edits is not the stream as it came, bit for bit"
    )
    assert same_bits(found.sum[list(case.plan.after)], _rows(found, case.plan.after_row, case.plan.after)), (
        f"{case.name}: captured after the edits is not the stream as it left, bit for bit"
    )
    _check_ring(case, found)
    dtype = case.stream.dtype
    for token in range(len(case.stream)):
        where = f"{case.name}, token {token}"
        expected = truth(case, token)
        if not (expected.rewritten or expected.shifted):
            assert same_bits(found.stream[token], case.stream[token]), f"{where}: nothing edits it, its bits changed"
        if case.hidden is not None and found.hidden is not None:
            if expected.rewritten:
                minus_zero = torch.full_like(found.hidden[token], -0.0)
                assert same_bits(found.hidden[token], minus_zero), f"{where}: rewritten, but hidden is not −0"
            else:
                assert same_bits(found.hidden[token], case.hidden[token]), f"{where}: hidden changed without a rewrite"
        if expected.exact is not None:
            assert same_bits(found.sum[token], expected.exact), f"{where}: replaced, but not bit for bit"
        if expected.rewritten or expected.shifted:
            error = (found.sum[token].double() - expected.row).abs()
            allowed = ROUNDINGS[dtype] * ROUNDOFF[dtype] * expected.scale
            worst = float((error / allowed.clamp_min(1e-30)).max())
            assert worst <= 1, f"{where}: off by {worst:.2f} of what rounding explains"


def _rows(found: Outcome, first: int, tokens: Sequence[int]) -> torch.Tensor:
    return found.ring[first : first + len(tokens)]


def _check_ring(case: Case, found: Outcome) -> None:
    untouched = torch.ones(case.ring_rows, dtype=torch.bool)
    for first, tokens in ((case.plan.before_row, case.plan.before), (case.plan.after_row, case.plan.after)):
        untouched[first : first + len(tokens)] = False
    rows = found.ring[untouched]
    assert same_bits(rows, torch.full_like(rows, math.nan)), f"{case.name}: a ring row that nothing names was written"


def random_case(seed: int, *, dtype: torch.dtype, width: int, tokens: int, pair: bool) -> Case:
    """Any plan: tokens with 0 to 4 rows, some of them 0, captures contiguous, scattered or none, rows nobody names full of NaN."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    configurations = [_random_configuration(choose, width) for _ in range(choose.randint(0, 6))]
    edited = choose.sample(range(tokens), choose.randint(0, tokens)) if configurations else []
    edits = {token: [choose.randint(0, len(configurations)) for _ in range(choose.randint(0, ROWS_PER_TOKEN))] for token in edited}
    before, after = _random_tokens(choose, tokens), _random_tokens(choose, tokens)
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


def _random_configuration(choose: random.Random, width: int) -> dict[str, Does]:
    does: dict[str, Does] = {}
    if choose.random() < 0.6:
        does["replace"] = Does(torch.randn(1, width), (choose.choice((0.0, 0.3, 1.0)),))
    if choose.random() < 0.6:
        does["add"] = Does(torch.randn(1, width))
    return does


def _random_tokens(choose: random.Random, tokens: int) -> list[int]:
    kind = choose.choice(("none", "run", "scattered"))
    if kind == "none":
        return []
    count = choose.randint(1, tokens)
    if kind == "scattered":
        return choose.sample(range(tokens), count)
    start = choose.randint(0, tokens - count)
    return list(range(start, start + count))
