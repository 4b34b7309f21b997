"""Definition of the site ops in plain torch; also the CPU implementation.

A site captures rows before its edits, applies the families in order, and captures rows after its
edits, for the token rows that the plan names. The stream of a pair site is s = hidden + residual,
an addition that vLLM fuses into the next norm: a rewritten row becomes (−0, new), whose sum is
`new` bit for bit; shifts of a row without rewrites are added to its residual.

If a rewrite applies to a token, s is first rounded to the model's dtype, as the next norm stores
it. All families then compute in float32, and the result is rounded once. A rewrite that does not
change a row (its strength is 0, the component is within its range, or the result has the same bits)
counts as absent. Last, the relative size of a row's edits is measured on the rounded rows, and a
row whose edits exceed their limit is rewritten with scaled ones. A limit bounds the edits of its
owner: the operator's are what they do to the row alone, a request's what the row has besides. The
cost is proportional to the number of tokens that each family edits; rows that no configuration
edits keep their bits.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..schemas.requests.interventions import (
    EVERY,
    FAMILIES,
    INSTALLED,
    LAYER_NORM_EPS,
    LIMIT,
    NEAR,
    NORMS,
    OWNER,
    PLACE,
    Intervention,
)
from . import installed
from .plan import (
    AFTER,
    ALIKE,
    ALIKE_FROM,
    BEFORE,
    CAPTURED_AFTER,
    CAPTURED_BEFORE,
    DEPTH,
    EDITED,
    EDITS,
    EDITS_AT,
    LARGEST_SIZE,
    OVERFLOWED,
    SITE,
    UNSOUND,
    WITHIN,
    Buffers,
    CapturePort,
)

#: New rows, and which of them were changed (None: all).
Rewritten = tuple[torch.Tensor, torch.Tensor | None]


class Applications(NamedTuple):
    """The applications of a family to n rows, whose contents are in the pool and the scalars, see
    `plan.Buffers`.
    """

    entries: torch.Tensor  # int32 `[n]`: the first entry of each row's application
    pool: torch.Tensor
    scalars: torch.Tensor

    def numbers(self, family: str) -> tuple[torch.Tensor, ...]:
        """Return the family's scalars in their order, each float32 `[n, 1]`."""
        numbers = self.scalars.index_select(0, self.entries)
        return tuple(numbers[:, : len(EVERY[PLACE[family]].scalars)].split(1, dim=1))

    def vectors(self, number: int = 0) -> torch.Tensor:
        """Return the vector of this number of each application, float32 `[n, hidden_size]`."""
        return self.pool.index_select(0, self.entries + number).float()


#: Formula of a rewriting family: (rows, applied) → `Rewritten`. rows: float32 `[n, hidden_size]`,
#: may be overwritten.
Rewrite = Callable[[torch.Tensor, Applications], Rewritten]
#: The edits of one owner: the rows `[n, hidden_size]` before and after them, and their limits as in
#: `scalars`, `[n or 1, any number]`, 0 where there is none.
EditTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _replace(rows: torch.Tensor, applied: Applications) -> Rewritten:
    (alpha,) = applied.numbers("replace")
    target = applied.vectors()
    return _mixed(rows, alpha, target), None


def _replace_masked(rows: torch.Tensor, applied: Applications) -> Rewritten:
    (alpha,) = applied.numbers("replace_masked")
    target = applied.vectors()
    mask = applied.vectors(1)
    return torch.where(mask != 0, _mixed(rows.clone(), alpha, target), rows), None


