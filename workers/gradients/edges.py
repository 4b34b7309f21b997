"""Edge attribution patching: an estimate of the effect of every path between two parts of a model
that leads through the residual stream alone.

score(sender → receiver) = Σ over positions of (the sender's output in the source prompt − in the
patched prompt) · ∂m/∂(the receiver's input). Syed et al. 2023 (arXiv:2310.10348). With several
steps, the gradient is the mean over midpoints of the straight path between the two prompts'
embeddings: EAP-IG, Hanna et al. 2024 (arXiv:2403.17806), whose own code takes left endpoints.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from ...schemas.jobs.sweeps import Baseline, StoredSweep
from ...schemas.prompts.selectors import Hook
from ..runner.hooks.architectures import UnsupportedArchitectureError
from .attribution import Pair
from .columns import rows_at
from .points import Points, Run, Site, weight_of
from .scalars import require_finite

#: Bytes of receivers' gradients at a time: positions are taken in chunks of about this size.
CHUNK_BYTES = 64 << 20
#: Receivers in attention, and the hook points of their projections' outputs.
_PROJECTED: tuple[tuple["Kind", Hook, str], ...] = (
    ("q", "q_proj", "q_proj"),
    ("k", "k_proj", "k_proj"),
    ("v", "v", "v_proj"),
)
Kind = Literal["embed", "head", "mlp", "q", "k", "v", "logits"]


class Node(NamedTuple):
    """A part of the model. Senders: `embed` (layer −1), `head` and `mlp`; receivers: the inputs of
    a head's `q`, `k` and `v`, of an `mlp`, and of the `logits` (layer: the number of layers).
    """

    layer: int
    kind: Kind
    head: int = -1


@dataclass(frozen=True)
class EdgeScores:
    """`scores`: in the metric's units, float64 `[senders, receivers]`; NaN where no edge exists."""

    base: Baseline
    source: Baseline | None
    senders: list[Node]
    receivers: list[Node]
    scores: np.ndarray

    def top(self, count: int) -> list[tuple[Node, Node, float]]:
        """Return the `count` edges with the largest |score|, the largest first."""
        sizes = np.nan_to_num(np.abs(self.scores), nan=-1.0).ravel()
        order = np.argsort(-sizes, kind="stable")[: min(count, int((sizes >= 0).sum()))]
        pairs = zip(*np.unravel_index(order, self.scores.shape), strict=True)
        return [(self.senders[s], self.receivers[r], float(self.scores[s, r])) for s, r in pairs]


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
    return _Edges(points, sweep, number).scores(steps, check)


