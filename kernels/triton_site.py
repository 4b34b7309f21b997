"""How does a GPU do what `reference.py` defines? One Triton launch for a site, the same whatever the step asks for.

The grid follows from shapes alone and everything else is read on the device, so a replayed CUDA graph obeys the buffers as
they are then. A program owns whole token rows and walks over the tokens; at a site without work it reads three numbers and ends.
A row is read once and written only where it changed; rows of the ring that no slot names are never written.
"""

# ruff: noqa: SIM102, SIM108 -- an `if` on constants is decided when the kernel is compiled, and stands alone

import torch
import triton
import triton.language as tl

from .families import FAMILIES, PLACE, SCALARS
from .plan import AFTER, BEFORE, DEPTH, EDITS, ROWS_PER_TOKEN

#: Programs of a launch at most: several for each multiprocessor, and still a short launch when there is nothing to do.
MAX_PROGRAMS = 1024
#: Two loads of 16 bytes for each thread, in the 16-bit types.
_LANES_PER_WARP = 512

_EDITS = tl.constexpr(EDITS)
_DEPTH = tl.constexpr(DEPTH)
_BEFORE_COUNT, _BEFORE_ROW, _BEFORE_PATTERN = map(tl.constexpr, (BEFORE.COUNT, BEFORE.ROW, BEFORE.PATTERN))
_AFTER_COUNT, _AFTER_ROW, _AFTER_PATTERN = map(tl.constexpr, (AFTER.COUNT, AFTER.ROW, AFTER.PATTERN))
_ROWS_PER_TOKEN = tl.constexpr(ROWS_PER_TOKEN)
_SCALARS = tl.constexpr(SCALARS)
_FAMILIES = tl.constexpr(len(FAMILIES))
#: One bit for each family.
_REWRITING = tl.constexpr(sum(1 << place for place, family in enumerate(FAMILIES) if family.effect == "rewrite"))
_GRADED = tl.constexpr(sum(1 << place for place, family in enumerate(FAMILIES) if family.graded))

_REPLACE = tl.constexpr(PLACE["replace"])
_ADD = tl.constexpr(PLACE["add"])


