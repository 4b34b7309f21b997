"""Which replicas must have a write before no failover can lose it?"""

from typing import Any

import pytest

from midstream.broker.redis_service.replicas import (
    Agreed,
    Holders,
    RedisAddress,
    Replicas,
    View,
    agreed,
    holders,
    is_dispensable,
    view,
)

R2 = ("r2", 1)
R3 = ("r3", 1)
BOTH = frozenset({R2, R3})
NONE = frozenset[RedisAddress]()


def said(**changed: Any) -> dict[str, Any]:
    """What a sentinel says of a replica in order."""
    return {
        "ip": "r2",
        "port": 1,
        "is_sdown": False,
        "slave-priority": 100,
        "master-link-status": "ok",
        "role-reported": "slave",
        "slave-repl-offset": 7,
    } | changed


def of_master(**changed: Any) -> dict[str, Any]:
    return {
        "flags": "master",
        "is_sdown": False,
        "is_odown": False,
        "config-epoch": 3,
        "runid": "m",
    } | changed


PROMOTED = {"role-reported": "master", "master-link-status": "err"}


@pytest.mark.parametrize(
    ("changed", "dispensable"),
    [
        ({}, False),
        (PROMOTED, False),  # it was a replica, and is the new master
        (PROMOTED | {"slave-repl-offset": 0}, True),  # a former master that came back
        ({"is_sdown": True}, True),
        ({"slave-priority": 0}, True),
        ({"master-link-status": "err"}, True),
    ],
)
def test_a_replica_that_sentinel_would_not_promote_is_dispensable(
    changed: dict[str, Any], dispensable: bool
) -> None:
    assert is_dispensable(said(**changed)) is dispensable


def test_a_sentinel_that_takes_the_master_for_dead_confirms_nothing() -> None:
    assert view([said()], of_master()) == View(3, "m", frozenset({R2}), NONE)
    for changed in (
        {"is_sdown": True},
        {"is_odown": True},
        {"flags": "master,failover_in_progress"},
    ):
        assert view([said()], of_master(**changed)) is None


ONE = View(3, "m", BOTH, NONE)
NEWER = View(4, "n", BOTH, NONE)
WITHOUT = View(3, "m", BOTH, frozenset({R3}))


@pytest.mark.parametrize(
    ("views", "found"),
    [
        ([ONE], None),
        ([ONE, None], None),
        ([ONE, ONE], Agreed("m", BOTH, BOTH)),
        ([ONE, ONE, NEWER], None),  # a failover has begun
        ([ONE, NEWER, NEWER], Agreed("n", BOTH, BOTH)),
        # a replica is dispensable if most say so
        ([WITHOUT, ONE, ONE], Agreed("m", BOTH, BOTH)),
        ([WITHOUT, WITHOUT], Agreed("m", BOTH, frozenset({R2}))),
    ],
)
def test_most_sentinels_must_say_the_same_of_the_newest_master(
    views: list[View | None], found: Agreed | None
) -> None:
    assert agreed(views, 3) == found


def test_only_who_has_acknowledged_everything_counts() -> None:
    def replica(ip: str, **changed: Any) -> dict[str, Any]:
        return {"ip": ip, "port": 1, "state": "online", "offset": 100, "lag": 0} | changed

    replication = {
        "role": "master",
        "slave0": replica("r2"),
        "slave1": replica("r3", offset=99, lag=1),
    }
    assert holders("m", 1, replication, 100) == Holders("m", 1, 2, frozenset({R2}))
    replication = {"slave0": replica("r2", state="wait_bgsave"), "slave1": replica("r3", lag=9)}
    assert holders("m", 0, replication, 100) == Holders("m", 0, 0, frozenset({R3}))


class Pool:
    """Of a client that was given Redis directly; with `sentinels`, through them."""

    service_name = "midstream"

    def __init__(self, *sentinels: Any) -> None:
        self.connection_pool = self
        self.sentinel_manager = self
        self.sentinels = sentinels


class Sentinel:
    def __init__(self, replicas: list[dict[str, Any]], **master: Any) -> None:
        self.replicas = replicas
        self.master = of_master(**master)
        self.asked = 0

    def sentinel_slaves(self, _: str) -> list[dict[str, Any]]:
        self.asked += 1
        return self.replicas

    def sentinel_master(self, _: str) -> dict[str, Any]:
        return self.master


def test_without_sentinels_a_number_of_replicas_is_enough() -> None:
    assert Replicas(Pool(), 1).suffice(Holders("m", 1, 0, NONE))
    assert not Replicas(Pool(), 2).suffice(Holders("m", 1, 2, BOTH))


def test_sentinels_are_asked_only_while_a_replica_is_missing() -> None:
    sentinels = [Sentinel([said(), said(ip="r3")]) for _ in range(3)]
    replicas = Replicas(Pool(*sentinels), 1)
    assert replicas.suffice(Holders("m", 2, 2, BOTH))
    before = [sentinel.asked for sentinel in sentinels]
    assert replicas.suffice(Holders("m", 2, 2, BOTH))
    assert [sentinel.asked for sentinel in sentinels] == before
    assert not replicas.suffice(Holders("m", 1, 1, frozenset({R2}))), (
        "the other one could be promoted"
    )
    for sentinel in sentinels:
        sentinel.replicas = [said(), said(ip="r3", is_sdown=True)]
    assert replicas.suffice(Holders("m", 1, 1, frozenset({R2})))
    assert not replicas.suffice(Holders("another", 1, 1, frozenset({R2}))), (
        "it is no master any more"
    )
