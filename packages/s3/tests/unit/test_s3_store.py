"""Is what a bucket reports as written there, whole, and is every way to fail an OSError that says
why?

The protocol's own tests run against it as well: `store` in tests/stores.py.
"""

import errno
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import obstore
import pytest
import s3_kit
from capture_kit import filesystem, finished, write
from http_kit import server
from s3_kit import FaultProxy

from midstream.broker.artifacts import fitness, retention
from midstream.client import CaptureReader
from midstream.schemas.settings.settings import Settings, SettingsError
from midstream.storage.store import NotInPlaceError, Signing, open_store as opened_by_the_core
from midstream_s3 import client as s3_client, store as s3_store
from midstream_s3.client import Stale
from midstream_s3.store import S3Store, _Troubles, open_store

#: The smallest that S3 accepts: uploads take less time than with the product's 8 MiB.
PART = 5 << 20
#: Leaves in two parts.
BIG = os.urandom(PART + 12345)


@pytest.fixture
def bucket(s3: FaultProxy) -> S3Store:
    return open_store(s3_kit.uri(s3))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "RETRIES", 2)
    monkeypatch.setattr(s3_store, "PART", PART)


def put(store: S3Store, key: str, *parts: bytes) -> None:
    writer = store.writer()
    try:
        for part in parts:
            writer.append(key, [part])
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def content(store: S3Store, key: str) -> bytes:
    with store.open(key) as handle:
        return bytes(handle.view())


def uploads(store: S3Store) -> int:
    """Uploads in parts that are neither complete nor aborted."""
    with urlopen(f"http://{s3_kit.moto()}/{store.address.bucket}?uploads") as answer:
        return len(re.findall(b"<Upload>", answer.read()))


@pytest.mark.parametrize("sizes", [[0], [1], [PART], [PART + 1], [5, PART, 7, len(BIG)]])
def test_an_object_of_any_size_reads_as_it_was_written(bucket: S3Store, sizes: list[int]) -> None:
    parts = [BIG[:size] for size in sizes]
    put(bucket, "tag/job/x", *parts)
    whole = b"".join(parts)
    assert bucket.stat("tag/job/x") == len(whole)
    assert content(bucket, "tag/job/x") == whole
    with bucket.open("tag/job/x") as handle:
        assert handle.read(3, 10) == whole[3:13]
        assert handle.read(len(whole) - 2 if len(whole) > 2 else 0, 100) == whole[-2:]
        assert handle.read(len(whole), 1) == b""


def test_nothing_is_visible_before_commit_and_nothing_is_left_of_an_abort(bucket: S3Store) -> None:
    writer = bucket.writer()
    writer.append("tag/job/big", [BIG])
    writer.append("tag/job/small", [b"x"])
    assert bucket.children() == []
    writer.abort()
    assert bucket.children() == []
    assert uploads(bucket) == 0
    assert bucket.used() == 0


@pytest.mark.parametrize("kind", ["503", "cut", "lost"])
@pytest.mark.parametrize(
    "when", ["PUT", "POST .*uploads", "PUT .*partNumber=2", "POST .*uploadId", "HEAD"]
)
def test_one_bad_answer_is_survived(s3: FaultProxy, bucket: S3Store, kind: str, when: str) -> None:
    s3.fault(kind, when, times=1)
    put(bucket, "tag/job/x.safetensors", BIG)
    assert content(bucket, "tag/job/x.safetensors") == BIG


@pytest.mark.parametrize("kind", ["half", "short"])
def test_a_download_that_ends_early_is_asked_for_again(
    s3: FaultProxy, bucket: S3Store, kind: str
) -> None:
    put(bucket, "x", BIG)
    fault = s3.fault(kind, "GET", times=2)
    assert content(bucket, "x") == BIG
    assert fault.seen == 2


#: Fault of every write → error, and what is said.
OUTAGES: list[tuple[str, type[OSError], str]] = [
    ("503", OSError, "asks to slow down"),
    ("500 InternalError", OSError, "answers 500"),
    ("507 XMinioStorageFull", OSError, "it is full"),
    ("403 AccessDenied", PermissionError, "do not allow it"),
    ("403 ExpiredToken", PermissionError, "have expired"),
    ("403 RequestTimeTooSkewed", PermissionError, "differ by more than 15 minutes: run NTP"),
    ("404 NoSuchBucket", OSError, "no such bucket"),
    ("404 NoSuchUpload", OSError, "no longer knows the upload"),
    ("cut", ConnectionError, "was cut|cannot be reached"),
    ("lost", ConnectionError, "was cut|cannot be reached"),
    ("flip", OSError, "not those that were sent"),
]


