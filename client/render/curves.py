"""The figure of a probe's scores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.artifacts.probes import ProbeResult
from .drawing import side_by_side
from .readings import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The height of an axis by that of its highest point.
HEADROOM = 1.15
#: Inches of a token.
_TOKEN = 0.16


def probe_figure(
    result: ProbeResult,
    *,
    tokens: Sequence[str] = (),
    threshold: float | None = None,
) -> "Figure":
    """Draw the score of each label at each position, or only their aggregates if the request did
    not ask for `tokens`. `tokens`: their texts; `threshold`: by default a policy's `at_least`. The
    first token sets no scale, as on the page: its row is an outlier in most models.
    """
    own = result.policy and result.policy.condition.at_least
    figure, (axis,) = side_by_side(1, max(5.0, len(tokens) * _TOKEN))
    axis.set(ylabel="score", title=result.probe)
    limit = own if threshold is None else threshold
    lines = [] if limit is None else [limit]
    for line in lines:
        axis.axhline(line, color="black", linewidth=0.9, linestyle="--", label="threshold")
    if result.tokens is None:
        axis.bar(result.scores.keys(), result.scores.values())
        return figure
    for label, scores in zip(result.scores, zip(*result.tokens, strict=True), strict=True):
        axis.plot(scores, label=label, marker=".")
    inside = [*np.ravel(result.tokens[1:] or result.tokens), *lines, 0.0]
    room = ((max(inside) - min(inside)) or 1.0) * (HEADROOM - 1)
    axis.set(xlabel="position", ylim=(min(inside) - room, max(inside) + room))
    words = [shown(word) for word in tokens[: result.positions]]
    if words:
        axis.set_xticks(range(len(words)), words, rotation=90, fontsize=6)
    axis.legend()
    return figure
