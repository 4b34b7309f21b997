"""Estimates of a pair as an attribution's record has them: in nats, by the method of its sweep."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from ...schemas.artifacts.saes import StoredSae
from ...schemas.base.tensors import to_numpy
from ...schemas.jobs.sweeps import StoredSweep
from ...schemas.prompts.selectors import Hook
from ...schemas.requests.attributions import Edge, Estimate, FeatureScore
from ...schemas.requests.sweep_paths import PathEnd
from ..engine.protocol import EstimateRequest
from ..runner.readings.sae import Autoencoder
from .attribution import Options, estimate_pair
from .edges import Node, edge_scores
from .features import feature_effects
from .loading import GIB, refused
from .memory import Footprint
from .points import Points, Site

#: The most prompts in one pass of integrated gradients.
MOST_AT_ONCE = 8
#: A sender of an edge → the hook that has its rows, and likewise a receiver.
_SENDERS: dict[str, Hook] = {"embed": "pre_attn", "head": "z", "mlp": "mlp_out"}
_RECEIVERS: dict[str, Hook] = {
    "q": "q",
    "k": "k",
    "v": "v",
    "mlp": "mlp_in",
    "logits": "post_block",
}


def at_once(footprint: Footprint, tokens: int, sites: list[Site], free: int) -> int:
    """Return how many prompts one pass may hold in `free` bytes, at most `MOST_AT_ONCE`.

    Raises MidstreamError("gradients_refused") with the figures if one does not fit.
    """

    def needed(batch: int) -> int:
        memory = footprint.memory(tokens, batch, sites)
        return memory.total - memory.parameters  # which are there already

    for batch in range(MOST_AT_ONCE, 0, -1):
        if needed(batch) <= free:
            return batch
    raise refused(
        f"gradients of {len(sites)} sites at {tokens} tokens need about {needed(1) / GIB:.2f} GiB, "
        f"and {free / GIB:.2f} GiB are free: use a shorter prompt, or fewer hooks or layers"
    )


def estimate(
    points: Points,
    footprint: Footprint,
    ask: EstimateRequest,
    free: int,
    load_sae: Callable[[StoredSae], Autoencoder],
    check: Callable[[], None],
) -> Estimate:
    """Return the estimates of a pair. `free`: bytes for activations.

    Raises MidstreamError and UnsupportedArchitectureError for a pair without estimates.
    """
    sweep, stored = _in_nats(ask.sweep, ask.pair), ask.sweep.attributed
    assert stored is not None, "the sweep of an attribution"
    if stored.sae is not None:
        sites: list[Site] = [(stored.sae.hook, stored.sae.layer)]
    elif stored.method == "edges":
        edges_of: tuple[Hook, ...] = ("z", "mlp_out", "q_proj", "k_proj", "v", "mlp_in", "pre_attn")
        sites = [(hook, layer) for hook in edges_of for layer in range(points.num_layers)]
    else:
        sites = [(hook, layer) for hook in sweep.hooks for layer in sweep.layers]
    batch = at_once(footprint, sweep.pairs[ask.pair].longest, sites, free)
    if stored.sae is not None:
        return _features(points, sweep, ask.pair, sites[0], load_sae(stored.sae), stored.keep)
    if stored.method == "edges":
        return _edges(points, sweep, ask.pair, stored.steps, stored.keep, check)
    options = Options(
        method="integrated" if stored.method == "integrated" else "attribution",
        steps=stored.steps,
        batch=batch,
        doubts=stored.verify is not None and stored.verify.doubtful > 0,
        mask=None if ask.mask is None else torch.tensor(to_numpy(ask.mask)).bool(),
        check=check,
    )
    found = estimate_pair(points, sweep, ask.pair, options)
    values = np.concatenate([found.values()[hook].ravel() for hook in sweep.hooks])
    doubtful: list[int] = []
    if found.doubts:
        doubts = np.concatenate([found.doubts[hook].ravel() for hook in sweep.hooks])
        order = np.argsort(-np.nan_to_num(doubts), kind="stable")[: stored.most]
        doubtful = [int(place) for place in order if doubts[place] > 0]
    return Estimate(
        base=found.base.value,
        source=None if found.source is None else found.source.value,
        values=[float(value) if np.isfinite(value) else None for value in values],
        doubtful=doubtful,
    )


def _in_nats(sweep: StoredSweep, pair: int) -> StoredSweep:
    """Return the sweep with a metric in nats: the one that `recovered` divides."""
    if sweep.metric != "recovered":
        return sweep
    plain: Any = "logit_diff" if sweep.pairs[pair].foil else "logprob"
    return msgspec.structs.replace(sweep, metric=plain)


def _edges(
    points: Points,
    sweep: StoredSweep,
    pair: int,
    steps: int,
    keep: int,
    check: Callable[[], None],
) -> Estimate:
    found = edge_scores(points, sweep, pair, steps, check)
    return Estimate(
        base=found.base.value,
        source=None if found.source is None else found.source.value,
        edges=[
            Edge(
                sender=_end(sender, _SENDERS, points),
                receiver=_end(receiver, _RECEIVERS, points),
                score=score,
            )
            for sender, receiver, score in found.top(keep)
        ],
    )


def _end(node: Node, hooks: dict[str, Hook], points: Points) -> PathEnd:
    """Return a node as the ends of paths are written; the embedding enters the first layer, and
    logits are read from the last.
    """
    return PathEnd(
        layer=min(max(node.layer, 0), points.num_layers - 1),
        hook=hooks[node.kind],
        head=None if node.head < 0 else node.head,
    )


def _features(
    points: Points, sweep: StoredSweep, pair: int, site: Site, sae: Autoencoder, keep: int
) -> Estimate:
    found = feature_effects(points, sweep, pair, site, sae, keep)
    scores = []
    for number, column in enumerate(sweep.pairs[pair].columns):
        if not column.places:
            continue
        position = column.places[0][0]
        parts = [*zip(found.indices[number], found.effects[number], strict=True)]
        parts.append((-1, found.error[number]))
        scores += [
            FeatureScore(
                layer=site[1], position=position, feature=int(feature), score=float(effect)
            )
            for feature, effect in parts
        ]
    scores.sort(key=lambda score: -abs(score.score))
    return Estimate(base=found.base, source=found.source, features=scores[:keep])
