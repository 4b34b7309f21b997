"""Estimates of the edges between the parts of a model, by gradients.

Edge attribution patching estimates the effect of every path between two parts of a model that leads
through the residual stream alone: score(sender → receiver) = Σ over positions of (the sender's
output in the source prompt − in the patched prompt) · ∂m/∂(the receiver's input). Syed et al. 2023
(arXiv:2310.10348). With several steps, the gradient is the mean over midpoints of the straight path
between the two prompts' embeddings: EAP-IG, Hanna et al. 2024 (arXiv:2403.17806), whose own code
takes left endpoints.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from midstream.schemas.prompts.selectors import Hook
from midstream.workers.runner.hooks.architectures import UnsupportedArchitectureError

from ..records.estimates import Edge, EdgeEnd
from ..records.sweeps import StoredSweep
from .attribution import CHUNK_BYTES
from .pairs import PairRuns, require_finite, rows_at
from .points import ForwardPass, Points, RowsBySite, SiteKey, weight_of
from .protocol import StopCheck

_EMBEDDING: SiteKey = ("pre_attn", 0)
EdgeReader = Literal["head", "q", "k", "v"]

#: Receivers in attention → the hook points of their projections' outputs.
_PROJECTED: dict[EdgeReader, Hook] = {"q": "q_proj", "k": "k_proj", "v": "v"}


@dataclass(frozen=True)
class EdgeScores:
    """`scores`: in the metric's units, float64 `[senders, receivers]`; NaN where no edge exists."""

    base: float
    source: float | None
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
    check: StopCheck = lambda: None,
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
    gradients: RowsBySite,
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
