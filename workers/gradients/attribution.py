"""Estimates of a sweep's cells by gradients: attribution patching and integrated gradients.

First order: (source row − row) · ∂m/∂row at the unpatched prompt, summed over what a cell writes
(Nanda 2023; Syed et al. 2023, arXiv:2310.10348). Integrated: the gradient is the mean over `steps`
midpoints of the straight path from the unpatched rows to the patched ones (Sundararajan et al.
2017, arXiv:1703.01365). On that path, all places of all columns of one hook and layer move
together, so that the cells of a layer share `steps` passes, and their sum converges to the effect
of patching all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ...schemas.jobs.sweeps import Baseline, StoredSweep
from ...schemas.prompts.selectors import Hook
from . import saturation
from .pairs import Pair, require_finite
from .points import Points, Run, Site

#: Hook points before the attention of their own layer; the rows of all others are next read by the
#: attention of the following layer.
_BEFORE_ATTENTION: frozenset[Hook] = frozenset({"pre_attn", "q_proj", "k_proj", "q", "k"})


@dataclass
class PairEstimate:
    """The estimates of one pair.

    `effects`: cell − unpatched prompt, in the metric's units, float64 `[layers, columns]`; NaN for
    skipped columns. `doubts`: how much the softmax of the attention that next reads a cell's rows
    departs from its tangent, in the same units, ≥ 0; a heuristic that orders cells.
    """

    base: Baseline
    source: Baseline | None
    unpatched: float  # value of a cell without an effect, in the metric's units
    effects: dict[Hook, np.ndarray]
    doubts: dict[Hook, np.ndarray] = field(default_factory=dict)

    def values(self) -> dict[Hook, np.ndarray]:
        """Return the estimates of the cells themselves, as a sweep's grids have them."""
        return {hook: self.unpatched + effects for hook, effects in self.effects.items()}


@dataclass(frozen=True)
class Options:
    """How cells are estimated."""

    steps: int = 0  # of integrated gradients; 0: first order
    correct: bool = False  # the QK correction of AtP* at `q` and `k`
    doubts: bool = False
    batch: int = 8  # prompts in one forward pass of integrated gradients
    mask: torch.Tensor | None = None  # the dimensions of `sweep.mask`, bool [width]
    #: Called between passes; raises to stop.
    check: Callable[[], None] = lambda: None


def estimate_pair(
    points: Points, sweep: StoredSweep, number: int, options: Options = Options()
) -> PairEstimate:
    """Return the estimates of all cells of pair `number`.

    Raises PairError and NonFiniteGradient, which concern this pair alone, and
    UnsupportedArchitectureError for a hook point that the model lacks.
    """
    pair = Pair(points, sweep, number, options.mask)
    doubts: dict[Hook, np.ndarray] = {}
    if options.steps:
        run = pair.run(grad=False)
        options.check()
        scale, effects = pair.scale(), _integrated(pair, run, options)
    else:
        run = pair.run(_attention_sites(pair, options))
        options.check()
        pair.require_slope()
        scale, gradients = pair.scale(), run.gradients(pair.value)
        effects = {site: pair.cells(site, run, pair.slope(gradients[site])) for site in pair.sites}
        if options.correct:
            effects |= {
                site: _corrected(pair, run, gradients, site)
                for site in pair.sites
                if site[0] in saturation.KINDS
            }
        if options.doubts:
            doubts = _by_hook(pair, _doubts(pair, run, gradients), abs(scale))
    unpatched = 0.0 if sweep.metric == "recovered" else pair.base.value
    grids = _by_hook(pair, effects, scale)
    return PairEstimate(pair.base, pair.source, unpatched, grids, doubts)


def _by_hook(pair: Pair, cells: dict[Site, np.ndarray], scale: float) -> dict[Hook, np.ndarray]:
    """Return hook → cells of its layers, summed over the window. `cells`: in nats, by site."""
    layers = pair.sweep.layers
    return {
        hook: scale * pair.columns.over_window(np.stack([cells[hook, layer] for layer in layers]))
        for hook in pair.sweep.hooks
    }


