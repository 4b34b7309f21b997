"""Estimates of a sweep's cells by gradients: attribution patching and integrated gradients.

First order: (source row − row) · ∂m/∂row at the unpatched prompt, summed over what a cell writes
(Nanda 2023; Syed et al. 2023, arXiv:2310.10348). Integrated: the gradient is the mean over `steps`
midpoints of the straight path from the unpatched rows to the patched ones (Sundararajan et al.
2017, arXiv:1703.01365). On that path, all places of all columns of one hook and layer move
together, so that the cells of a layer share `steps` passes, and their sum converges to the effect
of patching all of them.

Where attention is saturated, the gradient of the softmax vanishes, and a first-order estimate of a
patched query or key with it. The QK correction of AtP* (Kramár et al. 2024, arXiv:2403.00745,
section 3.1.1) recomputes the attention probabilities with the patched query or keys, and is linear
only in what they do afterwards: Σ_j (p'_ij − p_ij) · ∂m/∂p_ij, with ∂m/∂p_ij = ∂m/∂z_i · v_j.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from midstream.schemas.prompts.selectors import Hook

from ..records.sweeps import StoredSweep
from ..results.sweep_metrics import unchanged
from .pairs import PairRuns, require_finite
from .points import Attended, ForwardPass, Points, RowsBySite, SiteKey, repeated, scores
from .protocol import StopCheck

#: Hook points before the attention of their own layer; the rows of all others are next read by the
#: attention of the following layer.
_BEFORE_ATTENTION: frozenset[Hook] = frozenset({"pre_attn", "q_proj", "k_proj", "q", "k"})
#: Hook points with a QK correction.
KINDS: tuple[Hook, ...] = ("q", "k")
#: Site → the cells of its columns, in nats.
SiteCells = dict[SiteKey, np.ndarray]
#: Hook → cells, `[layers, columns]` in the metric's units.
HookCells = dict[Hook, np.ndarray]
#: Bytes of scores at a time: heads are computed in chunks of about this size.
CHUNK_BYTES = 64 << 20


@dataclass
class PairEstimate:
    """The estimates of one pair; `base`, `source`: as of `PairRuns`.

    `effects`: cell − unpatched prompt, in the metric's units, float64 `[layers, columns]`; NaN for
    skipped columns. `doubts`: how much the softmax of the attention that next reads a cell's rows
    departs from its tangent, in the same units, ≥ 0; a heuristic that orders cells.
    """

    base: float
    source: float | None
    unpatched: float  # value of a cell without an effect, in the metric's units
    effects: HookCells
    doubts: HookCells = field(default_factory=dict)

    def values(self) -> HookCells:
        """Return the estimates of the cells themselves, as a sweep's grids have them."""
        return {hook: self.unpatched + effects for hook, effects in self.effects.items()}


def estimate_pair(
    points: Points,
    sweep: StoredSweep,
    number: int,
    *,
    steps: int = 0,
    doubtful: bool = False,
    batch: int = 8,
    mask: torch.Tensor | None = None,
    check: StopCheck = lambda: None,
) -> PairEstimate:
    """Return the estimates of all cells of pair `number`: of integrated gradients in so many
    `steps`, or of first order with the QK correction, and with `doubts` if they are `doubtful`.

    `batch`: prompts in one forward pass of integrated gradients. `mask`: the dimensions of
    `sweep.mask`, bool `[width]`. `check`: called between passes; raises to stop.

    Raises PairError and NonFiniteGradient, which concern this pair alone, and
    UnsupportedArchitectureError for a hook point that the model lacks.
    """
    pair = PairRuns(points, sweep, number, mask)
    doubts: HookCells = {}
    if steps:
        run = pair.run(grad=False)
        check()
        scale = pair.scale()
        effects = _integrated(pair, run, steps, batch, check)
    else:
        run = pair.run(_attention_sites(pair, doubtful))
        check()
        pair.require_slope()
        scale = pair.scale()
        gradients = run.gradients(pair.value)
        effects = {site: pair.cells(site, run, pair.slope(gradients[site])) for site in pair.sites}
        effects |= {
            site: _corrected(pair, run, gradients, site) for site in pair.sites if site[0] in KINDS
        }
        if doubtful:
            doubts = _by_hook(pair, _doubts(pair, run, gradients), abs(scale))
    unpatched = unchanged(sweep.metric, pair.base)
    return PairEstimate(pair.base, pair.source, unpatched, _by_hook(pair, effects, scale), doubts)


