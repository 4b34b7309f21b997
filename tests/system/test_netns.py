"""What becomes of jobs when the wire between a worker and everything else is cut for half a lease?

`make test-machines` cuts it for longer, and cuts, slows and kills more.
"""

import time
from pathlib import Path

import httpx2
import pytest
from fleet import Fleet
from network import Network, why_not
from wait_kit import wait_until

from midstream.workers.serving.heartbeat import RENEWALS_PER_LEASE

LEASE_S = 8.0


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a second namespace")
def test_a_partition_of_half_a_lease_fails_no_job(tmp_path: Path) -> None:
    names = ("relay", "callbacks", "worker", "api")
    times = {"engine_options": {"token_s": 0.05}, "lease_s": LEASE_S}
    with (
        Network("w1") as network,
        Fleet(tmp_path, network, {"worker": "w1"}, names, **times) as fleet,
        httpx2.Client(base_url=fleet.url, timeout=90) as http,
        fleet.client() as redis,
    ):
        # One ends while the wire is cut, so that its receipts wait in the outbox; the other goes on
        # after it.
        jobs = [
            http.post(
                "/v1/jobs",
                json={
                    "model": "fake-model",
                    "prompts": ["hello", "there"],
                    "sampling": {"max_tokens": tokens},
                    "capture": {"layers": "all", "positions": "all"},
                },
            ).json()["id"]
            for tokens in (120, 260)
        ]
        wait_until(lambda: all(redis.hget(f"ms:job:{job}", "lease") for job in jobs))
        lease = redis.hget(f"ms:job:{jobs[0]}", "lease")
        wait_until(lambda: redis.hget(f"ms:job:{jobs[0]}", "lease") != lease)
        # The worst moment: the next renewal is the first that is lost. TCP itself sends it again
        # after 3.3 s, and after 6.6 s: too late.
        time.sleep(LEASE_S / RENEWALS_PER_LEASE - 0.05)
        network.cut("w1")
        time.sleep(LEASE_S / 2)
        network.heal()
        for job in jobs:
            view = http.get(f"/v1/jobs/{job}", params={"wait": 60}).json()
            assert view["state"] == "succeeded"
            assert view["attempt"] == 1
            assert view["receipts"] == 2
