"""Are captures durable, readable and deletable when API, worker and callbacks share a bucket and no
disk, whatever becomes of the bucket?

The S3 server is moto, in this process, behind a proxy that checks signatures and injects faults.
Everything but the model is real.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import s3_kit
from midstream_fake_engine.model import NUM_LAYERS, residual_rows
from s3_kit import FaultProxy
from stack import Stack
from typer.testing import CliRunner
from wait_kit import wait_until

from midstream.client import CaptureReader, Client
from midstream.client.cli import main
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import State
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.source_runs import RunRow, row_name, run_key
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream_s3.client import RETRY_S
from midstream_s3.store import S3Store, open_store


class Apart(Stack):
    """Every process has a data directory of its own."""

    def spawn(self, name: str, *, suffix: bool = True, **changed: Any) -> None:
        folder = self.directory / name
        folder.mkdir(exist_ok=True)
        super().spawn(name, suffix=suffix, **({"data_dir": str(folder)} | changed))


@pytest.fixture(scope="module")
def stack(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    settings = {
        "artifact_store": s3_kit.uri(proxy, prefix="lab"),
        "artifact_access_key": s3_kit.ACCESS_KEY,
        "artifact_secret_key": s3_kit.SECRET_KEY,
    }
    with Apart(tmp_path_factory.mktemp("stack"), api=True, lease_s=4.0, **settings) as running:
        yield running


@pytest.fixture(autouse=True)
def healthy(proxy: FaultProxy) -> Iterator[None]:
    yield
    proxy.faults.clear()


@pytest.fixture
def bucket(stack: Apart) -> S3Store:
    return open_store(stack.settings.artifacts)


def capture(tag: str = "t", **changes: Any) -> StoredCapture:
    return StoredCapture(
        **(
            {
                "sites": {"post_block": [0, 1, 2, 3]},
                "positions": "all_prompt",
                "tag": tag,
                "layout": "packed",
            }
            | changes
        )
    )


def check(reader: CaptureReader, requests: int = 1) -> None:
    """Every row is the model's, and every file has its CRC32."""
    assert reader.requests() == list(range(requests))
    for request in range(requests):
        for layer in reader.layers(request):
            expected = residual_rows(
                layer, np.array(reader.positions(request)), np.array(reader.token_ids(request))
            )
            np.testing.assert_array_equal(reader.array(layer, request=request), expected)
    assert all(each.ok for each in reader.verify())


@pytest.mark.long
@pytest.mark.parametrize("layout", ["packed", "per_file", "segment"])
def test_captures_come_back_by_link_through_the_api_and_from_the_bucket(
    stack: Apart, client: Client, proxy: FaultProxy, bucket: S3Store, layout: str, tmp_path: Path
) -> None:
    job = stack.submit(["one", "three"], capture=capture(layout.replace("_", "-"), layout=layout))
    assert stack.wait(job).state is State.SUCCEEDED
    manifest = httpx2.get(f"{stack.url}/v1/captures/{job}").json()
    assert s3_kit.SECRET_KEY not in str(manifest)
    links = [file["link"] for file in manifest["files"]]
    assert [link is None for link in links] == [layout == "segment"] * len(links), (
        "a link to a segment would open other jobs' rows"
    )
    proxy.seen.clear()
    check(client.capture(job), requests=2)
    assert proxy.count(r"^GET .*X-Amz-Signature") == (0 if layout == "segment" else len(links))
    proxy.fault("503", "X-Amz-Signature")
    check(client.capture(job, tmp_path / "fallback"), requests=2)
    check(CaptureReader(bucket.uri, job), requests=2)
    found = httpx2.get(f"{stack.url}/v1/captures/{job}/norms", params={"request": 1}).json()
    rows = residual_rows(
        found["layers"][-1], np.array(found["positions"]), np.array(found["token_ids"])
    )
    np.testing.assert_array_equal(
        np.array(found["norms"][-1], np.float32), np.linalg.norm(rows, axis=1)
    )
    shown = CliRunner().invoke(main.app, ["check", "capture", bucket.uri, "--set", f"job={job}"])
    assert shown.exit_code == 0, shown.output
    assert not list(stack.directory.rglob("*.safetensors")), "nothing of it is on a disk"
    for name in ("worker", "api", "callbacks"):
        assert s3_kit.SECRET_KEY not in stack.log(name)


def test_a_job_is_held_until_its_capture_is_durable(
    stack: Apart, proxy: FaultProxy, bucket: S3Store
) -> None:
    proxy.fault("slow", r"PUT .*/held/.*\.safetensors", times=1, seconds=3.0)
    began = time.monotonic()
    job = stack.submit(["one"], capture=capture("held"))
    wait_until(lambda: proxy.faults[0].seen == 1)
    view = stack.view(job)
    assert view.state == State.RUNNING
    assert view.capture_status == "pending"
    assert bucket.children("held/") == []
    view = stack.wait(job)
    assert view.state == State.SUCCEEDED
    assert view.capture_status == "ok"
    assert time.monotonic() - began >= 3.0
    assert len(bucket.children(f"held/{job}/")) == 2


