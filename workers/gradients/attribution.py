"""Estimates of a sweep's cells by gradients: attribution patching and integrated gradients.

First order: (source row − row) · ∂m/∂row at the unpatched prompt, summed over what a cell writes
(Nanda 2023; Syed et al. 2023, arXiv:2310.10348). Integrated: the gradient is the mean over `steps`
midpoints of the straight path from the unpatched rows to the patched ones (Sundararajan et al.
2017, arXiv:1703.01365). On that path, all places of all columns of one hook and layer move together
(`site`), so that the cells of a layer share `steps` passes, and their sum converges to the effect
of patching all of them; or the places of one cell alone (`cell`), which converges to the exact cell
and costs `steps` passes for each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.sweep_units import Units
from ...schemas.jobs.sweeps import Baseline, StoredSweep
from ...schemas.prompts.selectors import Hook
from . import saturation
from .columns import Columns, Part, rows_at
from .points import Points, Run, Site
from .scalars import PairMetric, require_finite

Method = Literal["attribution", "integrated"]
Along = Literal["site", "cell"]
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
    effects: dict[Hook, np.ndarray] = field(default_factory=dict)
    doubts: dict[Hook, np.ndarray] = field(default_factory=dict)
    # (hook, index in the sweep's layers, column) → dimensions chosen by rank
    neurons: dict[tuple[Hook, int, int], list[int]] = field(default_factory=dict)

    def values(self) -> dict[Hook, np.ndarray]:
        """Return the estimates of the cells themselves, as a sweep's grids have them."""
        return {hook: self.unpatched + effects for hook, effects in self.effects.items()}


@dataclass(frozen=True)
class Options:
    """How cells are estimated."""

    method: Method = "attribution"
    steps: int = 1  # of `integrated`
    path: Along = "site"  # of `integrated`
    correct: bool = False  # the QK correction of AtP* at `q` and `k`
    doubts: bool = False
    batch: int = 8  # prompts in one forward pass of `integrated`
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
        sites: Sequence[Site] | None = None,
    ) -> None:
        """`sites`: whose rows are replaced; null: the sweep's."""
        if sweep.path is not None:
            raise PairError("a path has no estimates: omit `path`")
        self.points, self.sweep, self.stored = points, sweep, sweep.pairs[number]
        self.number = number
        self.columns = Columns(sweep, number, mask)
        self.metric = PairMetric(sweep.metric, self.stored)
        own: list[Site] = [(hook, layer) for hook in sweep.hooks for layer in sweep.layers]
        self.sites = own if sites is None else list(sites)
        #: Sites with a QK correction.
        self.attended = [site for site in self.sites if site[0] in saturation.KINDS]
        self.base = Baseline(value=0.0, logprob=None, foil_logprob=None)
        self.source: Baseline | None = None
        self._source: dict[Site, torch.Tensor] = {}

    def run(self, extra: Sequence[Site] = (), *, grad: bool = True) -> Run:
        """Run both prompts, keep the source's rows, and set `value`, `base` and `source`.

        `extra`: sites beyond those that are replaced, of both runs. Returns the run of the prompt
        to patch, with a graph if `grad` is set.
        """
        sites = list(dict.fromkeys((*self.sites, *extra)))
        run, metric = self._run(self.stored.base, sites, grad=grad), self.metric
        clean, source = run.logits.detach(), None
        if self.sweep.ablation is None:
            other = self._run(self.stored.source, sites, grad=False)
            source = other.logits
            self._source = {
                site: rows_at(other.rows(site)[0], self.columns.source) for site in sites
            }
            clean = source if self.sweep.direction == "denoise" else clean
        metric.clean = metric.next_token(clean)
        self.value = metric.value(run.logits)
        self.base = metric.baseline(run.logits.detach())
        self.source = None if source is None else metric.baseline(source)
        require_finite({("", -1): self.value.detach()})
        return run

    def _run(self, prompt: list[int], sites: Sequence[Site], *, grad: bool) -> Run:
        batch = self.points.batch(self.metric.sequences(prompt))
        return self.points.run(batch, sites, keep=self.metric.keep(prompt), grad=grad)

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
    points.require(sweep.hooks)
    pair = Pair(points, sweep, number, options.mask)
    integrated = options.method == "integrated"
    run = pair.run([] if integrated else _attention_sites(pair, options), grad=not integrated)
    options.check()
    if not integrated:
        pair.require_slope()
    scale = pair.scale()
    unpatched = 0.0 if sweep.metric == "recovered" else pair.base.value
    result = PairEstimate(pair.base, pair.source, unpatched)
    if integrated:
        effects = _integrated(pair, run, options)
    else:
        gradients = run.gradients(pair.value)
        effects = _first_order(pair, run, gradients)
        if options.correct:
            effects.update(_corrected(pair, run, gradients, site) for site in pair.attended)
        if options.doubts:
            result.doubts = _doubts(pair, run, gradients, abs(scale))
    for hook in sweep.hooks:
        layers = np.stack([effects[hook, layer] for layer in sweep.layers]) * scale
        jointly = integrated and options.path == "cell"
        result.effects[hook] = layers if jointly else pair.columns.over_window(layers)
        for index, layer in enumerate(sweep.layers):
            for part in pair.parts((hook, layer), run):
                if part.ranked:
                    result.neurons.update(
                        ((hook, index, column), part.ranked) for column in part.columns
                    )
    return result