def _mixed(rows: torch.Tensor, alpha: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return (1 − alpha) · rows + alpha · target. Overwrites `rows`."""
    # 0 · s is NaN where s is infinite, so a full replacement copies the target instead.
    full = alpha == 1
    if bool(full.all()):
        return target
    return torch.where(full, target, rows.mul_(1 - alpha).add_(alpha * target))


def _lowrank(rows: torch.Tensor, applied: Applications) -> Rewritten:
    """Compute s + strength · Rᵀ(W s + b − R s), with one matrix product for all tokens of an
    application.
    """
    strength, rank, bias = (
        FAMILIES[PLACE["lowrank"]].column(scalar) for scalar in ("strength", "rank", "bias")
    )
    entries, pool, scalars = applied
    for entry in entries.unique().tolist():
        terms = slice(entry, entry + 2 * int(scalars[entry, rank]))
        rotation, weight = pool[terms].float().view(-1, 2, pool.shape[1]).unbind(1)
        indices = (entries == entry).nonzero().flatten()
        selected = rows.index_select(0, indices)
        # (W − R)·s instead of W·s − R·s avoids the subtraction of two large numbers.
        correction = torch.addmm(scalars[terms][::2, bias], selected, (weight - rotation).t())
        rows.index_copy_(
            0, indices, selected.addmm_(correction * scalars[entry, strength], rotation)
        )
    return rows, None


def _add_matched(rows: torch.Tensor, applied: Applications) -> Rewritten:
    (scale,) = applied.numbers("add_matched")
    direction = applied.vectors()
    return rows.addcmul_(
        scale * torch.linalg.vector_norm(rows, dim=1, keepdim=True), direction
    ), None


def _ablate(rows: torch.Tensor, applied: Applications) -> Rewritten:
    (strength,) = applied.numbers("ablate")
    direction = applied.vectors()
    return rows.addcmul_(
        strength * (rows * direction).sum(1, keepdim=True), direction, value=-1
    ), None


def _clamp(rows: torch.Tensor, applied: Applications) -> Rewritten:
    (strength, low, high) = applied.numbers("clamp")
    direction = applied.vectors()
    component = (rows * direction).sum(1, keepdim=True)
    outside = ~((component >= low) & (component <= high))  # true if the component is NaN
    change = strength * (torch.minimum(torch.maximum(component, low), high) - component)
    if bool(outside.all()):
        return rows.addcmul_(change, direction), None
    indices = outside.flatten().nonzero().flatten()
    return rows.index_add_(0, indices, change[indices] * direction[indices]), outside.flatten()


def _feature(rows: torch.Tensor, applied: Applications) -> Rewritten:
    strength, target, bias, threshold, norm = applied.numbers("feature")
    base, spread, divisor = _normalised(rows, norm)
    products = (applied.vectors() + applied.vectors(1)).add_(applied.vectors(2)).mul_(base)
    reading = products.sum(1, keepdim=True) / divisor + bias
    tolerance = NEAR * (products.abs_().sum(1, keepdim=True) / divisor + bias.abs())
    gap = target - torch.where(reading > threshold, reading, 0.0)
    changed = ~((gap == 0) | ((gap.abs() <= tolerance) & (tolerance < math.inf))).flatten()
    indices = changed.nonzero().flatten()
    return rows.index_add_(
        0, indices, (strength * gap * spread)[indices] * applied.vectors(3)[indices]
    ), changed


def _normalised(rows: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the rows (minus their mean where `norm` is `layer_norm`), σ and σ + ε; the last two
    and `norm` are `[n, 1]`.

    See the formula of the family `feature`.
    """
    one = torch.ones_like(norm)
    if not bool(norm.any()):
        return rows, one, one
    width = rows.shape[1]
    centred = norm == _CENTRED
    base = rows - torch.where(centred, rows.sum(1, keepdim=True) / width, 0.0)
    spread = ((base * base).sum(1, keepdim=True) / (width - centred.float())).sqrt()
    spread = torch.where(norm == 0, one, spread)
    return base, spread, spread + LAYER_NORM_EPS * centred


def _installed(rows: torch.Tensor, applied: Applications) -> Rewritten:
    """Call the installed op once for all rows of an entry."""
    entries, pool, scalars = applied
    new = rows.clone()
    for entry in entries.unique().tolist():
        indices = (entries == entry).nonzero().flatten()
        strength, first, second, code = scalars[entry, : len(INSTALLED.numbers)].tolist()
        new.index_copy_(
            0,
            indices,
            installed.edited(
                int(code),
                rows.index_select(0, indices),
                pool[entry].float(),
                strength,
                (first, second),
            ),
        )
    return new, (_bits(new) != _bits(rows)).any(1)


#: Elements per block of rows that are read several times: few enough to stay in the CPU's cache,
#: and enough to make the overhead of each call negligible.
_BLOCK = 2**18

REWRITES: dict[str, Rewrite] = {
    "replace": _replace,
    "replace_masked": _replace_masked,
    "lowrank": _lowrank,
    "add_matched": _add_matched,
    "ablate": _ablate,
    "clamp": _clamp,
    "feature": _feature,
}
_FORMULAS = {**REWRITES, INSTALLED.name: _installed}
_ADD = PLACE["add"]
_CENTRED = NORMS.index("layer_norm")
_BITS = {2: torch.int16, 4: torch.int32}
_LARGEST = torch.tensor(LARGEST_SIZE)
#: Captured rows of a site that are copied by stretches, if these have as many rows on average.
_MANY = 32


def launch(
    hidden: torch.Tensor | None, stream: torch.Tensor, buffers: Buffers, branches: int = 0
) -> None:
    """Run the sites of a launch, in the order of `buffers.plan`, which has one row for each site.

    Their stream is `hidden + stream`, or without `hidden` the one tensor, which is edited in place:
    each `[tokens, hidden_size]` or `[1, tokens, hidden_size]`, contiguous. The first `branches`
    sites are on a branch: their stream is `hidden` alone. Captured rows are written to
    `ring[first row + slot]`, other rows keep their contents.
    """
    planned: list[list[int]] = buffers.plan.tolist()
    if not planned[0][SITE]:
        return
    stream = _flat(stream)
    other = None if hidden is None else _flat(hidden)
    for number, steps in enumerate(planned):
        if other is not None and number < branches:
            _site(None, other, number, steps, buffers)
        else:
            _site(other, stream, number, steps, buffers)


def _flat(stream: torch.Tensor) -> torch.Tensor:
    """Return the stream as `[tokens, hidden_size]`."""
    return stream if stream.dim() == 2 else stream.view(-1, stream.shape[-1])


def _site(
    hidden: torch.Tensor | None,
    stream: torch.Tensor,
    number: int,
    steps: list[int],
    buffers: Buffers,
) -> None:
    """Run one site: capture, edit, capture. `number`: the site's index in its launch; `steps`: its
    row of the plan.
    """
    done = buffers.counts.numpy()[steps[SITE] - 1]
    if steps[BEFORE.COUNT]:
        done[CAPTURED_BEFORE] += _capture(hidden, stream, steps, buffers, BEFORE)
    if steps[EDITS]:
        edited = _shift_alike(hidden, stream, number, steps, buffers) if steps[ALIKE] else None
        if edited is None:
            edited = _edit_listed(hidden, stream, number, steps, buffers)
        done[EDITED] += edited
    if steps[AFTER.COUNT]:
        done[CAPTURED_AFTER] += _capture(hidden, stream, steps, buffers, AFTER)


def _edit_listed(
    hidden: torch.Tensor | None,
    stream: torch.Tensor,
    number: int,
    steps: list[int],
    buffers: Buffers,
) -> int:
    """Edit the tokens that the plan lists; return the number of configuration rows applied, summed
    over the tokens.
    """
    site_rows = buffers.site_rows[number]
    tokens = buffers.lists[steps[EDITS_AT] : steps[EDITS_AT] + steps[EDITS]]
    depth = steps[DEPTH]
    rows = buffers.token_rows[:, :depth].index_select(0, tokens)
    entries = site_rows.index_select(1, rows.flatten()).view(len(site_rows), len(tokens), depth)
    applied = entries.any(0)  # [n, depth]
    count = int(applied.count_nonzero())
    if count < max(applied.numel(), 1):
        # Some tokens may have no entry at this site: a site that any configuration of the step
        # edits lists all edited tokens.
        indices = applied.any(1).nonzero().flatten()
        tokens = tokens.index_select(0, indices)
        entries = entries.index_select(1, indices)
    if len(tokens):
        before = _rows(hidden, stream, tokens)
        _edit(hidden, stream, tokens, entries, buffers)
        after = _rows(hidden, stream, tokens)
        edits = _by_owner(before, after, entries, buffers)
        over = _measure(before, after, edits, tokens, steps, buffers.sizes)
        _rewrite_rows(hidden, stream, tokens[over], after[over])
    return count


# When a limit bounded the sum of all edits, a request with a limit of 1e-6 switched the operator's
# edits off.
def _by_owner(
    before: torch.Tensor,
    after: torch.Tensor,
    entries: torch.Tensor,
    buffers: Buffers,
) -> list[EditTensors]:
    """Return the edits by owner, the operator's first, or all of them as one owner's if there are
    no limits or no row has edits of both. `entries`: `[families, n, depth]`.
    """
    chosen = entries.transpose(0, 1).flatten(1)
    limits, owners = (
        buffers.scalars[:, column].index_select(0, chosen.flatten()).view(chosen.shape)
        for column in (LIMIT, OWNER)
    )
    both = owners.any(1) & ((chosen > 0) & (owners == 0)).any(1)
    if not bool(limits.any()) or not bool(both.any()):
        return [(before, after, limits)]
    operators = (owners > 0) & both[:, None]
    rows = both.nonzero().flatten()
    alone = before.index_select(0, rows)
    mask = operators.view(len(chosen), len(entries), -1).transpose(0, 1)
    _edit(None, alone, torch.arange(len(rows)), (entries * mask)[:, rows], buffers)
    middle = before.index_copy(0, rows, alone)
    return [(before, middle, limits * operators), (middle, after, limits * ~operators)]


def _shift_alike(
    hidden: torch.Tensor | None,
    stream: torch.Tensor,
    number: int,
    steps: list[int],
    buffers: Buffers,
) -> int | None:
    """Handle the usual case in one call: the only edit adds one vector to consecutive tokens.

    Returns the number of edited rows; in other cases does nothing, and returns None.
    """
    entries: list[int] = buffers.site_rows.numpy()[number, :, steps[ALIKE]].tolist()
    entry = entries[_ADD]
    if any(entries[:_ADD]) or any(entries[_ADD + 1 :]):
        return None
    if not entry:
        return 0
    run = slice(steps[ALIKE_FROM], steps[ALIKE_FROM] + steps[EDITS])
    rows = stream[run]
    other = None if hidden is None else hidden[run]
    before = rows.clone()
    rows.add_(buffers.pool[entry])
    if other is not None:
        before.add_(other)
    after = rows if other is None else rows + other
    edits = [(before, after, buffers.scalars[entry, LIMIT].view(1, 1))]
    over = _measure(before, after, edits, run, steps, buffers.sizes)
    _rewrite_rows(hidden, stream, over + steps[ALIKE_FROM], after[over])
    return len(rows)


def _measure(
    before: torch.Tensor,
    after: torch.Tensor,
    edits: Sequence[EditTensors],
    tokens: slice | torch.Tensor,
    steps: list[int],
    sizes: torch.Tensor,
) -> torch.Tensor:
    """Write the relative sizes of the edits that turned rows `before` into `after`, and which rows
    are not finite.

    `edits`: the same edits by owner. Returns the indices of the rows whose edits were too large and
    are scaled in `after`, int64.
    """
    row = before.float()
    # From the rows as they are stored, so that a capture before and after the edits shows the same.
    norm, change = (torch.linalg.vector_norm(item, dim=1) for item in (row, after.float() - row))
    over = torch.zeros(0, dtype=torch.int64)
    kept = _relative(norm, change)
    if any(bool(limits.any()) for _, _, limits in edits):
        rows, beyond, failing = _limited(row, norm, edits)
        over = beyond.nonzero().flatten()
        after[over] = rows[over].to(after.dtype)
        change = torch.linalg.vector_norm(after.float() - row, dim=1)
        kept = torch.where(failing > 0, -failing, _relative(norm, change))
    # both norms are finite only if all values are
    if not math.isfinite(float(norm.sum() + change.sum())):
        for rows, code in ((after, OVERFLOWED), (before, UNSOUND)):
            bad = torch.isfinite(rows).all(1).logical_not_()
            kept = torch.where(bad, torch.copysign(torch.tensor(code), kept), kept)
    sizes[steps[SITE] - 1, tokens] = kept
    return over


def _limited(
    row: torch.Tensor, norm: torch.Tensor, edits: Sequence[EditTensors]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows, float32 `[n, hidden_size]`, with each owner's edits within its limit; which
    of them were scaled, bool `[n]`; and the sizes beyond a limit that fails the request, else 0.

    `row`: float32 rows before the edits; `norm`: their norms.
    """
    beyond = torch.zeros_like(norm, dtype=torch.bool)
    failing = torch.zeros_like(norm)
    for start, end, limits in edits:
        edit = end.float() - start.float()
        change = torch.linalg.vector_norm(edit, dim=1)
        size = _relative(norm, change)
        scaled, failed = (
            torch.where(limits * sign > 0, limits.abs(), math.inf).amin(1) for sign in (1, -1)
        )
        over = size > scaled
        factor = torch.where(over, scaled * norm / change * WITHIN, 1.0)
        row = row + edit * factor[:, None]
        beyond |= over
        failing = torch.where((size > failed) & (failed <= scaled), size, failing)
    return row, beyond, failing


def _relative(norm: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    return torch.fmin(change / norm, _LARGEST).masked_fill_(change == 0, 0)  # of NaN, `_LARGEST`


def _rewrite_rows(
    hidden: torch.Tensor | None, stream: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
) -> None:
    """Write whole rows of tokens, int64 `[n]`; none for no tokens."""
    if len(tokens):
        stream.index_copy_(0, tokens, rows)
        if hidden is not None:
            hidden.index_fill_(0, tokens, -0.0)


def _rows(hidden: torch.Tensor | None, stream: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return a copy of these tokens' rows."""
    rows = stream.index_select(0, tokens)
    return rows if hidden is None else rows.add_(hidden.index_select(0, tokens))


def _capture(
    hidden: torch.Tensor | None,
    stream: torch.Tensor,
    steps: list[int],
    buffers: Buffers,
    port: CapturePort,
) -> int:
    """Copy the port's rows into the ring; return how many were captured."""
    ring = buffers.ring
    lists = buffers.lists
    count = steps[port.COUNT]
    tokens = lists[steps[port.AT] : steps[port.AT] + count]
    places = lists[steps[port.PLACES] : steps[port.PLACES] + count]
    if count >= _MANY:
        stretches = _stretches(tokens.numpy(), places.numpy())
        if len(stretches) <= count // _MANY:
            for first, place, size in stretches:
                last = first + size
                rows = ring[place : place + size]
                if hidden is None:
                    rows.copy_(stream[first:last])
                else:
                    torch.add(hidden[first:last], stream[first:last], out=rows)
            return count
    rows = _rows(hidden, stream, tokens)
    # numpy copies whole rows, torch's `index_copy_` each element, which takes five times as long
    bits = _BITS[rows.itemsize]
    ring.view(bits).numpy()[places.numpy()] = rows.view(bits).numpy()
    return count


def _stretches(tokens: np.ndarray, places: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first token, its place, count) of rows that follow one another in both."""
    starts = np.append(0, np.flatnonzero((np.diff(tokens) != 1) | (np.diff(places) != 1)) + 1)
    counts = np.diff(starts, append=len(tokens))
    return list(zip(tokens[starts].tolist(), places[starts].tolist(), counts.tolist(), strict=True))


def _edit(
    hidden: torch.Tensor | None,
    stream: torch.Tensor,
    tokens: torch.Tensor,
    entries: torch.Tensor,
    buffers: Buffers,
) -> None:
    """Apply all families to the tokens. `entries`: `[families, n, depth]` for tokens `[n]`."""
    used = [
        (family, entry)
        for family, entry, count in zip(
            EVERY, entries, entries.flatten(1).count_nonzero(1).tolist(), strict=False
        )
        if count
    ]
    if any(family.effect == "rewrite" for family, _ in used):
        live = [(family, _live(family, entry, buffers.scalars)) for family, entry in used]
        indices = _rewrite(hidden, stream, tokens, live, buffers).logical_not_().nonzero().flatten()
        tokens = tokens.index_select(0, indices)
        used = [(family, entry.index_select(0, indices)) for family, entry in live]
    for family, entry in used:
        if family.effect == "shift":
            _shift(stream, tokens, entry, buffers.pool)


def _live(family: Intervention, entries: torch.Tensor, scalars: torch.Tensor) -> torch.Tensor:
    """Return `entries`, with 0 where the strength is 0."""
    if not family.has_strength:
        return entries
    return entries.masked_fill(
        scalars[:, 0].index_select(0, entries.flatten()).view_as(entries) == 0, 0
    )


def _rewrite(
    hidden: torch.Tensor | None,
    stream: torch.Tensor,
    tokens: torch.Tensor,
    live: Sequence[tuple[Intervention, torch.Tensor]],
    buffers: Buffers,
) -> torch.Tensor:
    """Apply all families to the tokens that have rewrites; return on which tokens a rewrite had an
    effect: bool `[n]`.

    `live`: each family with its entries `[n, depth]`.

    A row whose bits do not change is not written. On CPUs, vLLM's norm uses the unrounded sum of a
    pair, so writing the same sum as a different pair would change the norm. A rewrite without
    effect (such as a patch with the prompt's own row) therefore changes no later bit.
    """
    done = torch.zeros(len(tokens), dtype=torch.bool)
    with_rewrite = (
        torch.stack([entries.any(1) for family, entries in live if family.effect == "rewrite"])
        .any(0)
        .nonzero()
        .flatten()
    )
    for block in with_rewrite.split(_rows_at_a_time(stream)):
        places = tokens.index_select(0, block)
        original = _rows(hidden, stream, places)
        rows = original.clone() if original.dtype == torch.float32 else original.float()
        acted = torch.zeros(len(block), dtype=torch.bool)
        for family, entries in live:
            part = entries.index_select(0, block)
            if family.effect == "rewrite":
                rows = _rewritten(_FORMULAS[family.name], rows, part, acted, buffers)
            elif bool(part.any()):
                rows += _total(part, buffers.pool)
        done[block[acted]] = True
        rows = rows.to(stream.dtype)
        differs = acted & (_bits(rows) != _bits(original)).any(1)
        if not bool(differs.all()):
            places = places[differs]
            rows = rows[differs]
        _rewrite_rows(hidden, stream, places, rows)
    return done


def _bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(_BITS[rows.dtype.itemsize])


def _rewritten(
    formula: Rewrite,
    rows: torch.Tensor,
    entries: torch.Tensor,
    acted: torch.Tensor,
    buffers: Buffers,
) -> torch.Tensor:
    """Apply one family, column by column, and return the rows.

    `entries`: `[n, depth]`; `acted`, bool `[n]`, is set for the rows that change.
    """
    for entry in entries.unbind(1):
        indices = entry.nonzero().flatten()
        if len(indices) == len(entry):
            rows, changed = formula(rows, Applications(entry, buffers.pool, buffers.scalars))
        elif len(indices):
            applied = Applications(entry.index_select(0, indices), buffers.pool, buffers.scalars)
            new, changed = formula(rows.index_select(0, indices), applied)
            rows.index_copy_(0, indices, new)
        else:
            continue
        acted[indices if changed is None else indices[changed]] = True
    return rows


def _total(entries: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Return the sum of the vectors to add over the columns, float32 `[n, hidden_size]`.

    `entries`: `[n, depth]`.
    """
    # −0 + v is v, regardless of v's sign
    total = torch.full((len(entries), pool.shape[1]), -0.0, dtype=torch.float32)
    for entry in entries.unbind(1):
        indices = entry.nonzero().flatten()
        if len(indices):
            chosen = entry.index_select(0, indices)
            total.index_add_(0, indices, pool.index_select(0, chosen).float())
    return total


def _shift(
    stream: torch.Tensor, tokens: torch.Tensor, entries: torch.Tensor, pool: torch.Tensor
) -> None:
    """Add vectors to tokens `[n]` that have no effective rewrite. `entries`: `[n, depth]`."""
    has_entry = entries.any(1)
    if not bool(has_entry.all()):
        tokens = tokens[has_entry]
        entries = entries[has_entry]
    if entries.shape[1] == 1:  # the usual case: added directly, without float32 sums
        stream.index_add_(0, tokens, pool.index_select(0, entries[:, 0]))
        return
    rows = _rows_at_a_time(stream)
    for places, part in zip(tokens.split(rows), entries.split(rows), strict=True):
        total = _total(part, pool)
        stream.index_copy_(0, places, (stream.index_select(0, places) + total).to(stream.dtype))


def _rows_at_a_time(stream: torch.Tensor) -> int:
    width: int = stream.shape[1]
    return max(1, _BLOCK // width)
