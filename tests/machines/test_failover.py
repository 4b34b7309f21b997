"""Redis with two replicas and Sentinel: does a failover in the middle of load lose anything that
was acknowledged?
"""

import itertools
import random
import time
from pathlib import Path

import pytest
from acknowledged import write_through
from fleet import SentinelFleet, Step
from network import HERE, Network
from redis_group import RedisGroup

from midstream.broker.redis_service.acl import write_users

REDIS = ("r1", "r2", "r3")
WHERE = {"worker-2": "w2"}


@pytest.mark.timeout(900)
def test_a_failover_under_load_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """The master is cut off from its replicas, but lives and answers all clients; it is cut off
    from everything; it is killed.
    """
    seed = random.SystemRandom().randrange(10**9)
    print(f"\nfailover with seed {seed}")
    with (
        Network(*REDIS, "w2") as network,
        SentinelFleet(
            tmp_path,
            network,
            WHERE,
            REDIS,
            1,
            names=("relay", "callbacks", "worker", "worker-2", "api"),
        ) as fleet,
    ):
        group = fleet.group
        took: list[float] = []

        def partition(*others: str, alone: tuple[str, ...] = ()) -> None:
            """The old master stays alive, and is found again after it has been alone for a while;
            `alone`: those that see nobody else meanwhile.
            """
            former = group.master()
            for name in (former, *alone):
                network.cut(name, *(others or group.others()))
            took.append(group.await_failover(former))
            time.sleep(8)
            network.heal()
            group.await_whole()

        def with_a_worker() -> None:
            """One worker sees the old master alone: it goes on with its jobs there."""
            partition(*group.others(), HERE, alone=("w2",))

        def kill() -> None:
            former = group.master()
            group.kill(former)
            took.append(group.await_failover(former))
            time.sleep(2)
            group.start(former)
            group.await_whole()

        steps: list[Step] = [
            ("load alone", lambda: time.sleep(3)),
            ("the master is cut off from its replicas, and answers all others", partition),
            ("the master is cut off from everything", lambda: partition(*network.names)),
            ("the master is cut off together with a worker", with_a_worker),
            ("the master is killed", kill),
        ]
        verdict, observed = fleet.run(steps, seed)
        print(
            f"failovers took {[round(seconds, 1) for seconds in took]} s until Sentinel "
            "named the new master"
        )
    assert verdict.found == {rule: [] for rule in verdict.RULES}
    assert len(observed) > 200, "the load was too light to show anything"


@pytest.mark.parametrize("way", ["ordered", "paused", "cut off", "killed", "replica cut off"])
def test_acknowledged_writes_outlive_a_failover(tmp_path: Path, way: str) -> None:
    """Also where the old master lives, and a replica that does not take over still follows it for a
    while.
    """
    write_users(tmp_path / "acl")
    with (
        Network(*REDIS) as network,
        RedisGroup(network, REDIS, tmp_path / "redis", tmp_path / "acl") as group,
    ):
        took: list[float] = []

        def happen() -> None:
            former = group.master()
            if (
                way == "replica cut off"
            ):  # no failover: whoever is left confirms, and the one that returns catches up
                network.cut(group.others()[0])
                time.sleep(10)
            else:
                {
                    "ordered": group.order_failover,
                    "paused": lambda: group.pause(former),
                    "killed": lambda: group.kill(former),
                    "cut off": lambda: network.cut(former, *group.others()),
                }[way]()
                took.append(group.await_failover(former))
                if way == "paused":
                    group.resume(former)
                time.sleep(8)
                if way == "killed":
                    group.start(former)
            network.heal()
            group.await_whole()

        times, lost = write_through(group, 1, happen)
        pause = max(after - before for before, after in itertools.pairwise(times))
        print(
            f"\n{way}: {len(times)} acknowledged, {len(lost)} lost, longest pause "
            f"{pause:.1f} s, new master after {took} s"
        )
        assert not lost, group.account()
    assert len(times) > 200, "too few writes to show anything"
