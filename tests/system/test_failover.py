"""A replica takes over from a Redis in the middle of load, and the address leads to it: is anything
that was acknowledged lost, or done twice?
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from acknowledged import lost_writes
from fronted_redis import FrontedRedis
from ledger_kit import open_ledger
from load import judged, load
from ports import free_port
from refusal_kit import refuses
from stack import Stack

from midstream.broker.ledger.core import aof_barrier
from midstream.broker.redis_service import opening

#: Seconds between the steps of a failover: what is written meanwhile must not be lost either.
BETWEEN_S = 1.5
AT_ONCE = 8
MAX_WAIT_S = 15.0


def after_a_kill(pair: FrontedRedis) -> None:
    """The master is gone, and comes back as a replica."""
    pair.kill_master()
    time.sleep(BETWEEN_S)
    pair.promote()
    pair.lead_to_promoted(cut=True)
    time.sleep(BETWEEN_S)
    pair.demote_former()


def behind_a_proxy(pair: FrontedRedis) -> None:
    """The master lives; connections to it are closed."""
    pair.promote()
    time.sleep(BETWEEN_S)
    pair.lead_to_promoted(cut=True)
    time.sleep(BETWEEN_S)
    pair.demote_former()


def behind_a_name(pair: FrontedRedis) -> None:
    """The master lives, connections to it stay, and it becomes read-only under them."""
    pair.promote()
    time.sleep(BETWEEN_S)
    pair.lead_to_promoted(cut=False)
    time.sleep(BETWEEN_S)
    pair.demote_former()


Failover = Callable[[FrontedRedis], None]
WAYS = [after_a_kill, behind_a_proxy, behind_a_name]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[FrontedRedis]:
    with FrontedRedis(tmp_path / "redis", free_port()) as pair:
        yield pair


@pytest.mark.parametrize(
    "fail_over",
    [after_a_kill, behind_a_name, pytest.param(behind_a_proxy, marks=pytest.mark.long)],
)
@pytest.mark.slow("writes before, during and after a failover")
def test_acknowledged_writes_outlive_a_failover(pair: FrontedRedis, fail_over: Failover) -> None:
    assert lost_writes(pair.url, 1, lambda: fail_over(pair)) == []


async def test_a_write_that_a_demoted_redis_refuses_is_repeated_at_the_promoted_one(
    pair: FrontedRedis,
) -> None:
    async with open_ledger(pair.url) as ledger:
        await ledger.ping()
        await asyncio.to_thread(_move, pair)
        await ledger.ping()


def test_a_client_that_repeats_nothing_connects_again_after_a_demoted_redis_refused(
    pair: FrontedRedis,
) -> None:
    with opening.client(pair.url, retry=None) as client:
        client.set("ms:probe", 1)
        _move(pair)
        with pytest.raises(redis.ConnectionError, match="Redis refuses writes, as a replica"):
            client.set("ms:probe", 1)
        client.set("ms:probe", 1)


async def test_connections_follow_the_address_where_a_former_master_confirms_nothing(
    pair: FrontedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, its connections stay, and nothing has told it."""
    monkeypatch.setattr(aof_barrier, "PATIENCE_S", 0.5)
    async with open_ledger(pair.url, redis_replicas=1) as ledger:
        await ledger.written()
        pair.promote()
        pair.lead_to_promoted(cut=False)
        with refuses(match="fewer than 1 replicas", kind="unavailable"):
            await ledger.written()
        answers = await ledger.redis.info("server")
    with redis.Redis.from_url(pair.master.url) as client:
        assert answers["run_id"] == client.info("server")["run_id"]


def _move(pair: FrontedRedis) -> None:
    pair.promote()
    pair.lead_to_promoted(cut=False)
    pair.demote_former()


class FrontedStack(Stack):
    """Its Redis is a `FrontedRedis`, set up as docs/machines.md says."""

    def __init__(self, directory: Path, **settings: Any):
        super().__init__(directory, redis_replicas=1, **settings)

    def _start_redis(self) -> None:
        self.pair = FrontedRedis(self.directory / "redis", self._redis_port).__enter__()
        for server in (self.pair.master, self.pair.replica):
            with redis.Redis.from_url(server.url) as client:
                client.config_set("min-replicas-to-write", 1)

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self.pair.__exit__()


@pytest.mark.long
@pytest.mark.parametrize("fail_over", WAYS)
@pytest.mark.slow("clients of a whole service, through a failover and back")
def test_a_failover_under_load_loses_and_doubles_no_job(
    tmp_path: Path, fail_over: Failover
) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"\nfailover with seed {seed}")
    with FrontedStack(tmp_path, api=True, workers=2, max_wait_s=MAX_WAIT_S) as stack:
        promoted = stack.pair.replica
        steps = [
            ("load alone", lambda: time.sleep(2)),
            ("the replica takes over", lambda: fail_over(stack.pair)),
            ("load alone", lambda: time.sleep(5)),
        ]
        observed = asyncio.run(load(stack.url, steps, seed, MAX_WAIT_S, AT_ONCE))
        verdict = asyncio.run(judged(stack.settings, observed))
        with redis.Redis.from_url(promoted.url) as client:
            role = client.info("replication")["role"]
    assert verdict.found == {rule: [] for rule in verdict.RULES}
    assert role == "master"
    assert verdict.seen["jobs"] > 2 * AT_ONCE, "the load was too light to show anything"
