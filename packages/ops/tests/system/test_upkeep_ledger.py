"""Draining, copies, restores, removal of a model, rollbacks: on a real Redis, without a stack."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from capture_kit import finished, write
from ledger_kit import MODEL, make_job, open_ledger

from midstream.broker.ledger.core import closing
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.people.audit import LedgerAudit
from midstream.broker.processes.folder_schema import FILE, claim_folder, of_folder
from midstream.broker.redis_service import ledger_schema
from midstream.broker.redis_service.ledger_schema import SERVICE
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_json
from midstream.schemas.base.version import __version__
from midstream.schemas.service import stored_schema
from midstream.schemas.service.stored_schema import SCHEMA
from midstream_ops import redis_server
from midstream_ops.redis_server import RedisServer
from midstream_ops.supervisor import RESTORING
from midstream_ops.upkeep import backup, drain, models, restore, rollback, verification
from midstream_ops.upkeep.notes import NOTE, read_note


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """The Redis of an installation whose settings are in the environment."""
    started = redis_server.start(tmp_path / "live" / "redis")
    monkeypatch.setenv("MIDSTREAM_REDIS_URL", started.url)
    monkeypatch.setenv("MIDSTREAM_DATA_DIR", str(tmp_path / "live"))
    yield started
    started.stop()


def act(server: RedisServer, do: Callable[[Ledger], Any]) -> Any:
    async def run() -> Any:
        async with open_ledger(server.url) as ledger:
            return await do(ledger)

    return asyncio.run(run())


def submitted(server: RedisServer, **fields: Any) -> str:
    job = make_job(**fields)
    act(server, lambda ledger: ledger.submit(job, {}))
    return job.id


# --- Draining


def drained(timeout: float = 0.0, *, opens: bool = False, dry_run: bool = False) -> None:
    drain.run(None, opens=opens, timeout=timeout, dry_run=dry_run)


def test_a_drain_takes_nothing_new_and_waits_for_what_was_accepted(
    server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    first = submitted(server)
    drained(dry_run=True)
    assert "the service takes new jobs" in capsys.readouterr().out
    assert act(server, lambda ledger: closing.closed_since(ledger.redis)) is None
    with pytest.raises(MidstreamError, match="not drained after") as waits:
        drained(0.01)
    assert f"{MODEL}: 1 queued, for a worker: none serves this model" in str(waits.value)
    with pytest.raises(MidstreamError, match="takes no new jobs for now") as refused:
        submitted(server)
    assert refused.value.kind == "overloaded"
    repeat = make_job()
    keyed = ("key", "a" * 64)
    act(server, lambda ledger: closing.reopen(ledger.redis))
    assert act(server, lambda ledger: ledger.submit(repeat, {}, keyed)) == (repeat.id, True)
    with pytest.raises(MidstreamError):
        drained(0.01)
    again = make_job()
    assert act(server, lambda ledger: ledger.submit(again, {}, keyed)) == (repeat.id, False)
    waiting = threading.Thread(target=drained)
    waiting.start()
    for job in (first, repeat.id):
        act(server, lambda ledger, job=job: ledger.request_cancel(job))
    waiting.join(60)
    assert not waiting.is_alive()
    drained(opens=True)
    submitted(server)
    log = act(server, lambda ledger: LedgerAudit(ledger).page(10)).entries
    assert [entry.action for entry in log] == ["drain --open", "drain", "drain"]


def test_what_a_gradient_worker_compares_is_taken_while_the_service_is_closed(
    server: RedisServer,
) -> None:
    act(server, lambda ledger: closing.close(ledger.redis, 1.0))
    submitted(server, tenant="gradient-worker")
    with pytest.raises(MidstreamError, match="takes no new jobs"):
        submitted(server)


# --- Copies


def copied(folder: Path, *, captures: bool = True, sample: int = 20) -> None:
    backup.run(folder, None, captures=captures, sample=sample, dry_run=False)


def captured(server: RedisServer, data: Path, number: int) -> list[str]:
    """Jobs that have ended, with captures in files and in a segment."""
    jobs = [submitted(server, capture=True) for _ in range(number)]
    layouts = ["auto", "packed"] * number
    write(
        data / "captures",
        *(finished(job, tag="t", layout=layouts.pop()) for job in jobs),
    )
    for job in jobs:
        act(server, lambda ledger, job=job: ledger.request_cancel(job))
        act(server, lambda ledger, job=job: ledger.redis.hset(f"ms:capture:{job}", "status", "ok"))
    return jobs


def test_a_copy_under_writes_is_restored_as_it_was(
    server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = tmp_path / "live"
    jobs = captured(server, live, 5)
    (live / "saes" / "own").mkdir(parents=True)
    (live / "saes" / "own" / "weights").write_bytes(b"w" * 1000)
    (live / "secrets").mkdir()
    (live / "secrets" / "redis.password").write_text("word")
    end = threading.Event()

    def write() -> None:
        client = redis.Redis.from_url(server.url)
        number = 0
        while not end.is_set():
            client.set(f"x:{number % 1000}", "v" * 1000)
            number += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        copied(tmp_path / "copy")
    finally:
        end.set()
        writing.join()
    assert (
        "5 jobs of the last ones found; 5 captures equal byte for byte" in capsys.readouterr().out
    )
    restored = tmp_path / "restored"
    restore.run(tmp_path / "copy", restored, dry_run=True)
    assert not restored.exists()
    restore.run(tmp_path / "copy", restored, dry_run=False)
    assert (restored / "saes" / "own" / "weights").read_bytes() == b"w" * 1000
    assert (restored / "secrets" / "redis.password").read_text() == "word"
    assert list(restored.glob(RESTORING.format("*"))) == []
    beside = redis_server.start(restored / "redis")
    try:
        client = redis.Redis.from_url(beside.url)
        assert {name.decode() for name in client.zrange("ms:jobs", 0, -1)} == set(jobs)
        client.set("kept", 1)  # it goes on in its own log
    finally:
        beside.stop()
    again = redis_server.start(restored / "redis")
    try:
        assert redis.Redis.from_url(again.url).get("kept") == b"1"
    finally:
        again.stop()
    for path in (live / "captures").rglob("*"):
        if path.is_file():
            inside = restored / "captures" / path.relative_to(live / "captures")
            assert inside.read_bytes() == path.read_bytes()


def test_a_copy_that_differs_or_is_damaged_is_refused(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(server, tmp_path / "live", 2)
    copied(tmp_path / "copy")
    with pytest.raises(MidstreamError, match="is a backup, complete since"):
        copied(tmp_path / "copy")
    with pytest.raises(MidstreamError, match="is in use by a stack"):
        restore.run(tmp_path / "copy", tmp_path / "live", dry_run=False)
    (file,) = list((tmp_path / "copy" / "captures").rglob("*.safetensors"))[:1]
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(MidstreamError, match="is not as it was written"):
        restore.run(tmp_path / "copy", tmp_path / "restored", dry_run=False)
    with pytest.raises(MidstreamError, match="is not equal to the service"):
        verification.verify(
            tmp_path / "copy", read_note(tmp_path / "copy"), _settings(server, tmp_path), 10
        )
    with pytest.raises(MidstreamError, match="are inside each other"):
        copied(tmp_path / "live" / "copy")


def _settings(server: RedisServer, tmp_path: Path) -> Any:
    from midstream.schemas.settings.settings import load_settings

    return load_settings({}, redis_url=server.url, data_dir=str(tmp_path / "live"))


def test_copies_and_restores_that_were_cut_off_go_on(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(server, tmp_path / "live", 3)
    copy = tmp_path / "copy"

    def cut_off(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(backup, "verify", cut_off)
        with pytest.raises(KeyboardInterrupt):
            copied(copy)
    taken = (copy / "redis.rdb").stat().st_mtime_ns
    with pytest.raises(MidstreamError, match="is not complete"):
        restore.run(copy, tmp_path / "restored", dry_run=False)
    with pytest.raises(MidstreamError, match="with --captures, that was cut off"):
        copied(copy, captures=False)
    copied(copy)
    assert (copy / "redis.rdb").stat().st_mtime_ns == taken
    target = tmp_path / "restored"
    real = restore.copy
    calls: list[Path] = []

    def second_fails(source: Path, to: Path, name: str) -> Any:
        calls.append(to)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(source, to, name)

    monkeypatch.setattr(restore, "copy", second_fails)
    with pytest.raises(KeyboardInterrupt):
        restore.run(copy, target, dry_run=False)
    assert len(list(target.glob(RESTORING.format("*")))) == 1
    restore.run(copy, target, dry_run=False)
    assert calls.count(calls[0]) == 1, "what is there is not copied again"
    assert list(target.glob(RESTORING.format("*"))) == []
    with pytest.raises(MidstreamError, match=r"has data of its own \(redis, captures\)"):
        restore.run(copy, target, dry_run=False)


def test_a_backup_of_a_version_that_cannot_be_read_is_refused(
    server: RedisServer, tmp_path: Path
) -> None:
    copied(tmp_path / "copy", captures=False)
    note = read_note(tmp_path / "copy")
    newer = stored_schema.StoredSchema(schema=9, readable_from=9, version="9.0.0")
    msgspec.structs.replace(note, stored=newer).write(tmp_path / "copy")
    with pytest.raises(MidstreamError, match=r"midstream 9\.0\.0 \(stored schema 9"):
        restore.run(tmp_path / "copy", tmp_path / "restored", dry_run=False)
    (tmp_path / "copy" / NOTE).write_text('{"format": 99}')
    with pytest.raises(MidstreamError, match="has format 99; this version reads format 1"):
        restore.run(tmp_path / "copy", tmp_path / "restored", dry_run=False)
    with pytest.raises(MidstreamError, match="is no backup"):
        restore.run(tmp_path, tmp_path / "restored", dry_run=False)


# --- Models


def test_a_model_s_traces_go_and_no_other_s(
    server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    client = redis.Redis.from_url(server.url)
    for name, tokenizer in (("old", "t1"), ("new", "t2"), ("twin", "t2")):
        client.hset("ms:models", name, to_json({"name": name, "tokenizer": tokenizer}))
        client.set(f"ms:blob:{tokenizer}", "x")
        client.hset("ms:counts", f"{name}/succeeded", 1)
        client.hset(f"ms:steering:{name}", "global_version", 1)
        client.hset(f"ms:loras:{name}", "style", b"record")
    assert not models.delete("old", dry_run=True)
    assert "loras: style" in capsys.readouterr().out
    assert client.hlen("ms:models") == 3
    job = submitted(server, model="old")
    with pytest.raises(MidstreamError, match="1 job of 'old' unfinished"):
        models.delete("old", dry_run=False)
    act(server, lambda ledger: ledger.request_cancel(job))
    with pytest.raises(MidstreamError, match="did you mean 'old'"):
        models.delete("odl", dry_run=False)
    assert models.delete("old", dry_run=False)
    assert sorted(client.hkeys("ms:models")) == [b"new", b"twin"]
    assert not client.exists("ms:blob:t1", "ms:steering:old", "ms:loras:old")
    assert client.hkeys("ms:counts") != []
    assert not client.hexists("ms:counts", "old/succeeded")
    assert models.delete("new", dry_run=False)
    assert client.exists("ms:blob:t2", "ms:loras:twin", "ms:steering:twin") == 3
    served = to_json({"worker": "w1", "boot": "b", "model": "twin"})
    client.hset("ms:workers", "w1", served)
    client.set("ms:alive:w1", "b")
    outcome = act(server, lambda ledger: ledger.run("delete_model", model="twin"))
    assert outcome == [b"served", b"w1"]


# --- Versions of what is stored


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have this process record a newer schema, which versions from a number on read."""

    def record(readable_from: int) -> None:
        for module in (ledger_schema, stored_schema):
            monkeypatch.setattr(module, "SCHEMA", SCHEMA + 1)
            monkeypatch.setattr(module, "READABLE_FROM", readable_from)
        monkeypatch.setattr(ledger_schema, "__version__", "9.0.0")

    return record


