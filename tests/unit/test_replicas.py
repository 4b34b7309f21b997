"""Which replicas must have a write before no failover can lose it?"""

from typing import Any

from midstream.broker.ops.replicas import Address, Agreed, Holders, View, agreed, holders, is_dispensable, view

R2, R3 = ("r2", 1), ("r3", 1)
BOTH, NONE = frozenset({R2, R3}), frozenset[Address]()


def said(**changed: Any) -> dict[str, Any]:
    """What a sentinel says of a replica in order."""
    return {
        "ip": "r2", "port": 1, "is_sdown": False, "slave-priority": 100, "master-link-status": "ok", "role-reported": "slave",
        "slave-repl-offset": 7,
    } | changed  # fmt: skip


def of_master(**changed: Any) -> dict[str, Any]:
    return {"flags": "master", "is_sdown": False, "is_odown": False, "config-epoch": 3, "runid": "m"} | changed


def test_a_replica_that_could_be_promoted_is_needed() -> None:
    assert not is_dispensable(said())
    promoted = {"role-reported": "master", "master-link-status": "err"}
    assert not is_dispensable(said(**promoted)), "it was a replica, and is the new master"
    assert is_dispensable(said(**promoted, **{"slave-repl-offset": 0})), "a former master that came back"


def test_a_replica_that_sentinel_would_not_promote_is_dispensable() -> None:
    assert is_dispensable(said(is_sdown=True))
    assert is_dispensable(said(**{"slave-priority": 0}))
    assert is_dispensable(said(**{"master-link-status": "err"}))


def test_a_sentinel_that_takes_the_master_for_dead_confirms_nothing() -> None:
    assert view([said()], of_master()) == View(3, "m", frozenset({R2}), NONE)
    for changed in ({"is_sdown": True}, {"is_odown": True}, {"flags": "master,failover_in_progress"}):
        assert view([said()], of_master(**changed)) is None


def test_most_sentinels_must_say_the_same_of_the_newest_master() -> None:
    one = View(3, "m", BOTH, NONE)
    assert agreed([one], 3) is None
    assert agreed([one, None], 3) is None
    assert agreed([one, one], 3) == Agreed("m", BOTH, BOTH)
    newer = View(4, "n", BOTH, NONE)
    assert agreed([one, one, newer], 3) is None, "a failover has begun"
    assert agreed([one, newer, newer], 3) == Agreed("n", BOTH, BOTH)


def test_most_sentinels_must_find_a_replica_dispensable() -> None:
    without, whole = View(3, "m", BOTH, frozenset({R3})), View(3, "m", BOTH, NONE)
    assert agreed([without, whole, whole], 3) == Agreed("m", BOTH, BOTH)
    assert agreed([without, without], 3) == Agreed("m", BOTH, frozenset({R2}))


def test_only_who_has_acknowledged_everything_counts() -> None:
    def replica(ip: str, **changed: Any) -> dict[str, Any]:
        return {"ip": ip, "port": 1, "state": "online", "offset": 100, "lag": 0} | changed

    replication = {"role": "master", "slave0": replica("r2"), "slave1": replica("r3", offset=99, lag=1)}
    assert holders("m", replication, 100) == Holders("m", 2, frozenset({R2}))
    replication = {"slave0": replica("r2", state="wait_bgsave"), "slave1": replica("r3", lag=9)}
    assert holders("m", replication, 100) == Holders("m", 0, frozenset({R3}))
