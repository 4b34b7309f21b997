"""The QK correction of AtP*: effects through attention with the softmax computed exactly.

Kramár et al. 2024 (arXiv:2403.00745, section 3.1.1). Where attention is saturated, the gradient of
the softmax vanishes, and a first-order estimate of a patched query or key with it. The correction
recomputes the attention probabilities with the patched query, or with the patched keys, and is
linear only in what the probabilities do afterwards: Σ_j (p'_ij − p_ij) · ∂m/∂p_ij, where ∂m/∂p_ij =
∂m/∂z_i · v_j.
"""

from collections.abc import Iterator, Sequence
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
    """Some query heads of one layer in one sequence. Tensors are float64, `[1, heads, tokens, …]`;
    key heads are repeated for the query heads that share them.
    """

    points: Points
    heads: slice
    q: torch.Tensor
    k: torch.Tensor
    gain: torch.Tensor  # [1, heads, queries, keys]: ∂m / ∂ probability
    attended: Attended  # the mask of this sequence

    def _split(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `[1, heads, places, head size]` of rows `[places, width]`."""
        by_head = rows.to(self.q).view(len(rows), -1, self.points.head_size).transpose(0, 1)[None]
        return repeated(by_head, self.points.heads("q"))[:, self.heads]

    def corrected(
        self, kind: Hook, patched: torch.Tensor, at: Sequence[int], member: torch.Tensor
    ) -> torch.Tensor:
        """Return the effects of patched queries or keys, `[heads, columns]`.

        `patched`: the rows as the patch writes them, `[places, width]`; `at`: their positions;
        `member`: which places a column writes, float64 `[columns, places]`.
        """
        rows, where, gain = self._split(patched), list(at), self.gain
        member = member.to(self.q.device)
        plain = scores(self.q, self.k, self.attended)
        before = (plain.softmax(-1) * gain).sum(-1)  # [1, heads, queries]
        if kind == "q":
            here = self.attended._replace(mask=self.attended.mask[..., where, :])
            after = (scores(rows, self.k, here).softmax(-1) * gain[..., where, :]).sum(-1)
            return ((after - before[..., where]) @ member.T)[0]
        # Σ_j p'_ij g_ij as a quotient: sums over the keys that stay and over the patched ones. The
        # denominator has no difference of nearly equal numbers, even where one key has all weight.
        there = self.attended._replace(mask=self.attended.mask[..., where])
        changed = scores(self.q, rows, there)
        top = torch.maximum(plain.amax(-1, keepdim=True), changed.amax(-1, keepdim=True))
        stay, come = (plain - top).exp(), (changed - top).exp()
        positions = torch.zeros(len(where), plain.shape[-1]).to(member)
        positions[range(len(where)), where] = 1.0
        others = 1.0 - (member @ positions).clamp(max=1.0)  # [columns, keys]
        total = stay @ others.T + come @ member.T
        gained = (stay * gain) @ others.T + (come * gain[..., where]) @ member.T
        return (gained / total - before[..., None]).sum(-2)[0]

    def linear(self, kind: Hook, differences: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
        """Return the first-order effects of changed queries or keys, `[heads, places]`.

        `differences`: patched − unpatched rows, `[places, width]`; `at`: their positions.
        """
        rows, where, cap = self._split(differences), list(at), self.attended.softcap
        pattern = scores(self.q, self.k, self.attended).softmax(-1)
        slope = pattern * (self.gain - (pattern * self.gain).sum(-1, keepdim=True))
        if cap:
            uncapped = self.q @ self.k.transpose(-1, -2) * self.attended.scale
            slope = slope * (1 - torch.tanh(uncapped / cap) ** 2)
        if kind == "q":
            effects = (slope[..., where, :] * (rows @ self.k.transpose(-1, -2))).sum(-1)
        else:
            effects = (slope[..., where] * (self.q @ rows.transpose(-1, -2))).sum(-2)
        return effects[0] * self.attended.scale


def sensitivities(
    points: Points, run: Run, gradients: torch.Tensor, layer: int
) -> Iterator[Sensitivity]:
    """Yield the heads of one layer in chunks, sequence by sequence.

    `run` has the layer's `q`, `k` and `v`; `gradients`: of `z`, `[batch, tokens, width]`.
    """
    heads, attended = points.heads("q"), run.attended[layer]
    for number in range(len(gradients)):
        tensors = (*(run.rows((hook, layer)) for hook in ("q", "k", "v")), gradients)
        split = (
            rows[number].double().view(1, rows.shape[1], -1, points.head_size) for rows in tensors
        )
        q, k, v, slope = (repeated(rows.transpose(1, 2), heads) for rows in split)
        seen = attended._replace(mask=attended.mask[number : number + 1].double())
        step = max(1, CHUNK_BYTES // (8 * q.shape[2] ** 2))
        for start in range(0, heads, step):
            part = slice(start, start + step)
            gain = slope[:, part] @ v[:, part].transpose(-1, -2)
            yield Sensitivity(points, part, q[:, part], k[:, part], gain, seen)
