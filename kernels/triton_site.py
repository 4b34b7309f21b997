"""Triton implementation of `reference.py`: one launch for the sites of a group, the same for every
step.

The grid follows from shapes alone and everything else is read on the device, so a replayed CUDA
graph obeys the buffers as they are then. A program owns whole token rows and walks over the tokens;
where the group has no work it reads one number and ends. A row is read once for all sites of the
group, again where it is rewritten, and written only where it changed; rows of the ring that no slot
names are never written.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from ..schemas.requests.interventions import FAMILIES, LAYER_NORM_EPS, NEAR, NORMS, PLACE, SCALARS
from .plan import (
    AFTER,
    BEFORE,
    CAPTURED_AFTER,
    CAPTURED_BEFORE,
    COLUMNS,
    COUNTS,
    DEPTH,
    EDITED,
    EDITS,
    ROWS_PER_TOKEN,
    SITE,
)

#: Programs of a launch at most: several for each multiprocessor, and still a short launch when
#: there is nothing to do.
MAX_PROGRAMS = 1024
#: Two loads of 16 bytes for each thread, in the 16-bit types.
_LANES_PER_WARP = 512
#: Of a thread, by the bytes of an element: what lets a multiprocessor keep many rows on their way,
#: regardless of what the largest formula needs. The memory sets the pace. ptxas spills 24 to 96
#: bytes for it in the 16-bit types, at a width of 8192.
_REGISTERS = {2: 64, 4: 96}

#: Whether a launch may begin before the one before it has ended, on GPUs that can: its own latency
#: is then hidden behind that.
DEPENDENT_LAUNCH = True
_FIRST_DEPENDENT = 90

_COLUMNS = tl.constexpr(COLUMNS)
_EDITS = tl.constexpr(EDITS)
_DEPTH = tl.constexpr(DEPTH)
_SITE = tl.constexpr(SITE)
_COUNTS, _EDITED, _CAPTURED_BEFORE, _CAPTURED_AFTER = map(
    tl.constexpr, (COUNTS, EDITED, CAPTURED_BEFORE, CAPTURED_AFTER)
)
_BEFORE_COUNT, _BEFORE_ROW, _BEFORE_PATTERN = map(
    tl.constexpr, (BEFORE.COUNT, BEFORE.ROW, BEFORE.PATTERN)
)
_AFTER_COUNT, _AFTER_ROW, _AFTER_PATTERN = map(
    tl.constexpr, (AFTER.COUNT, AFTER.ROW, AFTER.PATTERN)
)
_ROWS_PER_TOKEN = tl.constexpr(ROWS_PER_TOKEN)
_SCALARS = tl.constexpr(SCALARS)
_FAMILIES = tl.constexpr(len(FAMILIES))
#: One bit for each family.
_REWRITING = tl.constexpr(
    sum(1 << place for place, family in enumerate(FAMILIES) if family.effect == "rewrite")
)
_SHIFTING = tl.constexpr(
    sum(1 << place for place, family in enumerate(FAMILIES) if family.effect == "shift")
)
_GRADED = tl.constexpr(sum(1 << place for place, family in enumerate(FAMILIES) if family.graded))

_REPLACE, _REPLACE_MASKED, _LOWRANK, _ADD, _ADD_MATCHED, _ABLATE, _CLAMP, _FEATURE = (
    tl.constexpr(PLACE[name])
    for name in (
        "replace",
        "replace_masked",
        "lowrank",
        "add",
        "add_matched",
        "ablate",
        "clamp",
        "feature",
    )
)
_RANK, _BIAS = (
    tl.constexpr(FAMILIES[_LOWRANK.value].column(scalar)) for scalar in ("rank", "bias")
)
_LOW, _HIGH = (tl.constexpr(FAMILIES[_CLAMP.value].column(scalar)) for scalar in ("low", "high"))
_TARGET, _SHIFT, _THRESHOLD = (
    tl.constexpr(FAMILIES[_FEATURE.value].column(scalar))
    for scalar in ("target", "bias", "threshold")
)
_NORM = tl.constexpr(FAMILIES[_FEATURE.value].column("norm"))
_CENTRED = tl.constexpr(NORMS.index("layer_norm"))
_NEAR, _EPS = tl.constexpr(NEAR), tl.constexpr(LAYER_NORM_EPS)


@triton.jit
def _vector(vectors, lanes, inside):  # type: ignore[no-untyped-def]
    return tl.load(vectors + lanes, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rewritten(  # type: ignore[no-untyped-def]
    FAMILY: tl.constexpr, row, vectors, scalars, lanes, inside, WIDTH: tl.constexpr
):
    """The new row, and whether it is another. `row`: float32 `[BLOCK]`, zero outside.

    `vectors`, `scalars`: where the application begins in both; its entry n is at `vectors + n *
    WIDTH`, `scalars + n * _SCALARS`.
    """
    changed = tl.load(scalars) != 0.0
    if FAMILY == _REPLACE:
        alpha = tl.load(scalars)
        target = _vector(vectors, lanes, inside)
        row = tl.where(alpha == 1.0, target, (1.0 - alpha) * row + alpha * target)
    elif FAMILY == _REPLACE_MASKED:
        alpha = tl.load(scalars)
        target = _vector(vectors, lanes, inside)
        written = _vector(vectors + WIDTH, lanes, inside) != 0.0
        row = tl.where(
            written, tl.where(alpha == 1.0, target, (1.0 - alpha) * row + alpha * target), row
        )
    elif FAMILY == _LOWRANK:
        rank = tl.load(scalars + _RANK).to(tl.int32)
        new = row
        for term in range(rank):
            rotation = _vector(vectors + 2 * term * WIDTH, lanes, inside)
            weight = _vector(vectors + (2 * term + 1) * WIDTH, lanes, inside)
            needed = tl.load(scalars + 2 * term * _SCALARS + _BIAS) + tl.sum(
                (weight - rotation) * row, 0
            )
            new += tl.load(scalars) * needed * rotation
        row = new
    elif FAMILY == _ADD_MATCHED:
        row += tl.load(scalars) * tl.sqrt_rn(tl.sum(row * row, 0)) * _vector(vectors, lanes, inside)
    elif FAMILY == _ABLATE:
        direction = _vector(vectors, lanes, inside)
        row -= tl.load(scalars) * tl.sum(row * direction, 0) * direction
    elif FAMILY == _CLAMP:
        low, high = tl.load(scalars + _LOW), tl.load(scalars + _HIGH)
        direction = _vector(vectors, lanes, inside)
        component = tl.sum(row * direction, 0)
        # also where the component is not a number
        changed = ((component >= low) & (component <= high)) == 0
        needed = tl.minimum(tl.maximum(component, low), high)
        row = tl.where(changed, row + tl.load(scalars) * (needed - component) * direction, row)
    elif FAMILY == _FEATURE:
        # In numbers alone: another row would cost registers.
        centre = tl.full([], 0.0, tl.float32)
        spread = centre + 1.0
        if tl.load(scalars + _NORM) != 0.0:
            if tl.load(scalars + _NORM) == _CENTRED:
                centre = tl.div_rn(tl.sum(row, 0), spread * WIDTH)
            off = tl.where(inside, row - centre, 0.0)
            less = tl.where(tl.load(scalars + _NORM) == _CENTRED, 1.0, 0.0)
            spread = tl.sqrt_rn(tl.div_rn(tl.sum(off * off, 0), spread * WIDTH - less))
        encoder = (
            _vector(vectors, lanes, inside)
            + _vector(vectors + WIDTH, lanes, inside)
            + _vector(vectors + 2 * WIDTH, lanes, inside)
        )
        products = (row - centre) * encoder
        divisor = spread + tl.where(tl.load(scalars + _NORM) == _CENTRED, _EPS, 0.0)
        bias = tl.load(scalars + _SHIFT)
        reading = tl.div_rn(tl.sum(products, 0), divisor) + bias
        room = _NEAR * (tl.div_rn(tl.sum(tl.abs(products), 0), divisor) + tl.abs(bias))
        gap = tl.load(scalars + _TARGET) - tl.where(
            reading > tl.load(scalars + _THRESHOLD), reading, 0.0
        )
        changed = ((gap == 0.0) | ((tl.abs(gap) <= room) & (room < float("inf")))) == 0
        row = tl.where(
            changed,
            row + tl.load(scalars) * gap * spread * _vector(vectors + 3 * WIDTH, lanes, inside),
            row,
        )
    else:
        tl.static_assert(False, "a family of the table has no formula here")
    return row, changed


@triton.jit
def _shifted(FAMILY: tl.constexpr, total, vectors, lanes, inside):  # type: ignore[no-untyped-def]
    """`total`: float32 `[BLOCK]`, the sum so far."""
    if FAMILY == _ADD:
        total = total + _vector(vectors, lanes, inside)
    else:
        tl.static_assert(False, "a family of the table has no formula here")
    return total


@triton.jit
def _sum(hidden_row, row, PAIR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The stream, rounded to the model's dtype, as the next norm stores it."""
    if PAIR:
        row = (hidden_row.to(tl.float32) + row.to(tl.float32)).to(row.dtype)
    return row


