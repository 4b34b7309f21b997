"""Reports whether all replicas that Sentinel could promote have what was written: only then does no
failover lose it.

That some replica has it is not enough. Sentinel takes a master for dead that lives (a pause, a
partition, an order to fail over), and for about a second, until it has redirected the other
replicas, one of them still confirms the old master's writes. That replica then follows the
promoted one and drops it. So a replica counts as dispensable only if a majority of the sentinels
would not promote it.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import redis.exceptions

#: For so long it is trusted which replicas there are. (Whether one is dispensable is always asked
#: again.)
TRUSTED_S = 2.0
#: A replica that has said nothing for longer is not waited for by WAIT; it may still be
#: indispensable.
LAG_S = 2

Address = tuple[str, int]


class Holders(NamedTuple):
    """A master's report: its run id, how many replicas have everything by WAIT, and which by
    INFO.
    """

    run: str
    confirmed: int
    recent: int  # replicas that are heard of
    having: frozenset[Address]


class View(NamedTuple):
    """One sentinel's view of a live master: epoch, run id, all replicas, and the dispensable
    ones.
    """

    epoch: int
    run: str
    known: frozenset[Address]
    dispensable: frozenset[Address]


class Agreed(NamedTuple):
    """View of a majority of sentinels on the master with this run id."""

    run: str
    known: frozenset[Address]
    needed: frozenset[Address]


def holders(run: str, confirmed: int, replication: dict[str, Any], offset: int) -> Holders:
    """From the answers to WAIT and `INFO replication`: who has acknowledged everything up to
    `offset`.
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
    """Return whether a sentinel that says this of a replica would not promote it while another one
    is in order.

    It does not answer, it may not be promoted, or it does not follow the master. One that was
    promoted does not follow any more either: it was seen as a replica before (has an offset) and
    says that it is a master.
    """
    if replica["is_sdown"] or int(replica["slave-priority"]) == 0:
        return True
    was_promoted = replica["role-reported"] == "master" and int(replica["slave-repl-offset"]) > 0
    return replica["master-link-status"] != "ok" and not was_promoted


def view(replicas: Iterable[dict[str, Any]], master: dict[str, Any]) -> View | None:
    """Combine the answers to `SENTINEL REPLICAS` and, asked later, to `SENTINEL MASTER`.

    None: it takes the master for dead.
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
    """Return what more than half of all `sentinels` say of the newest configuration; None as long
    as they do not.
    """
    text = [item for item in views if item is not None]
    newest = [item for item in text if item.epoch == max(other.epoch for other in text)]
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
    """The replicas of a master that a client found through Sentinel, or was given directly: then
    `minimum` is all that is asked for.

    `minimum`: how many replicas must have a write in any case.
    """

    def __init__(self, client: Any, minimum: int) -> None:
        pool = client.connection_pool
        self.minimum = self.wait_for = minimum
        self._sentinels: list[Any] = list(
            getattr(getattr(pool, "sentinel_manager", None), "sentinels", [])
        )
        self._service: str = getattr(pool, "service_name", "")
        self._known: frozenset[Address] = frozenset()
        self._trusted = float("-inf")  # until when (monotonic)

    def _enough_by_itself(self, holders: Holders) -> bool | None:
        """Return whether that many suffice; None if sentinels have to say so."""
        if not self._sentinels:
            return holders.confirmed >= self.minimum
        self.wait_for = max(self.minimum, holders.recent)
        if len(holders.having) < self.minimum:
            return False
        return True if time.monotonic() < self._trusted and self._known <= holders.having else None

    def _enough_for(self, text: Agreed | None, holders: Holders) -> bool:
        if text is None:
            return False
        self._known, self._trusted = text.known, time.monotonic() + TRUSTED_S
        return text.run == holders.run and text.needed <= holders.having

    def suffice(self, holders: Holders) -> bool:
        """Return whether no failover can lose what `found.having` have.

        Asks sentinels one after the other, those that did not answer last.
        """
        enough = self._enough_by_itself(holders)
        if enough is not None:
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
            text = agreed(views, len(self._sentinels))
            if text is not None:
                return self._enough_for(text, holders)
        return False


class AsyncReplicas(Replicas):
    """The same with a client of redis.asyncio."""

    def __init__(self, client: Any, minimum: int) -> None:
        super().__init__(client, minimum)
        self._asked: dict[
            Any, asyncio.Task[View | None]
        ] = {}  # sentinels that have not answered yet

    async def sufficient(self, holders: Holders) -> bool:
        """`suffice`, asking all sentinels together until a majority has answered."""
        enough = self._enough_by_itself(holders)
        return self._enough_for(await self._ask(), holders) if enough is None else enough

    async def _ask(self) -> Agreed | None:
        waiting = set()
        for sentinel in self._sentinels:
            if (
                sentinel not in self._asked
            ):  # one that is cut off is not asked again until that is known
                self._asked[sentinel] = task = asyncio.create_task(
                    self._view(sentinel), name="midstream-sentinel"
                )
                waiting.add(task)
        views: list[View | None] = []
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            views += [task.result() for task in done]
            text = agreed(views, len(self._sentinels))
            if text is not None:
                return text
        return None

    async def _view(self, sentinel: Any) -> View | None:
        try:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                replicas = await sentinel.sentinel_slaves(self._service)
                return view(replicas, await sentinel.sentinel_master(self._service))
            return None
        finally:
            del self._asked[sentinel]
