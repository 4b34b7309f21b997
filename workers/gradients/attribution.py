"""Estimates of a sweep's cells by gradients: attribution patching and integrated gradients.

First order: (source row − row) · ∂m/∂row at the unpatched prompt, summed over what a cell writes
(Nanda 2023; Syed et al. 2023, arXiv:2310.10348). Integrated: the gradient is the mean over `steps`
midpoints of the straight path from the unpatched rows to the patched ones (Sundararajan et al.
2017, arXiv:1703.01365). On that path, all places of all columns of one hook and layer move
together, so that the cells of a layer share `steps` passes, and their sum converges to the effect
of patching all of them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.sweeps import Baseline, StoredSweep
from ...schemas.prompts.selectors import Hook
from . import saturation
from .columns import Columns, Part, rows_at
from .points import Points, Run, Site
from .scalars import PairMetric, require_finite

#: Hook points before the attention of their own layer; the rows of all others are next read by the
#: attention of the following layer.
_BEFORE_ATTENTION: frozenset[Hook] = frozenset({"pre_attn", "q_proj", "k_proj", "q", "k"})
#: `recovered` divides by the difference of the two prompts, in nats: the limit of exact sweeps.
LEAST_DIFFERENCE = 0.1


class PairError(MidstreamError):
    """A pair has no estimates; the message gives the reason. Other pairs are not affected."""

    def __init__(self, detail: str) -> None:
        super().__init__("useless_baseline", detail)


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


class Pair:
    """One pair's unpatched runs, which all estimates start from."""

    def __init__(
        self,
        points: Points,
        sweep: StoredSweep,
        number: int,
        mask: torch.Tensor | None = None,
        sites: Sequence[Site] = (),
    ) -> None:
        """`sites`: whose rows are replaced, by default the sweep's."""
        self.points, self.sweep, self.stored = points, sweep, sweep.pairs[number]
        self.columns = Columns(sweep, number, mask)
        self.metric = PairMetric(sweep.metric, self.stored)
        self.sites = list(sites) or [(hook, at) for hook in sweep.hooks for at in sweep.layers]
        self._source: dict[Site, torch.Tensor] = {}

    def run(self, extra: Collection[Site] = (), *, grad: bool = True) -> Run:
        """Run both prompts, keep the source's rows, and set `value`, `base` and `source`.

        `extra`: sites beyond those that are replaced, of both runs. Returns the run of the prompt
        to patch, with a graph if `grad` is set.
        """
        sites, metric = {*self.sites, *extra}, self.metric

        def run(prompt: list[int], grad: bool) -> Run:
            batch = self.points.batch(metric.sequences(prompt))
            return self.points.run(batch, sites, keep=metric.keep(prompt), grad=grad)

        patched, other = run(self.stored.base, grad), None
        if self.sweep.ablation is None:
            other = run(self.stored.source, False)
            self._source = {
                site: rows_at(other.rows(site)[0], self.columns.source) for site in sites
            }
        clean = other if other and self.sweep.direction == "denoise" else patched
        metric.clean = metric.next_token(clean.logits.detach())
        self.value = metric.value(patched.logits)
        self.base = metric.baseline(patched.logits.detach())
        self.source = metric.baseline(other.logits) if other else None
        require_finite({("", -1): self.value.detach()})
        return patched

    def replaced(self, site: Site, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """Return unpatched rows, and patched − unpatched rows, at all places of the pair's columns,
        both float32 `[places, width]`. `run`: the unpatched run.
        """
        rows = run.rows(site)[0]
        base = rows_at(rows, self.columns.base)
        if self.sweep.ablation == "zeros":
            source = torch.zeros_like(base)
        elif self.sweep.ablation == "mean":
            source = rows[: len(self.stored.base)].float().mean(0).expand_as(base)
        else:
            source = self._source[site]
        return base, self.sweep.alpha * (source - base)

    def parts(self, site: Site, run: Run) -> list[Part]:
        """Return the columns by the dimensions that they write at a site."""
        return self.columns.parts(self.replaced(site, run)[1])

    def along(
        self, run: Run, moves: Sequence[tuple[Site, float]], read: Collection[Site] = ()
    ) -> tuple[Run, dict[Site, torch.Tensor]]:
        """Run the prompt once for each move, in one batch: with the rows of its site that share of
        the way to the patched ones. Return the run, and site → gradient of the metrics' sum.

        `read`: sites beyond those that move; `run`: the unpatched run.
        """
        prompt, copies = self.stored.base, len(self.metric.suffixes)

        def edit(site: Site, rows: torch.Tensor) -> torch.Tensor:
            edited = rows
            for number, (moved, share) in enumerate(moves):
                if moved == site and share:
                    base, differences = self.replaced(site, run)
                    patched = base.clone()
                    patched[:, self.columns.dims] += share * differences[:, self.columns.dims]
                    edited = rows.clone() if edited is rows else edited
                    mine = slice(number * copies, (number + 1) * copies)
                    edited[mine, self.columns.base] = patched.to(rows.dtype)
            return edited

        moving = self.points.run(
            self.points.batch(self.metric.sequences(prompt) * len(moves)),
            {*read, *(site for site, _ in moves)},
            keep=self.metric.keep(prompt),
            edit=edit,
            grad=True,
        )
        values = [self.metric.value(part) for part in moving.logits.split(copies)]
        return moving, moving.gradients(torch.stack(values).sum())

    def slope(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient at each place, `[places, width]` float64, of the prompt's copies."""
        return gradients.double().sum(0)[self.columns.base]

    def cells(self, site: Site, run: Run, slope: torch.Tensor) -> np.ndarray:
        """Return the cells of a site in nats, `[columns]`. Raises NonFiniteGradient."""
        differences = self.replaced(site, run)[1]
        product = differences.double() * slope
        require_finite({site: product})
        return self.columns.sums(product, self.columns.parts(differences))

    def require_slope(self) -> None:
        """Raises PairError if the metric has no gradient at the unpatched prompt."""
        clean_is_base = self.sweep.ablation is not None or self.sweep.direction == "noise"
        if self.sweep.metric == "kl" and clean_is_base:
            raise PairError(
                "kl of the clean prompt to itself has a gradient of zero: use integrated "
                "gradients, or the metric logprob or logit_diff"
            )

    def scale(self) -> float:
        """Return what effects in nats are multiplied by. Raises PairError."""
        if self.sweep.metric != "recovered":
            return 1.0
        assert self.source is not None
        base, source = self.base.value, self.source.value
        if abs(source - base) < LEAST_DIFFERENCE:
            raise PairError(
                f"the two prompts differ too little for `recovered`: {base:.4f} nats for the "
                f"prompt to patch and {source:.4f} for the other; at least {LEAST_DIFFERENCE} are "
                "needed"
            )
        return 1.0 / (source - base)


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
            cells[part.columns] += exact.sum(0).cpu().numpy()
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
                departs[layer] += (exact - tangent).abs().sum(0).cpu()
    return {site: (columns.member @ departs[_reader(site)]).numpy() for site in pair.sites}