def _by_hook(pair: PairRuns, cells: SiteCells, scale: float) -> HookCells:
    """Return hook → cells of its layers, summed over the window. `cells`: in nats, by site."""
    layers = pair.sweep.layers
    return {
        hook: scale * pair.columns.over_window(np.stack([cells[hook, layer] for layer in layers]))
        for hook in pair.sweep.hooks
    }


def _integrated(
    pair: PairRuns, run: ForwardPass, steps: int, batch: int, check: StopCheck
) -> SiteCells:
    """Return the cells of each site, in nats, `[columns]`."""
    shares = [(step + 0.5) / steps for step in range(steps)]
    # from the last layer to the first: sites that share a backward pass are close together
    ordered = sorted(pair.sites, key=lambda site: -site[1])
    moves = [(site, share) for site in ordered for share in shares]
    copies = len(pair.metric.suffixes)
    size = max(1, batch // copies)
    cells: SiteCells = {}
    slope: torch.Tensor | float = 0.0
    for start in range(0, len(moves), size):
        check()
        together = moves[start : start + size]
        gradients = pair.along(run, together)[1]
        for number, (site, share) in enumerate(together):
            slope = slope + pair.slope(gradients[site][number * copies : (number + 1) * copies])
            if share == shares[-1]:
                cells[site] = pair.cells(site, run, slope / steps)
                slope = 0.0
    return cells


# --- Saturated attention


def _attention_sites(pair: PairRuns, doubtful: bool) -> set[SiteKey]:
    """Return the sites that the QK correction and the doubts need beyond the sweep's own."""
    layers = {layer for hook, layer in pair.sites if hook in KINDS}
    if doubtful:
        layers |= {*map(_reader, pair.sites)} - {pair.points.num_layers}
    return {(hook, layer) for layer in layers for hook in (*KINDS, "v", "z")}


def _reader(site: SiteKey) -> int:
    """Return the layer whose attention next reads the rows of a site."""
    hook, layer = site
    return layer if hook in _BEFORE_ATTENTION else layer + 1


def _corrected(
    pair: PairRuns, run: ForwardPass, gradients: RowsBySite, site: SiteKey
) -> np.ndarray:
    """Return the cells at `q` or `k` of one layer, in nats, with the softmax computed exactly."""
    kind, layer = site
    base, differences = pair.replaced(site, run)
    parts = pair.columns.parts(differences)
    cells = np.full(len(pair.columns.member), np.nan)
    for part in parts:
        cells[part.columns] = 0.0
    for heads in _sensitivities(pair.points, run, gradients["z", layer], layer):
        for part in parts:
            patched = base.clone()
            member = pair.columns.member[part.columns]
            patched[:, part.dims] += differences[:, part.dims]
            exact = heads.corrected(kind, patched, pair.columns.base, member)
            require_finite({site: exact})
            cells[part.columns] += exact.sum((0, 1)).cpu().numpy()
    return cells


def _doubts(pair: PairRuns, run: ForwardPass, gradients: RowsBySite) -> SiteCells:
    """Return Σ over heads and places of |exact − first order| of the queries and of the keys that
    the source prompt has at a cell's places, in the attention that next reads them.
    """
    columns = pair.columns
    places = len(pair.columns.base)
    alone = torch.eye(places, dtype=torch.float64)
    departs = {pair.points.num_layers: torch.zeros(places, dtype=torch.float64)}
    for layer in {*map(_reader, pair.sites)} - departs.keys():
        departs[layer] = torch.zeros(places, dtype=torch.float64)
        for heads in _sensitivities(pair.points, run, gradients["z", layer], layer):
            for kind in KINDS:
                base, differences = pair.replaced((kind, layer), run)
                exact = heads.corrected(kind, base + differences, columns.base, alone)
                tangent = heads.linear(kind, differences, columns.base)
                departs[layer] += (exact - tangent).abs().sum((0, 1)).cpu()
    return {site: (columns.member @ departs[_reader(site)]).numpy() for site in pair.sites}


@dataclass(frozen=True)
class _Sensitivity:
    """Some query heads of one layer. Tensors are float64, `[batch, heads, tokens, …]`; key heads
    are repeated for the query heads that share them.
    """

    points: Points
    heads: slice
    q: torch.Tensor
    k: torch.Tensor
    gain: torch.Tensor  # [batch, heads, queries, keys]: ∂m / ∂ probability
    attended: Attended

    def _split(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `[1, heads, places, head size]` of rows `[places, width]`."""
        by_head = rows[None].to(self.q).unflatten(2, (-1, self.points.head_size)).transpose(1, 2)
        return repeated(by_head, self.points.heads("q"))[:, self.heads]

    def corrected(
        self, kind: Hook, patched: torch.Tensor, at: list[int], member: torch.Tensor
    ) -> torch.Tensor:
        """Return the effects of patched queries or keys, `[batch, heads, columns]`.

        `patched`: the rows as the patch writes them, `[places, width]`; `at`: their positions;
        `member`: which places a column writes, float64 `[columns, places]`.
        """
        rows = self._split(patched)
        gain = self.gain
        member = member.to(self.q.device)
        plain = scores(self.q, self.k, self.attended)
        before = (plain.softmax(-1) * gain).sum(-1)  # [batch, heads, queries]
        if kind == "q":
            here = self.attended._replace(mask=self.attended.mask[..., at, :])
            after = (scores(rows, self.k, here).softmax(-1) * gain[..., at, :]).sum(-1)
            return (after - before[..., at]) @ member.T
        # Σ_j p'_ij g_ij as a quotient: sums over the keys that stay and over the patched ones. The
        # denominator has no difference of nearly equal numbers, even where one key has all weight.
        changed = scores(self.q, rows, self.attended._replace(mask=self.attended.mask[..., at]))
        top = torch.maximum(plain.amax(-1, keepdim=True), changed.amax(-1, keepdim=True))
        stay = (plain - top).exp()
        come = (changed - top).exp()
        positions = torch.zeros(len(at), plain.shape[-1]).to(member)
        positions[range(len(at)), at] = 1.0
        others = 1.0 - (member @ positions).clamp(max=1.0)  # [columns, keys]
        total = stay @ others.T + come @ member.T
        gained = (stay * gain) @ others.T + (come * gain[..., at]) @ member.T
        return (gained / total - before[..., None]).sum(-2)

    def linear(self, kind: Hook, differences: torch.Tensor, at: list[int]) -> torch.Tensor:
        """Return the first-order effects of changed queries or keys, `[batch, heads, places]`.

        `differences`: patched − unpatched rows, `[places, width]`; `at`: their positions.
        """
        with torch.enable_grad():
            ends = {"q": self.q.detach().requires_grad_(), "k": self.k.detach().requires_grad_()}
            pattern = scores(ends["q"], ends["k"], self.attended).softmax(-1)
            (slope,) = torch.autograd.grad((pattern * self.gain).sum(), ends[kind])
        return (slope[..., at, :] * self._split(differences)).sum(-1)


def _sensitivities(
    points: Points, run: ForwardPass, gradients: torch.Tensor, layer: int
) -> Iterator[_Sensitivity]:
    """Yield the heads of one layer in chunks.

    `run` has the layer's `q`, `k` and `v`; `gradients`: of `z`, `[batch, tokens, width]`.
    """
    heads = points.heads("q")
    attended = run.attended[layer]
    attended = attended._replace(mask=attended.mask.double())
    q, k, v, slope = (
        repeated(rows.double().unflatten(2, (-1, points.head_size)).transpose(1, 2), heads)
        for rows in (*(run.rows((hook, layer)) for hook in ("q", "k", "v")), gradients)
    )
    step = max(1, CHUNK_BYTES // (8 * len(q) * q.shape[2] ** 2))
    for start in range(0, heads, step):
        part = slice(start, start + step)
        gain = slope[:, part] @ v[:, part].transpose(-1, -2)
        yield _Sensitivity(points, part, q[:, part], k[:, part], gain, attended)