@triton.jit
def _unsound(row, inside):  # type: ignore[no-untyped-def]
    """1 where a value of the row is not finite, else 0."""
    return tl.max((inside & ((tl.abs(row.to(tl.float32)) < float("inf")) == 0)).to(tl.int32), 0)


@triton.jit
def _bits(row):  # type: ignore[no-untyped-def]
    if row.dtype.primitive_bitwidth == 16:
        return row.to(tl.int16, bitcast=True)
    else:
        return row.to(tl.int32, bitcast=True)


@triton.jit
def _slots(plan, capture_slots, token, capacity):  # type: ignore[no-untyped-def]
    """The token's slots in both captures of one site; −1: none."""
    before = tl.load(plan + _BEFORE_COUNT)
    after = tl.load(plan + _AFTER_COUNT)
    before_at = tl.load(plan + _BEFORE_PATTERN).to(tl.int64) * capacity + token
    after_at = tl.load(plan + _AFTER_PATTERN).to(tl.int64) * capacity + token
    before_slot = tl.load(capture_slots + before_at, mask=before > 0, other=-1)
    after_slot = tl.load(capture_slots + after_at, mask=after > 0, other=-1)
    return before_slot, after_slot


@triton.jit
def _named(plan, rows, site_rows, configurations):  # type: ignore[no-untyped-def]
    """A bit for each family that edits the token at one site, the number of configuration rows that
    do, and how many to look at.
    """
    edits = tl.load(plan + _EDITS)
    depth = tl.where(edits > 0, tl.load(plan + _DEPTH), 0)
    named = edits * 0
    applied = edits * 0
    for k in range(depth):
        row_number = tl.load(rows + k)
        of_row = edits * 0
        for family in tl.static_range(_FAMILIES):
            entry_here = tl.load(site_rows + family * configurations + row_number)
            of_row |= tl.where(entry_here > 0, 1 << family, 0)
        named |= of_row
        applied += tl.where(of_row != 0, 1, 0)
    return named, applied, depth