def _first_order(
    pair: Pair, run: Run, gradients: dict[Site, torch.Tensor]
) -> dict[Site, np.ndarray]:
    """Return the cells of each site, in nats, `[columns]`."""
    effects = {}
    for site in pair.sites:
        _, differences = pair.replaced(site, run)
        slope = rows_at(gradients[site].float().sum(0), pair.columns.base)
        effects[site] = _cells(pair, site, run, differences.double() * slope)
    return effects


def _cells(pair: Pair, site: Site, run: Run, product: torch.Tensor) -> np.ndarray:
    """Return the cells of a site. `product`: `[places, width]`. Raises NonFiniteGradient."""
    require_finite({site: product})
    return pair.columns.sums(product, pair.parts(site, run))


# --- Saturated attention


def _attention_sites(pair: Pair, options: Options) -> list[Site]:
    """Return the sites that the QK correction and the doubts need beyond the sweep's own."""
    layers = {layer for _, layer in pair.attended} if options.correct else set()
    if options.doubts:
        layers |= {_reader(site) for site in pair.sites}
    return [
        (hook, layer)
        for layer in sorted(layers)
        if layer < pair.points.num_layers
        for hook in (*saturation.KINDS, "v", "z")
    ]


def _reader(site: Site) -> int:
    """Return the layer whose attention next reads the rows of a site."""
    hook, layer = site
    return layer if hook in _BEFORE_ATTENTION else layer + 1


def _corrected(
    pair: Pair, run: Run, gradients: dict[Site, torch.Tensor], site: Site
) -> tuple[Site, np.ndarray]:
    """Return the cells at `q` or `k` of one layer, in nats, with the softmax computed exactly."""
    kind, layer = site
    base, differences = pair.replaced(site, run)
    parts = pair.parts(site, run)
    cells = np.full(len(pair.columns.member), np.nan)
    for part in parts:
        cells[part.columns] = 0.0
    for heads in saturation.sensitivities(pair.points, run, gradients["z", layer], layer):
        for part in parts:
            patched, member = (
                base + _only(differences, part.dims),
                pair.columns.member[part.columns],
            )
            exact = heads.corrected(kind, patched, pair.columns.base, member)
            require_finite({site: exact})
            cells[part.columns] += exact.sum(0).cpu().numpy()
    return site, cells


def _doubts(
    pair: Pair, run: Run, gradients: dict[Site, torch.Tensor], scale: float
) -> dict[Hook, np.ndarray]:
    """Return Σ over heads and places of |exact − first order| of the queries and of the keys that
    the source prompt has at a cell's places, in the attention that next reads them.
    """
    columns, alone = pair.columns, torch.eye(len(pair.columns.base), dtype=torch.float64)
    departs = {pair.points.num_layers: np.zeros(len(columns.base))}
    for layer in sorted({_reader(site) for site in pair.sites} - departs.keys()):
        departs[layer] = np.zeros(len(columns.base))
        for heads in saturation.sensitivities(pair.points, run, gradients["z", layer], layer):
            for kind in saturation.KINDS:
                base, differences = pair.replaced((kind, layer), run)
                exact = heads.corrected(kind, base + differences, columns.base, alone)
                tangent = heads.linear(kind, differences, columns.base)
                departs[layer] += (exact - tangent).abs().sum(0).cpu().numpy()
    return {
        hook: scale
        * columns.over_window(
            np.stack(
                [columns.member @ departs[_reader((hook, layer))] for layer in pair.sweep.layers]
            )
        )
        for hook in pair.sweep.hooks
    }