def test_rows_of_a_source_run_are_patched_from_the_bucket(stack: Apart) -> None:
    everywhere = capture(sites={hook: list(range(NUM_LAYERS)) for hook in HOOKS})
    run = stack.submit(
        ["The Eiffel Tower is in the city of"], max_tokens=1, capture=everywhere, run="paris"
    )
    assert stack.wait(run).state is State.SUCCEEDED
    row = row_name(RunRow(run_key(run, 0, "t"), "post_block", 2, 3))
    edit = StoredSteering(
        layers=[2], hook="post_block", positions=[3], family="replace", tensors=[row], numbers=[1.0]
    )
    job = stack.submit(["The Colosseum"], steering=[edit], runs={"paris": run})
    assert stack.wait(job).state is State.SUCCEEDED
    assert stack.result(job).determinism.consistent


@pytest.mark.parametrize("layout", ["packed", "segment"])
def test_a_deleted_capture_is_gone_from_the_bucket_for_links_and_readers(
    stack: Apart, client: Client, bucket: S3Store, layout: str
) -> None:
    job, other = (stack.submit(["one"], capture=capture("gone", layout=layout)) for _ in range(2))
    for each in (job, other):
        assert stack.wait(each).state is State.SUCCEEDED
    link = httpx2.get(f"{stack.url}/v1/captures/{job}").json()["files"][0]["link"]
    client.captures.delete(job)
    assert httpx2.get(f"{stack.url}/v1/captures/{job}").status_code == 410
    assert link is None or httpx2.get(link).status_code == 404
    with pytest.raises(MidstreamError) as caught:
        CaptureReader(bucket, job)
    assert caught.value.kind in ("gone", "not_found")
    assert bucket.children(f"gone/{job}/") == []
    check(client.capture(other))


@pytest.mark.long
def test_a_worker_killed_during_an_upload_loses_nothing(
    stack: Apart, client: Client, proxy: FaultProxy, bucket: S3Store
) -> None:
    fault = proxy.fault("slow", r"PUT .*/killed/.*\.json", times=1, seconds=5.0)
    job = stack.submit(["one", "three"], capture=capture("killed"))
    wait_until(lambda: fault.seen == 1)
    stack.crash("worker")
    assert stack.wait(job).state is State.SUCCEEDED
    check(client.capture(job), requests=2)
    check(CaptureReader(bucket, job), requests=2)
    client.captures.delete(job)
    wait_until(lambda: bucket.children(f"killed/{job}/") == [])


def test_a_store_that_is_away_for_seconds_costs_time_alone(
    stack: Apart, client: Client, proxy: FaultProxy
) -> None:
    proxy.stop()
    try:
        job = stack.submit(["one"], capture=capture("blip"))
        time.sleep(1.5)
    finally:
        proxy.start()
    assert stack.wait(job).state is State.SUCCEEDED
    check(client.capture(job))


@pytest.mark.long
def test_an_outage_longer_than_all_retries_costs_no_job(
    stack: Apart, client: Client, proxy: FaultProxy
) -> None:
    """Longer than requests are repeated, for jobs that run when it begins and for jobs that come
    after it was noticed.
    """
    first = [stack.submit(["x" * 40], max_tokens=16, capture=capture("long")) for _ in range(6)]
    proxy.stop()
    began = time.monotonic()
    try:
        wait_until(lambda: not stack.do(lambda ledger: ledger.workers())[0].healthy)
        body = {"model": "fake-model", "prompts": ["one"], "capture": {"layers": [1]}}
        assert httpx2.post(f"{stack.url}/v1/jobs", json=body).status_code == 503
        second = [stack.submit(["one"], capture=capture("long")) for _ in range(6)]
        time.sleep(max(0.0, began + 1.5 * RETRY_S - time.monotonic()))
        views = [stack.do(lambda ledger, job=job: ledger.view(job)) for job in second]
        assert {(view.state, view.attempt) for view in views} == {(State.QUEUED, 0)}, (
            "none is begun in vain"
        )
        assert stack.wait(stack.submit(["one"])).state is State.SUCCEEDED, "others run"
    finally:
        proxy.start()
    for job in (*first, *second):
        ended = stack.wait(job)
        assert ended.state is State.SUCCEEDED, ended.error
        check(client.capture(job))


def test_an_upload_that_is_refused_fails_its_job_alone(stack: Apart, proxy: FaultProxy) -> None:
    proxy.fault("403 AccessDenied", "PUT .*/refused/")
    jobs = [stack.submit(["one"], capture=capture(tag)) for tag in ("refused", "accepted")]
    refused, accepted = (stack.wait(job) for job in jobs)
    assert refused.state == State.FAILED
    assert accepted.state == State.SUCCEEDED
    assert "these credentials do not allow it" in refused.error.detail


def test_links_through_the_api_alone_and_a_quota(
    stack: Apart, client: Client, bucket: S3Store
) -> None:
    """Both are settings of the API: it is started with others."""
    job = stack.submit(["one"], capture=capture("private"))
    assert stack.wait(job).state is State.SUCCEEDED
    stack.replace("api", artifact_links="api", capture_quota_mib=1)
    assert [
        file["link"] for file in httpx2.get(f"{stack.url}/v1/captures/{job}").json()["files"]
    ] == [None]
    check(client.capture(job))
    writer = bucket.writer()
    writer.append("large/object", [bytes(1 << 20)])
    writer.commit()
    body = {"model": "fake-model", "prompts": ["one"], "capture": {"layers": [1]}}
    wait_until(lambda: "capture_quota_mib" in httpx2.post(f"{stack.url}/v1/jobs", json=body).text)
    bucket.delete("large/")
