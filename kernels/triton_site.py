"""Triton implementation of `reference.py`: one launch for a group of sites, the same for every
step.

The grid depends only on shapes, and everything else is read on the device, so a replayed CUDA graph
uses the buffers' contents at the time of the replay. Each program handles whole token rows, one
after another; if the group has no work, a program reads one number and ends. A row is read once for
all sites of the group, again if it is rewritten, and written only if it changed; ring rows that no
slot names are never written.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ..schemas.requests.interventions import (
    FAMILIES,
    LAYER_NORM_EPS,
    LIMIT,
    NEAR,
    NORMS,
    OWNER,
    PLACE,
    SCALARS,
)
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
    LARGEST_SIZE,
    LIMITED,
    OVERFLOWED,
    ROWS_PER_TOKEN,
    SITE,
    UNSOUND,
    WITHIN,
    Buffers,
)

#: Programs of a launch at most: several for each multiprocessor, but few enough for a short launch
#: when there is nothing to do.
MAX_PROGRAMS = 1024
#: Elements of a row per warp: two loads of 16 bytes for each thread, in the 16-bit types.
_LANES_PER_WARP = 512
#: Registers per thread, by the bytes of an element. The kernel is limited by memory bandwidth, so
#: the bound is chosen to keep many rows in flight on a multiprocessor, although the largest formula
#: needs more: at a width of 8192 a thread has a stack, of frames and spills, of 488 to 1024 bytes
#: with 16-bit types and of 424 to 664 with float32.
_REGISTERS = {2: 64, 4: 96}

_COLUMNS = tl.constexpr(COLUMNS)
_EDITS = tl.constexpr(EDITS)
_DEPTH = tl.constexpr(DEPTH)
_SITE = tl.constexpr(SITE)
_LIMITED = tl.constexpr(LIMITED)
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
#: Sets of families, one bit for each family.
_REWRITING = tl.constexpr(
    sum(1 << place for place, family in enumerate(FAMILIES) if family.effect == "rewrite")
)
_ADDING = tl.constexpr(1 << PLACE["add"])
_GRADED = tl.constexpr(
    sum(1 << place for place, family in enumerate(FAMILIES) if family.has_strength)
)

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


def _columns_of(family: str, *names: str) -> Iterator[tl.constexpr]:
    """Yield the columns of these scalars of a family."""
    for name in names:
        yield tl.constexpr(FAMILIES[PLACE[family]].column(name))


_RANK, _BIAS = _columns_of("lowrank", "rank", "bias")
_LOW, _HIGH = _columns_of("clamp", "low", "high")
_TARGET, _SHIFT, _THRESHOLD, _NORM = _columns_of("feature", "target", "bias", "threshold", "norm")
_CENTRED = tl.constexpr(NORMS.index("layer_norm"))
_NEAR = tl.constexpr(NEAR)
_EPS = tl.constexpr(LAYER_NORM_EPS)
_LIMIT, _OWNER, _LARGEST_SIZE, _WITHIN = map(tl.constexpr, (LIMIT, OWNER, LARGEST_SIZE, WITHIN))
_UNSOUND, _OVERFLOWED = map(tl.constexpr, (UNSOUND, OVERFLOWED))


@triton.jit
def _vector(vectors, lanes, inside):  # type: ignore[no-untyped-def]
    return tl.load(vectors + lanes, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rewritten(  # type: ignore[no-untyped-def]
    FAMILY: tl.constexpr, row, vectors, scalars, lanes, inside, WIDTH: tl.constexpr
):
    """Return the new row, and whether it changed. `row`: float32 `[BLOCK]`, zero outside the width.

    `vectors`, `scalars`: pointers to the application's first entry; entry n is at `vectors + n *
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
            correction = tl.load(scalars + 2 * term * _SCALARS + _BIAS) + tl.sum(
                (weight - rotation) * row, 0
            )
            new += tl.load(scalars) * correction * rotation
        row = new
    elif FAMILY == _ADD_MATCHED:
        row += tl.load(scalars) * tl.sqrt_rn(tl.sum(row * row, 0)) * _vector(vectors, lanes, inside)
    elif FAMILY == _ABLATE:
        direction = _vector(vectors, lanes, inside)
        row -= tl.load(scalars) * tl.sum(row * direction, 0) * direction
    elif FAMILY == _CLAMP:
        low = tl.load(scalars + _LOW)
        high = tl.load(scalars + _HIGH)
        direction = _vector(vectors, lanes, inside)
        component = tl.sum(row * direction, 0)
        # true if the component is NaN
        changed = ((component >= low) & (component <= high)) == 0
        target = tl.minimum(tl.maximum(component, low), high)
        row = tl.where(changed, row + tl.load(scalars) * (target - component) * direction, row)
    elif FAMILY == _FEATURE:
        # Only scalars are kept: a second row would need more registers.
        centre = tl.full([], 0.0, tl.float32)
        spread = centre + 1.0
        if tl.load(scalars + _NORM) != 0.0:
            if tl.load(scalars + _NORM) == _CENTRED:
                centre = tl.div_rn(tl.sum(row, 0), spread * WIDTH)
            centred = tl.where(inside, row - centre, 0.0)
            lost = tl.where(tl.load(scalars + _NORM) == _CENTRED, 1.0, 0.0)
            spread = tl.sqrt_rn(tl.div_rn(tl.sum(centred * centred, 0), spread * WIDTH - lost))
        encoder = (
            _vector(vectors, lanes, inside)
            + _vector(vectors + WIDTH, lanes, inside)
            + _vector(vectors + 2 * WIDTH, lanes, inside)
        )
        products = (row - centre) * encoder
        divisor = spread + tl.where(tl.load(scalars + _NORM) == _CENTRED, _EPS, 0.0)
        bias = tl.load(scalars + _SHIFT)
        reading = tl.div_rn(tl.sum(products, 0), divisor) + bias
        tolerance = _NEAR * (tl.div_rn(tl.sum(tl.abs(products), 0), divisor) + tl.abs(bias))
        gap = tl.load(scalars + _TARGET) - tl.where(
            reading > tl.load(scalars + _THRESHOLD), reading, 0.0
        )
        changed = ((gap == 0.0) | ((tl.abs(gap) <= tolerance) & (tolerance < float("inf")))) == 0
        row = tl.where(
            changed,
            row + tl.load(scalars) * gap * spread * _vector(vectors + 3 * WIDTH, lanes, inside),
            row,
        )
    else:
        tl.static_assert(False, "a family of the table has no formula here")
    return row, changed