def _integrated(pair: Pair, run: Run, options: Options) -> dict[Site, np.ndarray]:
    """Return the cells of each site, in nats, `[columns]`."""
    shares = [(step + 0.5) / options.steps for step in range(options.steps)]
    # from the last layer to the first: sites that share a backward pass are close together
    ordered = sorted(pair.sites, key=lambda site: -site[1])
    moves = [(site, share) for site in ordered for share in shares]
    copies = len(pair.metric.suffixes)
    size = max(1, options.batch // copies)
    cells: dict[Site, np.ndarray] = {}
    slope: torch.Tensor | float = 0.0
    for start in range(0, len(moves), size):
        options.check()
        batch = moves[start : start + size]
        gradients = pair.along(run, batch)[1]
        for number, (site, share) in enumerate(batch):
            slope = slope + pair.slope(gradients[site][number * copies : (number + 1) * copies])
            if share == shares[-1]:
                cells[site], slope = pair.cells(site, run, slope / options.steps), 0.0
    return cells


# --- Saturated attention


def _attention_sites(pair: Pair, options: Options) -> set[Site]:
    """Return the sites that the QK correction and the doubts need beyond the sweep's own."""
    corrected = {layer for hook, layer in pair.sites if hook in saturation.KINDS}
    layers = corrected if options.correct else set()
    if options.doubts:
        layers |= {*map(_reader, pair.sites)} - {pair.points.num_layers}
    return {(hook, layer) for layer in layers for hook in (*saturation.KINDS, "v", "z")}


def _reader(site: Site) -> int:
    """Return the layer whose attention next reads the rows of a site."""
    hook, layer = site
    return layer if hook in _BEFORE_ATTENTION else layer + 1


def _corrected(pair: Pair, run: Run, gradients: dict[Site, torch.Tensor], site: Site) -> np.ndarray:
    """Return the cells at `q` or `k` of one layer, in nats, with the softmax computed exactly."""
    kind, layer = site
    base, differences = pair.replaced(site, run)
    parts = pair.columns.parts(differences)
    cells = np.full(len(pair.columns.member), np.nan)
    for part in parts:
        cells[part.columns] = 0.0
    for heads in saturation.sensitivities(pair.points, run, gradients["z", layer], layer):
        for part in parts:
            patched, member = base.clone(), pair.columns.member[part.columns]
            patched[:, part.dims] += differences[:, part.dims]
            exact = heads.corrected(kind, patched, pair.columns.base, member)
            require_finite({site: exact})
            cells[part.columns] += exact.sum((0, 1)).cpu().numpy()
    return cells


def _doubts(pair: Pair, run: Run, gradients: dict[Site, torch.Tensor]) -> dict[Site, np.ndarray]:
    """Return Σ over heads and places of |exact − first order| of the queries and of the keys that
    the source prompt has at a cell's places, in the attention that next reads them.
    """
    columns, places = pair.columns, len(pair.columns.base)
    alone = torch.eye(places, dtype=torch.float64)
    departs = {pair.points.num_layers: torch.zeros(places, dtype=torch.float64)}
    for layer in {*map(_reader, pair.sites)} - departs.keys():
        departs[layer] = torch.zeros(places, dtype=torch.float64)
        for heads in saturation.sensitivities(pair.points, run, gradients["z", layer], layer):
            for kind in saturation.KINDS:
                base, differences = pair.replaced((kind, layer), run)
                exact = heads.corrected(kind, base + differences, columns.base, alone)
                tangent = heads.linear(kind, differences, columns.base)
                departs[layer] += (exact - tangent).abs().sum((0, 1)).cpu()
    return {site: (columns.member @ departs[_reader(site)]).numpy() for site in pair.sites}
