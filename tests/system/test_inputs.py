"""Is what a large job brings kept beside Redis, and no longer than somebody needs it?

(That a worker runs such a job, or says what is missing: `test_worker_runs.py`.)
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from edge import MODEL, Api, Hand, refused, running
from ledger_kit import WORKER, make_job, worker_info

from midstream.broker.ledger.jobs.inputs import GRACE_S, LARGE, SIGNS, SWEEP_AGAIN_S, LedgerInputs
from midstream.broker.ledger.jobs.ledger import Ledger, accepted_at
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job

#: Of the model to which vectors are sent here.
WIDE = 576
EDITS = 2500
#: Enough for an object.
FEW = 300
BLOBS = {"name": b"\1" * LARGE}


class KilledError(BaseException):
    """Stands for the end of the process."""


def edits(count: int) -> list[dict[str, Any]]:
    """Each with a vector of its own."""
    vectors = np.random.default_rng(1).standard_normal((count, WIDE)).astype(np.float32)
    return [
        {
            "layers": number % 4,
            "positions": "all",
            "vector": msgspec.to_builtins(from_numpy(vector)),
        }
        for number, vector in enumerate(vectors)
    ]


@pytest.fixture
async def inputs(ledger: Ledger) -> LedgerInputs:
    """With a live worker that has the store."""
    store = LedgerInputs(ledger)
    worker = worker_info()
    await ledger.heartbeat(worker)
    await store.sign(worker.worker, worker.boot)
    return store


@pytest.fixture
def wide(api: Api) -> Iterator[Hand]:
    with Hand(api.settings, hidden_size=WIDE, steering_rows=0, steering_entries=0) as worker:
        worker.do(LedgerInputs(worker.ledger).sign(worker.worker, "b1"))
        yield worker


def kept_in(inputs: LedgerInputs) -> list[Path]:
    """Everything in the store but the signs of workers."""
    root = Path(inputs.store.uri)
    own = (root / SIGNS, root / ".deleted")
    signs = {*own, *(root / SIGNS).iterdir()}
    return sorted(path for path in root.rglob("*") if path not in signs)


async def accepted(ledger: Ledger, inputs: LedgerInputs) -> Job:
    async with inputs.kept(make_job(), BLOBS) as (job, blobs):
        await ledger.submit(job, blobs)
    return job


def test_redis_takes_little_of_a_job_with_thousands_of_vectors(api: Api, wide: Hand) -> None:
    ledger = wide.ledger
    steering = edits(EDITS)
    api.submit(steering=steering)  # loads the scripts
    before = wide.do(ledger.redis.info())
    job_id = api.submit(steering=steering)
    after = wide.do(ledger.redis.info())
    assert after["aof_current_size"] - before["aof_current_size"] <= 300_000
    assert after["total_net_input_bytes"] - before["total_net_input_bytes"] <= 300_000

    job = wide.job(job_id)
    assert job.inputs is not None
    brought = wide.do(LedgerInputs(ledger).read(job))
    tensors = [from_msgpack(brought[name], Tensor) for [name] in named(job)]
    assert [content_hash(tensor) for tensor in tensors] == [name for [name] in named(job)]
    assert [msgspec.to_builtins(tensor) for tensor in tensors] == [
        edit["vector"] for edit in steering
    ]


def named(job: Job) -> list[list[str]]:
    return [entry.tensors for entry in job.steering[0]]


def test_a_store_that_is_away_refuses_the_job(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "file").write_text("no folder")
    facts = {"hidden_size": WIDE, "steering_rows": 0, "steering_entries": 0}
    with (
        running(tmp_path, redis_url, artifact_store=str(tmp_path / "file" / "store")) as api,
        Hand(api.settings, **facts),
    ):
        body = {"model": MODEL, "prompts": ["hello"], "steering": edits(FEW)}
        refused(api.http.post("/v1/jobs", json=body), 503, kind="unavailable")
        assert api.submit(steering=edits(1)), "which needs no store"


async def test_few_vectors_stay_in_the_ledger(inputs: LedgerInputs) -> None:
    small = {"name": b"\1" * (LARGE - 1)}
    async with inputs.kept(make_job(), small) as (job, blobs):
        assert blobs == small
    assert job.inputs is None
    assert not kept_in(inputs)


@pytest.mark.parametrize("worker", ["none", "another", "restarted"])
async def test_vectors_stay_in_the_ledger_where_a_worker_may_not_have_the_store(
    ledger: Ledger, inputs: LedgerInputs, worker: str
) -> None:
    if worker == "none":
        await ledger.redis.delete(f"ms:alive:{WORKER}")
    else:
        name = WORKER if worker == "restarted" else "w9"
        await ledger.heartbeat(worker_info(name, "started later"))
    async with inputs.kept(make_job(), BLOBS) as (job, blobs):
        assert blobs == BLOBS
    assert job.inputs is None
    assert not kept_in(inputs)


async def test_inputs_go_when_the_job_has_ended(
    ledger: Ledger, inputs: LedgerInputs, reaper: Reaper
) -> None:
    job = await accepted(ledger, inputs)
    soon = accepted_at(job.id) + SWEEP_AGAIN_S
    await reaper.sweep(soon)
    assert await inputs.read(job) == BLOBS
    await ledger.request_cancel(job.id)
    await reaper.sweep(soon + SWEEP_AGAIN_S)
    assert not kept_in(inputs)


async def test_inputs_of_a_job_that_was_never_accepted_go_after_a_while(
    inputs: LedgerInputs, reaper: Reaper
) -> None:
    """The API was killed between the object and the acceptance, or within the object."""
    with suppress(KilledError):
        async with inputs.kept(make_job(), BLOBS) as (job, _):
            raise KilledError
    other = make_job()
    unfinished = Path(inputs.store.uri) / other.id / ".tensors.1.tmp"
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"half")
    await reaper.sweep(accepted_at(job.id) + GRACE_S - 1)
    assert await inputs.read(job) == BLOBS, "it may still be accepted"
    await reaper.sweep(accepted_at(other.id) + GRACE_S + SWEEP_AGAIN_S)
    assert not kept_in(inputs)


async def test_inputs_of_a_refused_job_go_at_once(inputs: LedgerInputs) -> None:
    with pytest.raises(MidstreamError, match="limit"):
        async with inputs.kept(make_job(), BLOBS):
            raise MidstreamError("rate_limited", "a limit")
    assert not kept_in(inputs)


async def test_inputs_stay_where_the_ledger_may_have_accepted_the_job(
    inputs: LedgerInputs,
) -> None:
    with pytest.raises(MidstreamError, match="away"):
        async with inputs.kept(make_job(), BLOBS) as (job, _):
            raise MidstreamError("unavailable", "away")
    assert await inputs.read(job) == BLOBS


def test_a_repeated_submission_leaves_one_object(api: Api, wide: Hand) -> None:
    before = kept_in(LedgerInputs(wide.ledger))
    body = {"model": MODEL, "prompts": ["hello"], "steering": edits(FEW)}
    ids = {
        api.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k"}).json()["id"]
        for _ in range(2)
    }
    assert len(ids) == 1
    kept = wide.do(LedgerInputs(wide.ledger).read(wide.job(*ids)))
    assert len(kept) == FEW
    added = {*kept_in(LedgerInputs(wide.ledger))} - {*before}
    assert {path.name for path in added} == {*ids, "tensors"}
    assert len(added) == 2


@pytest.mark.parametrize("damage", ["gone", "changed"])
async def test_missing_or_changed_inputs_are_a_typed_error(
    ledger: Ledger, inputs: LedgerInputs, damage: str
) -> None:
    job = await accepted(ledger, inputs)
    path = Path(inputs.store.uri) / job.id / "tensors"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"\0" + path.read_bytes()[1:])
    with pytest.raises(MidstreamError, match=job.id) as raised:
        await inputs.read(job)
    assert raised.value.kind == "intervention_failed"
