"""What is planned for one forward reaches that forward and no other."""

import pytest
import torch

from midstream.schemas.specs import RankSpec, SteeringRow, StoredCapture, StoredSteering
from midstream.schemas.tensors import content_hash, from_numpy
from midstream.workers.runner.capture import Recording, SlabPool
from midstream.workers.runner.planner import Planner, Tracked
from midstream.workers.runner.sites import SharedBuffers, Site, Switch
from midstream.workers.runner.steering import RowTable, VectorStore
from midstream.workers.runner.step import RequestRows

HIDDEN, CAPACITY = 4, 8


def test_after_a_drain_that_fails_nothing_is_steered_or_recorded() -> None:
    site = Site(0, torch.zeros(CAPACITY, HIDDEN), torch.zeros(4, dtype=torch.int32), torch.zeros(3, HIDDEN))
    shared = SharedBuffers(*(torch.zeros(size, dtype=torch.int64) for size in (4 * CAPACITY, 4 * CAPACITY, CAPACITY)))
    switch, vectors = Switch(), VectorStore(HIDDEN)
    tensor = from_numpy(torch.ones(HIDDEN).numpy())
    vectors.put(content_hash(tensor), tensor)
    table = RowTable([site], 2, vectors)
    planner = Planner([site], shared, switch, table, SlabPool(1 << 20), traced=False)
    entry = StoredSteering(layers=[0], vector=content_hash(tensor), scale=1.0, hook="post_block", positions="all")
    row = SteeringRow(key="k", positions="all", entries=[entry])
    tracked = Tracked(RankSpec(version="v", job="j", request=0, attempt=1, prompt_tokens=3))
    tracked.rows = [(table.acquire(row)[0], row)]
    tracked.recording = Recording(StoredCapture(layers=[0], hook="post_block", positions="all", tag="t"), [0])
    tracked.recording.runs = None  # type: ignore[assignment]
    mine = [(tracked, RequestRows("r", 0, 3, 0))]
    planner.plan_steering(mine)
    planner.plan_capture(mine)
    planner.commit()
    assert site.counts.tolist()[:2] == [3, 3]
    with pytest.raises(AttributeError):
        planner.drain()
    assert site.counts.tolist()[:2] == [0, 0]
    assert not planner.busy
