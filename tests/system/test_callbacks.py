"""Does the callbacks process sweep, survive a restart of Redis, and end when told?"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ledger_kit import MODEL, make_job, open_ledger
from ports import free_port

from midstream.broker.ops import redis_server
from midstream.broker.queue.celery_app import lists_of, queue_of
from midstream.schemas.base.settings import Settings, to_environment


def test_the_reaper_resends_lost_messages_across_redis_restarts(tmp_path: Path) -> None:
    # field case 37
    server = redis_server.start(tmp_path / "redis", port=free_port())
    settings = Settings(redis_url=server.url, sweep_interval_s=0.2)
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "midstream.broker.callbacks"],
        env={**os.environ, **to_environment(settings)},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "callbacks ready\n"
        server.kill()
        time.sleep(1)
        server = redis_server.start(tmp_path / "redis", port=server.port)

        async def lose_and_wait() -> None:
            async with open_ledger(server.url) as ledger:
                job = make_job()
                await ledger.submit(job, {})
                await ledger.redis.zadd("ms:live", {job.id: 0})  # long queued
                deadline = time.monotonic() + 120
                while not await ledger.redis.exists(*lists_of(queue_of(MODEL))):
                    assert time.monotonic() < deadline, "no message was sent"
                    await asyncio.sleep(0.1)

        asyncio.run(lose_and_wait())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        server.stop()
        log.seek(0)
        print(log.read())
        log.close()


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
