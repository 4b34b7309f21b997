"""How many receipts per second go from rank to ledger, durably at both ends?

    python benchmarks/receipts.py [--receipts 20000] [--ranks 1 2] [--windows 1 64 1024]

Real SQLite outboxes (synchronous=FULL), a relay process and a Redis with AOF, all on this machine's
loopback. A receipt counts once the relay has acknowledged it, which it does after the commit in
Redis. `append` is what a writer thread pays; `alone` is the time from append to acknowledgement of
a single receipt in an idle system. Prints a line for each and all as JSON.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from services import relay, report

from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.receipts import sender
from midstream.broker.receipts.outbox import Outbox
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.jobs.receipts import CapturedFile, Receipt
from midstream.schemas.requests.specs import StoredCapture
from midstream.schemas.settings.settings import Settings

WORKER = "bench"
BOOT = "boot"
IDENTITY = "a" * 64
PROMPTS = 512  # per job
LONE = 50  # receipts for the latency of one


def receipt(job: str, request: int, rank: int, world: int) -> Receipt:
    path = f"bench/{job}/p{request:04d}.a1.pp0.safetensors"
    file = CapturedFile(
        path, 69_120, 123_456_789, rows=30, positions=1, sites={"post_block": list(range(30))}
    )
    return Receipt(
        version="0.1.0",
        worker=WORKER,
        boot=BOOT,
        job=job,
        request=request,
        attempt=1,
        rank=rank,
        world=world,
        tp=rank,
        pp=0,
        step=request,
        actions=0,
        checksum="0" * 16,
        status="ok",
        files=[file],
    )


async def claim_jobs(settings: Settings, count: int, ranks: int) -> list[str]:
    """`count` running jobs that wait for `PROMPTS × ranks` receipts each."""
    capture = StoredCapture(
        sites={"post_block": list(range(30))}, positions="last_prompt", tag="bench"
    )
    ledger = Ledger.connect(settings)
    made = []
    for _ in range(count):
        job = Job(
            id=new_job_id(),
            kind="generate",
            model="bench",
            prompts=[StoredPrompt(token_ids=[1])] * PROMPTS,
            sampling=Sampling(),
            created=now(),
            captures=[[capture]] * PROMPTS,
            identity=IDENTITY,
        )
        await ledger.submit(job, {})
        await ledger.claim(job.id, WORKER, BOOT, ranks, IDENTITY)
        made.append(job.id)
    await ledger.close()
    return made


def measure(
    settings: Settings,
    directory: Path,
    ranks: int,
    window: int,
    receipts: int,
) -> dict[str, Any]:
    """`receipts` per rank through `ranks` outboxes of this process at once."""
    jobs = asyncio.run(claim_jobs(settings, -(-receipts // PROMPTS), ranks))
    sender.WINDOW = window
    outboxes = [Outbox(directory, WORKER, rank, settings.relay_url) for rank in range(ranks)]
    appended = [0.0] * ranks

    def load(rank: int) -> None:
        start = time.perf_counter()
        for number in range(receipts):
            outboxes[rank].append(receipt(jobs[number // PROMPTS], number % PROMPTS, rank, ranks))
        appended[rank] = time.perf_counter() - start

    threads = [threading.Thread(target=load, args=(rank,)) for rank in range(ranks)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(outbox.flush(300) for outbox in outboxes):
        raise SystemExit("receipts were not acknowledged within 300 s")
    took = time.perf_counter() - start
    transactions = sum(outbox.store.transactions for outbox in outboxes)
    alone = []
    for number in range(LONE):
        begin = time.perf_counter()
        outboxes[0].append(receipt(jobs[0], number, 0, ranks))
        outboxes[0].flush(10)
        alone.append(time.perf_counter() - begin)
    for outbox in outboxes:
        outbox.close()
    return {
        "ranks": ranks,
        "window": window,
        "receipts": ranks * receipts,
        "settled_per_s": round(ranks * receipts / took),
        "append_us": round(1e6 * max(appended) / receipts, 1),
        "receipts_per_commit": round(ranks * receipts / transactions, 1),
        "alone_ms": round(1e3 * statistics.median(alone), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--receipts", type=int, default=20_000, help="per rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 64, 1024])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, relay(Path(scratch) / "redis") as settings:
        results = []
        for ranks in options.ranks:
            for window in options.windows:
                # One receipt per round trip is slow: a tenth of them shows it as well.
                count = options.receipts if window > 1 else max(1, options.receipts // 10)
                results.append(
                    measure(
                        settings,
                        Path(scratch) / f"outbox-{ranks}-{window}",
                        ranks,
                        window,
                        count,
                    )
                )
    report("receipts", results, cpus=os.cpu_count())


if __name__ == "__main__":
    main()