@triton.jit
def _rewritten(FAMILY: tl.constexpr, row, vectors, scalars, lanes, inside, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """`row`: float32 `[BLOCK]`, zero outside. `vectors`, `scalars`: where those of the entry begin; v1 is at `vectors + WIDTH`."""
    if FAMILY == _REPLACE:
        alpha = tl.load(scalars)
        target = tl.load(vectors + lanes, mask=inside, other=0.0).to(tl.float32)
        row = tl.where(alpha == 1.0, target, (1.0 - alpha) * row + alpha * target)
    else:
        tl.static_assert(False, "a family of the table has no formula here")
    return row


@triton.jit
def _shifted(FAMILY: tl.constexpr, total, vectors, scalars, lanes, inside, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """`total`: float32 `[BLOCK]`, the sum so far."""
    if FAMILY == _ADD:
        total = total + tl.load(vectors + lanes, mask=inside, other=0.0).to(tl.float32)
    else:
        tl.static_assert(False, "a family of the table has no formula here")
    return total


@triton.jit
def _sum(hidden_row, row, PAIR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The stream, rounded to the model's dtype, as the next norm stores it."""
    if PAIR:
        row = (hidden_row.to(tl.float32) + row.to(tl.float32)).to(row.dtype)
    return row


# Nothing but the large tensors' alignment may ask for another compilation: it could fall into the capture of a graph.
@triton.jit(
    do_not_specialize=["plan", "token_rows", "capture_slots", "site_rows", "scalars", "tokens", "capacity", "configurations", "programs"]
)
def _site(  # type: ignore[no-untyped-def]
    hidden,
    stream,
    ring,
    plan,
    token_rows,
    capture_slots,
    site_rows,
    pool,
    scalars,
    tokens,
    capacity,
    configurations,
    programs,
    PAIR: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    edits = tl.load(plan + _EDITS)
    before = tl.load(plan + _BEFORE_COUNT)
    after = tl.load(plan + _AFTER_COUNT)
    depth = tl.where(edits > 0, tl.load(plan + _DEPTH), 0)
    limit = tl.where((edits > 0) | (before > 0) | (after > 0), tokens, 0)
    before_slots = capture_slots + tl.load(plan + _BEFORE_PATTERN).to(tl.int64) * capacity
    after_slots = capture_slots + tl.load(plan + _AFTER_PATTERN).to(tl.int64) * capacity
    lanes = tl.arange(0, BLOCK)
    inside = lanes < WIDTH

    token = tl.program_id(0).to(tl.int64)  # 64 bits: token · width may pass 2^31
    while token < limit:
        before_slot = tl.load(before_slots + token, mask=before > 0, other=-1)
        after_slot = tl.load(after_slots + token, mask=after > 0, other=-1)
        rows = token_rows + token * _ROWS_PER_TOKEN
        named = edits * 0
        read = edits * 0  # by a family
        for k in range(depth):
            row_number = tl.load(rows + k)
            for family in tl.static_range(_FAMILIES):
                entry_here = tl.load(site_rows + family * configurations + row_number)
                named = named | entry_here
                if (_REWRITING >> family) & 1:
                    read = read | entry_here

        if (before_slot >= 0) | (after_slot >= 0) | (named > 0):
            at = token * WIDTH + lanes
            row = tl.load(stream + at, mask=inside, other=0.0)
            if PAIR:
                # A shift alone has no need of it, and the memory sets the pace.
                summed = (before_slot >= 0) | (after_slot >= 0) | (read > 0)
                hidden_row = tl.load(hidden + at, mask=lanes < tl.where(summed, WIDTH, 0), other=0.0)
            else:
                hidden_row = row  # not looked at
            if before_slot >= 0:
                place = (tl.load(plan + _BEFORE_ROW) + before_slot).to(tl.int64) * WIDTH
                tl.store(ring + place + lanes, _sum(hidden_row, row, PAIR), mask=inside)

            if named > 0:
                changed = edits * 0
                rewritten = edits * 0
                for family in tl.static_range(_FAMILIES):
                    mine = edits * 0
                    if (_REWRITING >> family) & 1:
                        value = _sum(hidden_row, row, PAIR).to(tl.float32)
                    else:
                        value = tl.zeros([BLOCK], tl.float32)
                    for k in range(depth):
                        entry = tl.load(site_rows + family * configurations + tl.load(rows + k)).to(tl.int64)
                        numbers = scalars + entry * _SCALARS
                        if (_GRADED >> family) & 1:
                            live = (entry > 0) & (tl.load(numbers) != 0.0)
                        else:
                            live = entry > 0
                        if live:
                            mine += 1
                            if (_REWRITING >> family) & 1:
                                value = _rewritten(family, value, pool + entry * WIDTH, numbers, lanes, inside, WIDTH)
                            else:
                                value = _shifted(family, value, pool + entry * WIDTH, numbers, lanes, inside, WIDTH)
                    if (_REWRITING >> family) & 1:
                        row = tl.where(mine > 0, value.to(row.dtype), row)
                        # −0, not 0: then the pair's sum has the new row's bits also where that is −0.
                        hidden_row = tl.where(mine > 0, (tl.zeros([BLOCK], tl.float32) * -1.0).to(row.dtype), hidden_row)
                        rewritten += mine
                    else:
                        row = tl.where(mine > 0, (row.to(tl.float32) + value).to(row.dtype), row)
                    changed += mine
                if changed > 0:
                    tl.store(stream + at, row, mask=inside)
                if PAIR:
                    if rewritten > 0:
                        tl.store(hidden + at, hidden_row, mask=inside)

            if after_slot >= 0:
                place = (tl.load(plan + _AFTER_ROW) + after_slot).to(tl.int64) * WIDTH
                tl.store(ring + place + lanes, _sum(hidden_row, row, PAIR), mask=inside)
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
) -> None:
    """As `reference.pair_site`; reads `capture_slots`, not `lists`. Raises ValueError for tensors that are not contiguous."""
    _launch(hidden, residual, ring, plan, token_rows, capture_slots, site_rows, pool, scalars, pair=True)


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
) -> None:
    """As `reference.single_site`; reads `capture_slots`, not `lists`. Raises ValueError for tensors that are not contiguous."""
    _launch(stream, stream, ring, plan, token_rows, capture_slots, site_rows, pool, scalars, pair=False)


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
    *,
    pair: bool,
) -> None:
    tensors = (hidden, stream, ring, plan, token_rows, capture_slots, site_rows, pool, scalars)
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor {list(tensor.shape)} with strides {list(tensor.stride())} is not contiguous")
    width, capacity = ring.shape[1], capture_slots.shape[1]
    tokens = min(stream.numel() // width, capacity)  # nothing is planned for padding beyond the buffers
    if not tokens:
        return
    block = triton.next_power_of_2(width)
    programs = min(tokens, MAX_PROGRAMS)
    _site[(programs,)](
        *tensors,
        tokens,
        capacity,
        site_rows.shape[1],
        programs,
        PAIR=pair,
        WIDTH=width,
        BLOCK=block,
        num_warps=max(1, min(16, block // _LANES_PER_WARP)),
        enable_fp_fusion=False,  # the bits of the reference; the memory sets the pace, not the arithmetic
    )