def test_the_newest_version_is_recorded_and_older_ones_do_not_lower_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = redis.Redis.from_url(server.url)
    assert ledger_schema.of_redis(client) is None
    ledger_schema.claim_redis(client)
    assert ledger_schema.of_redis(client) == stored_schema.own()
    client.hset(SERVICE, mapping={"schema": SCHEMA + 1, "readable_from": 1, "written_by": "9"})
    ledger_schema.claim_redis(client)
    found = ledger_schema.of_redis(client)
    assert found is not None
    assert found.version == "9"
    client.hset(SERVICE, "readable_from", SCHEMA + 1)
    with pytest.raises(MidstreamError, match="the ledger in Redis was written by midstream 9 "):
        ledger_schema.claim_redis(client)


def test_a_folder_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    claim_folder(tmp_path)
    assert of_folder(tmp_path) == stored_schema.own()
    newest = stored_schema.StoredSchema(schema=9, readable_from=9, version="9.0.0")
    (tmp_path / FILE).write_bytes(to_json(newest))
    with pytest.raises(MidstreamError, match=r"the data directory .* was written by .* 9\.0\.0"):
        claim_folder(tmp_path)


def test_a_rollback_reads_what_jobs_need_and_then_records_this_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("MIDSTREAM_DATA_DIR", str(data))
    monkeypatch.delenv("MIDSTREAM_REDIS_URL", raising=False)
    (data / "secrets").mkdir(parents=True)
    (data / "secrets" / "redis.password").write_text("word")
    server = redis_server.start(data / "redis", password="word")
    job = submitted(server)
    client = redis.Redis.from_url(server.url)
    raw = client.hget(f"ms:job:{job}", "spec")
    assert raw is not None
    strange = msgspec.msgpack.encode(msgspec.msgpack.decode(raw) | {"invented_later": 1})
    client.hset(f"ms:job:{job}", mapping={"spec": strange, "written_by": "9.0.0"})
    newest = {"schema": SCHEMA + 1, "readable_from": 1, "written_by": "9.0.0"}
    client.hset(SERVICE, mapping=newest)
    with pytest.raises(MidstreamError, match="is in use by a stack"):
        rollback.run(None, dry_run=False)
    server.stop()
    with pytest.raises(MidstreamError, match="cannot read 1 of") as refused:
        rollback.run(None, dry_run=False)
    assert f"job {job} was accepted by midstream 9.0.0" in str(refused.value)
    server = redis_server.start(data / "redis", password="word")
    client = redis.Redis.from_url(server.url)
    assert client.hget(SERVICE, "written_by") == b"9.0.0", "nothing was changed"
    client.hset(f"ms:job:{job}", "spec", raw)
    server.stop()
    rollback.run(None, dry_run=True)
    assert "a dry run: nothing was changed" in capsys.readouterr().out
    rollback.run(None, dry_run=False)
    assert f"midstream {__version__} may go on with this data" in capsys.readouterr().out
    server = redis_server.start(data / "redis", password="word")
    try:
        found = ledger_schema.of_redis(redis.Redis.from_url(server.url))
        assert found == stored_schema.own()
    finally:
        server.stop()
