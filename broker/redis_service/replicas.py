"""Checks whether every replica that Sentinel could promote has a write; only such a write survives
any failover.

One replica with the write is not enough. Sentinel may replace a live master (after a pause or a
partition, or when ordered to). For about a second, until Sentinel has redirected the other
replicas, one of them may still confirm the old master's writes; it then follows the promoted
replica and drops them. So a replica counts as dispensable only if a majority of the sentinels would
not promote it.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import redis.exceptions

#: Seconds for which the list of replicas is trusted. (Whether one is dispensable is always queried
#: again.)
TRUSTED_S = 2.0
#: Seconds of silence after which WAIT does not wait for a replica; it may still be indispensable.
LAG_S = 2

RedisAddress = tuple[str, int]


class Holders(NamedTuple):
    """A master's report on the replicas that have its writes."""

    run: str  # the master's run id
    confirmed: int  # number of replicas that have everything, by WAIT
    recent: int  # number of replicas heard from within `LAG_S`
    having: frozenset[RedisAddress]  # replicas that have everything, by INFO


class View(NamedTuple):
    """One sentinel's view of a live master: epoch, run id, all replicas, and the dispensable
    ones.
    """

    epoch: int
    run: str
    known: frozenset[RedisAddress]
    dispensable: frozenset[RedisAddress]


class Agreed(NamedTuple):
    """The view that a majority of sentinels has of the master with this run id."""

    run: str
    known: frozenset[RedisAddress]
    needed: frozenset[RedisAddress]


def holders(run: str, confirmed: int, replication: dict[str, Any], offset: int) -> Holders:
    """Return which replicas have acknowledged everything up to `offset`, from the answers to WAIT
    and `INFO replication`.
    """
    replicas = [
        value
        for name, value in replication.items()
        if name.startswith("slave") and isinstance(value, dict)
    ]
    online = [replica for replica in replicas if replica["state"] == "online"]
    recent = sum(int(replica["lag"]) <= LAG_S for replica in online)
    having = frozenset(
        (str(replica["ip"]), int(replica["port"]))
        for replica in online
        if int(replica["offset"]) >= offset
    )
    return Holders(run, confirmed, recent, having)


def is_dispensable(replica: dict[str, Any]) -> bool:
    """Return whether a sentinel with this view of a replica would not promote it while another one
    is healthy.

    True if the replica does not answer, may not be promoted, or does not follow the master. A
    replica that has just been promoted does not follow the master either, but is not dispensable:
    it is recognised by its role, which is master, and the offset that it reached as a replica.
    """
    if replica["is_sdown"] or int(replica["slave-priority"]) == 0:
        return True
    was_promoted = replica["role-reported"] == "master" and int(replica["slave-repl-offset"]) > 0
    return replica["master-link-status"] != "ok" and not was_promoted


def view(replicas: Iterable[dict[str, Any]], master: dict[str, Any]) -> View | None:
    """Combine a sentinel's answers to `SENTINEL REPLICAS` and then `SENTINEL MASTER`.

    None: the sentinel considers the master down.
    """
    if master["is_sdown"] or master["is_odown"] or "failover_in_progress" in master["flags"]:
        return None
    by_address = {(str(replica["ip"]), int(replica["port"])): replica for replica in replicas}
    dispensable = frozenset(
        address for address, replica in by_address.items() if is_dispensable(replica)
    )
    return View(
        int(master["config-epoch"]), str(master["runid"]), frozenset(by_address), dispensable
    )


def agreed(views: Sequence[View | None], sentinels: int) -> Agreed | None:
    """Return the view of the newest configuration that more than half of all `sentinels` share;
    None if there is none.
    """
    answers = [item for item in views if item is not None]
    newest = [item for item in answers if item.epoch == max(other.epoch for other in answers)]
    majority = sentinels // 2 + 1
    if len(newest) < majority or len({item.run for item in newest}) != 1:
        return None
    known = frozenset().union(*(item.known for item in newest))
    needed = {
        address
        for address in known
        if sum(address in item.dispensable for item in newest) < majority
    }
    return Agreed(newest[0].run, known, frozenset(needed))


class Replicas:
    """The replicas of the master that a client uses.

    `minimum`: how many replicas must have a write; with Sentinel, also each that it could promote.
    """

    def __init__(self, client: Any, minimum: int) -> None:
        pool = client.connection_pool
        self.minimum = self.wait_for = minimum
        self._sentinels: list[Any] = list(
            getattr(getattr(pool, "sentinel_manager", None), "sentinels", [])
        )
        self._service: str = getattr(pool, "service_name", "")
        self._known: frozenset[RedisAddress] = frozenset()
        self._trusted = float("-inf")  # until when (monotonic)

    def _sufficient_alone(self, holders: Holders) -> bool | None:
        """Return whether `holders` suffice; None if that depends on the sentinels."""
        if not self._sentinels:
            return holders.confirmed >= self.minimum
        # Not all replicas: the loss of one machine would then stop every acknowledgement.
        self.wait_for = max(self.minimum, holders.recent)
        if len(holders.having) < self.minimum:
            return False
        return True if time.monotonic() < self._trusted and self._known <= holders.having else None

    def _sufficient_for(self, view: Agreed | None, holders: Holders) -> bool:
        if view is None:
            return False
        # The sentinels were asked after the write was confirmed: before, they could still have
        # promoted a replica without it.
        self._known, self._trusted = view.known, time.monotonic() + TRUSTED_S
        return view.run == holders.run and view.needed <= holders.having

    def suffice(self, holders: Holders) -> bool:
        """Return whether no failover can lose the writes that `holders.having` have.

        Asks sentinels one after the other; those that have failed to answer come last.
        """
        if (enough := self._sufficient_alone(holders)) is not None:
            return enough
        views: list[View | None] = []
        for sentinel in list(self._sentinels):
            try:
                views.append(
                    view(
                        sentinel.sentinel_slaves(self._service),
                        sentinel.sentinel_master(self._service),
                    )
                )
            except (redis.exceptions.RedisError, OSError):
                self._sentinels.remove(sentinel)
                self._sentinels.append(sentinel)
            if (majority := agreed(views, len(self._sentinels))) is not None:
                return self._sufficient_for(majority, holders)
        return False


class AsyncReplicas(Replicas):
    """`Replicas` for a client of redis.asyncio."""

    def __init__(self, client: Any, minimum: int) -> None:
        super().__init__(client, minimum)
        self._pending: dict[Any, asyncio.Task[View | None]] = {}  # sentinel → its query

    async def sufficient(self, holders: Holders) -> bool:
        """`suffice`, asking all sentinels together until a majority has answered."""
        enough = self._sufficient_alone(holders)
        return self._sufficient_for(await self._ask(), holders) if enough is None else enough

    async def _ask(self) -> Agreed | None:
        waiting = set()
        for sentinel in self._sentinels:
            # a sentinel that is cut off is not asked again before its query has failed
            if sentinel not in self._pending:
                self._pending[sentinel] = task = asyncio.create_task(
                    self._view(sentinel), name="midstream-sentinel"
                )
                waiting.add(task)
        views: list[View | None] = []
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            views += [task.result() for task in done]
            if (majority := agreed(views, len(self._sentinels))) is not None:
                return majority
        return None

    async def _view(self, sentinel: Any) -> View | None:
        try:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                replicas = await sentinel.sentinel_slaves(self._service)
                return view(replicas, await sentinel.sentinel_master(self._service))
            return None
        finally:
            del self._pending[sentinel]
