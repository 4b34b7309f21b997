"""Does a capture wait for a bucket that takes nothing, fail when the bucket refuses it alone, and
is each request counted?
"""

import re
from pathlib import Path

import pytest
import s3_kit
from capture_kit import filesystem, finished
from prometheus_client import CollectorRegistry, generate_latest
from s3_kit import FaultProxy
from test_writer import Desk, capture
from wait_kit import wait_until

from midstream.broker.artifacts import retention
from midstream.broker.telemetry import store_metrics
from midstream.client import CaptureReader
from midstream.schemas.jobs.receipts import STORE_UNAVAILABLE, Receipt
from midstream.storage import calls
from midstream.storage.calls import Tally
from midstream.workers.runner.files.writer import WriteJob
from midstream_s3 import client as s3_client, store as s3_store
from midstream_s3.store import S3Store, open_store


@pytest.fixture
def bucket(s3: FaultProxy) -> S3Store:
    return open_store(s3_kit.uri(s3))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "RETRIES", 1)


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """Counts of this test alone."""
    made = Tally()
    monkeypatch.setattr(s3_client, "CALLS", made)
    monkeypatch.setattr(calls, "CALLS", made)
    return made


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("segment", "503"),
        ("packed", "503"),
        ("packed", "500 InternalError"),
        ("packed", "cut"),
        ("packed", "403 SignatureDoesNotMatch"),
        ("packed", "507 XMinioStorageFull"),
    ],
)
def test_while_the_store_takes_nothing_no_capture_is_tried_alone(
    s3: FaultProxy, bucket: S3Store, kind: str, layout: str
) -> None:
    consumer = filesystem(bucket)
    captures = [finished(f"job_{n}", layout=layout) for n in range(8)]
    assert bucket.trouble() == ""  # and that is known for a while
    s3.fault(kind, "PUT")
    s3.seen.clear()
    assert [outcome.unavailable for outcome in consumer.consume(captures)] == [True] * 8
    assert len({re.sub(r"\?.*", "", line) for line in s3.seen if line.startswith("PUT")}) <= 18, (
        "the group once, and a test write"
    )
    s3.seen.clear()
    assert all(outcome.unavailable for outcome in consumer.consume(captures))
    assert s3.count("PUT") <= 1, "the next group is not tried before a test write succeeds"
    s3.faults.clear()
    s3_store._troubles.forget(bucket)
    assert [outcome.error for outcome in consumer.consume(captures)] == [""] * 8
    assert CaptureReader(bucket, "job_7").requests() == [0]


def test_what_the_store_refuses_alone_fails_alone(s3: FaultProxy, bucket: S3Store) -> None:
    s3.fault("403 AccessDenied", "PUT .*job_1/")
    outcomes = filesystem(bucket).consume([finished(f"job_{n}", layout="packed") for n in range(4)])
    assert [(bool(outcome.error), outcome.unavailable) for outcome in outcomes] == [
        (False, False),
        (True, False),
        (False, False),
        (False, False),
    ]


def test_a_group_of_which_two_get_no_answer_is_not_tried_further(
    s3: FaultProxy, bucket: S3Store
) -> None:
    s3.fault("503", "PUT .*job_")
    outcomes = filesystem(bucket).consume([finished(f"job_{n}", layout="packed") for n in range(9)])
    assert all(outcome.unavailable for outcome in outcomes)
    first = s3.count("PUT .*job_8/")
    assert s3.count("PUT .*job_0/") == s3.count("PUT .*job_1/") == 2 * first


def test_receipts_say_that_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: FaultProxy, bucket: S3Store
) -> None:
    desk = Desk(tmp_path, monkeypatch, into=bucket)
    s3.fault("503", "PUT")
    desk.submit(capture(), request=0)
    desk.submit(capture(consumers=["filesystem", "nobody"]), request=1)
    wait_until(lambda: not desk.writer.backlog.size)
    late = Receipt(
        version="1",
        worker="w",
        boot="b",
        job="job_x",
        request=2,
        attempt=1,
        rank=0,
        world=1,
        tp=0,
        pp=0,
        step=1,
        actions=0,
        checksum="0" * 16,
        status="error",
        kind="capture_failed",
    )
    desk.writer.submit(WriteJob(late))  # given up by a step that waited for the writers
    s3.faults.clear()
    s3_store._troubles.forget(bucket)
    desk.submit(capture(), request=3)
    kinds = {request: (receipt.status, receipt.kind) for request, receipt in desk.close().items()}
    assert kinds == {
        0: ("error", STORE_UNAVAILABLE),
        1: ("error", STORE_UNAVAILABLE),
        2: ("error", STORE_UNAVAILABLE),
        3: ("ok", ""),
    }