@triton.jit
def _whole(  # type: ignore[no-untyped-def]
    hidden_row, row, branch, PAIR: tl.constexpr, MIXED: tl.constexpr
):
    """The stream of a site: of a branch, `hidden` alone."""
    whole = _sum(hidden_row, row, PAIR)
    if MIXED:
        whole = tl.where(branch, hidden_row, whole)
    return whole


@triton.jit
def _count(counts, plan, of, number):  # type: ignore[no-untyped-def]
    """Adds to a number of the site's.

    Looks up where it lies each time, and as early as it can: what is kept costs registers.
    """
    tl.atomic_add(counts + (tl.load(plan + _SITE) - 1) * _COUNTS + of, number, sem="relaxed")


@triton.jit
def _visit(  # type: ignore[no-untyped-def]
    hidden,
    stream,
    hidden_row,
    row,
    branch,
    at,
    ring,
    plan,
    rows,
    site_rows,
    pool,
    scalars,
    counts,
    before_slot,
    after_slot,
    named,
    applied,
    depth,
    lanes,
    inside,
    configurations,
    PAIR: tl.constexpr,
    MIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply one site to one token: returns the new rows, and their value for `broken`.

    `hidden_row`, `row`: what lies at `hidden + at` and `stream + at`. `branch`: the site is of
    `hidden` alone; if `MIXED`, else never.
    """
    mark = named * 0
    if before_slot >= 0:
        place = (tl.load(plan + _BEFORE_ROW) + before_slot).to(tl.int64) * WIDTH
        tl.store(ring + place + lanes, _whole(hidden_row, row, branch, PAIR, MIXED), mask=inside)
        _count(counts, plan, _CAPTURED_BEFORE, 1)

    if named > 0:
        _count(counts, plan, _EDITED, applied)
        unsound = _unsound(_whole(hidden_row, row, branch, PAIR, MIXED), inside)
        rewrites = named * 0
        if (named & _REWRITING) != 0:
            value = _whole(hidden_row, row, branch, PAIR, MIXED).to(tl.float32)
            for family in tl.static_range(_FAMILIES):
                if (named >> family) & 1:
                    # −0 + v is v, regardless of v's sign
                    total = tl.zeros([BLOCK], tl.float32) * -1.0
                    for k in range(depth):
                        entry = tl.load(site_rows + family * configurations + tl.load(rows + k)).to(
                            tl.int64
                        )
                        vectors, numbers = pool + entry * WIDTH, scalars + entry * _SCALARS
                        live = entry > 0
                        if (_GRADED >> family) & 1:
                            live = live & (tl.load(numbers) != 0.0)
                        if live:
                            if (_REWRITING >> family) & 1:
                                value, changed = _rewritten(
                                    family, value, vectors, numbers, lanes, inside, WIDTH
                                )
                                rewrites += tl.where(changed, 1, 0)
                            else:
                                total = _shifted(family, total, vectors, lanes, inside)
                    if not (_REWRITING >> family) & 1:
                        value += total
            # Again: kept meanwhile it would cost the registers of a row. Another site of this
            # launch may have written it.
            tl.debug_barrier()
            row = tl.load(stream + at, mask=inside, other=0.0)
            if PAIR:
                hidden_row = tl.load(hidden + at, mask=inside, other=0.0)
            if rewrites > 0:
                new = value.to(row.dtype)
                differs = inside & (
                    _bits(new) != _bits(_whole(hidden_row, row, branch, PAIR, MIXED))
                )
                if tl.max(differs.to(tl.int32), 0) > 0:
                    # or another pair would stand for the same row
                    if PAIR:
                        # −0, not 0: then the pair's sum has the new row's bits also where that is
                        # −0.
                        hidden_row = (tl.zeros([BLOCK], tl.float32) * -1.0).to(row.dtype)
                        if MIXED:
                            hidden_row = tl.where(branch, new, hidden_row)
                            new = tl.where(branch, row, new)
                        tl.store(hidden + at, hidden_row, mask=inside)
                    row = new
                    tl.store(stream + at, row, mask=inside)
        # Also where every rewrite left the row as it is.
        if (rewrites == 0) & ((named & _SHIFTING) != 0):
            total = tl.zeros([BLOCK], tl.float32) * -1.0
            for family in tl.static_range(_FAMILIES):
                if (_SHIFTING >> family) & 1:
                    for k in range(depth):
                        entry = tl.load(site_rows + family * configurations + tl.load(rows + k)).to(
                            tl.int64
                        )
                        if entry > 0:
                            total = _shifted(family, total, pool + entry * WIDTH, lanes, inside)
            if MIXED:
                shifted = (tl.where(branch, hidden_row, row).to(tl.float32) + total).to(row.dtype)
                hidden_row = tl.where(branch, shifted, hidden_row)
                row = tl.where(branch, row, shifted)
                tl.store(tl.where(branch, hidden, stream) + at, shifted, mask=inside)
            else:
                row = (row.to(tl.float32) + total).to(row.dtype)
                tl.store(stream + at, row, mask=inside)
        mark = tl.where(
            unsound > 0, -1, _unsound(_whole(hidden_row, row, branch, PAIR, MIXED), inside)
        ) * tl.load(plan + _SITE)

    if after_slot >= 0:
        place = (tl.load(plan + _AFTER_ROW) + after_slot).to(tl.int64) * WIDTH
        tl.store(ring + place + lanes, _whole(hidden_row, row, branch, PAIR, MIXED), mask=inside)
        _count(counts, plan, _CAPTURED_AFTER, 1)
    return hidden_row, row, mark


# Nothing but the large tensors' alignment may ask for another compilation: it could fall into the
# capture of a graph.
@triton.jit(
    do_not_specialize=[
        *("plan", "token_rows", "capture_slots", "site_rows", "scalars", "broken", "counts"),
        *("tokens", "capacity", "configurations", "programs", "sites", "branches"),
    ]
)
def _sites(  # type: ignore[no-untyped-def]
    hidden,
    stream,
    ring,
    plan,
    token_rows,
    capture_slots,
    site_rows,
    pool,
    scalars,
    broken,
    counts,
    tokens,
    capacity,
    configurations,
    programs,
    sites,
    branches,
    PAIR: tl.constexpr,
    MIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    active = tl.load(plan + _SITE)
    if DEPENDENT:
        # The launch may have begun while the one before it runs. What came before that is over: the
        # plan is there, the stream is not. Also where there is nothing to do: the next launch takes
        # the end of this one for the end of all before it.
        tl.extra.cuda.gdc_wait()
    limit = tl.where(active != 0, tokens, 0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < WIDTH

    token = tl.program_id(0).to(tl.int64)  # 64 bits: token · width may pass 2^31
    while token < limit:
        rows = token_rows + token * _ROWS_PER_TOKEN
        at = token * WIDTH + lanes
        row = tl.zeros([BLOCK], ring.dtype.element_ty)
        hidden_row = row
        loaded = active * 0
        mark = active * 0
        for site in range(sites):
            of_site, entries = plan + site * _COLUMNS, site_rows + site * _FAMILIES * configurations
            before_slot, after_slot = _slots(of_site, capture_slots, token, capacity)
            named, applied, depth = _named(of_site, rows, entries, configurations)
            if (before_slot >= 0) | (after_slot >= 0) | (named > 0):
                if loaded == 0:
                    row = tl.load(stream + at, mask=inside, other=0.0)
                    # unused where there is no pair
                    hidden_row = tl.load(hidden + at, mask=inside, other=0.0) if PAIR else row
                    loaded += 1
                hidden_row, row, result = _visit(
                    hidden,
                    stream,
                    hidden_row,
                    row,
                    site < branches,
                    at,
                    ring,
                    of_site,
                    rows,
                    entries,
                    pool,
                    scalars,
                    counts,
                    before_slot,
                    after_slot,
                    named,
                    applied,
                    depth,
                    lanes,
                    inside,
                    configurations,
                    PAIR=PAIR,
                    MIXED=MIXED,
                    WIDTH=WIDTH,
                    BLOCK=BLOCK,
                )
                mark = tl.where(mark != 0, mark, result)  # the first site counts
        if mark != 0:  # noqa: SIM102 -- Triton has no short-circuit
            if tl.load(broken + token) == 0:
                tl.store(broken + token, mark)
        token += programs


def pair_site(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    ring: torch.Tensor,
    plan: torch.Tensor,
    lists: torch.Tensor,
    token_rows: torch.Tensor,
    capture_slots: torch.Tensor,
    site_rows: torch.Tensor,
    pool: torch.Tensor,
    scalars: torch.Tensor,
    broken: torch.Tensor,
    counts: torch.Tensor,
    branches: int = 0,
) -> None:
    """Do what `reference.pair_site` does; reads `capture_slots`, not `lists`.

    Raises ValueError for tensors that are not contiguous.
    """
    tensors = (
        hidden,
        residual,
        ring,
        plan,
        token_rows,
        capture_slots,
        site_rows,
        pool,
        scalars,
        broken,
        counts,
    )
    _launch(*tensors, branches=branches, pair=True)


def single_site(
    stream: torch.Tensor,
    ring: torch.Tensor,
    plan: torch.Tensor,
    lists: torch.Tensor,
    token_rows: torch.Tensor,
    capture_slots: torch.Tensor,
    site_rows: torch.Tensor,
    pool: torch.Tensor,
    scalars: torch.Tensor,
    broken: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Do what `reference.single_site` does; reads `capture_slots`, not `lists`.

    Raises ValueError for tensors that are not contiguous.
    """
    tensors = (
        stream,
        stream,
        ring,
        plan,
        token_rows,
        capture_slots,
        site_rows,
        pool,
        scalars,
        broken,
        counts,
    )
    _launch(*tensors, branches=0, pair=False)


def _launch(
    hidden: torch.Tensor,
    stream: torch.Tensor,
    ring: torch.Tensor,
    plan: torch.Tensor,
    token_rows: torch.Tensor,
    capture_slots: torch.Tensor,
    site_rows: torch.Tensor,
    pool: torch.Tensor,
    scalars: torch.Tensor,
    broken: torch.Tensor,
    counts: torch.Tensor,
    *,
    branches: int,
    pair: bool,
) -> None:
    tensors = (
        hidden,
        stream,
        ring,
        plan,
        token_rows,
        capture_slots,
        site_rows,
        pool,
        scalars,
        broken,
        counts,
    )
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor {list(tensor.shape)} with strides {list(tensor.stride())} is not "
                "contiguous"
            )
    width, capacity = ring.shape[1], capture_slots.shape[1]
    # nothing is planned for padding beyond the buffers
    tokens = min(stream.numel() // width, capacity)
    if not tokens:
        return
    block = triton.next_power_of_2(width)
    programs = min(tokens, MAX_PROGRAMS)
    dependent = DEPENDENT_LAUNCH and can_depend()
    _sites[(programs,)](
        *tensors,
        tokens,
        capacity,
        site_rows.shape[2],
        programs,
        len(plan),
        branches,
        PAIR=pair,
        MIXED=branches > 0,
        WIDTH=width,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=max(1, min(16, block // _LANES_PER_WARP)),
        maxnreg=_REGISTERS[stream.dtype.itemsize],
        # the bits of the reference; the memory sets the pace, not the arithmetic
        enable_fp_fusion=False,
        **({"launch_pdl": True} if dependent else {}),
    )


@cache
def can_depend() -> bool:
    """Return whether this GPU, and this Triton, have programmatic dependent launches: compute
    capability 9.0 and up.
    """
    if not isinstance(_visit, triton.JITFunction):  # interpreted
        return False
    target = triton.runtime.driver.active.get_current_target()
    return (
        target.backend == "cuda"
        and target.arch >= _FIRST_DEPENDENT
        and hasattr(tl.extra.cuda, "gdc_wait")
    )
