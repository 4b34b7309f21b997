"""How much of Redis does a job take: waiting in the queue, being run, over, for each event, and
with a capture's receipt?

    python benchmarks/redis_memory.py [--jobs 5000] [--tokens 64]

A Redis and a ledger, no other process. Every number is the growth of `used_memory` over all jobs,
divided by their number.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import redis
from receipts import receipt

from midstream import __version__
from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.ops import redis_server
from midstream.schemas.base.records import now
from midstream.schemas.base.settings import Settings
from midstream.schemas.jobs.jobs import Event, Job, Output, Sampling, StoredPrompt
from midstream.schemas.requests.specs import StoredCapture

WORKER, BOOT, IDENTITY, EVENTS = "bench", "boot", "a" * 64, 16


async def measure(settings: Settings, jobs: int, tokens: int, captures: bool) -> dict[str, Any]:
    """Bytes for each job; of a prompt and an output of `tokens` tokens each."""
    ledger = Ledger.connect(settings)
    await ledger.redis.flushall()
    await ledger.redis.config_set("appendonly", "no")  # its buffers come and go
    capture = StoredCapture(
        sites={"post_block": list(range(30))}, positions="last_prompt", tag="bench"
    )
    prompt, text = (
        StoredPrompt(token_ids=list(range(tokens)), text="word " * tokens),
        "word " * tokens,
    )
    ids = [new_job_id() for _ in range(jobs)]
    output = Output(
        index=0,
        text=text,
        token_ids=list(range(tokens)),
        finish_reason="length",
        prompt_tokens=tokens,
    )

    async def used() -> int:
        memory = await ledger.redis.info("memory")
        return int(memory["used_memory"] - memory["mem_clients_normal"] - memory["mem_aof_buffer"])

    async def each(step: Any) -> float:
        before = await used()
        for at in range(0, jobs, 64):
            await asyncio.gather(*(step(job_id) for job_id in ids[at : at + 64]))
        return round((await used() - before) / jobs)

    async def submit(job_id: str) -> None:
        job = Job(
            id=job_id,
            kind="generate",
            model="bench",
            prompts=[prompt],
            sampling=Sampling(max_tokens=tokens),
            created=now(),
            captures=[[capture]] if captures else [],
            identity=IDENTITY,
        )
        await ledger.submit(job, {})

    async def claim(job_id: str) -> None:
        assert await ledger.claim(job_id, WORKER, BOOT, 1, IDENTITY)

    async def events(job_id: str) -> None:
        for number in range(1, EVENTS + 1):
            data = {"index": 0, "text": "word ", "token_ids": [1], "finish_reason": None}
            assert await ledger.emit(job_id, 1, number, Event(event="token", data=data, attempt=1))

    async def store(job_id: str) -> None:
        await ledger.store_outputs(
            job_id, 1, [output], Event(event="output", data={"index": 0}, attempt=1)
        )

    await submit(new_job_id())  # scripts are loaded
    line: dict[str, Any] = {
        "captures": captures,
        "queued": await each(submit),
        "more_while_running": await each(claim),
    }
    line["each_event"] = round(await each(events) / EVENTS)
    if captures:
        settler = Settler(redis.Redis.from_url(settings.redis_url), settings)
        told = [(seq, receipt(job_id, 0, 0, 1)) for seq, job_id in enumerate(ids, 1)]
        before = await used()
        settler.settle(WORKER, 0, "epoch", told)
        line["each_receipt"] = round((await used() - before) / jobs)
    line["more_when_over"] = await each(store)
    before = await used()
    await ledger.close()
    line["kept_bytes_in_all"] = sum(
        value
        for name, value in line.items()
        if name in ("queued", "more_while_running", "more_when_over")
    )
    line["used_mib"] = round(before / 2**20, 1)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt and each output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        server = redis_server.start(Path(folder) / "redis")
        settings = Settings(redis_url=server.url, data_dir=folder, lease_s=600)
        report = [
            asyncio.run(measure(settings, options.jobs, options.tokens, captures))
            for captures in (False, True)
        ]
        server.stop()
    for line in report:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    print(
        json.dumps(
            {
                "benchmark": "redis_memory",
                "version": __version__,
                "jobs": options.jobs,
                "tokens": options.tokens,
                "results": report,
            }
        )
    )


if __name__ == "__main__":
    main()
