"""What is killed when? A schedule drawn from a seed, and its execution beside the load."""

import asyncio
import random
import signal
from dataclasses import dataclass, field

from cluster import Cluster, Outage

#: Fault → how often the full gate causes it: kills, stops (SIGTERM), kills of a process and of its
#: next start, pauses past the lease (SIGSTOP), refused writes of Redis; a machine that dies, and
#: whose Redis loads its log slowly while the other processes on it start; a relay that is away for
#: longer than receipts may take. `api`: for each replica.
FULL = {
    "worker": 30,
    "gradients": 10,
    "redis": 5,
    "relay": 5,
    "api": 2,
    "callbacks": 2,
    **{f"{kind} stop": 1 for kind in ("worker", "gradients", "relay", "api", "callbacks")},
    "worker start": 4,
    **{f"{kind} start": 1 for kind in ("gradients", "relay", "api", "callbacks")},
    "worker pause": 3,
    "gradients pause": 1,
    "redis full": 3,
    "machine": 2,
    "relay long": 1,
}
#: In a run of its own, because jobs wait for the weights that they were accepted for: all workers
#: end, and come back with other weights.
OTHER_WEIGHTS = {"worker": 6, "gradients": 2, "relay": 1, "redis": 1, "model": 4}
#: And where harvests go into a bucket: it goes away, it answers 503 and cuts uploads.
BUCKET = {"bucket away": 5, "bucket busy": 10}
STOP = " stop"
START = " start"
PAUSE = " pause"
NO_ROOM = " full"
AWAY = " away"
BUSY = " busy"
LONG = " long"
#: A paused worker goes on so many seconds after its lease has run out.
PAST_LEASE_S = 3.0
#: A killed process is started again after so many seconds, at most.
DOWN_S = 1.0
#: A relay is away for longer than `capture_timeout_s` by this: its sign of life lasts some time, in
#: which the time of receipts counts.
LONG_S = 25.0
#: Seconds between two looks at whether jobs wait for other weights.
LOOK_S = 1.0
#: What dies with a machine.
MACHINE = ["redis", "relay", "callbacks", "worker", "api"]
#: Faults happen between these shares of the load, so that each has something before and something
#: behind it.
FIRST = 0.03
LAST = 0.95


@dataclass
class Fault:
    """Before job number `before` is sent, one of `targets` is killed, or gets SIGTERM; or
    `together` all of them.
    """

    kind: str  # as in `FULL`
    targets: list[str]
    before: int
    down_s: float
    fired: asyncio.Event = field(default_factory=asyncio.Event)
    outage: Outage | None = None
    together: bool = False


def schedule(rng: random.Random, cluster: Cluster, jobs: int, kills: dict[str, int]) -> list[Fault]:
    """All faults in the order in which they happen."""
    wanted: list[tuple[str, list[str]]] = []
    engines = [*cluster.workers, *cluster.gradients]
    together = {"machine": [*MACHINE, *cluster.gradients], "model": engines}
    one_of = {"worker": cluster.workers, "gradients": cluster.gradients}
    for kind, count in kills.items():
        what = kind.partition(" ")[0]
        if what in together:
            wanted += [(kind, together[what])] * count
        elif what in one_of:
            names = one_of[what]
            wanted += [(kind, rng.sample(names, len(names))) for _ in range(count)]
        elif what == "api":
            wanted += [(kind, [replica]) for replica in cluster.ports for _ in range(count)]
        else:
            wanted += [(kind, [what])] * count
    faults = [
        Fault(
            kind,
            targets,
            rng.randint(int(FIRST * jobs), int(LAST * jobs)),
            rng.uniform(0.05, DOWN_S),
        )
        for kind, targets in wanted
    ]
    for fault in faults:
        fault.together = fault.kind in together
        if fault.kind.endswith(LONG):
            fault.down_s += cluster.settings.capture_timeout_s + LONG_S
    return sorted(faults, key=lambda fault: fault.before)


class Chaos:
    """Executes faults as the load comes to them; several things may be away at once, the same thing
    never twice.
    """

    def __init__(self, cluster: Cluster, faults: list[Fault]):
        self._cluster = cluster
        self.faults = faults
        self._busy: set[str] = set()
        self._freed = asyncio.Condition()
        self._reviving: list[asyncio.Task[None]] = []

    async def pass_job(self, number: int) -> None:
        """Wait until everything that is to be killed before this job has been killed."""
        for fault in self.faults:
            if fault.before <= number and not fault.fired.is_set():
                await self._fire(fault)

    async def serve_all(self) -> None:
        """Give the workers other weights whenever only jobs that were accepted for those are left,
        until cancelled.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            if await asyncio.to_thread(self._cluster.unserved):
                engines = [*self._cluster.workers, *self._cluster.gradients]
                await self._fire(Fault("model", engines, 0, 0.0, together=True))

    async def end(self) -> None:
        """Everything is up again."""
        for task in self._reviving:
            await task

    async def _fire(self, fault: Fault) -> None:
        async with self._freed:
            few = (
                self._busy.isdisjoint
                if fault.together
                else lambda names: not self._busy.issuperset(names)
            )
            await self._freed.wait_for(lambda: few(fault.targets))
            targets = (
                fault.targets
                if fault.together
                else [next(name for name in fault.targets if name not in self._busy)]
            )
            self._busy.update(targets)
        strikes = {
            STOP: self._cluster.stop_in_order,
            START: self._cluster.strike_start,
            NO_ROOM: self._cluster.fill,
            AWAY: self._cluster.part,
            BUSY: self._cluster.burden,
        }
        strike = next(
            (found for suffix, found in strikes.items() if fault.kind.endswith(suffix)),
            self._cluster.strike,
        )
        how = signal.SIGSTOP if fault.kind.endswith(PAUSE) else signal.SIGKILL
        if fault.together:
            fault.outage = await asyncio.to_thread(
                {"machine": self._cluster.outage, "model": self._cluster.swap}[fault.kind], targets
            )
        else:
            fault.outage = await asyncio.to_thread(strike, targets[0], how)
        fault.fired.set()
        self._reviving.append(asyncio.create_task(self._revive(fault, targets)))

    async def _revive(self, fault: Fault, targets: list[str]) -> None:
        await asyncio.sleep(
            fault.down_s
            + (self._cluster.settings.lease_s + PAST_LEASE_S if fault.outage.paused else 0)
        )
        if "redis" not in targets:
            # what starts while Redis is away waits for it, but says so by ending where it must
            await self._until_free("redis")
        await asyncio.to_thread(self._cluster.revive, fault.outage)
        async with self._freed:
            self._busy.difference_update(targets)
            self._freed.notify_all()

    async def _until_free(self, name: str) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: name not in self._busy)
