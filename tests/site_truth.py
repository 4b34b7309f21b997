"""What should a token's row be?

A loop in float64, with a bound on what float32's roundings may do to each element.

Written from the definition, not from the code: one function for each family, and the order in which
they follow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from site_plans import SitePlan

from midstream.kernels.plan import Does
from midstream.schemas.requests.interventions import NEAR

#: Unit roundoff of the arithmetic: half the distance between 1 and the next float32.
U = 2.0**-24
#: Roundings of a few products and sums, element by element, with room.
FEW = 6 * U


@dataclass
class Truth:
    """`row` is the new stream if `rewritten`, else the tensor that shifts go to. float64."""

    row: torch.Tensor
    error: torch.Tensor  # how far float32 arithmetic may be from `row`, before the last rounding
    rewritten: bool = False
    shifted: bool = False
    exact: torch.Tensor | None = None  # its bits, where they are known
    open: bool = False  # float32 may see a component on the other side of its limit


def truth(plan: SitePlan, hidden: torch.Tensor | None, stream: torch.Tensor, token: int) -> Truth:
    """For a site whose stream is `hidden + stream`, or `stream` alone; both `[tokens, width]` in
    the model's dtype.
    """
    whole = stream[token] if hidden is None else hidden[token] + stream[token]
    state = Truth(whole.double(), torch.zeros(len(whole), dtype=torch.float64))
    rows = [plan.configurations[number - 1] for number in plan.edits.get(token, ()) if number]
    for name, family in ORDER.items():
        here = [row[name] for row in rows if name in row]
        if name == "add":
            _add(state, here, stream.dtype)
            continue
        for does in here:
            # as the buffers hold them
            scalars = torch.as_tensor(does.scalars, dtype=torch.float32).double()
            if scalars.flatten()[0]:
                family(state, does.vectors, scalars, stream.dtype)
    if state.shifted and not state.rewritten:
        return _shifted_alone(rows, stream[token], open=state.open)
    return state


def rounded(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the pool holds them."""
    return vectors.to(dtype).double()


