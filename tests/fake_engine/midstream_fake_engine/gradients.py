"""The fake gradient engine: estimates of a sweep's cells, some of which are wrong on purpose.

An estimate is the cell's exact value in the fake model; that of every `OFF`th cell, which is
doubtful, is off by `ERROR`. Faults that `settings.fault` may name, beside those of the fake engine:
`estimate:pair=N` (that pair of each job cannot be estimated).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.base.version import __version__
from midstream.schemas.jobs.jobs import Sampling
from midstream.schemas.jobs.models import GradientInfo, ModelInfo
from midstream.schemas.requests.specs import RankSpec
from midstream.schemas.settings.settings import Settings
from midstream.storage.formats.sae_files import folder_of
from midstream.workers.engine.protocol import EngineRequest
from midstream_lab.gradients.protocol import EstimateRequest
from midstream_lab.records.estimates import Estimate, FeatureScore
from midstream_lab.records.sweeps import Column, StoredPair, StoredSweep

from .engine import FakeEngine
from .grades import Edit, expected_logprob, own_row, replaced

if TYPE_CHECKING:
    from midstream.workers.runner.readings.sae import Autoencoder
    from midstream_lab.gradients.points import Points

T = TypeVar("T")
#: Every this many cells, the estimate is wrong, by this many nats.
OFF = 5
ERROR = 3.0


class FakeGradients(FakeEngine):
    """A `GradientEngine` without a model: one rank."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._sae_root = settings.artifacts_of("saes")
        self.gradients = GradientInfo(
            model=self.info.name, identity=self.info.identity, dtype="float32", device="cpu"
        )
        # One, as in the real engine: transformers cannot be imported by two threads at once.
        self._thread = ThreadPoolExecutor(1)

    async def estimate(self, ask: EstimateRequest) -> Estimate:
        await asyncio.sleep(self._token_s)
        if self._reason:
            raise MidstreamError("engine_failed", self._reason)
        base = ask.sweep.pairs[ask.pair].base
        spec = RankSpec(
            version=__version__,
            job=ask.job,
            request=ask.request,
            attempt=ask.attempt,
            prompt_tokens=len(base),
        )
        request = EngineRequest(ask.job, ask.request, ask.attempt, base, Sampling())
        self.ranks.begin(spec)
        self.ranks.end(spec)
        self.ranks.report(request, spec, [])
        if (fault := self.faults.get("estimate")) is not None and int(fault["pair"]) == ask.pair:
            raise MidstreamError("intervention_failed", "the gradients are not finite")
        if ask.sweep.attributed is not None and ask.sweep.attributed.sae is not None:
            return await asyncio.to_thread(self._features, ask.sweep, ask.pair)
        return estimate_of(ask.sweep, ask.pair, self._weights)

    def _features(self, sweep: StoredSweep, pair: int) -> Estimate:
        from midstream.workers.runner.readings.sae import load

        how = sweep.attributed
        assert how is not None
        assert how.sae is not None
        sae = load(folder_of(self._sae_root, how.sae.path), how.sae.digest)
        return feature_estimate(sweep, pair, sae, self._weights)

    async def run(self, work: Callable[[Any, Callable[[], None]], T]) -> T:
        """Call `work` with the hook points of a small random Llama of the fake model's sizes."""
        stopped = threading.Event()

        def check() -> None:
            time.sleep(self._token_s)
            if stopped.is_set():
                raise RuntimeError("stopped")

        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: work(small_model(self.info), check)
            )
        finally:
            stopped.set()


def small_model(info: ModelInfo) -> Points:
    """Return the hook points of a random Llama with the sizes of `info`; always the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from midstream_lab.gradients.points import ATTENTION, Points

    config = LlamaConfig(
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        intermediate_size=2 * info.hidden_size,
        num_hidden_layers=info.num_layers,
        num_attention_heads=2,
        attn_implementation=ATTENTION,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(std=0.2, generator=generator)
    return Points(model)


def estimate_of(sweep: StoredSweep, pair: int, weights: int = 0) -> Estimate:
    """Return the estimates of a pair, in nats; of sweeps that replace whole rows."""
    stored = sweep.pairs[pair]
    cells = list(product(sweep.hooks, sweep.layers, stored.columns))
    values = [_value(hook, layer, column, stored, weights) for hook, layer, column in cells]
    wrong = [place for place in range(len(cells)) if is_off(place) and values[place] is not None]
    return Estimate(
        base=measured(stored.base, [], stored),
        source=measured(stored.source, [], stored),
        values=[
            None if value is None else value + ERROR * is_off(place)
            for place, value in enumerate(values)
        ],
        doubtful=wrong,
        forwards=3.0,
    )


def feature_estimate(sweep: StoredSweep, pair: int, sae: Autoencoder, weights: int = 0) -> Estimate:
    """Return the estimates of the features of a pair that differ, and of its errors, in nats; every
    `OFF`th is wrong. The random ones are the last, which are the weakest.
    """
    import torch

    stored = sweep.pairs[pair]
    how = sweep.attributed
    layer = sweep.layers[0]
    assert how is not None
    hook = sweep.hooks[0]
    base = measured(stored.base, [], stored)
    scores = list[FeatureScore]()
    for number, column in enumerate(stored.columns):
        for to, of in column.places:  # one each
            ours, theirs = (
                torch.from_numpy(own_row(hook, layer, place, prompt, weights)[None].copy())
                for place, prompt in ((to, stored.base), (of, stored.source))
            )
            parts = sae.exchange(ours, theirs)
            differ = parts.change[0].nonzero()[:, 0].tolist()
            if parts.error.any():
                differ.append(-1)
            for feature in differ:
                row = from_numpy(sae.exchanged(ours, parts, feature)[0].numpy())
                edit = hook, layer, to, to_msgpack(("replace", [content_hash(row)], [1.0], 1.0))
                score = measured(stored.base, [edit], stored) - base
                score += ERROR * is_off(len(scores))
                scores.append(FeatureScore(column=number, feature=feature, score=score))
    scores.sort(key=lambda score: -abs(score.score))
    drawn = scores[-how.verify.random :] if how.verify is not None else []
    return Estimate(
        base=base,
        source=measured(stored.source, [], stored),
        features=scores[: how.keep],
        drawn=drawn,
    )


def is_off(place: int) -> bool:
    """Whether the estimate of the cell with this index in its pair's grid is wrong."""
    return place % OFF == 2


def measured(token_ids: list[int], edits: list[Edit], pair: StoredPair) -> float:
    """The difference between answer and foil, of one token each, in nats."""
    (answer,) = pair.answer
    (foil,) = pair.foil
    return expected_logprob(token_ids, edits, answer) - expected_logprob(token_ids, edits, foil)


def _value(hook: str, layer: int, column: Column, pair: StoredPair, weights: int) -> float | None:
    if not column.places:
        return None
    edits = [
        edit
        for to, of in column.places
        for edit in replaced(
            hook,
            layer,
            to,
            pair.base,
            own_row(hook, layer, of, pair.source, weights),
            weights=weights,
        )
    ]
    return measured(pair.base, edits, pair)
