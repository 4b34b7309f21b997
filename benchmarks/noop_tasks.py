"""Raw Celery to compare with: a worker whose one task does nothing but count itself in Redis.

Run as `python noop_tasks.py REDIS_URL` it is that worker: Celery's own consumer and transport, with
the settings that our workers have.
"""

import sys
from typing import Any

import redis

from midstream.broker.queue.celery_app import make_app
from midstream.schemas.settings.settings import Settings

DONE = "bench:noop:done"
QUEUE = "bench-noop"


def noop_app(redis_url: str) -> Any:
    app = make_app(Settings(redis_url=redis_url))
    app.conf.worker_consumer = "celery.worker.consumer:Consumer"
    counter = redis.Redis.from_url(redis_url)

    @app.task(name="bench.noop")
    def noop(_: str) -> None:
        counter.incr(DONE)

    return app


if __name__ == "__main__":
    noop_app(sys.argv[1]).worker_main(
        [
            "worker",
            "--pool",
            "threads",
            "--concurrency",
            "128",
            "-Q",
            QUEUE,
            "-n",
            "noop@%h",
            "-E",
            "--without-gossip",
            "--without-mingle",
        ]
    )