def direction(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of length 1, then as the pool holds it."""
    wide = vectors[0].double()
    return rounded((wide / wide.norm()).float(), dtype)


def _shifted_alone(rows: list[Mapping[str, Does]], stream: torch.Tensor, *, open: bool) -> Truth:
    vectors = [row["add"].vectors[0].to(stream.dtype) for row in rows if "add" in row]
    wide = [stream.double(), *(vector.double() for vector in vectors)]
    magnitude = torch.stack(wide).abs().sum(0)
    exact = stream + vectors[0] if len(vectors) == 1 else None
    return Truth(torch.stack(wide).sum(0), FEW * magnitude, shifted=True, exact=exact, open=open)


def _change(state: Truth, step: torch.Tensor, error: torch.Tensor | float) -> None:
    """s ← s + step, of which `error` is not known."""
    state.error = state.error + error + FEW * (state.row.abs() + step.abs())
    state.row = state.row + step
    state.rewritten = True
    state.exact = None


def _dot(state: Truth, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """s · vector, and how far float32 may be from it in any order of summation."""
    products = state.row * vector
    return products.sum(), (vector.abs() * state.error).sum() + (
        len(vector) + 2
    ) * U * products.abs().sum()


def _replace(
    state: Truth, vectors: torch.Tensor, scalars: torch.Tensor, dtype: torch.dtype
) -> None:
    alpha = scalars[0]
    target = rounded(vectors[0], dtype)
    if alpha == 1:
        state.row = target
        state.error = torch.zeros_like(target)
        state.rewritten = True
        state.exact = vectors[0].to(dtype)
        return
    state.error = (1 - alpha).abs() * state.error + FEW * (
        ((1 - alpha) * state.row).abs() + (alpha * target).abs()
    )
    state.row = (1 - alpha) * state.row + alpha * target
    state.rewritten = True
    state.exact = None


def _replace_masked(
    state: Truth, vectors: torch.Tensor, scalars: torch.Tensor, dtype: torch.dtype
) -> None:
    untouched = not (state.rewritten or state.shifted)
    before = (state.row, state.error, state.row.to(dtype) if untouched else state.exact)
    _replace(state, vectors[:1], scalars, dtype)
    written = vectors[1] == 1
    state.row = torch.where(written, state.row, before[0])
    state.error = torch.where(written, state.error, before[1])
    if state.exact is not None:
        state.exact = None if before[2] is None else torch.where(written, state.exact, before[2])


def _lowrank(
    state: Truth, vectors: torch.Tensor, scalars: torch.Tensor, dtype: torch.dtype
) -> None:
    strength = scalars[0, 0]
    terms = len(vectors) // 2
    assert scalars[0, 1] == terms
    step = torch.zeros_like(state.row)
    error = torch.zeros_like(state.row)
    for term in range(terms):
        rotation = rounded(vectors[2 * term], dtype)
        weight = rounded(vectors[2 * term + 1], dtype)
        bias = scalars[2 * term, 2]
        turned, off = _dot(state, rotation)
        learned, also_off = _dot(state, weight)
        wanted = learned + bias - turned
        step += strength * wanted * rotation
        error += (
            strength.abs()
            * rotation.abs()
            * (off + also_off + FEW * (learned.abs() + bias.abs() + turned.abs()))
        )
        error += terms * U * (strength * wanted * rotation).abs()
    _change(state, step, error)


def _add(state: Truth, here: list[Does], dtype: torch.dtype) -> None:
    if here:
        vectors = torch.stack([rounded(does.vectors[0], dtype) for does in here])
        rewritten = state.rewritten
        _change(state, vectors.sum(0), FEW * vectors.abs().sum(0))
        state.rewritten = rewritten
        state.shifted = True


def _add_matched(
    state: Truth, vectors: torch.Tensor, scalars: torch.Tensor, dtype: torch.dtype
) -> None:
    scale = scalars[0]
    v = direction(vectors, dtype)
    length = state.row.norm()
    off = (state.row.abs() * state.error).sum() / length.clamp_min(1e-30) + (
        len(v) + 2
    ) * U * length
    _change(state, scale * length * v, (scale * v).abs() * off)


def _ablate(state: Truth, vectors: torch.Tensor, scalars: torch.Tensor, dtype: torch.dtype) -> None:
    strength = scalars[0]
    v = direction(vectors, dtype)
    component, off = _dot(state, v)
    _change(state, -strength * component * v, (strength * v).abs() * off)


def _clamp(state: Truth, vectors: torch.Tensor, scalars: torch.Tensor, dtype: torch.dtype) -> None:
    strength, low, high = scalars
    v = direction(vectors, dtype)
    component, off = _dot(state, v)
    state.open = state.open or bool(min((component - low).abs(), (component - high).abs()) <= off)
    if not low <= component <= high:
        wanted = component.clamp(low, high)
        _change(
            state,
            strength * (wanted - component) * v,
            (strength * v).abs() * (off + FEW * (component.abs() + wanted.abs())),
        )


def _feature(
    state: Truth, vectors: torch.Tensor, scalars: torch.Tensor, dtype: torch.dtype
) -> None:
    strength, target, bias, threshold, norm = scalars
    d = rounded(vectors[3], dtype)
    encoder = sum(rounded(vectors[part], dtype) for part in range(3))
    assert isinstance(encoder, torch.Tensor)
    read, spread, unsure_spread = _normalised(state, int(norm))
    component, off = _dot(read, encoder)
    reading = component + bias
    off = off + FEW * (component.abs() + bias.abs())
    room = 2 * NEAR * ((read.row * encoder).abs().sum() + bias.abs()) + off
    unsure = torch.zeros(())
    if (reading - threshold).abs() <= off:  # it jumps there
        state.open = True
        unsure = reading.abs() + off
    activation = torch.where(reading > threshold, reading, 0.0)
    gap = target - activation
    known = off if reading > threshold else 0.0
    if gap == 0 and not unsure:
        return
    if gap.abs() <= room:
        state.open = True
        unsure = unsure + room
    off = spread * (known + unsure + FEW * (target.abs() + activation)) + gap.abs() * unsure_spread
    _change(state, strength * gap * spread * d, (strength * d).abs() * off)


def _normalised(state: Truth, norm: int) -> tuple[Truth, torch.Tensor, torch.Tensor]:
    """(The row that the encoder reads, what it was divided by, and how far float32 may be from
    that.)
    """
    row = state.row
    error = state.error
    width = len(state.row)
    if norm == 0:
        return state, row.new_ones(()), row.new_zeros(())
    if norm == 1:
        row = row - row.mean()
        error = (
            error + error.mean() + (width + 2) * U * state.row.abs().mean() + FEW * state.row.abs()
        )
    degrees = width - (norm == 1)
    spread = (row.square().sum() / degrees).sqrt()
    off = (row.abs() * error).sum() / (degrees * spread.clamp_min(1e-30)) + (width + 4) * U * spread
    divisor = spread + (1e-5 if norm == 1 else 0.0)
    read = row / divisor
    return Truth(read, error / divisor + read.abs() * (off / divisor + FEW)), spread, off


#: In the order in which they are applied.
ORDER: dict[str, Callable[..., None]] = {
    "replace": _replace,
    "replace_masked": _replace_masked,
    "lowrank": _lowrank,
    "add": _add,
    "add_matched": _add_matched,
    "ablate": _ablate,
    "clamp": _clamp,
    "feature": _feature,
}
