"""A Celery worker for the tests of leases: `python lease_worker.py URL QUEUE with|without SECONDS`.

Prints what its task does.
"""

import sys
import time

from midstream.broker.queue import visibility
from midstream.broker.queue.celery_app import make_app, queue_of
from midstream.schemas.base.settings import Settings

#: Seconds; leases are renewed four times in each, so that a busy machine may be late with one or
#: two.
VISIBILITY_TIMEOUT_S = 5


def main() -> None:
    url, model, leases, seconds = sys.argv[1:]
    app = make_app(Settings(redis_url=url, visibility_timeout_s=VISIBILITY_TIMEOUT_S))
    if leases == "with":
        app.steps["consumer"].add(visibility.LeaseStep)

    @app.task(name="midstream.generate")
    def generate(job_id: str) -> None:
        print("start", job_id, flush=True)
        time.sleep(float(seconds))
        print("end", job_id, flush=True)

    app.Worker(
        redirect_stdouts=False,
        pool="threads",
        concurrency=4,
        queues=[queue_of(model)],
        without_gossip=True,
        without_mingle=True,
        quiet=True,
        loglevel="ERROR",
        hostname=f"{model}@test",
    ).start()


if __name__ == "__main__":
    main()
