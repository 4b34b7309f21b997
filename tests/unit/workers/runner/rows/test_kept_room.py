"""When the scheduler gives up the blocks that it keeps for sweeps."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.workers.runner.base import process


@pytest.mark.parametrize(
    ("waiting", "running", "scheduled", "stuck"),
    [(1, 0, 0, True), (1, 2, 0, False), (1, 2, 2, False), (0, 0, 0, False), (0, 2, 0, False)],
)
def test_blocks_are_given_up_when_nothing_else_lets_requests_proceed(
    monkeypatch: pytest.MonkeyPatch, waiting: int, running: int, scheduled: int, stuck: bool
) -> None:
    """With several steps under way a step may be empty because all that runs is in another one."""
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    from midstream.workers.runner.vllm import scheduler

    class Stock:
        kv_cache_manager = SimpleNamespace(usage=0.0)

        def get_request_counts(self) -> tuple[int, int]:
            return running, waiting

        def schedule(self) -> Any:
            return SimpleNamespace(total_num_scheduled_tokens=scheduled, finished_req_ids=set())

    asked: list[bool] = []
    made = object.__new__(type("Made", (scheduler._Midstream, Stock), {}))
    made.waiting, made.running, made.max_num_active_reqs = (
        [object()] * waiting,
        [object()] * running,
        8,
    )
    made._midstream_ring = SimpleNamespace(begin=lambda *_: None)
    made._midstream_cells = SimpleNamespace(composing=lambda *_: nullcontext())
    made._midstream_blocks = SimpleNamespace(make_room=lambda stuck: asked.append(stuck))
    made._midstream_rows = SimpleNamespace(pending=False)
    (
        made._midstream_finished,
        made._midstream_capturing,
        made._midstream_ends,
        made._midstream_arrived,
    ) = {}, {}, [], {}
    made.schedule()
    assert asked == ([False, True] if stuck else [False])
