"""Are draining, copying, restoring and the removal of a model what they say, also under kills?"""

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from up_kit import MIDSTREAM, START_S, Up
from wait_kit import wait_until

from midstream import Client, MidstreamError
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.named.registry import Registry
from midstream.broker.redis_service.ledger_schema import SERVICE
from midstream.client.captures.blobs import find
from midstream.client.cli.keys import own_redis_url
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.requests.steering import MODULES
from midstream.schemas.settings.settings import Settings
from midstream.storage.store import open_store
from midstream_ops.supervisor import RESTORING

CAPTURE: dict[str, Any] = {"layers": "all", "positions": "all_prompt"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Start `midstream up`; nothing it started may outlive the test."""
    started: list[Up] = []

    def begin(data: Path = tmp_path / "data", **settings: Any) -> Up:
        started.append(Up(data, **settings))
        return started[-1]

    yield begin
    for up in started:
        up.close()
        assert up.alive() == []


class Load:
    """Submits jobs with captures, one after the other, until it is closed."""

    def __init__(self, url: str) -> None:
        self.jobs: list[str] = []
        self._client = Client(url)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.02):
            with suppress(MidstreamError):
                prompt = f"prompt {len(self.jobs)} " + "of many words " * 8
                job = self._client.submit(
                    model="fake", prompts=[prompt], max_tokens=2, capture=CAPTURE
                )
                self.jobs.append(job.id)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._client.close()


def content(data: Path, job: str) -> dict[tuple[str, int], bytes]:
    """Place in the store → bytes of each blob of a job."""
    found = {}
    for blob in find(open_store(data / "captures"), job, None):
        assert blob.store is not None
        with blob.store.open(blob.key) as handle:
            length = handle.size - blob.offset if blob.bytes is None else blob.bytes
            found[blob.key, blob.offset] = handle.read(blob.offset, length)
    return found


@pytest.mark.long
def test_a_backup_under_load_is_whole_and_another_stack_runs_from_it(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    up = start()
    url = up.ready()
    (up.data / "saes" / "own").mkdir(parents=True)
    (up.data / "saes" / "own" / "weights").write_bytes(os.urandom(5000))
    folder = tmp_path / "backup"
    with Client(url) as client, closing(Load(url)) as load:
        wait_until(lambda: len(load.jobs) > 20)
        client.wait(load.jobs[10], timeout=60)
        before = [job for job in load.jobs if client.jobs.get(job).state is State.SUCCEEDED]
        dry = up.midstream("backup", str(folder), "--captures", "--dry-run")
        assert dry.returncode == 0, dry.stderr
        assert "redis: " in dry.stdout
        assert not folder.exists()
        made = up.midstream("backup", str(folder), "--captures", "--sample", "10")
        assert made.returncode == 0, made.stderr
        assert "10 captures equal byte for byte" in made.stdout
        again = up.midstream("backup", str(folder), "--captures")
        assert "is a backup, complete since" in again.stderr
        inside = up.midstream("backup", str(up.data / "backup"))
        assert "are inside each other" in inside.stderr
    refused = up.midstream("restore", str(folder))
    assert refused.returncode == 1
    assert "is in use by a stack" in refused.stderr
    other = tmp_path / "restored"
    dry = up.midstream("restore", str(folder), "--data-dir", str(other), "--dry-run")
    assert "would restore" in dry.stdout
    assert not other.exists()
    done = up.midstream("restore", str(folder), "--data-dir", str(other))
    assert done.returncode == 0, done.stderr
    assert (other / "saes" / "own" / "weights").read_bytes() == (
        up.data / "saes" / "own" / "weights"
    ).read_bytes()
    assert (other / "secrets").stat().st_mode & 0o077 == 0
    beside = start(other)
    with Client(url) as client, Client(beside.ready()) as restored:
        for job in before:
            ours = restored.result(job)
            theirs = client.result(job)
            assert ours.outputs == theirs.outputs
            assert ours.identity == theirs.identity
            with restored.capture(job) as reader:
                assert all(check.ok for check in reader.verify())
            assert content(other, job) == content(up.data, job) != {}


@pytest.mark.long
def test_a_backup_and_a_restore_that_are_killed_go_on(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    up = start()
    url = up.ready()
    with closing(Load(url)) as load:
        wait_until(lambda: len(load.jobs) > 40)
    with Client(url) as client:
        for job in load.jobs:
            client.wait(job, timeout=60)
    for number in range(300):
        place = up.data / "loras" / f"adapter{number:03}"
        place.mkdir(parents=True)
        (place / "weights").write_bytes(os.urandom(1 << 16))
    folder = tmp_path / "backup"
    listed = folder / "files.jsonl"
    command = ["backup", str(folder), "--captures"]
    killed_after(up, command, lambda: listed.exists() and listed.stat().st_size > 2000)
    assert json.loads((folder / "backup.json").read_bytes())["complete"] == 0.0
    first = (folder / "redis.rdb").stat().st_mtime_ns
    half = up.midstream("restore", str(folder), "--data-dir", str(tmp_path / "no"))
    assert "is not complete" in half.stderr
    other = up.midstream("backup", str(folder))
    assert "with --captures, that was cut off" in other.stderr
    with listed.open("ab") as lines:
        lines.write(b'{"path": "loras/half')  # as a process that is killed leaves it
    done = up.midstream(*command)
    assert done.returncode == 0, done.stderr
    assert "going on with the backup" in done.stdout
    assert (folder / "redis.rdb").stat().st_mtime_ns == first
    target = tmp_path / "restored"
    marker = target / RESTORING.format(json.loads((folder / "backup.json").read_bytes())["id"])
    command = ["restore", str(folder), "--data-dir", str(target)]
    killed_after(up, command, lambda: marker.exists() and marker.stat().st_size > 2000)
    early = Up(target)
    assert early.process.wait(START_S) == 1
    assert "is half restored" in early.output()
    done = up.midstream(*command)
    assert done.returncode == 0, done.stderr
    assert "going on with the restore" in done.stdout
    assert not marker.exists()
    ours, theirs = (
        {str(path.relative_to(of)): path.read_bytes() for path in of.rglob("weights")}
        for of in (up.data, target)
    )
    assert ours == theirs
    assert content(target, load.jobs[0]) == content(up.data, load.jobs[0]) != {}
    again = up.midstream(*command)
    assert "has data of its own (redis, captures" in again.stderr


def killed_after(up: Up, command: list[str], condition: Callable[[], bool]) -> None:
    """Kill a command once the condition holds."""
    process = subprocess.Popen([*MIDSTREAM, *command], env=up.environment)
    wait_until(lambda: condition() or process.poll() is not None)
    assert process.poll() is None, "it was over too early"
    process.kill()
    process.wait()


@pytest.mark.long
def test_a_damaged_backup_is_refused_and_nothing_starts_from_it(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    up = start()
    with Client(up.ready()) as client:
        client.run(model="fake", prompts=["a"], max_tokens=1, capture=CAPTURE, timeout=60)
    folder = tmp_path / "backup"
    assert up.midstream("backup", str(folder)).returncode == 0
    copy = folder / "redis.rdb"
    copy.write_bytes(copy.read_bytes()[:-1] + b"!")
    refused = up.midstream("restore", str(folder), "--data-dir", str(tmp_path / "restored"))
    assert refused.returncode == 1
    assert "redis.rdb is not as it was written" in refused.stderr
    note = json.loads((folder / "backup.json").read_bytes())
    note["stored"] |= {"schema": 9, "readable_from": 9, "version": "9.0.0"}
    (folder / "backup.json").write_text(json.dumps(note))
    refused = up.midstream("restore", str(folder), "--data-dir", str(tmp_path / "restored"))
    assert "was written by midstream 9.0.0 (stored schema 9" in refused.stderr


@pytest.mark.long
def test_a_drain_takes_nothing_new_outlives_kills_and_ends_when_all_jobs_have(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("1")  # each job stops after a token
    up = start(
        **{"tuning.worker_concurrency": 2, "lease_s": 6, "tuning.visibility_timeout_s": 4},
        fault=f"turnstile:file={gate}",
    )
    with Client(up.ready()) as client:
        first: dict[str, Any] = {"model": "fake", "prompts": ["a"], "max_tokens": 5}
        jobs = [client.submit(**first, idempotency_key=f"k{n}").id for n in range(12)]
        dry = up.midstream("drain", "--dry-run")
        assert "the service takes new jobs" in dry.stdout
        assert "fake: " in dry.stdout
        short = up.midstream("drain", "--timeout", "0.1")
        assert short.returncode == 1
        assert "not drained after 0.1 s: fake: " in short.stderr
        server = redis.Redis.from_url(own_redis_url(up.data))
        assert server.hexists(SERVICE, "closed")
        answer = refused(client, first)
        assert answer.kind == "overloaded"
        assert "takes no new jobs for now" in str(answer)
        assert client.submit(**first, idempotency_key="k0").id == jobs[0]
        for name in ("worker", "redis"):
            os.kill(up.pid(name), signal.SIGKILL)
        waits = subprocess.Popen([*MIDSTREAM, "drain"], env=up.environment, stderr=subprocess.PIPE)
        up.until(lambda: up.output().count(" restarted") >= 2)
        assert waits.poll() is None, "it waits, also while Redis is away"
        waits.kill()
        waits.communicate()
        gate.unlink()
        done = up.midstream("drain")
        assert done.returncode == 0, done.stderr
        assert "drained: no accepted job is unfinished" in done.stdout
        assert {client.jobs.get(job).state for job in jobs} == {State.SUCCEEDED}
    assert up.interrupt() == 0
    again = start()
    with Client(again.ready()) as client:
        assert refused(client, first).kind == "overloaded", "a restart opens nothing"
        assert "the service takes new jobs" in again.midstream("drain", "--open").stdout
        assert client.run(**first, timeout=60).state is State.SUCCEEDED
        assert "takes new jobs already" in again.midstream("drain", "--open").stdout


def refused(client: Client, fields: dict[str, Any]) -> MidstreamError:
    with pytest.raises(MidstreamError) as caught:
        client.submit(**fields)
    return caught.value


@pytest.mark.long
def test_a_model_that_is_served_no_longer_is_removed_and_no_other(up: Up) -> None:
    url = own_redis_url(up.data)
    settings = Settings(redis_url=url)

    async def prepare() -> None:
        ledger = Ledger.connect(settings)
        try:
            served = await ledger.model("fake")
            assert served is not None
            old = msgspec.structs.replace(served, name="old")
            await ledger.redis.hset("ms:models", "old", to_json(old))
            module = await Registry(ledger, MODULES).get("fake", "joy")
            assert module is not None
            mine = msgspec.structs.replace(module, model="old")
            await Registry(ledger, MODULES).put("old", module.name, lambda _: mine, {})
            await ledger.redis.hset("ms:counts", "old/succeeded", 3)
            await ledger.redis.hset("ms:steering:old", "global_version", 2)
        finally:
            await ledger.close()

    with Client(up.ready()) as client:
        width = client.model("fake")["hidden_size"]
        client.modules.put("joy", [{"vector": [1.0] * width, "layers": 1}])
        asyncio.run(prepare())
        dry = up.midstream("delete", "model", "old", "--set", "dry_run=true")
        assert dry.returncode == 0, dry.stderr
        assert "modules: joy" in dry.stdout
        assert "nothing was deleted" in dry.stdout
        client_of = redis.Redis.from_url(url)
        assert client_of.hexists("ms:models", "old")
        served = up.midstream("delete", "model", "fake")
        assert "'fake' is served by w1" in served.stderr
        unknown = up.midstream("delete", "model", "odl")
        assert "did you mean 'old'?" in unknown.stderr
        gone = up.midstream("delete", "model", "old")
        assert gone.returncode == 0, gone.stderr
        assert "old deleted" in gone.stdout
        left = [key for key in client_of.keys("*old*") if not key.startswith(b"ms:job")]
        assert left == []
        assert client_of.hkeys("ms:models") == [b"fake"]
        assert client_of.hget("ms:counts", "old/succeeded") is None
        assert [each.name for each in client.modules.list()] == ["joy"]
        raw = client_of.hget("ms:models", "fake")
        tokenizer = from_json(raw, ModelInfo).tokenizer
        assert client_of.exists(f"ms:blob:{tokenizer}")
        done = client.run(
            model="fake", prompts=["a"], max_tokens=1, steering=[{"module": "joy"}], timeout=60
        )
        assert done.state is State.SUCCEEDED