@pytest.mark.parametrize(("kind", "error", "said"), OUTAGES)
@pytest.mark.parametrize("size", [100, len(BIG)])
def test_an_outage_is_an_os_error_with_its_reason_and_leaves_nothing(
    s3: FaultProxy, bucket: S3Store, kind: str, error: type[OSError], said: str, size: int
) -> None:
    s3.fault(kind, r"(PUT|POST) (?!.*uploads)" if size > PART else "PUT")
    with pytest.raises(error, match=said) as caught:
        put(bucket, "tag/job/x", BIG[:size])
    assert not isinstance(caught.value, FileNotFoundError)  # which would read as deleted
    assert s3_kit.SECRET_KEY not in str(caught.value)
    s3.faults.clear()
    assert bucket.children() == ([] if kind != "lost" or size > PART else ["tag/"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"keys": {s3_kit.ACCESS_KEY: "another"}}, "secret key does not belong"),
        ({"keys": {}}, "access key is unknown"),
        ({"clock": 3600.0}, "run NTP"),
        ({"clock": -3600.0}, "run NTP"),
    ],
)
def test_wrong_credentials_and_clocks_are_told_apart(
    s3: FaultProxy, bucket: S3Store, change: dict[str, Any], said: str
) -> None:
    vars(s3).update(change)
    for ask in (
        lambda: bucket.stat("x"),
        bucket.children,
        bucket.used,
        bucket.marks,
        lambda: put(bucket, "y", b"1"),
    ):
        with pytest.raises(PermissionError, match=said):
            ask()
    assert said in _Troubles().of(bucket)


