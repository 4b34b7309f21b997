"""Whatever a process had just made durable when it was killed: does the job end right, once, and
does its client learn it?

A process is started with one crash point armed, a job is sent that comes to it, and the process is
gone. What is started in its place has the next point armed, so that jobs may go through several
deaths. In the end the gate's judge looks at all of them.
"""

import asyncio
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

from clients import Clients, Observed, Plan
from cluster import Cluster, Outage
from gate import register, settle
from judge import Verdict, judge
from monitor import Monitor
from receiver import Clock, Receiver
from wait_kit import wait_until

from midstream.schemas.settings.faults import CRASH_POINTS, FOLDER

PLAIN = Plan(0, "job", ("a plain prompt",), 8)
PACKED = replace(
    PLAIN,
    way="captured completion",
    capture={"layers": [0], "positions": "all", "layout": "packed"},
)
SEGMENT = replace(PACKED, capture={"layers": [0], "positions": "all", "layout": "segment"})
#: Its tokens trigger the latch.
GUARDED = replace(PLAIN, way="guarded job", max_tokens=64, conversation="c")
SWEEP = Plan(0, "sweep", ("clean prompt", "other prompt"), 1)
CANCELLED = replace(PLAIN, way="cancelled job", max_tokens=400, when="running")
LONG = replace(PLAIN, max_tokens=200)

#: Point → who comes to it, and with what. In an order in which each process is needed by the next.
WALK: dict[str, tuple[str, Plan]] = {
    "api.committed": ("api", replace(PLAIN, way="completion")),
    "worker.received": ("worker", PLAIN),
    "worker.claimed": ("worker", replace(PLAIN, way="held job")),
    "worker.generated": ("worker", GUARDED),
    "worker.stored": ("worker", PACKED),
    "worker.released": ("worker", PLAIN),
    "worker.aborted": ("worker", CANCELLED),
    "capture.written": ("worker", PACKED),
    "capture.renamed": ("worker", PACKED),
    "segment.written": ("worker", SEGMENT),
    "segment.indexed": ("worker", SEGMENT),
    "receipt.stored": ("worker", PACKED),
    "receipt.sent": ("worker", replace(PLAIN, way="steered job")),
    "sweep.kept": ("worker", SWEEP),
    "relay.received": ("relay", PACKED),
    "relay.committed": ("relay", replace(GUARDED, conversation="d", capture=SEGMENT.capture)),
    "sweeper.requeued": ("callbacks", LONG),
    "webhook.lent": ("callbacks", PLAIN),
    "webhook.sent": ("callbacks", PLAIN),
}
#: Those that only harvests or attributions come to: `tests/system/test_harvest_kills.py` and
#: `packages/lab/tests/system/test_attributions.py`.
ELSEWHERE = {name for name in CRASH_POINTS if name.startswith(("harvest.", "attribution."))}
#: What has to go wrong besides, for a point to be reached.
BESIDES = {"worker.released": "engine_dies:tokens=3;"}
SETTINGS = {
    "engine_options": {"token_s": 0.01},
    "max_attempts": 50,
    "lease_s": 3.0,
    "tuning.dispatch_window": 1,
}
DEATH_S = 40.0


def test_the_workload_reaches_every_crash_point() -> None:
    assert set(WALK) | ELSEWHERE == set(CRASH_POINTS)


# field case 37, 38
def test_a_job_survives_a_kill_at_every_crash_point(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    with (
        Receiver() as receiver,
        Cluster(tmp_path, workers=1, apis=1, callbacks_fault=clock.fault, **SETTINGS) as cluster,
    ):
        monitor = Monitor(cluster.settings.redis_url)
        monitor.start()
        register(cluster, receiver.url)
        observed = asyncio.run(walk(cluster, receiver))
        settle(cluster, clock)
        verdict = Verdict()
        asyncio.run(judge(cluster.settings, observed, monitor, receiver, verdict))
        monitor.stop()
    assert verdict.found == {rule: [] for rule in verdict.RULES}
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == set(WALK)
    assert verdict.seen["attempts"] > len(WALK), "some of them had to be run again"
    assert verdict.seen["latches"] == 3
    assert verdict.seen["latched"] == 1, "the last job had one"
    assert verdict.seen["latches again"] > 0, "one was of a job that ran again"


async def walk(cluster: Cluster, receiver: Receiver) -> list[Observed]:
    """Every process at each of its points; what the clients observed."""
    clients = Clients(
        cluster.urls,
        "walk",
        random.Random(1),
        cluster.settings.max_wait_s,
        cluster.was_away,
        cluster.sources,
    )
    following = []
    try:
        for number, (point, (name, plan)) in enumerate(WALK.items()):
            outage = await asyncio.to_thread(arm, cluster, name, point)
            following.append(
                asyncio.create_task(
                    clients.follow(replace(plan, number=number, callback=receiver.url))
                )
            )
            if point == "sweeper.requeued":
                await asyncio.to_thread(lose_a_worker, cluster)
            await asyncio.to_thread(await_death, cluster, name, point)
            outage.killed = time.monotonic()
            following_process = list(WALK.values())[number + 1][0] if number + 1 < len(WALK) else ""
            if following_process != name:
                await asyncio.to_thread(cluster.revive, outage)
        observed = await asyncio.gather(*following)
        again = [replace(GUARDED, number=len(WALK) + number) for number in range(2)]
        return [*observed, *[await clients.follow(plan) for plan in again]]
    finally:
        await clients.close()


def arm(cluster: Cluster, name: str, point: str) -> Outage:
    """Let the process die at `point`; it may be dead of the one before."""
    outage = Outage(name, time.monotonic())
    cluster.outages.append(outage)
    if cluster.processes[name].poll() is None:
        cluster.kill(name)
    # what it finds may bring it there before it is ready
    cluster.spawn(name, fault=f"{BESIDES.get(point, '')}crash:at={point}")
    return outage


def lose_a_worker(cluster: Cluster) -> None:
    """A worker dies with its job and does not come back before the sweeper has noticed."""
    wait_until(lambda: cluster.do(lambda ledger: ledger.redis.scard("ms:held:w1")), DEATH_S)
    outage = cluster.strike("worker")
    await_death(cluster, "callbacks", "sweeper.requeued")
    cluster.revive(outage)


def await_death(cluster: Cluster, name: str, point: str) -> None:
    code = cluster.exit_code(name, DEATH_S)
    assert code == -signal.SIGKILL, (
        f"{name} ended with {code} instead of dying at {point}:\n{cluster.log(name)[-2000:]}"
    )
    assert (cluster.directory / FOLDER / point).exists(), f"{name} was killed, and not at {point}"
