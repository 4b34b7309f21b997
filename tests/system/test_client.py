"""Does the Python client do against the real stack what it says? And the command line?"""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from up_kit import Up

from midstream.client import AsyncClient, Client, wire
from midstream.schemas.errors import MidstreamError
from midstream.schemas.jobs import State
from midstream.workers.fake_model import HIDDEN_SIZE, NUM_LAYERS, residual_rows

CAPTURE = {"layers": "all", "positions": "all_prompt", "tag": "mine"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    started = Up(tmp_path_factory.mktemp("client") / "data")
    started.ready()
    yield started
    started.close()


@pytest.fixture
def client(up: Up) -> Iterator[Client]:
    with Client(up.ready()) as made:
        yield made


def expected(layer: int, token_ids: list[int]) -> np.ndarray:
    return residual_rows(layer, np.arange(len(token_ids)), np.array(token_ids))


def test_a_job_runs_from_keyword_arguments_to_arrays(client: Client) -> None:
    result = client.run(model="fake", prompts=["hello", "you"], capture=CAPTURE, sampling={"max_tokens": 5}, timeout=30)
    assert [len(output.token_ids) for output in result.outputs] == [5, 5]
    reader = client.capture(result.id)
    assert reader.requests() == [0, 1]
    for request, length in ((0, 5), (1, 3)):
        tokens = reader.token_ids(request)
        assert len(tokens) == length
        for layer in range(NUM_LAYERS):
            np.testing.assert_array_equal(reader.array(layer, request=request), expected(layer, tokens))
    assert all(check.ok for check in reader.verify())


def test_captures_can_be_downloaded_and_are_the_same(client: Client, tmp_path: Path) -> None:
    result = client.run(model="fake", prompts=["far away"], capture=CAPTURE, timeout=30)
    here, there = client.capture(result.id), client.capture(result.id, tmp_path / "copy")
    assert here.files[0].parent != there.files[0].parent
    assert here.files[0].read_bytes() == there.files[0].read_bytes()
    np.testing.assert_array_equal(here.stack(), there.stack())
    assert [check.ok for check in there.verify()] == [True]


def test_a_download_is_kept_for_the_program_when_the_server_is_elsewhere(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from midstream.client import download

    result = client.run(model="fake", prompts=["far away"], capture=CAPTURE, timeout=30)
    monkeypatch.setattr(download, "in_place", lambda manifest, job_id: [])
    reader = client.capture(result.id)
    assert "midstream-capture-" in str(reader.files[0])
    np.testing.assert_array_equal(reader.array(1), expected(1, reader.token_ids()))


def test_a_numpy_vector_steers(client: Client) -> None:
    vector = np.ones(HIDDEN_SIZE, np.float32)
    steered = client.run(model="fake", prompts=["hello"], steering=[{"layers": [1], "vector": vector, "scale": 2.0}], timeout=30)
    assert steered.determinism is not None
    assert steered.determinism.consistent
    plain = client.run(model="fake", prompts=["hello"], timeout=30)
    assert plain.outputs != steered.outputs


# field case 27
def test_a_vector_of_the_wrong_width_is_refused_by_its_field(client: Client) -> None:
    with pytest.raises(MidstreamError) as caught:
        client.submit(model="fake", prompts=["hello"], steering=[{"layers": 1, "vector": np.ones(HIDDEN_SIZE + 1)}])
    assert caught.value.kind == "invalid_request"
    assert (caught.value.field or "").startswith("steering[0].vector")


def test_a_completion_with_capture_wait_has_its_files_when_it_returns(client: Client) -> None:
    answer = client.completion("fake", ["one", "two"], capture=CAPTURE, capture_wait=True, max_tokens=3, temperature=0)
    assert len(answer.texts) == 2
    assert answer.capture_results is not None
    assert answer.capture_results.status == "ok"
    assert answer.determinism is not None
    assert client.capture(answer.job).requests() == [0, 1]
    assert client.job(answer.job).state is State.SUCCEEDED


def test_a_chat_is_answered(client: Client) -> None:
    answer = client.chat("fake", [{"role": "user", "content": "hello"}], max_tokens=4, temperature=0)
    assert len(answer.text) > 0
    assert answer.capture_results is None


def test_a_response_that_was_held_too_long_is_fetched_as_a_job(tmp_path: Path) -> None:
    up = Up(tmp_path / "data", fake_token_s=0.2, max_wait_s=0.5)
    try:
        with Client(up.ready()) as client:
            answer = client.completion("fake", "slow", capture=CAPTURE, capture_wait=True, max_tokens=6, temperature=0)
            assert answer.finish_reasons == ["length"]
            assert answer.capture_results is not None
            assert answer.capture_results.status == "ok"
    finally:
        up.close()


def test_events_are_followed_to_the_end_and_can_be_resumed(client: Client) -> None:
    job = client.submit(model="fake", prompts=["hello"], capture=CAPTURE)
    events = list(client.events(job.id))
    assert events[-1].event == "done"
    assert "receipt" in {event.event for event in events}
    again = list(client.events(job.id, after=events[2].id))
    assert again == events[3:]


def test_jobs_are_listed_and_a_finished_one_cannot_be_cancelled(client: Client) -> None:
    result = client.run(model="fake", prompts=["hello"], timeout=30)
    assert result.id in {view.id for view in client.jobs(state="succeeded", limit=200).jobs}
    with pytest.raises(MidstreamError) as caught:
        client.cancel(result.id)
    assert caught.value.kind == "conflict"


def test_a_job_that_is_not_there_is_not_found(client: Client) -> None:
    with pytest.raises(MidstreamError) as caught:
        client.result("job_nothing")
    assert caught.value.kind == "not_found"


def test_many_coroutines_share_one_async_client(up: Up) -> None:
    async def go() -> None:
        async with AsyncClient(up.ready()) as client:
            assert await client.ready()
            assert await client.models() == ["fake"]
            runs = [client.run(model="fake", prompts=[f"prompt {number}"], capture=CAPTURE, timeout=60) for number in range(20)]
            results = await asyncio.gather(*runs)
            assert len({result.id for result in results}) == 20
            reader = await client.capture(results[3].id)
            np.testing.assert_array_equal(reader.array(2), expected(2, reader.token_ids()))
            events = [event.event async for event in client.events(results[0].id)]
            assert events[-1] == "done"
            answer = await client.completion("fake", "hi", capture=CAPTURE, capture_wait=True, max_tokens=2)
            assert answer.capture_results is not None
            with pytest.raises(MidstreamError, match="there is no model"):
                await client.chat("nobody", [{"role": "user", "content": "x"}])

    asyncio.run(go())


def test_every_answer_names_the_version(up: Up) -> None:
    import httpx

    from midstream import __version__

    for path in ("/healthz", "/v1/jobs/job_nothing", "/v1/models"):
        assert httpx.get(up.ready() + path).headers[wire.VERSION_HEADER] == __version__


# --- The same by hand ---


def test_submit_waits_and_shows_outputs_receipts_and_what_to_do_next(up: Up) -> None:
    done = up.midstream("submit", "hello", "you", "--layers", "0-2", "--positions", "all_prompt", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "succeeded" in done.stdout
    assert "captures ok: 2 files" in done.stdout
    assert "consistent" in done.stdout
    assert "midstream capture show job_" in done.stdout


def test_a_job_can_be_submitted_now_and_looked_at_later(up: Up) -> None:
    submitted = up.midstream("submit", "hello", "--layers", "all", "--no-wait")
    job_id = submitted.stdout.strip()
    assert job_id.startswith("job_")
    waited = up.midstream("job", "wait", job_id, "--json")
    assert waited.returncode == 0, waited.stderr
    assert json.loads(waited.stdout)["capture_results"]["status"] == "ok"
    assert job_id in up.midstream("job", "list").stdout
    assert "succeeded" in up.midstream("job", "show", job_id).stdout
    assert "done" in up.midstream("job", "events", job_id).stdout
    shown = up.midstream("capture", "show", job_id, "--values", "1")
    assert "[4, 1, 8]" in shown.stdout
    assert "float32 [1, 8]" in shown.stdout


def test_a_file_that_was_changed_is_found_by_verify(up: Up, tmp_path: Path) -> None:
    job_id = up.midstream("submit", "hello", "--layers", "all", "--no-wait").stdout.strip()
    assert up.midstream("job", "wait", job_id).returncode == 0
    assert up.midstream("capture", "save", job_id, str(tmp_path / "copy")).returncode == 0
    assert up.midstream("capture", "verify", str(tmp_path / "copy")).returncode == 0
    (file,) = (tmp_path / "copy").glob("*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    checked = up.midstream("capture", "verify", str(tmp_path / "copy"))
    assert checked.returncode == 1
    assert "error: 1 of 1 files" in checked.stderr


def test_a_body_from_a_file_is_submitted_as_it_is(up: Up, tmp_path: Path) -> None:
    body = {"model": "fake", "prompts": [[1, 2, 3]], "capture": {"layers": [0], "positions": [1]}, "sampling": {"max_tokens": 2}}
    (tmp_path / "job.json").write_text(json.dumps(body))
    done = up.midstream("submit", "--body", str(tmp_path / "job.json"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["prompt_tokens"] == 3


# field case 39
def test_a_job_that_is_refused_fails_the_command(up: Up) -> None:
    refused = up.midstream("submit", "hello", "--layers", "99")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: capture.layers: layer 99")
    assert refused.stdout == ""


def test_cancel_stops_a_running_job_and_waiting_for_it_fails(tmp_path: Path) -> None:
    up = Up(tmp_path / "data", fake_token_s=0.2)
    try:
        with Client(up.ready()) as client:
            job = client.submit(model="fake", prompts=["hello"], sampling={"max_tokens": 500})
            while client.job(job.id).state is not State.RUNNING:
                time.sleep(0.05)
            assert up.midstream("job", "cancel", job.id).returncode == 0
            ended = up.midstream("job", "wait", job.id)
        assert ended.returncode == 1
        assert "cancelled" in ended.stderr
    finally:
        up.close()