class _Edges:
    def __init__(self, points: Points, sweep: StoredSweep, number: int) -> None:
        layers = range(points.num_layers)
        self.points, self.layers = points, layers
        written: tuple[Hook, ...] = ("z", "mlp_out")
        sent: list[Site] = [("pre_attn", 0), *((hook, at) for hook in written for at in layers)]
        self.pair = Pair(points, sweep, number, sites=sent)
        self.parallel = "post_attn" not in points.taps
        read: tuple[Hook, ...] = ("pre_attn", "q_proj", "k_proj", "v", "mlp_in")
        if not self.parallel:
            read = (*read, "post_attn")
        self.read: list[Site] = [(hook, layer) for hook in read for layer in layers]
        self.read.append(("post_block", layers[-1]))
        self.senders = [Node(-1, "embed")]
        self.receivers: list[Node] = []
        for layer in layers:
            self.senders += [Node(layer, "head", head) for head in range(points.heads("q"))]
            self.senders.append(Node(layer, "mlp"))
            for kind, hook, _ in _PROJECTED:
                self.receivers += [Node(layer, kind, head) for head in range(points.heads(hook))]
            self.receivers.append(Node(layer, "mlp"))
        self.receivers.append(Node(len(layers), "logits"))

    def scores(self, steps: int, check: Callable[[], None]) -> EdgeScores:
        pair = self.pair
        run = pair.run(grad=False)
        if steps == 1:
            pair.require_slope()
        scale = pair.scale()
        total = np.zeros((len(self.senders), len(self.receivers)))
        for step in range(steps):
            check()
            share = (step + 0.5) / steps if steps > 1 else 0.0
            for node, gradients, where in self._inputs(self._moved(run, share)):
                self._add(total, run, node, gradients, where)
        require_finite({("", -1): torch.from_numpy(total)})
        known = np.array([[self._exists(s, r) for r in self.receivers] for s in self.senders])
        return EdgeScores(
            pair.base,
            pair.source,
            self.senders,
            self.receivers,
            np.where(known, total * scale / steps, np.nan),
        )

    def _exists(self, sender: Node, receiver: Node) -> bool:
        same = sender.kind == "head" and receiver.kind == "mlp" and not self.parallel
        return sender.layer < receiver.layer + same

    def _moved(self, run: Run, share: float) -> tuple[Run, dict[Site, torch.Tensor]]:
        """Run the prompt with this share of the source's embeddings; return rows and gradients."""
        pair, site = self.pair, ("pre_attn", 0)

        def edit(at: Site, rows: torch.Tensor) -> torch.Tensor:
            if at != site:
                return rows
            base, differences = pair.replaced(("pre_attn", 0), run)
            edited = rows.clone()
            edited[:, pair.columns.base] = (base + share * differences).to(rows.dtype)
            return edited

        prompt = pair.stored.base
        moved = self.points.run(
            self.points.batch(pair.metric.sequences(prompt)),
            self.read,
            keep=pair.metric.keep(prompt),
            edit=edit if share else None,
            grad=True,
        )
        return moved, moved.gradients(pair.metric.value(moved.logits))

    def _inputs(
        self, pass_of_step: tuple[Run, dict[Site, torch.Tensor]]
    ) -> Iterator[tuple[list[Node], torch.Tensor, slice]]:
        """Yield receivers with the same senders, ∂m/∂(input of each), float32 `[receivers, places,
        hidden_size]`, and which places these are.
        """
        points, base = self.points, self.pair.columns.base
        run, gradients = pass_of_step
        heads = points.heads("q") + 2 * points.heads("k")
        step = max(1, CHUNK_BYTES // (4 * points.hidden_size * heads))
        for start in range(0, len(base), step):
            where = slice(start, start + step)

            def slope(site: Site, part: slice = where) -> torch.Tensor:
                return rows_at(gradients[site].float().sum(0), base[part])

            def stream(site: Site, part: slice = where) -> torch.Tensor:
                return rows_at(run.rows(site)[0], base[part])

            for number in self.layers:
                layer = points.layers[number]
                assert points.input_norm is not None
                nodes, slopes = [], []
                for kind, hook, name in _PROJECTED:
                    path, columns = points.projections[name]
                    weight = weight_of(layer.get_submodule(path))[:, columns].float()
                    heads = points.heads(hook)
                    by_head = slope((hook, number)).view(-1, heads, points.head_size)
                    weights = weight.view(-1, heads, points.head_size)
                    slopes.append(torch.einsum("phd,ihd->hpi", by_head, weights))
                    nodes += [Node(number, kind, head) for head in range(heads)]
                norm = layer.get_submodule(points.input_norm)
                yield nodes, _before(norm, stream(("pre_attn", number)), torch.cat(slopes)), where
                norm = layer.get_submodule(points.taps["mlp_in"].path)
                hook = "pre_attn" if self.parallel else "post_attn"
                through = _before(norm, stream((hook, number)), slope(("mlp_in", number))[None])
                yield [Node(number, "mlp")], through, where
            last = slope(("post_block", self.layers[-1]))
            yield [Node(len(self.layers), "logits")], last[None], where

    def _add(
        self, total: np.ndarray, run: Run, nodes: list[Node], gradients: torch.Tensor, where: slice
    ) -> None:
        """Add the scores at some places of all edges into these receivers."""
        first = self.receivers.index(nodes[0])
        into = slice(first, first + len(nodes))
        heads = self.points.heads("q")
        for number in range(-1, len(self.layers)):
            if number < 0:
                sent, start = self.pair.replaced(("pre_attn", 0), run)[1][None, where], 0
            elif any(self._exists(Node(number, kind), nodes[0]) for kind in ("head", "mlp")):
                sent, start = self._sent(run, number, where), 1 + number * (heads + 1)
            else:
                break
            sent = sent.to(gradients.device).flatten(1)
            scores = sent @ gradients.flatten(1).T
            total[start : start + len(sent), into] += scores.double().cpu().numpy()

    def _sent(self, run: Run, number: int, where: slice) -> torch.Tensor:
        """Return the differences of what a layer's heads and MLP add to the stream, `[heads + 1,
        places, hidden_size]`.
        """
        points, size = self.points, self.points.head_size
        _, z = self.pair.replaced(("z", number), run)
        _, mlp = self.pair.replaced(("mlp_out", number), run)
        weight = weight_of(points.layers[number].get_submodule(points.output_path)).float()
        by_head = torch.einsum(
            "phd,hdo->hpo",
            z[where].view(-1, points.heads("q"), size),
            weight.view(points.heads("q"), size, -1),
        )
        return torch.cat([by_head, mlp[None, where].to(by_head.device)])


def _before(norm: nn.Module, rows: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Return gradients at the input of a norm. `rows`: its input, `[places, hidden_size]`;
    `gradients`: at its output, `[receivers, places, hidden_size]`, float32.
    """
    dtype = next(iter(norm.parameters()), rows).dtype
    with torch.enable_grad():
        given = rows.to(dtype).expand(gradients.shape).clone().requires_grad_()
        (result,) = torch.autograd.grad(norm(given), given, gradients.to(dtype))
    return result.float()
