"""Estimates of a pair as an attribution's record has them, by the method of its sweep; and effects
of a sparse autoencoder's features.

A row is scale · decoder(activations) + shift + error; the effect of a feature is the difference of
its activations, times its decoder row at the patched prompt's scale, times the gradient (Marks et
al. 2024, arXiv:2403.19647). All effects of a place, with that of the error, sum to the effect of
its row (`Autoencoder.exchange`, which exact values use too).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.prompts.selectors import Hook
from midstream.workers.runner.readings.sae import Autoencoder

from ..records.estimates import Estimate, FeatureScore
from ..records.sweep_units import nodes_of
from ..records.sweeps import StoredSweep
from .attribution import estimate_pair
from .edges import edge_scores
from .loading import GIB, Footprint, refused
from .pairs import PairRuns, require_finite, rows_at
from .points import Points, SiteKey
from .protocol import EstimateRequest, StopCheck

#: Rows that are encoded at a time for their mean.
_ROWS = 64
#: The most prompts in one pass of integrated gradients.
MOST_AT_ONCE = 8


def feature_effects(points: Points, sweep: StoredSweep, number: int, sae: Autoencoder) -> Estimate:
    """Return the effects of features of pair `number`, and of the error as feature −1, at the
    autoencoder's site: the strongest of all columns, and for `verify` some at random, of the
    features and errors that differ between the prompts.

    In an ablation with zeros, activations and error are zero, and the biases stay; with `mean`,
    activations are the mean over the prompt. Raises PairError and NonFiniteGradient.
    """
    how = sweep.attributed
    assert how is not None
    assert how.sae is not None
    site: SiteKey = (how.sae.hook, how.sae.layer)
    draw = 0 if how.verify is None else how.verify.random
    pair = PairRuns(points, sweep, number, sites=[site])
    run = pair.run()
    pair.require_slope()
    scale = pair.scale()
    slopes = rows_at(run.gradients(pair.value)[site].float().sum(0), pair.columns.base)
    base, differences = pair.replaced(site, run)
    require_finite({site: differences * slopes})
    sae = sae.to(base.device)
    columns = pair.columns
    prompt = run.rows(site)[0, : len(pair.stored.base)].float()
    mean = (
        torch.stack([sae.encode(rows).sum(0) for rows in prompt.split(_ROWS)]).sum(0) / len(prompt)
        if sweep.ablation == "mean"
        else None
    )
    scores: list[FeatureScore] = []
    drawn: list[FeatureScore] = []
    rng = np.random.default_rng([how.seed, number])
    lots = np.empty(0)
    for column, member in enumerate(columns.member):
        if column in columns.skipped:
            continue
        places = member.bool().to(base.device)
        rows = base[places]
        slope = slopes[places]
        source = rows + differences[places] / sweep.alpha if sweep.ablation != "zeros" else None
        parts = sae.exchange(rows, source, mean)
        gain = sae.gains(slope * parts.scale)
        sums = (sweep.alpha * parts.change.double() * gain.double()).sum(0)
        effects = sums.cpu().numpy() * scale
        lost = sweep.alpha * (parts.error.double() * slope).sum().item() * scale
        error = FeatureScore(column=column, feature=-1, score=lost)
        strongest = np.argsort(-np.abs(effects), kind="stable")[: how.keep]
        scores += [*_scores(column, strongest.tolist(), effects), error]
        if draw:
            # Drawn here, from the features that differ and the errors: most of a dictionary is
            # inactive in both prompts, and its effect is known to be 0.
            drawn += _scores(column, parts.change.any(0).nonzero()[:, 0].tolist(), effects)
            if parts.error.any():
                drawn.append(error)
            lots = np.append(lots, rng.random(len(drawn) - len(lots)))
            kept = np.argsort(lots)[:draw]
            drawn = [drawn[place] for place in kept]
            lots = lots[kept]
    scores.sort(key=lambda score: -abs(score.score))
    drawn.sort(key=lambda score: (score.column, score.feature))
    return Estimate(base=pair.base, source=pair.source, features=scores[: how.keep], drawn=drawn)


def _scores(column: int, features: Sequence[int], effects: np.ndarray) -> list[FeatureScore]:
    return [
        FeatureScore(column=column, feature=feature, score=float(effects[feature]))
        for feature in features
    ]


def at_once(
    footprint: Footprint,
    tokens: int,
    sites: list[SiteKey],
    free: int,
    *,
    least: int = 1,
    most: int = MOST_AT_ONCE,
    kept: int = 1,
) -> int:
    """Return how many prompts one pass may hold in `free` bytes, from `least` to `most`.

    `kept`: positions of each whose logits are computed. Raises
    MidstreamError("gradients_refused") with the figures if `least` do not fit.
    """

    def needed(batch: int) -> int:
        return footprint.memory(tokens, batch, sites, kept).total

    for batch in range(max(least, most), least - 1, -1):
        if needed(batch) <= free:
            return batch
    raise refused(
        f"gradients of {len(sites)} sites at {tokens} tokens need about "
        f"{needed(least) / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free: use a shorter prompt, "
        "or fewer hooks or layers"
    )


def estimate(
    points: Points,
    footprint: Footprint,
    ask: EstimateRequest,
    free: int,
    load_sae: Callable[[StoredSae], Autoencoder],
    check: StopCheck,
) -> Estimate:
    """Return the estimates of a pair. `free`: bytes for activations.

    Raises MidstreamError and UnsupportedArchitectureError for a pair without estimates.
    """
    sweep = ask.sweep
    stored = ask.sweep.attributed
    assert stored is not None, "the sweep of an attribution"
    if stored.sae is not None:
        sites: list[SiteKey] = [(stored.sae.hook, stored.sae.layer)]
    elif stored.method == "edges":
        edges_of: tuple[Hook, ...] = ("z", "mlp_out", "q_proj", "k_proj", "v", "mlp_in", "pre_attn")
        sites = [(hook, layer) for hook in edges_of for layer in range(points.num_layers)]
    else:
        sites = sweep.sites
    pair = sweep.pairs[ask.pair]
    nodes = len(nodes_of(sweep.pairs[ask.pair]))
    # a node is a continuation of the prompt, or a shorter piece of one; all run in one pass
    batch = at_once(footprint, pair.longest, sites, free, least=min(nodes, 2), kept=nodes + 1)
    if stored.sae is not None:
        return feature_effects(points, sweep, ask.pair, load_sae(stored.sae))
    if stored.method == "edges":
        found = edge_scores(points, sweep, ask.pair, stored.steps, check)
        return Estimate(base=found.base, source=found.source, edges=found.top(stored.keep))
    outcome = estimate_pair(
        points,
        sweep,
        ask.pair,
        steps=stored.steps if stored.method == "integrated" else 0,
        batch=batch,
        doubtful=stored.verify is not None and stored.verify.doubtful > 0,
        mask=None if ask.mask is None else torch.tensor(to_numpy(ask.mask)).bool(),
        check=check,
    )
    values = np.concatenate([outcome.values()[hook].ravel() for hook in sweep.hooks])
    doubtful: list[int] = []
    if outcome.doubts:
        doubts = np.concatenate([outcome.doubts[hook].ravel() for hook in sweep.hooks])
        order = np.argsort(-np.nan_to_num(doubts), kind="stable")[: stored.most]
        doubtful = [int(place) for place in order if doubts[place] > 0]
    return Estimate(
        base=outcome.base,
        source=outcome.source,
        values=[float(value) if np.isfinite(value) else None for value in values],
        doubtful=doubtful,
    )
