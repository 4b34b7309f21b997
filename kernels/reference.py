"""What exactly happens at a hook site? In plain torch: the definition, and what runs on the CPU.

Capture before, then the families in order, then capture after, for the token rows that the plan names.
A stream site of the kind *deferred pair* holds s = hidden + residual, an addition that vLLM fuses into the next norm; a
rewritten row becomes (−0, new), whose sum is `new` bit for bit, and a shift goes to the residual. Work is proportional to
the tokens named; rows that no configuration touches keep their bits.
"""

from collections.abc import Callable

import torch

from .families import FAMILIES, Family
from .plan import AFTER, BEFORE, DEPTH, EDITS, EDITS_AT, Port

#: Of a `rewrite`: (rows, vectors, scalars) → rows. rows: float32 `[n, hidden_size]`, which may be overwritten; vectors:
#: `[n, entries, hidden_size]` in the model's dtype; scalars: float32 `[n, SCALARS]`.
Rewrite = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: Of a `shift`: (vectors, scalars) → what is added, `[n, hidden_size]`, float32 or the model's dtype.
Shift = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _replace(rows: torch.Tensor, vectors: torch.Tensor, scalars: torch.Tensor) -> torch.Tensor:
    alpha, target = scalars[:, :1], vectors[:, 0].float()
    # 0 · s is not 0 where s is infinite, so full replacement is not left to the arithmetic.
    return torch.where(alpha == 1, target, (1 - alpha) * rows + alpha * target)


def _add(vectors: torch.Tensor, scalars: torch.Tensor) -> torch.Tensor:
    return vectors[:, 0]


#: Rows at a time where several passes are made: they stay in the cache, and fresh memory costs more than the arithmetic.
_BLOCK = 128

REWRITES: dict[str, Rewrite] = {"replace": _replace}
SHIFTS: dict[str, Shift] = {"add": _add}


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
    """A site whose stream is `hidden + residual`, both `[tokens, hidden_size]` or `[1, tokens, hidden_size]`, contiguous.

    `ring`: `[ring_rows, hidden_size]` of the same dtype; captured rows go to `ring[first row + slot]`, and nothing else in
    it is written. The rest: `plan.Planned`.
    """
    steps: list[int] = plan.tolist()
    if steps[EDITS] or steps[BEFORE.COUNT] or steps[AFTER.COUNT]:
        width = ring.shape[1]
        _site(hidden.view(-1, width), residual.view(-1, width), ring, steps, lists, token_rows, site_rows, pool, scalars)


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
    """A site that is one tensor, edited in place: `[tokens, hidden_size]` or `[1, tokens, hidden_size]`, contiguous.

    The rest as in `pair_site`.
    """
    steps: list[int] = plan.tolist()
    if steps[EDITS] or steps[BEFORE.COUNT] or steps[AFTER.COUNT]:
        _site(None, stream.view(-1, ring.shape[1]), ring, steps, lists, token_rows, site_rows, pool, scalars)