def _only(differences: torch.Tensor, dims: torch.Tensor | None) -> torch.Tensor:
    """Return the differences in these dimensions, and 0 elsewhere."""
    if dims is None:
        return differences
    chosen, kept = dims.to(differences.device), torch.zeros_like(differences)
    kept[:, chosen] = differences[:, chosen]
    return kept


# --- Integrated gradients


@dataclass(frozen=True, eq=False)
class _Moved:
    """Rows that move together along one path."""

    owner: Site  # whose cells they give
    sites: list[Site]
    column: int | None  # null: all places of all columns
    dims: torch.Tensor | None  # null: all


def _moved(pair: Pair, run: Run, options: Options) -> list[_Moved]:
    """Return the paths, from the last layer to the first: those that share a backward pass are
    close together.
    """
    moves: list[_Moved] = []
    units = Units(pair.sweep)
    for cell in units.cells(pair.number):
        hook, layer = pair.sweep.hooks[cell.hook], pair.sweep.layers[cell.layer]
        if options.path == "cell":
            layers, places = units.patched(cell)
            if places:
                part = next(
                    part for part in pair.parts((hook, layer), run) if cell.column in part.columns
                )
                sites = [(hook, at) for at in layers]
                moves.append(_Moved((hook, layer), sites, cell.column, part.dims))
        elif cell.column == 0:
            moves.append(_Moved((hook, layer), [(hook, layer)], None, options.mask))
    return sorted(moves, key=lambda moved: -moved.owner[1])


def _integrated(pair: Pair, run: Run, options: Options) -> dict[Site, np.ndarray]:
    """Return the cells of each site, in nats, `[columns]`."""
    cells = {site: np.full(len(pair.columns.member), np.nan) for site in pair.sites}
    shares = [(step + 0.5) / options.steps for step in range(options.steps)]
    tasks = [(moved, share) for moved in _moved(pair, run, options) for share in shares]
    size = max(1, options.batch // len(pair.metric.suffixes))
    slopes: dict[Site, torch.Tensor] = {}
    for start in range(0, len(tasks), size):
        options.check()
        batch = tasks[start : start + size]
        for (moved, share), gradients in zip(batch, _slopes(pair, run, batch), strict=True):
            slopes = {site: slope + slopes.get(site, 0.0) for site, slope in gradients.items()}
            if share != shares[-1]:
                continue
            for site, slope in slopes.items():
                differences = _only(pair.replaced(site, run)[1], moved.dims)
                product = differences.double() * slope / options.steps
                if moved.column is None:
                    cells[site] = _cells(pair, site, run, product)
                    continue
                require_finite({site: product})
                part = float(pair.columns.member[moved.column] @ product.sum(1).cpu())
                cells[moved.owner][moved.column] = part + np.nan_to_num(
                    cells[moved.owner][moved.column]
                )
            slopes = {}
    return cells


def _slopes(
    pair: Pair, run: Run, batch: Sequence[tuple[_Moved, float]]
) -> Iterator[dict[Site, torch.Tensor]]:
    """Yield, for each path and share, site → gradient there, `[places, width]` float64.

    One forward pass runs the whole batch, and one backward pass.
    """
    points, columns, copies = pair.points, pair.columns, len(pair.metric.suffixes)
    prompts = pair.metric.sequences(pair.stored.base)
    at = torch.tensor(columns.base, dtype=torch.long, device=points.device)

    def edit(site: Site, rows: torch.Tensor) -> torch.Tensor:
        edited, where = rows.clone(), at.to(rows.device)
        for number, (moved, share) in enumerate(batch):
            if site not in moved.sites:
                continue
            base, differences = pair.replaced(site, run)
            written = (base + share * _only(differences, moved.dims)).to(rows.dtype)
            places = slice(None)
            if moved.column is not None:
                places = columns.member[moved.column].bool().to(rows.device)
            for copy in range(number * copies, (number + 1) * copies):
                edited[copy, where[places]] = written[places]
        return edited

    sites = list(dict.fromkeys(site for moved, _ in batch for site in moved.sites))
    moving = points.run(
        points.batch(prompts * len(batch)),
        sites,
        keep=pair.metric.keep(pair.stored.base),
        edit=edit,
        grad=True,
    )
    values = [pair.metric.value(part) for part in moving.logits.split(copies)]
    gradients = moving.gradients(torch.stack(values).sum())
    for number, (moved, _) in enumerate(batch):
        copied = slice(number * copies, (number + 1) * copies)
        yield {
            site: gradients[site][copied].double().sum(0)[at.to(gradients[site].device)]
            for site in moved.sites
        }
