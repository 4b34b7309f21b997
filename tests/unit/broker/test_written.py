"""When is the log of Redis written as far as somebody has been answered?"""

from typing import Any

import pytest

from midstream.broker.ledger.core.aof_barrier import Barrier
from midstream.broker.redis_service.availability import LossyRedis


def told(
    size: int, held_back: int, base: int = 100, syncing: bool = True, status: str = "ok"
) -> dict[str, Any]:
    """`INFO persistence`, as much of it as matters here."""
    return {
        "aof_enabled": 1,
        "aof_current_size": size,
        "aof_buffer_length": held_back,
        "aof_base_size": base,
        "aof_pending_bio_fsync": int(syncing),
        "aof_last_write_status": status,
    }


def test_without_a_log_the_barrier_passes_only_where_that_is_allowed() -> None:
    assert Barrier(lossy=True).passed({"aof_enabled": 0})
    with pytest.raises(LossyRedis, match="no append-only file"):
        Barrier().passed({"aof_enabled": 0})


def test_a_redis_that_loads_its_log_has_not_written() -> None:
    assert not Barrier().passed({"aof_enabled": 0, "loading": 1})


def test_unsynced_writes_are_synced_before_the_answer() -> None:
    assert Barrier().passed(told(500, 20, syncing=False))
    assert not Barrier().passed(told(500, 20, syncing=False, status="err"))


@pytest.mark.parametrize(
    "looks",
    [
        [told(500, 20), told(519, 40), told(520, 60)],  # later writes are not waited for
        [  # a rewritten log is waited for again
            told(500, 20),
            *(told(size, 30, base=900) for size in (900, 929, 930)),
        ],
    ],
)
def test_the_barrier_passes_once_the_log_is_written_as_far(looks: list[dict[str, Any]]) -> None:
    barrier = Barrier()
    assert [barrier.passed(look) for look in looks] == [False] * (len(looks) - 1) + [True]


@pytest.mark.parametrize(("confirmed", "passes"), [(0, False), (1, False), (2, True), (3, True)])
def test_the_barrier_passes_once_enough_replicas_confirm(confirmed: int, passes: bool) -> None:
    assert Barrier(2).passed(True, confirmed, told(500, 0)) is passes
