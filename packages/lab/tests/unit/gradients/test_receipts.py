"""The receipt of an estimate has a checksum of everything that was computed, and of what it was
computed from; a model that is dropped leaves memory.
"""

import asyncio
import weakref
from unittest.mock import AsyncMock, Mock

import pytest
from gradient_kit import BASE, SOURCE, model_info
from midstream_fake_engine.gradients import small_model
from msgspec.structs import replace

from midstream.schemas.jobs.models import GradientInfo
from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.tuning import Tuning
from midstream_lab.gradients.engine import TransformersEngine
from midstream_lab.gradients.loading import Footprint
from midstream_lab.gradients.protocol import EstimateRequest
from midstream_lab.records.estimates import Edge, EdgeEnd, Estimate, FeatureScore
from midstream_lab.records.sweeps import StoredPair, StoredSweep

INFO = model_info()
PAIR = StoredPair(base=BASE, source=SOURCE, answer=[1], foil=[2], columns=[])
SWEEP = StoredSweep(pairs=[PAIR], hooks=["z"], layers=[0], metric="logit_diff", direction="denoise")
ASK = EstimateRequest("job_1", 7, 1, SWEEP, 0)
EDGE = Edge(EdgeEnd("embed", -1), EdgeEnd("mlp", 1), 0.25)
ESTIMATE = Estimate(
    base=1.5,
    source=-0.5,
    values=[0.5, None],
    doubtful=[1, 0],
    edges=[EDGE],
    features=[FeatureScore(0, 3, 0.125)],
)


async def checksum(estimate: Estimate, ask: EstimateRequest = ASK) -> str:
    """Of the only receipt of a worker whose only computation gives `estimate`."""
    engine = TransformersEngine(Settings(model="m"))
    writer = Mock()
    engine.info = INFO
    engine._writer = writer
    engine.run = AsyncMock(return_value=estimate)  # type: ignore[method-assign]
    assert await engine.estimate(ask) == estimate
    receipt = writer.submit.call_args.args[0].receipt
    assert receipt.job == "job_1"
    assert receipt.request == 7
    assert receipt.actions == 1
    return str(receipt.checksum)


CHANGED = {
    "value": {"values": [0.5000001, None]},
    "skipped cell": {"values": [0.5, 0.0]},
    "doubtful cells": {"doubtful": [1]},
    "order of doubtful cells": {"doubtful": [0, 1]},
    "score of an edge": {"edges": [replace(EDGE, score=0.2500001)]},
    "end of an edge": {"edges": [replace(EDGE, receiver=EdgeEnd("mlp", 0))]},
    "score of a feature": {"features": [FeatureScore(0, 3, 0.1250001)]},
    "feature": {"features": [FeatureScore(0, 4, 0.125)]},
    "drawn feature": {"drawn": [FeatureScore(0, 5, 0.0625)]},
    "choice": {"chosen": {"top": [3]}},
}


@pytest.mark.parametrize("part", CHANGED)
async def test_checksum_covers_every_number(part: str) -> None:
    assert await checksum(replace(ESTIMATE, **CHANGED[part])) != await checksum(ESTIMATE)


async def test_checksum_covers_what_was_asked_and_no_time() -> None:
    assert await checksum(replace(ESTIMATE, forwards=2.5)) == await checksum(ESTIMATE)
    other = EstimateRequest("job_1", 7, 1, replace(SWEEP, alpha=0.5), 0)
    assert await checksum(ESTIMATE, other) != await checksum(ESTIMATE)


async def test_idle_model_leaves_memory() -> None:
    engine = TransformersEngine(Settings(model="m", tuning=Tuning(gradients_idle_s=1)))
    engine.gradients = GradientInfo(model="m", identity="", dtype="float32", device="cpu")
    points = small_model(INFO)
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    weakref.finalize(points.model, lambda: loop.call_soon_threadsafe(gone.set))
    engine._loaded = Footprint(points)
    del points
    await engine.run(lambda points, check: None)
    idle = asyncio.create_task(engine._unload_when_idle())
    async with asyncio.timeout(60):
        await gone.wait()
    idle.cancel()
