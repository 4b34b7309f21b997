"""Does the callbacks process sweep, survive a restart of Redis, run what packages offer, and end
when told? Real processes.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import redis
from ledger_kit import MODEL, open_ledger, queued_job
from mortal_redis import mortal
from wait_kit import wait_until

from midstream.broker.queue.celery_app import lists_of, queue_of
from midstream.schemas.settings.settings import Settings, to_environment
from midstream.schemas.settings.tuning import Tuning


def test_the_reaper_resends_lost_messages_across_redis_restarts(tmp_path: Path) -> None:
    # field case 37
    async def lose_a_message() -> None:
        async with open_ledger(server.url) as ledger:
            job = await queued_job(ledger)
            await ledger.redis.delete(*lists_of(queue_of(MODEL)))
            await ledger.redis.zadd("ms:live", {job.id: 0})  # long queued

    with mortal(tmp_path / "redis") as server:
        settings = Settings(redis_url=server.url, tuning=Tuning(sweep_interval_s=0.2))
        process = subprocess.Popen(
            [sys.executable, "-m", "midstream.broker.callbacks"],
            env={**os.environ, **to_environment(settings)},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "callbacks ready\n"
            server.kill()
            time.sleep(1)
            server.start()
            asyncio.run(lose_a_message())
            with redis.Redis.from_url(server.url) as client:
                wait_until(lambda: client.exists(*lists_of(queue_of(MODEL))) == 1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def test_a_missing_setting_is_named_at_start() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")}
    ended = subprocess.run(
        [sys.executable, "-m", "midstream.broker.callbacks"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "MIDSTREAM_REDIS_URL" in ended.stderr
