"""Do jobs and captures flow through queue, worker, receipts, files and ledger, and what becomes of
captures when the disk refuses, a consumer breaks or their time is over?

Everything but the model is real.
"""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from extension_kit import install_example, install_unruly
from ledger_kit import enqueue
from midstream_fake_engine.model import HIDDEN_SIZE, residual_rows
from stack import Stack, unsuccessful
from wait_kit import wait_until

from midstream import __version__
from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.client import CaptureReader
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.models import TokenizerBundle, encode_bundle
from midstream.schemas.readings.installed import OptionValue, StoredReader
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.specs import StoredCapture, StoredSteering

VECTOR = from_numpy(np.arange(HIDDEN_SIZE, dtype=np.float32))
PLUGIN = """
from midstream.workers.runner.files.finished_rows import Outcome

class Picky:
    def consume(self, captures):
        if any(len(capture.positions) > 3 for capture in captures):
            raise ValueError("more than three rows")
        return [Outcome() for _ in captures]

def broken():
    raise OSError("no connection")
"""


def capture(tag: str, **changes: object) -> StoredCapture:
    facts = {"sites": {"post_block": [0, 1, 2, 3]}, "positions": "all_prompt", "tag": tag}
    return StoredCapture(**(facts | changes))  # type: ignore[arg-type]


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
    outlast a stall. A package with consumers is installed beside.
    """
    site = tmp_path_factory.mktemp("site")
    info = site / "picky-1.0.dist-info"
    info.mkdir()
    (site / "picky_consumer_of_the_tests.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: picky\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[midstream.capture_consumers]\npicky = "
        "picky_consumer_of_the_tests:Picky\nbroken = "
        "picky_consumer_of_the_tests:broken\n"
    )
    install_unruly(install_example(site))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        with Stack(
            tmp_path_factory.mktemp("stack"),
            **{"engine.tensor_parallel_size": 2, "engine.pipeline_parallel_size": 2},
            engine_options={"token_s": 0.02},
            lease_s=30,
            extensions="row-geometry,unruly",
        ) as running:
            yield running


def test_streaming_publishes_each_token(stack: Stack) -> None:
    job_id = stack.submit(["abc"], max_tokens=6, stream=True)
    assert stack.wait(job_id).state is State.SUCCEEDED
    events = stack.do(lambda ledger: ledger.events(job_id))
    tokens = [event.data for event in events if event.event == "token"]
    result = stack.result(job_id)
    assert result.capture_results.status == "not_requested"
    assert result.determinism is None
    (output,) = result.outputs
    assert len(tokens) == 6
    assert len(output.token_ids) == 6
    assert output.prompt_tokens == 3
    assert "".join(str(token["text"]) for token in tokens) == output.text
    assert [token["finish_reason"] for token in tokens] == [None] * 5 + ["length"]
    assert [event.event for event in events if event.event != "token"] == [
        "state",
        "state",
        "output",
        "state",
        "done",
    ]


def test_a_stream_whose_events_a_failover_lost_begins_again(stack: Stack) -> None:
    job_id = stack.submit(["a", "b"], max_tokens=100, stream=True)
    while (
        said := stack.do(lambda ledger: ledger.redis.hget(f"ms:job:{job_id}", "said"))
    ) is None or int(said) < 20:
        time.sleep(0.01)
    stack.do(lambda ledger: ledger.redis.hincrby(f"ms:job:{job_id}", "said", -10))
    view = stack.wait(job_id)
    assert view.state == State.SUCCEEDED
    assert view.attempt == 2
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for event in stack.do(lambda ledger: ledger.events(job_id)):
        if event.event == "token" and event.attempt == 2:
            streamed[event.data["index"]] += event.data["token_ids"]
    outputs = stack.result(job_id).outputs
    assert streamed == {output.index: output.token_ids for output in outputs}


def test_eight_jobs_of_three_prompts_run_at_once_and_keep_their_own_outputs(stack: Stack) -> None:
    alone = stack.submit(["job 3 prompt 1"], max_tokens=100)
    stack.wait(alone)
    jobs = [
        stack.submit(
            [f"job {j} prompt {p}" for p in range(3)], max_tokens=100, capture=capture("t")
        )
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


def test_a_steered_job_reports_what_every_rank_applied(stack: Stack) -> None:
    job_id = stack.submit(
        ["abc"], steering=steering(), blobs={content_hash(VECTOR): VECTOR}, max_tokens=2
    )
    assert stack.wait(job_id).state is State.SUCCEEDED
    determinism = stack.result(job_id).determinism
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
    """At once: nobody waits for receipts that never come."""
    view = stack.wait(stack.submit(["abc"], steering=steering("0" * 64), max_tokens=2))
    assert view.state is State.FAILED
    assert view.error.type == "urn:midstream:intervention_failed"


# field case 21
def test_a_job_that_this_version_cannot_read_fails_with_both_versions_named(stack: Stack) -> None:
    async def spoil(ledger):  # type: ignore[no-untyped-def]
        await ledger.redis.hset(f"ms:job:{job_id}", "spec", b"\x93\x01\x02\x03")

    job_id = stack.submit(["abc"], max_tokens=2, send=False)
    stack.do(spoil)
    enqueue(stack.app, job_id, "generate", stack.settings.served_model)
    view = stack.wait(job_id)
    assert view.state is State.FAILED
    assert view.error.title == "Version mismatch"
    assert view.error.detail.count(f"midstream {__version__}") == 2


@pytest.mark.parametrize("broadcast", [True, False])
def test_a_running_job_is_cancelled_by_broadcast_or_by_the_next_heartbeat(
    stack: Stack, broadcast: bool
) -> None:
    job_id = stack.submit(["long"], max_tokens=2000)
    stack.wait_running(job_id)
    stack.do(lambda ledger: ledger.request_cancel(job_id))
    if broadcast:
        stack.app.control.broadcast("midstream_cancel", arguments={"job_id": job_id})
    view = stack.wait(job_id, 2 * stack.settings.lease_s)
    assert view.state is State.CANCELLED
    assert view.cancelling is not None
    assert view.finished is not None
    if broadcast:
        assert view.finished - view.cancelling < 5, "a heartbeat comes every ten seconds"


def test_the_worker_registers_its_model(stack: Stack) -> None:
    info = stack.do(lambda ledger: ledger.model("fake-model"))
    assert info.num_layers == 4
    assert info.hidden_size == HIDDEN_SIZE
    assert info.tp == 2
    assert info.pp == 2
    raw = stack.do(lambda ledger: ledger.get_blob(info.tokenizer))
    assert raw is not None
    assert encode_bundle(from_msgpack(raw, TokenizerBundle))[0] == info.tokenizer
    (worker,) = stack.do(lambda ledger: ledger.workers())
    assert worker.worker == "w1"
    assert worker.model == "fake-model"
    assert worker.pid == stack.pid("worker")
    assert worker.healthy


def test_inspect_shows_the_engine_and_its_jobs(stack: Stack) -> None:
    job_id = stack.submit(["long"], max_tokens=2000)
    stack.wait_running(job_id)
    node = f"w1@{socket.gethostname()}"
    reply = stack.app.control.inspect([node], timeout=30)._request("midstream_engine")[node]
    assert reply["model"] == "fake-model"
    assert reply["tp"] == 2
    assert reply["pp"] == 2
    assert reply["running"][job_id] == 1
    stack.do(lambda ledger: ledger.request_cancel(job_id))
    stack.app.control.broadcast("midstream_cancel", arguments={"job_id": job_id})
    stack.wait(job_id)


def test_a_message_of_a_finished_or_unknown_job_does_nothing(stack: Stack) -> None:
    job_id = stack.submit(["once"], max_tokens=2)
    version = stack.wait(job_id).version
    enqueue(stack.app, job_id, "generate", "fake-model")
    enqueue(stack.app, "job_unknown", "generate", "fake-model")
    assert stack.wait(stack.submit(["after"], max_tokens=2)).state is State.SUCCEEDED
    assert stack.view(job_id).version == version
    with pytest.raises(MidstreamError, match="job_unknown"):
        stack.view("job_unknown")


def rows_of(reader: CaptureReader, layer: int, request: int = 0) -> np.ndarray:
    return residual_rows(
        layer, np.array(reader.positions(request)), np.array(reader.token_ids(request))
    )


@pytest.mark.parametrize("layout", ["packed", "per_file", "segment"])
def test_a_capture_of_each_layout_is_durable_when_every_rank_has_reported(
    stack: Stack, layout: str
) -> None:
    job_id = stack.submit(
        ["one", "three"], capture=capture(layout.replace("_", "-"), layout=layout)
    )
    view = stack.wait(job_id)
    assert view.state == State.SUCCEEDED
    assert view.capture_status == "ok"
    assert view.receipts == 8
    assert view.receipts_expected == 8
    files = stack.result(job_id).capture_results.files
    assert {(file.request, file.pp, file.positions) for file in files} == {
        (0, 0, 3),
        (0, 1, 3),
        (1, 0, 5),
        (1, 1, 5),
    }
    reader = CaptureReader(stack.settings.capture_root, job_id)
    assert reader.requests() == [0, 1]
    assert reader.layers() == [0, 1, 2, 3]
    for request in (0, 1):
        for layer in range(4):
            np.testing.assert_array_equal(
                reader.array(layer, request=request), rows_of(reader, layer, request)
            )
    assert all(check.ok for check in reader.verify())


def test_rows_in_memory_come_back_with_the_result_and_nothing_is_written(stack: Stack) -> None:
    job_id = stack.submit(["one"], capture=capture("memory", consumers=["memory"]))
    assert stack.wait(job_id).capture_status == "ok"
    results = stack.result(job_id).capture_results
    assert results.files == []
    reader = CaptureReader.from_bytes([told.rows for told in results.consumers])
    np.testing.assert_array_equal(reader.array(3), rows_of(reader, 3))
    assert not (stack.settings.capture_root / "memory").exists()


# field case 19
def test_an_unwritable_capture_folder_fails_only_its_jobs(stack: Stack) -> None:
    (stack.settings.capture_root / "blocked").write_text("not a folder")
    jobs = [
        stack.submit(["one"], capture=capture(tag, layout=layout))
        for layout in ("packed", "segment")
        for tag in ("blocked", "free")
    ]
    views = [stack.wait(job_id) for job_id in jobs]
    assert [view.state for view in views] == [State.FAILED, State.SUCCEEDED] * 2
    for view in views[::2]:
        assert view.error.type == "urn:midstream:capture_failed"
        assert "write failed" in view.error.detail
        assert view.capture_status == "error"


# field case 19
def test_a_full_disk_fails_the_capture_with_its_reason_and_the_worker_goes_on(stack: Stack) -> None:
    disk = stack.settings.capture_root / "small"
    disk.mkdir(parents=True, exist_ok=True)
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip("file systems cannot be mounted here")
    try:
        for layout in ("packed", "segment"):
            large = stack.wait(stack.submit(["x" * 2000], capture=capture("small", layout=layout)))
            assert large.state == State.FAILED
            assert (large.error and large.error.type) == "urn:midstream:capture_failed"
            assert "No space left on device" in large.error.detail
            wait_until(  # the other stage may still be at it
                lambda: shutil.disk_usage(disk).free >= 32 << 10,
                why="what could not be written is removed",
            )
            small = stack.submit(["x"], capture=capture("small", layout=layout))
            assert stack.wait(small).state is State.SUCCEEDED
            assert CaptureReader(stack.settings.capture_root, small).positions() == [0]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_consumer_plugin_gets_rows_and_a_failing_one_makes_the_result_partial(
    stack: Stack,
) -> None:
    (info,) = stack.do(lambda ledger: ledger.models())
    assert info.consumers == ["filesystem", "memory", "logging", "picky"]
    wanted = capture("picky", consumers=["filesystem", "picky"])
    fine = stack.submit(["abc"], capture=wanted)
    short = stack.submit(["abc", "abcdef"], capture=wanted)
    assert stack.wait(fine).capture_status == "ok"
    view = stack.wait(short)
    assert view.state == State.SUCCEEDED
    assert view.capture_status == "partial"
    results = stack.result(short).capture_results
    assert "picky failed: more than three rows" in results.detail
    assert {(told.request, told.name, told.ok) for told in results.consumers} == {
        (0, "filesystem", True), (0, "picky", True), (1, "filesystem", True), (1, "picky", False),
    }  # fmt: skip
    assert CaptureReader(stack.settings.capture_root, short).requests() == [0, 1]


def test_an_installed_reader_answers_from_both_stages(stack: Stack) -> None:
    (info,) = [
        model
        for model in stack.do(lambda ledger: ledger.models())
        if model.name == stack.settings.served_model
    ]
    codes = {each.name: each.digest for each in info.extensions}
    assert set(codes) == {"row-geometry", "unruly"}

    def wish(name: str, options: dict[str, OptionValue], **changes: Any) -> StoredCapture:
        reading = StoredReader(
            name=name, digest=codes[name], row_bytes=64, fixed_bytes=64, options=options
        )
        return capture("", consumers=[READER], reading=msgspec.structs.replace(reading, **changes))

    jobs = [
        stack.submit(["one", "three"], capture=wish("row-geometry", {"k": 2})),
        stack.submit(["one"], capture=wish("unruly", {"mood": "raise"})),
        stack.submit(["one"], capture=wish("row-geometry", {"k": 2}, digest="0" * 64)),
    ]
    assert [stack.wait(job_id).state for job_id in jobs] == [
        State.SUCCEEDED,
        State.FAILED,
        State.FAILED,
    ]
    found = stack.result(jobs[0]).readers
    assert found is not None
    for request, reading in enumerate(found):
        assert reading.request == request
        assert reading.digest == codes["row-geometry"]
        assert reading.options == {"k": 2}
        assert [part.sites for part in reading.parts] == [
            {"post_block": [0, 1]},
            {"post_block": [2, 3]},
        ]
        for part in reading.parts:
            rows = [
                residual_rows(layer, np.array(part.positions), np.array(part.token_ids))
                for layer in part.sites["post_block"]
            ]
            np.testing.assert_allclose(
                part.arrays["norm"].numpy(), np.linalg.norm(np.stack(rows), axis=-1), rtol=1e-6
            )
    for job_id, words in (
        (jobs[1], "unruly: ValueError: no such luck"),
        (jobs[2], "the job was accepted for the code 000000000000"),
    ):
        error = stack.wait(job_id).error
        assert error.type == "urn:midstream:reading_failed"
        assert words in error.detail


def test_the_callbacks_worker_deletes_expired_captures(stack: Stack) -> None:
    jobs = [
        stack.submit(["one"], capture=capture("passing", layout=layout))
        for layout in ("packed", "segment")
    ]
    assert unsuccessful(map(stack.wait, jobs)) == {}
    stack.replace("callbacks", capture_ttl_s=1)

    def left() -> list[Path]:
        """Rows on disk; a segment's blobs become holes while its writer may still append to it."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # deleted while we looked: once more
                return [
                    path
                    for path in stack.settings.capture_root.rglob("*.s*")
                    if path.is_file() and path.stat().st_blocks
                ]

    stack.wait(
        jobs[0], until=lambda _: not stack.do(lambda ledger: LedgerCaptures(ledger).list()).captures
    )
    stack.wait(jobs[0], until=lambda _: not left())
    assert unsuccessful(map(stack.view, jobs)) == {}
