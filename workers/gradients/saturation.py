"""The QK correction of AtP*: effects through attention with the softmax computed exactly.

Kramár et al. 2024 (arXiv:2403.00745, section 3.1.1). Where attention is saturated, the gradient of
the softmax vanishes, and a first-order estimate of a patched query or key with it. The correction
recomputes the attention probabilities with the patched query, or with the patched keys, and is
linear only in what the probabilities do afterwards: Σ_j (p'_ij − p_ij) · ∂m/∂p_ij, where ∂m/∂p_ij =
∂m/∂z_i · v_j.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...schemas.prompts.selectors import Hook
from .attention import Attended, repeated, scores
from .points import Points, Run

#: Bytes of scores at a time: heads are computed in chunks of about this size.
CHUNK_BYTES = 64 << 20

#: Hook points with a correction.
KINDS: tuple[Hook, ...] = ("q", "k")


@dataclass(frozen=True)
class Sensitivity:
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
        rows, gain, member = self._split(patched), self.gain, member.to(self.q.device)
        plain = scores(self.q, self.k, self.attended)
        before = (plain.softmax(-1) * gain).sum(-1)  # [batch, heads, queries]
        if kind == "q":
            here = self.attended._replace(mask=self.attended.mask[..., at, :])
            after = (scores(rows, self.k, here).softmax(-1) * gain[..., at, :]).sum(-1)
            return (after - before[..., at]) @ member.T
        # Σ_j p'_ij g_ij as a quotient: sums over the keys that stay and over the patched ones. The
        # denominator has no difference of nearly equal numbers, even where one key has all weight.
        there = self.attended._replace(mask=self.attended.mask[..., at])
        changed = scores(self.q, rows, there)
        top = torch.maximum(plain.amax(-1, keepdim=True), changed.amax(-1, keepdim=True))
        stay, come = (plain - top).exp(), (changed - top).exp()
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


def sensitivities(
    points: Points, run: Run, gradients: torch.Tensor, layer: int
) -> Iterator[Sensitivity]:
    """Yield the heads of one layer in chunks.

    `run` has the layer's `q`, `k` and `v`; `gradients`: of `z`, `[batch, tokens, width]`.
    """
    heads, attended = points.heads("q"), run.attended[layer]
    attended = attended._replace(mask=attended.mask.double())
    q, k, v, slope = (
        repeated(rows.double().unflatten(2, (-1, points.head_size)).transpose(1, 2), heads)
        for rows in (*(run.rows((hook, layer)) for hook in ("q", "k", "v")), gradients)
    )
    step = max(1, CHUNK_BYTES // (8 * len(q) * q.shape[2] ** 2))
    for start in range(0, heads, step):
        part = slice(start, start + step)
        gain = slope[:, part] @ v[:, part].transpose(-1, -2)
        yield Sensitivity(points, part, q[:, part], k[:, part], gain, attended)
