"""Effects of a sparse autoencoder's features, and of what it does not reconstruct.

A row is scale · decoder(activations) + shift + error; the effect of a feature is the difference of
its activations, times its decoder row at the patched prompt's scale, times the gradient (Marks et
al. 2024, arXiv:2403.19647). All effects of a place, with that of the error, sum to the effect of
its row (`Autoencoder.exchange`, which exact values use too).
"""

from typing import NamedTuple

import numpy as np
import torch

from ...schemas.jobs.sweeps import StoredSweep
from ..runner.readings.sae import Autoencoder
from .pairs import PairRuns, require_finite, rows_at
from .points import Points, SiteKey

#: Rows that are encoded at a time for their mean.
_ROWS = 64


class FeatureEffects(NamedTuple):
    """Effects in the metric's units. Skipped columns have index −1 and NaN."""

    indices: np.ndarray  # int64 [columns, k]: the largest |effect| first
    effects: np.ndarray  # float64 [columns, k]
    rest: np.ndarray  # float64 [columns]: sum over all other features
    error: np.ndarray  # float64 [columns]
    drawn: list[tuple[int, int, float]]  # column, feature (−1: the error) and effect; at random
    base: float  # the metric of the patched prompt, in nats
    source: float | None  # of the other prompt; None in an ablation


def feature_effects(
    points: Points,
    sweep: StoredSweep,
    number: int,
    site: SiteKey,
    sae: Autoencoder,
    top: int,
    draw: int = 0,
    seed: int = 0,
) -> FeatureEffects:
    """Return the effects at one site of pair `number`: the `top` features of each column, and
    `draw` at random from all columns' features that differ between the prompts, and errors.

    In an ablation with zeros, activations and error are zero, and the biases stay; with `mean`,
    activations are the mean over the prompt. Raises PairError and NonFiniteGradient.
    """
    pair = PairRuns(points, sweep, number, sites=[site])
    run = pair.run()
    pair.require_slope()
    scale = pair.scale()
    slopes = rows_at(run.gradients(pair.value)[site].float().sum(0), pair.columns.base)
    base, differences = pair.replaced(site, run)
    require_finite({site: differences * slopes})
    sae, columns = sae.to(base.device), pair.columns
    prompt = run.rows(site)[0, : len(pair.stored.base)].float()
    mean = (
        torch.stack([sae.encode(rows).sum(0) for rows in prompt.split(_ROWS)]).sum(0) / len(prompt)
        if sweep.ablation == "mean"
        else None
    )
    count = min(top, sae.form.d_sae)
    result = FeatureEffects(
        np.full((len(columns.member), count), -1),
        np.full((len(columns.member), count), np.nan),
        np.full(len(columns.member), np.nan),
        np.full(len(columns.member), np.nan),
        drawn=[],
        base=pair.base.value,
        source=None if pair.source is None else pair.source.value,
    )
    rng, lots = np.random.default_rng([seed, number]), np.empty(0)
    for column, member in enumerate(columns.member):
        if column in columns.skipped:
            continue
        places = member.bool().to(base.device)
        rows, slope = base[places], slopes[places]
        source = None
        if sweep.ablation != "zeros":
            source = rows + differences[places] / sweep.alpha
        parts = sae.exchange(rows, source, mean)
        gain = sae.gains(slope * parts.scale)
        effects = (sweep.alpha * parts.change.double() * gain.double()).sum(0) * scale
        order = np.argsort(-effects.abs().cpu().numpy(), kind="stable")
        chosen = torch.from_numpy(order[:count]).to(effects.device)
        error = sweep.alpha * (parts.error.double() * slope).sum() * scale
        result.indices[column] = chosen.cpu().numpy()
        result.effects[column] = effects[chosen].cpu().numpy()
        result.rest[column] = (effects.sum() - effects[chosen].sum()).item()
        result.error[column] = error.item()
        if draw:
            found = parts.change.any(0).nonzero()[:, 0].tolist()
            result.drawn.extend(
                (column, *item) for item in zip(found, effects[found].tolist(), strict=True)
            )
            if parts.error.any():
                found.append(-1)
                result.drawn.append((column, -1, error.item()))
            lots = np.append(lots, rng.random(len(found)))
            kept = np.argsort(lots)[:draw]
            result.drawn[:], lots = [result.drawn[place] for place in kept], lots[kept]
    return result