@triton.jit
def _sum(hidden_row, row, PAIR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the stream, rounded to the model's dtype, as the next norm stores it."""
    if PAIR:
        row = (hidden_row.to(tl.float32) + row.to(tl.float32)).to(row.dtype)
    return row


@triton.jit
def _bits(row):  # type: ignore[no-untyped-def]
    if row.dtype.primitive_bitwidth == 16:
        return row.to(tl.int16, bitcast=True)
    else:
        return row.to(tl.int32, bitcast=True)


@triton.jit
def _slots(plan, capture_slots, token, capacity):  # type: ignore[no-untyped-def]
    """Return the token's slots in both captures of a site; −1: not captured."""
    before = tl.load(plan + _BEFORE_COUNT)
    after = tl.load(plan + _AFTER_COUNT)
    before_at = tl.load(plan + _BEFORE_PATTERN).to(tl.int64) * capacity + token
    after_at = tl.load(plan + _AFTER_PATTERN).to(tl.int64) * capacity + token
    before_slot = tl.load(capture_slots + before_at, mask=before > 0, other=-1)
    after_slot = tl.load(capture_slots + after_at, mask=after > 0, other=-1)
    return before_slot, after_slot


@triton.jit
def _named(plan, rows, site_rows, configurations):  # type: ignore[no-untyped-def]
    """Return a bit for each family that edits the token at one site, the number of configuration
    rows that edit it there, and the number of columns of its rows.
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
    """Return the row of a site's stream; for a site on a branch, that of `hidden` alone."""
    whole = _sum(hidden_row, row, PAIR)
    if MIXED:
        whole = tl.where(branch, hidden_row, whole)
    return whole


# Not inlined: it is rare, and all others would pay for its registers.
@triton.jit(noinline=True)
def _unsound(  # type: ignore[no-untyped-def]
    hidden,
    stream,
    first,
    branch,
    PAIR: tl.constexpr,
    MIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return 1 if a value of a token's row is not finite, else 0. `first`: the row's index in
    `stream`.
    """
    lanes = tl.arange(0, BLOCK)
    at = first + lanes
    inside = lanes < WIDTH
    row = tl.load(stream + at, mask=inside, other=0.0)
    hidden_row = tl.load(hidden + at, mask=inside, other=0.0) if PAIR else row
    whole = _whole(hidden_row, row, branch, PAIR, MIXED)
    return tl.max(((tl.abs(whole.to(tl.float32)) < float("inf")) == 0).to(tl.int32), 0)


@triton.jit
def _count(counts, plan, of, number):  # type: ignore[no-untyped-def]
    """Add `number` to one of the site's counts.

    The address is computed at each call, because keeping it would need registers.
    """
    # Relaxed, because no other instruction has to wait for it.
    tl.atomic_add(counts + (tl.load(plan + _SITE) - 1) * _COUNTS + of, number, sem="relaxed")


@triton.jit
def _limits(rows, site_rows, scalars, depth, configurations):  # type: ignore[no-untyped-def]
    """Return the smallest limit to which the edits of a request are scaled at a token, and the
    smallest beyond which they fail it (infinite: none); those of the operator's edits; and whether
    both owners edit the token and one has a limit: if not, all edits count as the request's.
    """
    scaled = tl.full([], float("inf"), tl.float32)
    failed = scaled
    high_scaled = scaled
    high_failed = scaled
    owners = depth * 0  # 1: the request, 2: the operator, 3: both
    for k in range(depth):
        row_number = tl.load(rows + k)
        for family in tl.static_range(_FAMILIES):
            entry = tl.load(site_rows + family * configurations + row_number).to(tl.int64)
            if entry > 0:
                limit = tl.load(scalars + entry * _SCALARS + _LIMIT)
                most = tl.where(limit > 0, limit, float("inf"))
                least = tl.where(limit < 0, -limit, float("inf"))
                if tl.load(scalars + entry * _SCALARS + _OWNER) != 0.0:
                    high_scaled = tl.minimum(high_scaled, most)
                    high_failed = tl.minimum(high_failed, least)
                    owners |= 2
                else:
                    scaled = tl.minimum(scaled, most)
                    failed = tl.minimum(failed, least)
                    owners |= 1
    strictest = tl.minimum(tl.minimum(scaled, failed), tl.minimum(high_scaled, high_failed))
    both = (owners == 3) & (strictest < float("inf"))
    if both == 0:
        scaled = tl.minimum(scaled, high_scaled)
        failed = tl.minimum(failed, high_failed)
    return scaled, failed, high_scaled, high_failed, both


@triton.jit
def _relative(norm, change):  # type: ignore[no-untyped-def]
    size = tl.div_rn(change, norm)
    size = tl.where(size <= _LARGEST_SIZE, size, _LARGEST_SIZE)  # also if it is NaN
    return tl.where(change == 0.0, 0.0, size)


@triton.jit
def _norm(row):  # type: ignore[no-untyped-def]
    return tl.sqrt_rn(tl.sum(row * row, 0))


@triton.jit
def _limited(before, after, norm, scaled, failed):  # type: ignore[no-untyped-def]
    """Return the row `after` with the edit scaled to its limit, whether that changed it, the norm
    of what is left of the edit, and its relative size as `sizes` has it.

    `before`, `after`: zero outside the width. `norm`: of `before`.
    """
    row = before.to(tl.float32)
    change = _norm(after.to(tl.float32) - row)
    size = _relative(norm, change)
    kept = size
    over = size > scaled
    if over:
        factor = tl.div_rn(scaled * norm, change) * _WITHIN
        after = (row + (after.to(tl.float32) - row) * factor).to(after.dtype)
        change = _norm(after.to(tl.float32) - row)
        kept = _relative(norm, change)
    return after, over, change, tl.where((size > failed) & (failed <= scaled), -size, kept)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    hidden,
    stream,
    row,
    hidden_row,
    new,
    branch,
    at,
    inside,
    PAIR: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write `new` as the whole row of a site's stream; return the new rows."""
    if PAIR:
        # −0, not 0, so that the pair's sum has the new row's bits even if that row has −0.
        emptied = (tl.zeros([BLOCK], tl.float32) * -1.0).to(row.dtype)
        if MIXED:
            emptied = tl.where(branch, new, emptied)
            new = tl.where(branch, row, new)
        hidden_row = emptied
        tl.store(hidden + at, hidden_row, mask=inside)
    tl.store(stream + at, new, mask=inside)
    return hidden_row, new


@triton.jit
def _part(row, edit, norm, scaled, failed):  # type: ignore[no-untyped-def]
    """Return `row` with one owner's edit, scaled to its limit; whether it was scaled; and its
    relative size if that fails the request, else 0.
    """
    change = _norm(edit)
    size = _relative(norm, change)
    over = size > scaled
    if over:
        edit *= tl.div_rn(scaled * norm, change) * _WITHIN
    return row + edit, over, tl.where((size > failed) & (failed <= scaled), size, 0.0)


@triton.jit
def _edited(  # type: ignore[no-untyped-def]
    value,
    every,
    named,
    rows,
    site_rows,
    pool,
    scalars,
    depth,
    configurations,
    lanes,
    inside,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply the families in order to a row, float32 `[BLOCK]`; return the new row, how many
    rewrites changed it, and the sum of the last shift. `every`: 0 for the operator's entries alone.
    """
    rewrites = named * 0
    shift = tl.zeros([BLOCK], tl.float32)
    for family in tl.static_range(_FAMILIES):
        if (named >> family) & 1:
            # −0 + v is v, regardless of v's sign
            total = tl.zeros([BLOCK], tl.float32) * -1.0
            for k in range(depth):
                entry = tl.load(site_rows + family * configurations + tl.load(rows + k)).to(
                    tl.int64
                )
                vectors = pool + entry * WIDTH
                numbers = scalars + entry * _SCALARS
                live = entry > 0
                if every == 0:
                    live = live & (tl.load(numbers + _OWNER) != 0.0)
                if (_GRADED >> family) & 1:
                    live = live & (tl.load(numbers) != 0.0)
                if live:
                    if family == _ADD:
                        total = total + _vector(vectors, lanes, inside)
                    else:
                        value, changed = _rewritten(
                            FAMILY=family,
                            row=value,
                            vectors=vectors,
                            scalars=numbers,
                            lanes=lanes,
                            inside=inside,
                            WIDTH=WIDTH,
                        )
                        rewrites += tl.where(changed, 1, 0)
            if family == _ADD:
                value += total
                shift = total
    return value, rewrites, shift


# Not inlined: such tokens are rare, and all others would pay for the registers of a third row.
@triton.jit(noinline=True)
def _edit_both(  # type: ignore[no-untyped-def]
    hidden,
    stream,
    first,
    norm,
    rows,
    site_rows,
    pool,
    scalars,
    named,
    depth,
    configurations,
    branch,
    PAIR: tl.constexpr,
    MIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the row of a token that both owners edit if one of their edits exceeds its limit; the
    other one stays as it is. Return whether it was written, the norm of what the edits did, and
    their relative size as `sizes` has it.

    `first`: the row's index in `stream`; `norm`: the row's. The operator's edits are what they do
    to the row alone, a request's what the row has besides.
    """
    lanes = tl.arange(0, BLOCK)
    at = first + lanes
    inside = lanes < WIDTH
    row = tl.load(stream + at, mask=inside, other=0.0)
    hidden_row = tl.load(hidden + at, mask=inside, other=0.0) if PAIR else row
    whole = _whole(hidden_row, row, branch, PAIR, MIXED)
    before = whole.to(tl.float32)
    value = before
    middle = before
    shift = before * 0.0
    rewrites = named * 0
    for every in range(2):  # the operator's entries alone, then all
        value, rewrites, shift = _edited(
            value=before,
            every=every,
            named=named,
            rows=rows,
            site_rows=site_rows,
            pool=pool,
            scalars=scalars,
            depth=depth,
            configurations=configurations,
            lanes=lanes,
            inside=inside,
            WIDTH=WIDTH,
            BLOCK=BLOCK,
        )
        if every == 0:
            middle = value.to(row.dtype).to(tl.float32)
    if rewrites == 0:
        # rounded as the shift alone is
        shifted = (row.to(tl.float32) + shift).to(row.dtype)
        if MIXED:
            shifted = tl.where(branch, row, shifted)
            hidden_row = tl.where(
                branch, (hidden_row.to(tl.float32) + shift).to(row.dtype), hidden_row
            )
        value = _whole(hidden_row, shifted, branch, PAIR, MIXED).to(tl.float32)
    value = value.to(row.dtype).to(tl.float32)
    scaled, failed, high_scaled, high_failed, _both = _limits(
        rows, site_rows, scalars, depth, configurations
    )
    bounded, over, high_failing = _part(before, middle - before, norm, high_scaled, high_failed)
    bounded, over_own, failing = _part(bounded, value - middle, norm, scaled, failed)
    over |= over_own
    failing = tl.where(failing > 0.0, failing, high_failing)
    new = tl.where(over, bounded, value).to(row.dtype)
    change = _norm(new.to(tl.float32) - before)
    size = _relative(norm, change)
    if over:
        _write(
            hidden=hidden,
            stream=stream,
            row=row,
            hidden_row=hidden_row,
            new=new,
            branch=branch,
            at=at,
            inside=inside,
            PAIR=PAIR,
            MIXED=MIXED,
            BLOCK=BLOCK,
        )
    return over, change, tl.where(failing > 0.0, -failing, size)


@triton.jit
def _visit(  # type: ignore[no-untyped-def]
    hidden,
    stream,
    hidden_row,
    row,
    branch,
    first,
    at,
    ring,
    plan,
    rows,
    site_rows,
    pool,
    scalars,
    counts,
    sizes,
    before_slot,
    after_slot,
    named,
    applied,
    depth,
    lanes,
    inside,
    configurations,
    capacity,
    PAIR: tl.constexpr,
    MIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply one site to one token; return the new rows.

    `sizes`: a pointer to the token's column. `hidden_row`, `row`: the values at `hidden + at` and
    `stream + at`, which begin at `first`. `branch`: the site is on a
    branch, whose stream is `hidden` alone; only if `MIXED`.
    """
    if before_slot >= 0:
        place = (tl.load(plan + _BEFORE_ROW) + before_slot).to(tl.int64) * WIDTH
        tl.store(ring + place + lanes, _whole(hidden_row, row, branch, PAIR, MIXED), mask=inside)
        _count(counts, plan, _CAPTURED_BEFORE, 1)

    if named > 0:
        _count(counts, plan, _EDITED, applied)
        whole = _whole(hidden_row, row, branch, PAIR, MIXED)
        norm = _norm(whole.to(tl.float32))
        # A row that is not finite has no finite norm. Neither have finite values whose squares
        # overflow, so then all values are looked at.
        unsound = named * 0
        if (norm < float("inf")) == 0:
            tl.debug_barrier()  # its threads have other elements of the row
            unsound = _unsound(
                hidden, stream, first, branch, PAIR=PAIR, MIXED=MIXED, WIDTH=WIDTH, BLOCK=BLOCK
            )
            tl.debug_barrier()
        size = tl.full([], 0.0, tl.float32)
        change = size
        bounded_size = size
        scaled = size + float("inf")
        both = named < 0
        failed = scaled
        if tl.load(plan + _LIMITED) != 0:
            scaled, failed, _high_scaled, _high_failed, both = _limits(
                rows, site_rows, scalars, depth, configurations
            )
        rewrites = named * 0
        left = named  # the families whose edits are still to be applied
        if both:
            # The barriers: its threads have other elements of the row.
            tl.debug_barrier()
            written, change, bounded_size = _edit_both(
                hidden=hidden,
                stream=stream,
                first=first,
                norm=norm,
                rows=rows,
                site_rows=site_rows,
                pool=pool,
                scalars=scalars,
                named=named,
                depth=depth,
                configurations=configurations,
                branch=branch,
                PAIR=PAIR,
                MIXED=MIXED,
                WIDTH=WIDTH,
                BLOCK=BLOCK,
            )
            tl.debug_barrier()
            scaled = scaled + float("inf")
            failed = failed + float("inf")
            left = tl.where(written, 0, named)
            # loaded again, so that the call needs no registers for them
            row = tl.load(stream + at, mask=inside, other=0.0)
            hidden_row = tl.load(hidden + at, mask=inside, other=0.0) if PAIR else row
        if (left & _REWRITING) != 0:
            value, rewrites, _shift = _edited(
                value=_whole(hidden_row, row, branch, PAIR, MIXED).to(tl.float32),
                every=1,
                named=named,
                rows=rows,
                site_rows=site_rows,
                pool=pool,
                scalars=scalars,
                depth=depth,
                configurations=configurations,
                lanes=lanes,
                inside=inside,
                WIDTH=WIDTH,
                BLOCK=BLOCK,
            )
            # Load the row again: keeping it until here would need registers for a whole row. The
            # barrier is needed because an earlier site of this launch may have written the row.
            tl.debug_barrier()
            row = tl.load(stream + at, mask=inside, other=0.0)
            if PAIR:
                hidden_row = tl.load(hidden + at, mask=inside, other=0.0)
            if rewrites > 0:
                whole = _whole(hidden_row, row, branch, PAIR, MIXED)
                new, _over, change, size = _limited(
                    whole, value.to(row.dtype), norm, scaled, failed
                )
                differs = inside & (_bits(new) != _bits(whole))
                if tl.max(differs.to(tl.int32), 0) > 0:
                    # Written only if it differs: another pair with the same sum would change the
                    # next norm.
                    hidden_row, row = _write(
                        hidden=hidden,
                        stream=stream,
                        row=row,
                        hidden_row=hidden_row,
                        new=new,
                        branch=branch,
                        at=at,
                        inside=inside,
                        PAIR=PAIR,
                        MIXED=MIXED,
                        BLOCK=BLOCK,
                    )
        # Also reached if there were rewrites, but none changed the row.
        if (rewrites == 0) & ((left & _ADDING) != 0):
            total = tl.zeros([BLOCK], tl.float32) * -1.0
            for k in range(depth):
                entry = tl.load(site_rows + _ADD * configurations + tl.load(rows + k)).to(tl.int64)
                if entry > 0:
                    total = total + _vector(pool + entry * WIDTH, lanes, inside)
            whole = _whole(hidden_row, row, branch, PAIR, MIXED)
            if MIXED:
                shifted = (tl.where(branch, hidden_row, row).to(tl.float32) + total).to(row.dtype)
                hidden_row = tl.where(branch, shifted, hidden_row)
                row = tl.where(branch, row, shifted)
                tl.store(tl.where(branch, hidden, stream) + at, shifted, mask=inside)
            else:
                row = (row.to(tl.float32) + total).to(row.dtype)
                tl.store(stream + at, row, mask=inside)
            new, over, change, size = _limited(
                whole, _whole(hidden_row, row, branch, PAIR, MIXED), norm, scaled, failed
            )
            if over:
                hidden_row, row = _write(
                    hidden=hidden,
                    stream=stream,
                    row=row,
                    hidden_row=hidden_row,
                    new=new,
                    branch=branch,
                    at=at,
                    inside=inside,
                    PAIR=PAIR,
                    MIXED=MIXED,
                    BLOCK=BLOCK,
                )
        size = tl.where(both, bounded_size, size)
        sign = tl.where(size < 0.0, -1.0, 1.0)
        overflowed = named * 0
        if (norm + change < float("inf")) == 0:
            tl.debug_barrier()  # its threads have other elements of the row
            overflowed = _unsound(
                hidden, stream, first, branch, PAIR=PAIR, MIXED=MIXED, WIDTH=WIDTH, BLOCK=BLOCK
            )
            tl.debug_barrier()
        size = tl.where(overflowed > 0, sign * _OVERFLOWED, size)
        size = tl.where(unsound > 0, sign * _UNSOUND, size)
        tl.store(sizes + (tl.load(plan + _SITE) - 1).to(tl.int64) * capacity, size)

    if after_slot >= 0:
        place = (tl.load(plan + _AFTER_ROW) + after_slot).to(tl.int64) * WIDTH
        tl.store(ring + place + lanes, _whole(hidden_row, row, branch, PAIR, MIXED), mask=inside)
        _count(counts, plan, _CAPTURED_AFTER, 1)
    return hidden_row, row


# Only the alignment of the large tensors may select another compiled variant: with more reasons, a
# compilation could fall into the capture of a graph.
@triton.jit(
    do_not_specialize=[
        *(
            "plan",
            "token_rows",
            "capture_slots",
            "site_rows",
            "scalars",
            "counts",
            "sizes",
        ),
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
    counts,
    sizes,
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
):
    # 0 if no site of the launch has anything to do: then nothing else is loaded.
    active = tl.load(plan + _SITE)
    limit = tl.where(active != 0, tokens, 0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < WIDTH

    token = tl.program_id(0).to(tl.int64)  # 64 bits: token · width may exceed 2^31
    while token < limit:
        rows = token_rows + token * _ROWS_PER_TOKEN
        at = token * WIDTH + lanes
        row = tl.zeros([BLOCK], ring.dtype.element_ty)
        hidden_row = row
        loaded = active * 0
        # A loop on the device that loads rows when they are first needed spilled 64 bytes a thread;
        # unrolled, two sites spilled 232, and each number of sites would be compiled by itself.
        for site in range(sites):
            of_site = plan + site * _COLUMNS
            entries = site_rows + site * _FAMILIES * configurations
            before_slot, after_slot = _slots(of_site, capture_slots, token, capacity)
            named, applied, depth = _named(of_site, rows, entries, configurations)
            if (before_slot >= 0) | (after_slot >= 0) | (named > 0):
                if loaded == 0:
                    row = tl.load(stream + at, mask=inside, other=0.0)
                    # unused where there is no pair
                    hidden_row = tl.load(hidden + at, mask=inside, other=0.0) if PAIR else row
                    loaded += 1
                hidden_row, row = _visit(
                    hidden=hidden,
                    stream=stream,
                    hidden_row=hidden_row,
                    row=row,
                    branch=site < branches,
                    first=token * WIDTH,
                    at=at,
                    ring=ring,
                    plan=of_site,
                    rows=rows,
                    site_rows=entries,
                    pool=pool,
                    scalars=scalars,
                    counts=counts,
                    sizes=sizes + token,
                    before_slot=before_slot,
                    after_slot=after_slot,
                    named=named,
                    applied=applied,
                    depth=depth,
                    lanes=lanes,
                    inside=inside,
                    configurations=configurations,
                    capacity=capacity,
                    PAIR=PAIR,
                    MIXED=MIXED,
                    WIDTH=WIDTH,
                    BLOCK=BLOCK,
                )
        token += programs


def launch(
    hidden: torch.Tensor | None, stream: torch.Tensor, buffers: Buffers, branches: int = 0
) -> None:
    """Run sites like `reference.launch`, but read `capture_slots` instead of `lists`.

    Raises ValueError for tensors that are not contiguous.
    """
    tensors = (
        stream if hidden is None else hidden,
        stream,
        buffers.ring,
        buffers.plan,
        buffers.token_rows,
        buffers.capture_slots,
        buffers.site_rows,
        buffers.pool,
        buffers.scalars,
        buffers.counts,
        buffers.sizes,
    )
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor {list(tensor.shape)} with strides {list(tensor.stride())} is not "
                "contiguous"
            )
    width = buffers.ring.shape[1]
    capacity = buffers.capture_slots.shape[1]
    # padding rows beyond the buffers' capacity are never planned
    tokens = min(stream.numel() // width, capacity)
    if not tokens:
        return
    block = triton.next_power_of_2(width)
    programs = min(tokens, MAX_PROGRAMS)
    _sites[(programs,)](
        *tensors,
        tokens,
        capacity,
        buffers.site_rows.shape[2],
        programs,
        len(buffers.plan),
        branches,
        PAIR=hidden is not None,
        MIXED=branches > 0,
        WIDTH=width,
        BLOCK=block,
        num_warps=max(1, min(16, block // _LANES_PER_WARP)),
        maxnreg=_REGISTERS[stream.dtype.itemsize],
        # no fused multiply-add, to get the reference's bits; memory is the bottleneck anyway
        enable_fp_fusion=False,
    )
