"""Do jobs flow through queue, worker, ranks' receipts and ledger, with the fake engine and
everything else real?
"""

import socket
import time
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from ledger_kit import enqueue
from midstream_fake_engine.model import HIDDEN_SIZE
from stack import Stack, unsuccessful

from midstream import __version__
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.models import TokenizerBundle, encode_bundle
from midstream.schemas.requests.specs import StoredCapture, StoredSteering

ALL_LAYERS = StoredCapture(
    sites={"post_block": [0, 1, 2, 3]}, positions="all_prompt", tag="t", layout="packed"
)
VECTOR = from_numpy(np.arange(HIDDEN_SIZE, dtype=np.float32))


def steering(name: str = content_hash(VECTOR)) -> list[StoredSteering]:
    return [
        StoredSteering(
            layers=[1, 2],
            hook="post_block",
            positions="all",
            family="add",
            tensors=[name],
            scale=2.0,
        )
    ]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two TP ranks in each of two pipeline stages; 20 ms a token, so that jobs overlap; leases that
    outlast a stall.
    """
    directory = tmp_path_factory.mktemp("stack")
    with Stack(
        directory,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        engine_options={"token_s": 0.02},
        lease_s=30,
    ) as running:
        yield running


def test_a_plain_job_ends_with_its_output(stack: Stack) -> None:
    job_id = stack.submit(["hello"], max_tokens=5)
    assert stack.wait(job_id).state is State.SUCCEEDED
    result = stack.result(job_id)
    assert len(result.outputs[0].token_ids) == 5
    assert result.outputs[0].prompt_tokens == 5
    assert result.capture_results.status == "not_requested"
    assert result.determinism is None


def test_eight_jobs_of_three_prompts_run_at_once_and_keep_their_own_outputs(stack: Stack) -> None:
    alone = stack.submit(["job 3 prompt 1"], max_tokens=100)
    stack.wait(alone)
    jobs = [
        stack.submit([f"job {j} prompt {p}" for p in range(3)], max_tokens=100, capture=ALL_LAYERS)
        for j in range(8)
    ]
    views = [stack.wait(job_id) for job_id in jobs]
    assert unsuccessful(views) == {}
    results = [stack.result(job_id) for job_id in jobs]
    times = [(view.started or 0.0, view.finished or 0.0) for view in views]
    whole = max(end for _, end in times) - min(begin for begin, _ in times)
    assert sum(end - begin for begin, end in times) > 2 * whole, (
        "one after the other they take less than the whole"
    )
    assert results[3].outputs[1].token_ids == stack.result(alone).outputs[0].token_ids
    assert [[output.index for output in result.outputs] for result in results] == [[0, 1, 2]] * 8


def test_a_capture_succeeds_when_every_rank_reported_and_its_files_are_durable(
    stack: Stack,
) -> None:
    job_id = stack.submit(["one", "three"], capture=ALL_LAYERS, max_tokens=3)
    view = stack.wait(job_id)
    assert (view.state, view.capture_status, view.receipts, view.receipts_expected) == (
        State.SUCCEEDED,
        "ok",
        8,
        8,
    )
    results = stack.result(job_id).capture_results
    assert sorted(
        (file.request, file.pp, file.sites["post_block"], file.positions) for file in results.files
    ) == [
        (0, 0, [0, 1], 3),
        (0, 1, [2, 3], 3),
        (1, 0, [0, 1], 5),
        (1, 1, [2, 3], 5),
    ]
    for file in results.files:
        content = (stack.settings.capture_root / file.path).read_bytes()[
            file.offset : file.offset + file.bytes
        ]
        assert (len(content), zlib.crc32(content)) == (file.bytes, file.crc32)


def test_a_steered_job_reports_what_every_rank_applied(stack: Stack) -> None:
    job_id = stack.submit(
        ["abc"], steering=steering(), blobs={content_hash(VECTOR): VECTOR}, max_tokens=2
    )
    assert stack.wait(job_id).state is State.SUCCEEDED
    determinism = stack.result(job_id).determinism
    assert determinism is not None
    assert determinism.consistent
    assert {
        (stage.pp, rank.tp, rank.applied) for stage in determinism.stages for rank in stage.ranks
    } == {
        # one layer a stage; three prompt tokens and one that was fed back
        (pp, tp, 4)
        for pp in (0, 1)
        for tp in (0, 1)
    }


# field case 21
def test_a_missing_vector_fails_the_job(stack: Stack) -> None:
    started = time.monotonic()
    job_id = stack.submit(["abc"], steering=steering("0" * 64), max_tokens=2)
    view = stack.wait(job_id)
    assert view.state is State.FAILED
    assert view.error is not None
    assert view.error.type == "urn:midstream:intervention_failed"
    assert time.monotonic() - started < 40, "nobody waits for receipts that never come"


# field case 21
def test_a_job_that_this_version_cannot_read_fails_with_both_versions_named(stack: Stack) -> None:
    async def spoil(ledger):  # type: ignore[no-untyped-def]
        await ledger.redis.hset(f"ms:job:{job_id}", "spec", b"\x93\x01\x02\x03")

    job_id = stack.submit(["abc"], max_tokens=2, send=False)
    stack.do(spoil)
    enqueue(stack.app, job_id, "generate", stack.settings.served_model)
    view = stack.wait(job_id)
    assert view.state is State.FAILED
    assert view.error is not None
    assert view.error.title == "Version mismatch"
    assert view.error.detail.count(f"midstream {__version__}") == 2


def test_a_running_job_is_cancelled_promptly(stack: Stack) -> None:
    took = []
    for _ in range(3):
        job_id = stack.submit(["long"], max_tokens=2000)
        stack.wait_running(job_id)
        stack.do(lambda ledger, job_id=job_id: ledger.request_cancel(job_id))
        stack.app.control.broadcast("midstream_cancel", arguments={"job_id": job_id})
        view = stack.wait(job_id)
        assert view.state is State.CANCELLED
        assert view.cancelling is not None
        assert view.finished is not None
        took.append(view.finished - view.cancelling)
    assert min(took) < 1, (
        f"{took}, by the ledger's clock: a stall of the machine hits one of them, a "
        "worker that waits hits all"
    )


def test_a_cancel_with_a_lost_broadcast_is_noticed_by_the_heartbeat(stack: Stack) -> None:
    job_id = stack.submit(["long"], max_tokens=2000)
    stack.wait_running(job_id)
    stack.do(lambda ledger: ledger.request_cancel(job_id))
    assert stack.wait(job_id, 2 * stack.settings.lease_s).state is State.CANCELLED


def test_streaming_publishes_each_token(stack: Stack) -> None:
    job_id = stack.submit(["abc"], max_tokens=6, stream=True)
    stack.wait(job_id)
    events = stack.do(lambda ledger: ledger.events(job_id))
    tokens = [event.data for event in events if event.event == "token"]
    output = stack.result(job_id).outputs[0]
    assert len(tokens) == 6
    assert "".join(str(token["text"]) for token in tokens) == output.text
    assert [token["finish_reason"] for token in tokens] == [None] * 5 + ["length"]
    assert [event.event for event in events if event.event != "token"] == [
        "state",
        "state",
        "output",
        "state",
        "done",
    ]


def test_the_worker_registers_its_model(stack: Stack) -> None:
    info = stack.do(lambda ledger: ledger.model("fake-model"))
    assert info is not None
    assert (info.num_layers, info.hidden_size, info.tp, info.pp) == (4, HIDDEN_SIZE, 2, 2)
    raw = stack.do(lambda ledger: ledger.get_blob(info.tokenizer))
    assert raw is not None
    assert encode_bundle(from_msgpack(raw, TokenizerBundle))[0] == info.tokenizer
    (worker,) = stack.do(lambda ledger: ledger.workers())
    assert (worker.worker, worker.model, worker.pid, worker.healthy) == (
        "w1",
        "fake-model",
        stack.pid("worker"),
        True,
    )


def test_inspect_shows_the_engine_and_its_jobs(stack: Stack) -> None:
    job_id = stack.submit(["long"], max_tokens=2000)
    stack.wait_running(job_id)
    node = f"w1@{socket.gethostname()}"
    reply = stack.app.control.inspect([node], timeout=30)._request("midstream_engine")[node]
    assert (reply["model"], reply["tp"], reply["pp"]) == ("fake-model", 2, 2)
    assert reply["running"][job_id] == 1
    stack.do(lambda ledger: ledger.request_cancel(job_id))
    stack.app.control.broadcast("midstream_cancel", arguments={"job_id": job_id})
    stack.wait(job_id)


def test_a_message_of_a_finished_or_unknown_job_does_nothing(stack: Stack) -> None:
    job_id = stack.submit(["once"], max_tokens=2)
    version = stack.wait(job_id).version
    enqueue(stack.app, job_id, "generate", "fake-model")
    enqueue(stack.app, "job_unknown", "generate", "fake-model")
    after = stack.submit(["after"], max_tokens=2)
    assert stack.wait(after).state is State.SUCCEEDED
    assert stack.view(job_id).version == version
    with pytest.raises(MidstreamError, match="job_unknown"):
        stack.view("job_unknown")