def test_requests_are_counted_with_outcomes_retries_bytes_and_times(
    s3: FaultProxy, bucket: S3Store, tally: Tally
) -> None:
    s3.fault("503", "PUT", times=1)
    bucket.put("a/x", b"12345")
    with pytest.raises(FileNotFoundError):
        bucket.open("a/nothing")
    with bucket.open("a/x") as handle:
        assert handle.read(0, 5) == b"12345"
    s3.keys = {}
    with pytest.raises(PermissionError):
        bucket.children()
    found = tally.read()
    assert found["put"].outcomes == {"away": 1, "ok": 1}
    assert found["put"].retries == 1
    assert found["put"].bytes == 5
    assert found["get"].outcomes == {"missing": 1, "ok": 1}
    assert found["get"].bytes == 5
    assert found["list"].outcomes == {"refused": 1}
    assert sum(found["put"].buckets) == 2
    assert found["put"].seconds > 0


def test_an_upload_in_parts_is_counted_once_with_its_bytes(bucket: S3Store, tally: Tally) -> None:
    size = s3_store.PART + 1
    writer = bucket.writer()
    writer.append("a/big", [bytes(size)])
    writer.commit()
    assert tally.read()["upload"].outcomes == {"ok": 1}
    assert tally.read()["upload"].bytes == size


def test_metrics_add_this_process_and_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tally: Tally, bucket: S3Store
) -> None:
    bucket.put("a/x", b"12345")
    registry = CollectorRegistry()
    sources = [lambda: [tally.read()], lambda: [tally.read(), {}]]
    monkeypatch.setattr(store_metrics, "SOURCES", sources)
    registry.register(store_metrics.STORE)
    text = generate_latest(registry).decode()
    for line in (
        'requests_total{operation="put",outcome="ok"} 2.0',
        'bytes_total{operation="put"} 10.0',
        'retries_total{operation="put"} 0.0',
        'seconds_bucket{le="+Inf",operation="put"} 2.0',
        'seconds_count{operation="put"} 2.0',
    ):
        assert f"midstream_store_{line}" in text


def test_segments_of_a_bucket_stay_small_enough_to_be_rewritten(
    monkeypatch: pytest.MonkeyPatch, s3: FaultProxy, bucket: S3Store
) -> None:
    monkeypatch.setattr(s3_store, "REWRITTEN", 64 << 10)
    # 10,000 bytes of rows each
    captures = [finished(f"job_{n}", layout="segment", positions=range(500)) for n in range(6)]
    captures.append(finished("job_large", layout="segment", positions=range(4000)))
    outcomes = filesystem(bucket).consume(captures)
    assert [outcome.error for outcome in outcomes] == [""] * 7
    held: dict[str, list[str]] = {}
    for told, outcome in zip(captures, outcomes, strict=True):
        held.setdefault(outcome.files[0].path, []).append(told.spec.job)
    assert [len(jobs) for jobs in held.values()] == [2, 2, 2, 1]
    assert all(bucket.stat(path) <= 64 << 10 for path, jobs in held.items() if len(jobs) > 1)
    s3.seen.clear()
    retention.delete(bucket, ["job_large"])
    large = outcomes[-1].files[0].path
    assert s3.count(rf"(GET|PUT) .*{large}(\?|$)") == 0, (
        "a segment of one job is removed without being read"
    )
    with pytest.raises(FileNotFoundError):
        bucket.stat(large)
    retention.delete(bucket, ["job_0"])
    with pytest.raises(Exception, match="job_0"):
        CaptureReader(bucket, "job_0")
    assert all(
        check.ok for n in range(1, 6) for check in CaptureReader(bucket, f"job_{n}").verify()
    )
