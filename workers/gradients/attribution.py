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

Edge attribution patching estimates the effect of every path between two parts of a model that leads
through the residual stream alone: score(sender → receiver) = Σ over positions of (the sender's
output in the source prompt − in the patched prompt) · ∂m/∂(the receiver's input). Syed et al. 2023
(arXiv:2310.10348). With several steps, the gradient is the mean over midpoints of the straight path
between the two prompts' embeddings: EAP-IG, Hanna et al. 2024 (arXiv:2403.17806), whose own code
takes left endpoints.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from ...schemas.jobs.sweeps import Baseline, StoredSweep
from ...schemas.prompts.selectors import Hook
from ...schemas.requests.attributions import Edge, EdgeEnd
from ..runner.hooks.architectures import UnsupportedArchitectureError
from .pairs import PairRuns, require_finite, rows_at
from .points import Attended, ForwardPass, Points, SiteKey, repeated, scores, weight_of

#: Hook points before the attention of their own layer; the rows of all others are next read by the
#: attention of the following layer.
_BEFORE_ATTENTION: frozenset[Hook] = frozenset({"pre_attn", "q_proj", "k_proj", "q", "k"})
#: Hook points with a QK correction.
KINDS: tuple[Hook, ...] = ("q", "k")
#: Bytes of scores at a time: heads are computed in chunks of about this size.
CHUNK_BYTES = 64 << 20


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
class EstimateOptions:
    """How cells are estimated."""

    steps: int = 0  # of integrated gradients; 0: first order
    correct: bool = False  # the QK correction of AtP* at `q` and `k`
    doubts: bool = False
    batch: int = 8  # prompts in one forward pass of integrated gradients
    mask: torch.Tensor | None = None  # the dimensions of `sweep.mask`, bool [width]
    #: Called between passes; raises to stop.
    check: Callable[[], None] = lambda: None


def estimate_pair(
    points: Points, sweep: StoredSweep, number: int, options: EstimateOptions = EstimateOptions()
) -> PairEstimate:
    """Return the estimates of all cells of pair `number`.

    Raises PairError and NonFiniteGradient, which concern this pair alone, and
    UnsupportedArchitectureError for a hook point that the model lacks.
    """
    pair = PairRuns(points, sweep, number, options.mask)
    doubts: dict[Hook, np.ndarray] = {}
    if options.steps:
        run = pair.run(grad=False)
        options.check()
        scale = pair.scale()
        effects = _integrated(pair, run, options)
    else:
        run = pair.run(_attention_sites(pair, options))
        options.check()
        pair.require_slope()
        scale = pair.scale()
        gradients = run.gradients(pair.value)
        effects = {site: pair.cells(site, run, pair.slope(gradients[site])) for site in pair.sites}
        if options.correct:
            effects |= {
                site: _corrected(pair, run, gradients, site)
                for site in pair.sites
                if site[0] in KINDS
            }
        if options.doubts:
            doubts = _by_hook(pair, _doubts(pair, run, gradients), abs(scale))
    unpatched = 0.0 if sweep.metric == "recovered" else pair.base.value
    return PairEstimate(pair.base, pair.source, unpatched, _by_hook(pair, effects, scale), doubts)


def _by_hook(
    pair: PairRuns, cells: dict[SiteKey, np.ndarray], scale: float
) -> dict[Hook, np.ndarray]:
    """Return hook → cells of its layers, summed over the window. `cells`: in nats, by site."""
    layers = pair.sweep.layers
    return {
        hook: scale * pair.columns.over_window(np.stack([cells[hook, layer] for layer in layers]))
        for hook in pair.sweep.hooks
    }


def _integrated(
    pair: PairRuns, run: ForwardPass, options: EstimateOptions
) -> dict[SiteKey, np.ndarray]:
    """Return the cells of each site, in nats, `[columns]`."""
    shares = [(step + 0.5) / options.steps for step in range(options.steps)]
    # from the last layer to the first: sites that share a backward pass are close together
    ordered = sorted(pair.sites, key=lambda site: -site[1])
    moves = [(site, share) for site in ordered for share in shares]
    copies = len(pair.metric.suffixes)
    size = max(1, options.batch // copies)
    cells: dict[SiteKey, np.ndarray] = {}
    slope: torch.Tensor | float = 0.0
    for start in range(0, len(moves), size):
        options.check()
        batch = moves[start : start + size]
        gradients = pair.along(run, batch)[1]
        for number, (site, share) in enumerate(batch):
            slope = slope + pair.slope(gradients[site][number * copies : (number + 1) * copies])
            if share == shares[-1]:
                cells[site] = pair.cells(site, run, slope / options.steps)
                slope = 0.0
    return cells


# --- Saturated attention


def _attention_sites(pair: PairRuns, options: EstimateOptions) -> set[SiteKey]:
    """Return the sites that the QK correction and the doubts need beyond the sweep's own."""
    layers = {layer for hook, layer in pair.sites if hook in KINDS} if options.correct else set()
    if options.doubts:
        layers |= {*map(_reader, pair.sites)} - {pair.points.num_layers}
    return {(hook, layer) for layer in layers for hook in (*KINDS, "v", "z")}


def _reader(site: SiteKey) -> int:
    """Return the layer whose attention next reads the rows of a site."""
    hook, layer = site
    return layer if hook in _BEFORE_ATTENTION else layer + 1


def _corrected(
    pair: PairRuns, run: ForwardPass, gradients: dict[SiteKey, torch.Tensor], site: SiteKey
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


def _doubts(
    pair: PairRuns, run: ForwardPass, gradients: dict[SiteKey, torch.Tensor]
) -> dict[SiteKey, np.ndarray]:
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


_EMBEDDING: SiteKey = ("pre_attn", 0)
EdgeReader = Literal["head", "q", "k", "v"]
#: Receivers in attention → the hook points of their projections' outputs.
_PROJECTED: dict[EdgeReader, Hook] = {"q": "q_proj", "k": "k_proj", "v": "v"}


@dataclass(frozen=True)
class EdgeScores:
    """`scores`: in the metric's units, float64 `[senders, receivers]`; NaN where no edge exists."""

    base: Baseline
    source: Baseline | None
    senders: list[EdgeEnd]
    receivers: list[EdgeEnd]
    scores: np.ndarray

    def top(self, count: int) -> list[Edge]:
        """Return the `count` edges with the largest |score|, the largest first."""
        sizes = np.nan_to_num(np.abs(self.scores), nan=-1.0).ravel()
        order = np.argsort(-sizes, kind="stable")[: min(count, int((sizes >= 0).sum()))]
        pairs = zip(*np.unravel_index(order, self.scores.shape), strict=True)
        return [
            Edge(sender=self.senders[s], receiver=self.receivers[r], score=float(self.scores[s, r]))
            for s, r in pairs
        ]


def edge_scores(
    points: Points,
    sweep: StoredSweep,
    number: int,
    steps: int = 1,
    check: Callable[[], None] = lambda: None,
) -> EdgeScores:
    """Return the scores of all edges of pair `number`, at all positions of its columns together.

    `steps`: 1 for EAP, more for EAP-IG. `check`: called between passes; raises to stop. Raises
    PairError, NonFiniteGradient, and UnsupportedArchitectureError where a norm follows a branch, so
    that the branch is not a sum over heads.
    """
    if points.taps["attn_out"].path != points.attention_path:
        raise UnsupportedArchitectureError(
            f"{points.architecture} has no edges: a norm follows its branches, so that attention "
            "is not a sum over heads"
        )
    layers = range(points.num_layers)
    last = points.num_layers - 1
    parallel = "post_attn" not in points.taps  # MLPs read the stream before attention
    into_mlp: Hook = "pre_attn" if parallel else "post_attn"
    written: tuple[Hook, ...] = ("z", "mlp_out")
    read: set[Hook] = {"pre_attn", "mlp_in", into_mlp, *_PROJECTED.values()}
    sent: list[SiteKey] = [_EMBEDDING, *((hook, layer) for hook in written for layer in layers)]
    received: list[SiteKey] = [
        ("post_block", last),
        *((hook, layer) for hook in read for layer in layers),
    ]
    pair = PairRuns(points, sweep, number, sites=sent)
    run = pair.run(grad=False)
    if steps == 1:
        pair.require_slope()
    scale = pair.scale() / steps
    senders, receivers = _nodes(points)
    total = np.zeros((len(senders), len(receivers)))
    size = max(1, CHUNK_BYTES // (4 * points.hidden_size * len(senders)))
    for step in range(steps):
        check()
        share = (step + 0.5) / steps if steps > 1 else 0.0
        moved, gradients = pair.along(run, [(_EMBEDDING, share)], received)
        for start in range(0, len(pair.columns.base), size):
            where = slice(start, start + size)
            outputs = torch.cat([*_sent(pair, run, where)]).flatten(1)
            slopes = _received(points, moved, gradients, pair.columns.base[where], into_mlp)
            products = [outputs @ slope.flatten(1).T for slope in slopes]
            total += torch.cat(products, 1).double().cpu().numpy()
    inside = [("head", "mlp")] if not parallel else []  # edges inside a layer
    exists = [
        [s.layer <= r.layer if (s.kind, r.kind) in inside else s.layer < r.layer for r in receivers]
        for s in senders
    ]
    scores = np.where(exists, total * scale, np.nan)
    require_finite({("", -1): torch.from_numpy(np.where(exists, total, 0.0))})
    return EdgeScores(pair.base, pair.source, senders, receivers, scores)


def _nodes(points: Points) -> tuple[list[EdgeEnd], list[EdgeEnd]]:
    """Return all senders and all receivers, as `_sent` and `_received` order them."""
    senders = [EdgeEnd(kind="embed", layer=-1)]
    receivers = list[EdgeEnd]()

    def heads(kind: EdgeReader, layer: int, hook: Hook) -> list[EdgeEnd]:
        return [EdgeEnd(kind=kind, layer=layer, head=head) for head in range(points.heads(hook))]

    for layer in range(points.num_layers):
        mlp = EdgeEnd(kind="mlp", layer=layer)
        senders += [*heads("head", layer, "z"), mlp]
        for kind, hook in _PROJECTED.items():
            receivers += heads(kind, layer, hook)
        receivers.append(mlp)
    return senders, [*receivers, EdgeEnd(kind="logits", layer=points.num_layers)]


def _sent(pair: PairRuns, run: ForwardPass, where: slice) -> Iterator[torch.Tensor]:
    """Yield the differences of what the senders add to the stream at some places, float32
    `[senders, places, hidden_size]`, on one device.
    """
    points = pair.points
    yield pair.replaced(_EMBEDDING, run)[1][None, where].to(points.device)
    for number, layer in enumerate(points.layers):
        z, mlp = (pair.replaced((hook, number), run)[1][where] for hook in ("z", "mlp_out"))
        weight = weight_of(layer.get_submodule(points.output_path)).float()
        heads = weight.unflatten(0, (-1, points.head_size))
        by_head = torch.einsum("phd,hdo->hpo", z.unflatten(1, (-1, points.head_size)), heads)
        yield by_head.to(points.device)
        yield mlp[None].to(points.device)


def _received(
    points: Points,
    run: ForwardPass,
    gradients: dict[SiteKey, torch.Tensor],
    at: list[int],
    into_mlp: Hook,
) -> Iterator[torch.Tensor]:
    """Yield ∂m/∂(input of each receiver) at some positions, float32 `[receivers, places,
    hidden_size]`, on one device. `into_mlp`: the hook point that the norm before an MLP reads.
    """

    def slope(hook: Hook, layer: int) -> torch.Tensor:
        return rows_at(gradients[hook, layer].float().sum(0), at)

    for number, layer in enumerate(points.layers):
        assert points.input_norm is not None
        slopes = []
        for hook, (path, columns) in zip(_PROJECTED.values(), points.projections, strict=True):
            weight = weight_of(layer.get_submodule(path))[:, columns].float()
            by_head = slope(hook, number).unflatten(1, (-1, points.head_size))
            heads = weight.unflatten(1, (-1, points.head_size))
            slopes.append(torch.einsum("phd,ihd->hpi", by_head, heads))
        inputs: tuple[tuple[str, Hook, torch.Tensor], ...] = (
            (points.input_norm, "pre_attn", torch.cat(slopes)),
            (points.taps["mlp_in"].path, into_mlp, slope("mlp_in", number)[None]),
        )
        for norm, stream, after in inputs:
            rows = rows_at(run.rows((stream, number))[0], at)
            yield _before(layer.get_submodule(norm), rows, after).to(points.device)
    yield slope("post_block", points.num_layers - 1)[None].to(points.device)


def _before(norm: nn.Module, rows: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Return gradients at the input of a norm. `rows`: its input, `[places, hidden_size]`;
    `gradients`: at its output, `[receivers, places, hidden_size]`, float32.
    """
    dtype = next(iter(norm.parameters()), rows).dtype
    with torch.enable_grad():
        given = rows.to(dtype).expand(gradients.shape).clone().requires_grad_()
        (result,) = torch.autograd.grad(norm(given), given, gradients.to(dtype))
    return result.float()
