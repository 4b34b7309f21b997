"""The fault gate: does anything that was accepted get lost, or happen twice, while every part of
the service is killed?

    python tests/faults/gate.py                        # 10,000 jobs, a random seed, which it prints
    python tests/faults/gate.py --seed 7 --jobs 1000 --kill worker=4 --kill redis=1

Prints what it saw as JSON. Exit code 1 when a rule was broken.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1] / "system"),
        str(Path(__file__).parents[1]),
        str(Path(__file__).parents[1] / "fake_engine"),
        str(Path(__file__).parents[2] / "packages" / "s3" / "tests"),
    ]

from chaos import FULL, Chaos, Fault, schedule
from clients import (
    EVERYONE,
    GRADIENT_WAYS,
    HELD,
    MODEL,
    POLICIES,
    POLICY_WAYS,
    WATCHED_WAYS,
    WAYS,
    Clients,
    Observed,
    Plan,
    plans,
)
from cluster import MODELS, Cluster
from harvest_kit import check_equal
from judge import Verdict, judge
from leftovers import Census, own_temporary_folder
from midstream_fake_engine.model import HIDDEN_SIZE, identity_of
from monitor import Monitor
from receiver import LADDER_S, STEP_S, Clock, Receiver
from s3_kit import FaultProxy

from midstream.client import Client
from midstream_harvest.reader import open as open_harvest

#: Clients that wait for their jobs at the same time. While one waits for longer than this, no other
#: begins: all attributions and fits are computed by one worker in turn, and on a slow machine 128
#: clients would wait there until they give up.
AT_ONCE = 128
LONGEST_S = 150.0
#: Before this share of the jobs the receiver of webhooks goes away for an hour.
HOUR_AT = 0.4
#: After the last client has its answer: late receipts and webhooks, and lists that a sweep still
#: has to look at.
SETTLE_S = 60.0
#: Harvests that are made again when nothing is killed any more.
CALM = 2


@dataclass
class Report:
    """What a run has shown."""

    seed: int
    jobs: int
    seconds: float
    verdict: Verdict
    observed: list[Observed]
    faults: list[Fault]
    left: dict[str, Any]

    @property
    def clean(self) -> bool:
        return self.verdict.clean

    def figures(self) -> dict[str, Any]:
        """What was asked, killed, seen and broken, and how long it took, as JSON."""
        held = [observed for observed in self.observed if observed.plan.way in HELD]
        answers: Counter[str] = sum((observed.answers for observed in self.observed), Counter())
        return {
            "seed": self.seed,
            "jobs": self.jobs,
            "seconds": round(self.seconds, 1),
            "jobs_per_s": round(self.jobs / self.seconds, 1),
            "kills": dict(Counter(fault.kind for fault in self.faults if fault.outage)),
            "ways": dict(Counter(observed.plan.way for observed in self.observed)),
            "held": {
                "asked": len(held),
                "resolved": sum(bool(observed.ids) for observed in held),
                "longest_s": round(max((observed.held_s for observed in held), default=0.0), 1),
            },
            "answers": dict(sorted(answers.items())),
            "seen": dict(self.verdict.seen),
            "broken": {rule: found[:10] for rule, found in self.verdict.found.items() if found},
            "when": self.when(),
            "left": self.left,
            "recovery": recovery(self.faults, self.observed),
        }

    def when(self) -> dict[str, list[str]]:
        """Return, for each job that a broken rule names, its life and the faults in it: seconds of
        `time.monotonic`.
        """
        found: dict[str, list[str]] = {}
        texts = " ".join(text for texts in self.verdict.found.values() for text in texts)
        for client in self.observed:
            if not client.id or client.id not in texts:
                continue
            outages = [(fault.kind, fault.outage) for fault in self.faults if fault.outage]
            found[client.id] = [f"lived {client.begun:.1f} to {client.finished:.1f}"] + [
                f"{kind} {outage.name} {outage.killed:.1f} to {outage.ready:.1f}"
                for kind, outage in outages
                if outage.killed < client.finished and outage.ready > client.begun
            ]
        return found


def recovery(faults: list[Fault], observed: list[Observed]) -> dict[str, dict[str, Any]]:
    """Per kind of kill, seconds from it: until the process was ready again (its pause included),
    until the first job that was accepted after it had finished, and until every job had finished
    that was under way. Median and longest.
    """
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ended = [client for client in observed if client.finished]
    for fault in faults:
        if fault.outage is None:
            continue
        at = fault.outage.killed
        row = found[fault.kind]
        row["ready_s"].append(fault.outage.ready - at)
        row["next_s"].append(
            min((client.finished for client in ended if client.accepted > at), default=at) - at
        )
        row["flight_s"].append(
            max(
                (client.finished for client in ended if client.begun < at < client.finished),
                default=at,
            )
            - at
        )
    return {
        kind: {"times": len(rows["ready_s"])}
        | {
            name: [round(statistics.median(values), 2), round(max(values), 2)]
            for name, values in rows.items()
        }
        for kind, rows in sorted(found.items())
    }


async def _load(
    cluster: Cluster,
    faults: list[Fault],
    rng: random.Random,
    jobs: int,
    receiver: Receiver,
    clock: Clock,
    say: Callable[[str], object],
    ways: dict[str, int],
) -> list[Observed]:
    """All clients, `AT_ONCE` at a time, and the faults among them."""
    chaos = Chaos(cluster, faults)
    clients = Clients(
        cluster.urls,
        f"gate-{os.urandom(4).hex()}",
        rng,
        cluster.settings.max_wait_s,
        cluster.was_away,
        cluster.sources,
    )
    room = asyncio.Semaphore(AT_ONCE)
    observed: list[Observed] = []
    tasks: list[asyncio.Task[None]] = []
    began: dict[asyncio.Task[None], float] = {}  # of the clients that wait

    async def one(plan: Plan) -> None:
        try:
            observed.append(await clients.follow(plan))
        finally:
            room.release()
        if len(observed) % 1000 == 0:
            say(f"{len(observed)} of {jobs} jobs are over")

    serving = asyncio.create_task(chaos.serve_all())
    try:
        for plan in plans(rng, jobs, receiver.url, files=True, ways=ways):
            if plan.number == int(HOUR_AT * jobs):
                tasks.append(asyncio.create_task(asyncio.to_thread(clock.pass_hour, receiver)))
            await chaos.pass_job(plan.number)
            await room.acquire()
            if long := [task for task, at in began.items() if at < time.monotonic() - LONGEST_S]:
                await asyncio.wait(long)
            client = asyncio.create_task(one(plan))
            began[client] = time.monotonic()
            client.add_done_callback(began.pop)
            tasks.append(client)
        await asyncio.gather(*tasks)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await chaos.end()
    finally:
        for task in [serving, *tasks]:
            task.cancel()
        await clients.close()
    return observed


def run(
    directory: Path,
    seed: int,
    jobs: int,
    kills: dict[str, int],
    *,
    workers: int = 2,
    apis: int = 2,
    bucket: FaultProxy | None = None,
    everyone: bool = False,
    say: Callable[[str], object] = print,
    **settings: Any,
) -> Report:
    """The gate on a cluster of its own in `directory`, with `settings` of the service.

    `bucket`: what harvests go into. `everyone`: there is a policy of all traffic, and doses under
    it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    verdict = Verdict()
    clock = Clock(directory / "clock")
    parts: dict[str, Any] = {
        "workers": workers,
        "gradients": True,
        "apis": apis,
        "callbacks_fault": clock.fault,
        "bucket": bucket,
    }
    with (
        own_temporary_folder() as temporary,
        Receiver() as receiver,
        Cluster(directory, **parts, **settings) as cluster,
    ):
        census = Census(cluster, temporary)
        ways = WAYS | GRADIENT_WAYS
        if "model" not in kills:
            register(cluster, receiver.url, everyone)
            ways |= POLICY_WAYS | (WATCHED_WAYS if everyone else {})
        faults = schedule(rng, cluster, jobs, kills)
        monitor = Monitor(cluster.settings.redis_url)
        monitor.start()
        started = time.monotonic()
        load = _load(cluster, faults, rng, jobs, receiver=receiver, clock=clock, say=say, ways=ways)
        observed = asyncio.run(load)
        seconds = time.monotonic() - started
        settle(cluster, clock)
        asyncio.run(judge(cluster.settings, observed, monitor, receiver, verdict))
        monitor.stop()
        if cluster.model != MODELS[0]:
            cluster.swap([*cluster.workers, *cluster.gradients])
        undisturbed(cluster, observed, verdict)
        verdict.say("left over", *census.left(), of="at the end of the load")
        left = census.figures()
        cluster.stop()
        verdict.say("left over", *census.left(), of="after the stop")
    return Report(
        seed=seed,
        jobs=jobs,
        seconds=seconds,
        verdict=verdict,
        observed=observed,
        faults=faults,
        left=left,
    )