def _site(
    hidden: torch.Tensor | None,
    stream: torch.Tensor,
    ring: torch.Tensor,
    steps: list[int],
    lists: torch.Tensor,
    token_rows: torch.Tensor,
    site_rows: torch.Tensor,
    pool: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    if steps[BEFORE.COUNT]:
        _capture(hidden, stream, ring, steps, lists, BEFORE)
    if steps[EDITS]:
        tokens = lists[steps[EDITS_AT] : steps[EDITS_AT] + steps[EDITS]]
        depth = steps[DEPTH]
        rows = token_rows[:, :depth].index_select(0, tokens)
        entries = site_rows.index_select(1, rows.flatten()).view(len(site_rows), len(tokens), depth)
        for family, mine, named in zip(FAMILIES, entries, entries.flatten(1).count_nonzero(1).tolist(), strict=True):
            if named:
                apply = _rewrite if family.effect == "rewrite" else _shift
                apply(family, hidden, stream, tokens, mine, named == mine.numel(), pool, scalars)
    if steps[AFTER.COUNT]:
        _capture(hidden, stream, ring, steps, lists, AFTER)


def _capture(
    hidden: torch.Tensor | None, stream: torch.Tensor, ring: torch.Tensor, steps: list[int], lists: torch.Tensor, port: Port
) -> None:
    count, start = steps[port.COUNT], steps[port.START]
    rows = ring[steps[port.ROW] : steps[port.ROW] + count]
    if start >= 0:
        if hidden is None:
            rows.copy_(stream[start : start + count])
        else:
            torch.add(hidden[start : start + count], stream[start : start + count], out=rows)
        return
    tokens = lists[steps[port.AT] : steps[port.AT] + count]
    torch.index_select(stream, 0, tokens, out=rows)
    if hidden is not None:
        rows.add_(hidden.index_select(0, tokens))


def _vectors(family: Family, pool: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """`[n, family.entries, hidden_size]` of the entries `[n]`."""
    if family.entries == 1:
        return pool.index_select(0, entries).unsqueeze(1)
    each = entries[:, None] + torch.arange(family.entries, dtype=entries.dtype)
    return pool.index_select(0, each.flatten()).view(len(entries), family.entries, -1)


def _rewrite(
    family: Family,
    hidden: torch.Tensor | None,
    stream: torch.Tensor,
    tokens: torch.Tensor,
    entries: torch.Tensor,
    full: bool,
    pool: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    """`entries`: `[n, depth]` of the tokens `[n]`; `full`: none of them is 0."""
    if family.graded:
        strengths = scalars[:, 0].index_select(0, entries.flatten()).view_as(entries)
        entries, full = entries.masked_fill(strengths == 0, 0), False
    if not full:
        tokens, entries = _named(tokens, entries)
    formula = REWRITES[family.name]
    for places, part in zip(tokens.long().split(_BLOCK), entries.split(_BLOCK), strict=True):
        rows = stream.index_select(0, places)
        if hidden is not None:
            rows += hidden.index_select(0, places)
        rows = rows.float()
        for entry in part.unbind(1):
            mine = entry.nonzero().flatten()
            if len(mine) == len(entry):
                rows = formula(rows, _vectors(family, pool, entry), scalars.index_select(0, entry))
            elif len(mine):
                entry = entry.index_select(0, mine)
                rows[mine] = formula(rows.index_select(0, mine), _vectors(family, pool, entry), scalars.index_select(0, entry))
        stream.index_copy_(0, places, rows.to(stream.dtype))
        if hidden is not None:
            hidden.index_fill_(0, places, -0.0)


def _shift(
    family: Family,
    hidden: torch.Tensor | None,
    stream: torch.Tensor,
    tokens: torch.Tensor,
    entries: torch.Tensor,
    full: bool,
    pool: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    """As `_rewrite`."""
    if not full:
        tokens, entries = _named(tokens, entries)
    formula = SHIFTS[family.name]
    if entries.shape[1] == 1:  # what is usual: no detour through float32
        entry = entries[:, 0]
        stream.index_add_(0, tokens, formula(_vectors(family, pool, entry), scalars.index_select(0, entry)).to(stream.dtype))
        return
    for places, part in zip(tokens.long().split(_BLOCK), entries.split(_BLOCK), strict=True):
        total = torch.zeros(len(places), stream.shape[1], dtype=torch.float32)
        for entry in part.unbind(1):
            mine = entry.nonzero().flatten()
            if len(mine):
                entry = entry.index_select(0, mine)
                total.index_add_(0, mine, formula(_vectors(family, pool, entry), scalars.index_select(0, entry)).float())
        stream.index_copy_(0, places, (stream.index_select(0, places) + total).to(stream.dtype))


def _named(tokens: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those tokens, and their entries, for which any column names one."""
    named = entries.any(1)
    return tokens[named], entries[named]