def test_a_missing_bucket_is_not_taken_for_a_deleted_object(s3: FaultProxy) -> None:
    nowhere = open_store(s3_kit.uri(s3, "never-made"))
    for ask in (
        nowhere.prepare,
        lambda: nowhere.stat("x"),
        lambda: nowhere.open("x"),
        lambda: nowhere.mark("j"),
        nowhere.used,
    ):
        with pytest.raises(OSError, match="there is no such bucket") as caught:
            ask()
        assert not isinstance(caught.value, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        open_store(s3_kit.uri(s3)).open("x")


def test_a_store_that_is_away_or_slow_is_reported_in_time_and_comes_back(
    s3: FaultProxy, bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, "x", b"1")
    s3.stop()
    with pytest.raises(ConnectionRefusedError, match="cannot be reached"):
        bucket.stat("x")
    assert "cannot be reached: nothing can be written" in _Troubles().of(bucket)
    s3.start()
    assert content(bucket, "x") == b"1"
    s3.fault("slow", "PUT", seconds=300.0)
    with monkeypatch.context() as patch:
        patch.setattr(s3_client, "PROBE_S", 1)
        s3_client.client.cache_clear()
        assert "does not answer in time" in _Troubles().of(bucket)
    s3.faults.clear()
    s3_client.client.cache_clear()
    assert _Troubles().of(bucket) == ""


def test_a_request_that_never_ends_is_given_up(
    s3: FaultProxy, bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "REQUEST_S", 1)
    monkeypatch.setattr(s3_client, "RETRY_S", 2)
    s3.fault("slow", seconds=60.0)
    with pytest.raises(TimeoutError, match="does not answer in time"):
        put(open_store(bucket.uri.replace("kept", "slow")), "x", b"1")


@pytest.mark.parametrize(
    "change",
    [
        lambda store: obstore.put(s3_client.client(store.address), "x", b"other"),
        lambda store: store.delete("x"),
    ],
    ids=["replaced", "removed"],
)
def test_what_was_replaced_or_removed_before_it_was_confirmed_is_not_reported(
    bucket: S3Store, monkeypatch: pytest.MonkeyPatch, change: Callable[[S3Store], object]
) -> None:
    head = S3Store.head

    def after(store: S3Store, key: str) -> Any:
        change(store)
        return head(store, key)

    monkeypatch.setattr(S3Store, "head", after)
    with pytest.raises(NotInPlaceError, match="while being written"):
        put(bucket, "x", b"mine")


def test_an_index_is_uploaded_after_what_it_describes(s3: FaultProxy, bucket: S3Store) -> None:
    """A process that is killed in between leaves rows without an index, and no index without
    rows.
    """
    s3.fault("503", r"PUT .*\.(seg|safetensors)$")
    for layout in ("segment", "packed"):
        (outcome,) = filesystem(bucket, owner=f"w.{layout}").consume([finished(layout=layout)])
        assert "asks to slow down" in outcome.error
    assert s3.count(r"PUT .*json") == 0


def test_a_segment_whose_group_failed_in_doubt_is_not_found(
    s3: FaultProxy, bucket: S3Store
) -> None:
    """All was uploaded, but not confirmed: the group is written again, elsewhere."""
    disk = filesystem(bucket)
    fault = s3.fault("503", r"HEAD .*\.jsonl")
    (outcome,) = disk.consume([finished()])
    assert "is not available" in outcome.error
    assert fault.seen > 0
    assert bucket.children("tag/segments/") == []
    s3.faults.clear()
    assert disk.consume([finished()])[0].error == ""
    assert len(CaptureReader(bucket, "job_x").files) == 1


def test_a_segment_takes_one_group_and_its_name_once(bucket: S3Store) -> None:
    segment = bucket.segment("tag/segments/w.0.seg")
    segment.append([b"rows"], b"{}\n")
    assert not segment.usable
    with pytest.raises(FileExistsError):
        bucket.segment("tag/segments/w.0.seg")


def test_two_processes_that_erase_in_one_segment_lose_neither_erasure(bucket: S3Store) -> None:
    count = 12
    size = 5000
    put(bucket, "s.seg", b"x" * count * size)
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda n: bucket.erase("s.seg", [(n * size, size)]), range(0, count, 2)))
    assert content(bucket, "s.seg") == (bytes(size) + b"x" * size) * (count // 2)


def test_a_handle_shows_one_version_or_raises(bucket: S3Store) -> None:
    put(bucket, "s.seg", BIG)
    handle, fresh, other = (bucket.open("s.seg") for _ in range(3))
    assert handle.read(10, 4) == BIG[10:14]
    bucket.erase("s.seg", [(0, 100)])
    assert handle.read(12, 1000) == BIG[12:1012]  # read ahead
    with pytest.raises(Stale) as caught:
        handle.read(PART, 10)
    assert caught.value.errno == errno.ESTALE
    assert other.read(98, 4) == BIG[98:102]  # came with its size
    bucket.erase("s.seg", [(PART, 5)])
    assert (
        fresh.read(PART, 10) == bytes(5) + BIG[PART + 5 : PART + 10]
    )  # nothing had been read of the version before


def test_a_link_needs_no_credentials_and_ends(s3: FaultProxy, bucket: S3Store) -> None:
    assert isinstance(bucket, Signing)
    put(bucket, "tag/job/x", b"0123456789")
    link = bucket.sign("tag/job/x", 60)
    assert s3_kit.SECRET_KEY not in link
    with urlopen(Request(link, headers={"Range": "bytes=3-5"})) as answer:
        assert answer.read() == b"345"
    s3.clock = 61
    with pytest.raises(HTTPError, match="403"):
        urlopen(link)
    assert bucket.sign("x", 60, "https://store.example").startswith(
        f"https://store.example/{bucket.address.bucket}/kept/here/x?"
    )


# The processes of a service have them by settings (all other tests), readers elsewhere by AWS' own
# ways.
@pytest.mark.parametrize(
    "given",
    [
        {"AWS_ACCESS_KEY_ID": s3_kit.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": s3_kit.SECRET_KEY},
        {"MIDSTREAM_CONFIG": "m.toml"},
        {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_PROFILE": "other"},
    ],
    ids=["environment", "toml", "profile"],
)
def test_credentials_come_from_settings_or_from_where_aws_keeps_them(
    bucket: S3Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    key = s3_kit.ACCESS_KEY
    secret = s3_kit.SECRET_KEY
    Path("m.toml").write_text(f'artifact_access_key = "{key}"\nartifact_secret_key = "{secret}"\n')
    Path("credentials").write_text(
        f"[other]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    )
    for name in s3_kit.ENVIRONMENT:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    put(bucket, "x", b"1")
    assert content(bucket, "x") == b"1"


def temporary(s3: FaultProxy, seconds: float) -> dict[str, str]:
    """New credentials of a session, which the server accepts for so long."""
    key = f"ASIA{secrets.token_hex(6)}"
    secret = secrets.token_hex(20)
    token = secrets.token_hex(30)
    s3.keys[key] = secret
    s3.tokens[key] = (token, time.time() + seconds)
    return {"aws_access_key_id": key, "aws_secret_access_key": secret, "aws_session_token": token}


def test_temporary_credentials_in_a_file_are_read_again(
    s3: FaultProxy, bucket: S3Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As tools write them, in the middle of what a process does: after they have expired, or before
    it.
    """
    for name in s3_kit.ENVIRONMENT:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write() -> str:
        """Returns the new key."""
        made = temporary(s3, 3600)
        lines = [f"{name} = {value}" for name, value in made.items()]
        (tmp_path / "credentials").write_text("\n".join(["[default]", *lines, ""]))
        return made["aws_access_key_id"]

    def expire(key: str) -> None:
        s3.tokens[key] = (s3.tokens[key][0], 0.0)

    first = write()
    put(bucket, "x", b"1")
    expire(first)
    with pytest.raises(OSError, match="the credentials have expired"):
        put(bucket, "x", b"2")
    second = write()
    assert bucket.stat("x") is not None, "HEAD is answered without a reason"
    put(bucket, "x", b"2")
    monkeypatch.setattr(s3_client, "READ_AGAIN_S", 0)
    write()
    time.sleep(0.2)  # obstore asks at most ten times a second
    expire(second)
    put(bucket, "x", b"3")
    assert content(bucket, "x") == b"3"
    assert s3.count("") < 30, "nothing is repeated without new credentials"


def test_temporary_credentials_of_a_role_are_asked_for_again(
    s3: FaultProxy, bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By obstore, of the machine's metadata service: a token, the role's name, its credentials."""
    for name in s3_kit.ENVIRONMENT:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    first = temporary(s3, 3600)
    second = temporary(s3, 3600)
    # obstore asks again when they are valid for less than five minutes
    expires = (datetime.now(UTC) + timedelta(seconds=60)).isoformat()
    answers = [
        json.dumps(
            {
                "AccessKeyId": made["aws_access_key_id"],
                "SecretAccessKey": made["aws_secret_access_key"],
                "Token": made["aws_session_token"],
                "Expiration": expires,
            }
        ).encode()
        for made in (first, second)
    ]
    asking = (200, {}, b"token"), (200, {}, b"role")
    with server(*asking, (200, {}, answers[0]), *asking, (200, {}, answers[1])) as (url, _):
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
        s3_client.client.cache_clear()
        obstore.put(s3_client.client(bucket.address), "x", b"1")
        del s3.keys[first["aws_access_key_id"]]
        time.sleep(0.2)  # obstore asks at most ten times a second
        obstore.put(s3_client.client(bucket.address), "x", b"2")
        assert s3.count("PUT") == 2


def test_half_of_a_pair_of_credentials_is_refused(
    bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MIDSTREAM_ARTIFACT_SECRET_KEY")
    with pytest.raises(SettingsError, match="belong together"):
        bucket.stat("x")


def test_captures_under_a_prefix_are_all_that_a_store_sees(s3: FaultProxy) -> None:
    bucket = s3_kit.new_bucket()
    mine, other = (open_store(s3_kit.uri(s3, bucket, prefix)) for prefix in ("a", "ab"))
    write(mine, finished())
    write(other, finished("job_y"))
    mine.mark("job_x")
    assert mine.children() == ["tag/"]
    assert other.marks() == []
    assert open_store(s3_kit.uri(s3, bucket, "")).children() == ["a/", "ab/"]
    mine.delete("tag/")
    assert mine.children() == []
    assert other.children() == ["tag/"]
    assert other.used() > 0


@pytest.mark.parametrize("key", ["../x", "/x", "a/../../x", "", "."])
def test_a_key_outside_the_store_is_refused(bucket: S3Store, key: str) -> None:
    for ask in (
        bucket.stat,
        bucket.open,
        bucket.check,
        lambda key: put(bucket, key, b"1"),
        lambda key: bucket.sign(key, 1),
    ):
        with pytest.raises(ValueError, match="not inside"):
            ask(key)


def test_a_large_object_leaves_in_parts_and_is_not_held_in_memory(bucket: S3Store) -> None:
    """80 MiB, appended in pieces of 4, from a process that holds none of it."""
    program = f"""
import resource, sys
from midstream_s3 import store as s3_store
from midstream.storage.store import open_store
s3_store.PART = {PART}
writer = open_store({bucket.uri!r}).writer()
writer.append("warm", [bytes({2 * PART})])
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
for _ in range(20):
    writer.append("large", [bytes(4 << 20)])
writer.commit()
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert bucket.stat("large") == 80 << 20
    assert int(done.stdout) < 60, "MiB"


def test_a_deletion_reads_the_segments_of_its_job_alone(s3: FaultProxy, bucket: S3Store) -> None:
    for n, other in enumerate(("job_y", "job_x", "job_y")):
        write(bucket, finished(f"job_{n}"), finished(other), owner=f"w.{n}")
    assert bucket.segments("job_x") == ["tag/segments/w.1-0.0.seg"]
    s3.seen.clear()
    assert retention.delete(bucket, ["job_x"], keep=["job_x"]) == ["job_x"]
    assert set(re.findall(r"GET \S*/tag/segments/([^/?]+\.seg)", "\n".join(s3.seen))) == {
        "w.1-0.0.seg"
    }
    assert bucket.segments("job_x") != []  # until the deletion is over, for what comes late
    assert retention.delete(bucket, ["job_x"]) == ["job_x"]
    assert bucket.segments("job_x") == []
    s3.seen.clear()
    assert CaptureReader(bucket, "job_1").requests() == [0]
    assert s3.count(r"GET .*\.jsonl") == 1


def test_a_segment_is_referred_to_before_its_index_is_there(
    s3: FaultProxy, bucket: S3Store
) -> None:
    s3.fault("403 AccessDenied", r"PUT .*\.segments/")
    (outcome,) = filesystem(bucket).consume([finished()])
    assert "do not allow" in outcome.error
    assert s3.count(r"PUT .*\.jsonl") == 0


@pytest.mark.parametrize(
    ("when", "said"), [("PUT", "no conditional writes"), ("GET", "no conditional reads")]
)
def test_a_server_that_ignores_conditions_is_refused_at_the_start(
    s3: FaultProxy, bucket: S3Store, when: str, said: str
) -> None:
    settings = Settings(artifact_store=bucket.uri)
    fitness.require(settings)
    s3.fault("deaf", when)
    with pytest.raises(SettingsError, match=said):
        fitness.require(settings)
    assert said in _Troubles().of(bucket), "and captures are not accepted"
    s3.stop()
    try:
        fitness.require(settings)  # not known: the processes wait for it
    finally:
        s3.start()
    s3.faults.clear()
    assert _Troubles().of(bucket) == ""


def test_a_server_that_wants_etags_without_quotation_marks_is_served(
    s3: FaultProxy, bucket: S3Store
) -> None:
    """Ceph 16 takes no others in conditions of writes."""
    s3.fault("ceph", "PUT")
    assert bucket.unfit() == ""
    put(bucket, "s.seg", b"x" * 10)
    assert bucket.erase("s.seg", [(2, 3)])
    assert content(bucket, "s.seg") == b"xx\0\0\0xxxxx"
    assert bucket.children() == ["s.seg"], "what the examination wrote is gone"


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("s3://", "names a bucket"),
        ("s3://key:secret@bucket", "no credentials"),
        ("s3://bucket?secret=x", "secret: unknown option"),
    ],
)
def test_a_bucket_is_named_without_credentials(uri: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        open_store(uri)
    assert "key:secret" not in str(caught.value)


def test_the_core_opens_the_same_store_by_its_uri() -> None:
    store = open_store("s3://bucket/a/b/?region=eu-central-1&endpoint=http://minio:9000")
    assert store == opened_by_the_core(store.uri)
    assert store.link("tag/x") == "s3://bucket/a/b/tag/x"