def register(cluster: Cluster, url: str, everyone: bool = False) -> None:
    """`POLICIES`, with webhooks to `url`; with `everyone`, `EVERYONE`."""
    with Client(next(iter(cluster.urls.values()))) as client:
        weight = [1.0] * HIDDEN_SIZE
        client.probes.put("token", weight=weight, layer=0, model=MODEL, labels=["token"])
        for name, fields in POLICIES.items():
            content = fields | {"actions": [*fields["actions"], {"action": "webhook", "url": url}]}
            client.policies.put(name, model=MODEL, probe="token", **content)
        if everyone:
            client.policies.put("everyone", model=MODEL, probe="token", **EVERYONE)


def undisturbed(cluster: Cluster, observed: list[Observed], verdict: Verdict) -> None:
    """The first harvests again, with nothing killed: the same rows in the same order in the same
    shards.
    """
    with Client(next(iter(cluster.urls.values()))) as client:
        harvests = [
            each
            for each in observed
            if each.plan.way == "harvest" and each.state == "succeeded" and not each.plan.rewrite
        ]
        harvests = [
            each
            for each in harvests
            if client.harvests.get(each.id).identity == identity_of(cluster.settings)
        ]
        for first in harvests[:CALM]:
            again = client.harvests.wait(
                client.harvests.submit(**first.plan.body()), timeout=SETTLE_S
            )
            try:
                check_equal(
                    open_harvest(client.harvests.get(first.id).uri), open_harvest(again.uri)
                )
            except AssertionError as error:
                verdict.say(
                    "wrong answer",
                    f"{first.id} is not what {again.id} is, which was not disturbed: {error}",
                )
            verdict.seen["harvests again"] += 1


def settle(cluster: Cluster, clock: Clock) -> None:
    """Until no job and no webhook is under way any more, or for `SETTLE_S`: the judge reports what
    is left then.
    """
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline and cluster.do(lambda ledger: ledger.redis.zcard("ms:live")):
        time.sleep(0.2)
    end = clock.ahead + LADDER_S
    while clock.ahead < end and cluster.do(lambda ledger: ledger.redis.zcard("ms:hooks")):
        clock.advance(STEP_S if time.monotonic() < deadline else 600.0)
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill", action="append", metavar="KIND=TIMES", help=f"default: {FULL}")
    parser.add_argument("--keep", type=Path, help="a directory for data and logs, which are kept")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    kills = (
        {kind: int(times) for kind, _, times in (kill.partition("=") for kill in options.kill)}
        if options.kill
        else FULL
    )
    with tempfile.TemporaryDirectory(prefix="fault-gate-") as temporary:
        report = run(
            options.keep or Path(temporary), seed, options.jobs, kills, workers=options.workers
        )
    print(json.dumps(report.figures(), indent=1))
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
