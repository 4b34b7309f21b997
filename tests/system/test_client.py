"""Does the Python client do against the real stack what it says? And the command line?"""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE, NUM_LAYERS, residual_rows
from up_kit import Up

from midstream import CaptureSpec, PatchStudy, Span, returned_rows
from midstream.client import AsyncClient, Client
from midstream.client.sdk import wire
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json
from midstream.schemas.jobs.jobs import JobResult, State

CAPTURE = {"layers": "all", "positions": "all_prompt", "tag": "mine"}


@pytest.fixture
def client(up: Up) -> Iterator[Client]:
    with Client(up.ready()) as made:
        yield made


def expected(layer: int, token_ids: list[int]) -> np.ndarray:
    return residual_rows(layer, np.arange(len(token_ids)), np.array(token_ids))


def test_a_job_runs_from_keyword_arguments_to_arrays(client: Client) -> None:
    result = client.run(
        model="fake",
        prompts=["hello", "you"],
        capture=CAPTURE,
        sampling={"max_tokens": 5},
        timeout=120,
    )
    assert [len(output.token_ids) for output in result.outputs] == [5, 5]
    reader = client.capture(result.id)
    assert reader.requests() == [0, 1]
    for request, length in ((0, 5), (1, 3)):
        tokens = reader.token_ids(request)
        assert len(tokens) == length
        for layer in range(NUM_LAYERS):
            np.testing.assert_array_equal(
                reader.array(layer, request=request), expected(layer, tokens)
            )
    assert all(check.ok for check in reader.verify())


def test_captures_can_be_downloaded_and_are_the_same(client: Client, tmp_path: Path) -> None:
    result = client.run(model="fake", prompts=["far away"], capture=CAPTURE, timeout=120)
    here, there = client.capture(result.id), client.capture(result.id, tmp_path / "copy")
    assert here.files[0].parent != there.files[0].parent
    assert here.token_ids() == there.token_ids()
    np.testing.assert_array_equal(here.stack(), there.stack())
    assert [check.ok for check in there.verify()] == [True]


def test_downloads_from_a_remote_server_are_cached_for_the_process(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midstream.client.sdk.answers import download

    result = client.run(model="fake", prompts=["far away"], capture=CAPTURE, timeout=120)
    monkeypatch.setattr(download, "in_place", lambda manifest, job_id: [])
    reader = client.capture(result.id)
    assert "midstream-capture-" in str(reader.files[0])
    np.testing.assert_array_equal(reader.array(1), expected(1, reader.token_ids()))


def test_hooks_spans_and_positions_are_asked_for_by_structs_or_fields(client: Client) -> None:
    prompt = "to be or not to be"
    spec = CaptureSpec(
        hooks={"resid_pre": 0, "mlp_out": "2-3"},
        positions=[Span(text="be", occurrence=-1), 0],
        tag="mine",
    )
    fields = {
        "hooks": {"pre_attn": [0], "hook_mlp_out": [2, -1]},
        "positions": [{"text": "be", "occurrence": 1}, -18],
        "tag": "mine",
    }
    for capture in (spec, fields):
        reader = client.capture(
            client.run(model="fake", prompts=prompt, capture=capture, timeout=120).id
        )
        assert (reader.hooks(), reader.positions()) == (["pre_attn", "mlp_out"], [0, 16, 17])
        tokens = np.array(reader.token_ids())
        for hook, layer in (("pre_attn", 0), ("mlp_out", 2), ("mlp_out", 3)):
            np.testing.assert_array_equal(
                reader.array(layer, hook), residual_rows(layer, np.array([0, 16, 17]), tokens, hook)
            )


def test_small_captures_come_back_in_the_answer_as_arrays(client: Client) -> None:
    capture = {
        "hooks": {"post_block": "all", "pre_attn": 1},
        "positions": "all_prompt",
        "consumers": ["memory"],
    }
    answer = client.completion(
        "fake", ["one", "three"], capture=capture, max_tokens=3, temperature=0
    )
    assert answer.capture_results is not None
    assert (answer.capture_results.status, answer.capture_results.files) == ("ok", [])
    for request, length in ((0, 3), (1, 5)):
        tokens = answer.rows.token_ids(request)
        assert len(tokens) == length
        np.testing.assert_array_equal(answer.rows.array(2, request=request), expected(2, tokens))
        wanted = residual_rows(1, np.arange(length), np.array(tokens), "pre_attn")
        np.testing.assert_array_equal(answer.rows.array(1, "pre_attn", request), wanted)
    result = client.run(model="fake", prompts=["one"], capture=capture, timeout=120)
    np.testing.assert_array_equal(
        returned_rows(result.capture_results).stack(), answer.rows.stack(request=0)
    )


def test_an_answer_without_rows_says_how_to_ask_for_them(client: Client) -> None:
    answer = client.completion(
        "fake", "one", capture=CAPTURE, capture_wait=True, max_tokens=2, temperature=0
    )
    with pytest.raises(MidstreamError, match=r"captures: ok.*\"memory\""):
        assert answer.rows


@pytest.mark.long
def test_global_captures_are_taken_of_every_request(tmp_path: Path) -> None:
    up = Up(
        tmp_path / "data",
        global_capture="post_block:all;pre_attn:0-1",
        global_capture_positions="0,-1",
        global_capture_tag="ops",
    )
    try:
        with Client(up.ready()) as client:
            plain = client.completion("fake", "hello", max_tokens=2, temperature=0)
            assert plain.capture_results is None
            job = client.wait(plain.job, timeout=120)
            assert (job.state, job.capture_status) == (State.SUCCEEDED, "ok")
            assert {file.tag for file in client.result(plain.job).capture_results.files} == {"ops"}
            reader = client.capture(plain.job)
            assert (reader.positions(), reader.layers(hook="pre_attn"), len(reader.layers())) == (
                [0, 4],
                [0, 1],
                NUM_LAYERS,
            )
            with pytest.raises(MidstreamError, match="choose another"):
                client.submit(model="fake", prompts=["hello"], capture={"tag": "ops"})
    finally:
        up.close()


def test_a_numpy_vector_steers(client: Client) -> None:
    vector = np.ones(HIDDEN_SIZE, np.float32)
    steered = client.run(
        model="fake",
        prompts=["hello"],
        steering=[{"layers": [1], "vector": vector, "scale": 2.0}],
        timeout=120,
    )
    assert steered.determinism is not None
    assert steered.determinism.consistent
    plain = client.run(model="fake", prompts=["hello"], timeout=120)
    assert plain.outputs != steered.outputs


# field case 27
def test_a_vector_of_the_wrong_width_is_refused_by_its_field(client: Client) -> None:
    with pytest.raises(MidstreamError) as caught:
        client.submit(
            model="fake",
            prompts=["hello"],
            steering=[{"layers": 1, "vector": np.ones(HIDDEN_SIZE + 1)}],
        )
    assert caught.value.kind == "invalid_request"
    assert (caught.value.field or "").startswith("steering[0].vector")


def test_a_completion_with_capture_wait_has_its_files_when_it_returns(client: Client) -> None:
    answer = client.completion(
        "fake", ["one", "two"], capture=CAPTURE, capture_wait=True, max_tokens=3, temperature=0
    )
    assert len(answer.texts) == 2
    assert answer.capture_results is not None
    assert answer.capture_results.status == "ok"
    assert answer.determinism is not None
    assert client.capture(answer.job).requests() == [0, 1]
    assert client.jobs.get(answer.job).state is State.SUCCEEDED


def test_a_chat_is_answered(client: Client) -> None:
    answer = client.chat(
        "fake", [{"role": "user", "content": "hello"}], max_tokens=4, temperature=0
    )
    assert len(answer.text) > 0
    assert answer.capture_results is None


@pytest.mark.long
def test_a_response_that_was_held_too_long_is_fetched_as_a_job(tmp_path: Path) -> None:
    up = Up(tmp_path / "data", engine_options={"token_s": 0.2}, max_wait_s=0.5)
    try:
        with Client(up.ready()) as client:
            answer = client.completion(
                "fake", "slow", capture=CAPTURE, capture_wait=True, max_tokens=6, temperature=0
            )
            assert answer.finish_reasons == ["length"]
            assert answer.capture_results is not None
            assert answer.capture_results.status == "ok"
    finally:
        up.close()


def test_events_are_followed_to_the_end_and_can_be_resumed(client: Client) -> None:
    job = client.submit(model="fake", prompts=["hello"], capture=CAPTURE)
    events = list(client.jobs.events(job.id))
    assert events[-1].event == "done"
    assert "receipt" in {event.event for event in events}
    again = list(client.jobs.events(job.id, after=events[2].id))
    assert again == events[3:]


def test_jobs_are_listed_and_a_finished_one_cannot_be_cancelled(client: Client) -> None:
    result = client.run(model="fake", prompts=["hello"], timeout=120)
    assert result.id in {view.id for view in client.jobs.list(state="succeeded", limit=200).jobs}
    with pytest.raises(MidstreamError) as caught:
        client.jobs.cancel(result.id)
    assert caught.value.kind == "conflict"


def test_an_unknown_job_is_not_found_in_the_client(client: Client) -> None:
    with pytest.raises(MidstreamError) as caught:
        client.result("job_nothing")
    assert caught.value.kind == "not_found"


async def test_many_coroutines_share_one_async_client(up: Up) -> None:
    async with AsyncClient(up.ready()) as client:
        assert await client.ready()
        assert await client.models() == ["fake"]
        runs = [
            client.run(model="fake", prompts=[f"prompt {number}"], capture=CAPTURE, timeout=120)
            for number in range(20)
        ]
        results = await asyncio.gather(*runs)
        assert len({result.id for result in results}) == 20
        reader = await client.capture(results[3].id)
        np.testing.assert_array_equal(reader.array(2), expected(2, reader.token_ids()))
        events = [event.event async for event in client.jobs.events(results[0].id)]
        assert events[-1] == "done"
        answer = await client.completion(
            "fake", "hi", capture=CAPTURE, capture_wait=True, max_tokens=2
        )
        assert answer.capture_results is not None
        with pytest.raises(MidstreamError, match="unknown model"):
            await client.chat("nobody", [{"role": "user", "content": "x"}])


def test_every_answer_names_the_version(up: Up) -> None:
    import httpx2

    from midstream import __version__

    for path in ("/healthz", "/v1/jobs/job_nothing", "/v1/models"):
        assert httpx2.get(up.ready() + path).headers[wire.VERSION_HEADER] == __version__


# --- The same by hand ---


def test_submit_waits_and_shows_outputs_receipts_and_what_to_do_next(up: Up) -> None:
    done = up.midstream(
        "submit",
        "hello",
        "you",
        "--layers",
        "0-2",
        "--positions",
        "all_prompt",
        "--max-tokens",
        "4",
    )
    assert done.returncode == 0, done.stderr
    assert "succeeded" in done.stdout
    assert "captures ok: 2 files" in done.stdout
    assert "consistent" in done.stdout
    assert "midstream capture show job_" in done.stdout


def test_the_capture_options_of_submit_reach_the_worker(up: Up) -> None:
    options = [
        "--hooks",
        "resid_pre:0;post_block:all",
        "--span",
        "o#-1",
        "--span",
        "l#all",
        "--positions",
        "0",
        "--every-n",
        "2",
    ]
    form = ["--at", "after", "--dtype", "float16", "--layout", "per_file", "--tag", "cli"]
    consumers = ["--consumer", "filesystem", "--consumer", "memory"]
    done = up.midstream("submit", "hello world", *options, *form, *consumers, "--json")
    assert done.returncode == 0, done.stderr
    result = from_json(done.stdout, JobResult)
    files = result.capture_results.files
    assert {(file.layout, file.tag) for file in files} == {("per_file", "cli")}
    assert len(files) == 1 + NUM_LAYERS, "one file for each hook and layer"
    rows = returned_rows(result.capture_results)
    assert (rows.positions(), rows.layers(hook="pre_attn"), len(rows.layers())) == (
        [0, 2, 3, 7, 9],
        [0],
        NUM_LAYERS,
    )
    shown = up.midstream(
        "submit", "hello", "--hooks", "mlp_in", "--layers", "1", "--consumer", "memory"
    )
    assert "mlp_in" in shown.stdout, shown.stderr
    assert re.search(r"\d B in the response", shown.stdout)


@pytest.mark.long
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
    assert "error: 1 of 1 checks failed" in checked.stderr


def test_a_body_from_a_file_is_submitted_as_it_is(up: Up, tmp_path: Path) -> None:
    body = {
        "model": "fake",
        "prompts": [[1, 2, 3]],
        "capture": {"layers": [0], "positions": [1]},
        "sampling": {"max_tokens": 2},
    }
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


@pytest.mark.long
def test_cancel_stops_a_running_job_and_waiting_for_it_fails(tmp_path: Path) -> None:
    up = Up(tmp_path / "data", engine_options={"token_s": 0.2})
    try:
        with Client(up.ready()) as client:
            job = client.submit(model="fake", prompts=["hello"], sampling={"max_tokens": 500})
            while client.jobs.get(job.id).state is not State.RUNNING:
                time.sleep(0.05)
            assert up.midstream("job", "cancel", job.id).returncode == 0
            ended = up.midstream("job", "wait", job.id)
        assert ended.returncode == 1
        assert "cancelled" in ended.stderr
    finally:
        up.close()


def test_captures_are_listed_exported_and_deleted(up: Up, client: Client, tmp_path: Path) -> None:
    job = client.run(
        model="fake", prompts=["hello"], capture={**CAPTURE, "tag": "passing"}, timeout=120
    ).id
    assert [entry.job for entry in client.captures.list(tag="passing", limit=1).captures] == [job]
    assert job in up.midstream("capture", "list", "--tag", "passing").stdout
    done = up.midstream("capture", "export", job, str(tmp_path / "rows.npz"), "--layers", "1")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "rows.npz") as arrays:
        np.testing.assert_array_equal(
            arrays["post_block.1"], expected(1, arrays["token_ids"].tolist())
        )
    assert up.midstream("capture", "delete", job).returncode == 0
    for gone in (lambda: client.capture(job), lambda: client.captures.delete(job)):
        with pytest.raises(MidstreamError) as caught:
            gone()
        assert caught.value.kind == "gone"
    assert up.midstream("capture", "show", job).returncode == 1
    assert client.captures.list(tag="passing").captures == []


def test_a_patch_study_zooms_and_cancels_on_interrupt(
    up: Up, client: Client, tmp_path: Path
) -> None:
    study = PatchStudy("hello you", "hallo you", " a", " b", client=client, model="fake").sweep(
        hooks=["resid_pre", "mlp_out"], metric="logit_diff"
    )
    told = study.result.summary
    assert (told.cells + told.skipped, told.total) == (
        told.total,
        2 * NUM_LAYERS * len(study.result.pairs[0].labels),
    )
    study.save(tmp_path / "study.json")
    best = study.top(1)[0]
    closer = PatchStudy.load(tmp_path / "study.json", client).zoom(best)
    assert closer.result.pairs[0].positions == [best.positions]
    assert closer.top(1)[0].value == pytest.approx(best.value)
    assert client.capture(study.job, tag="base").token_ids()

    def stop(event: object) -> None:
        raise KeyboardInterrupt

    long = PatchStudy("hello you" * 40, "hallo you" * 40, " a", " b", client=client, model="fake")
    with pytest.raises(KeyboardInterrupt):
        long.sweep(hooks=["resid_pre", "mlp_out"], metric="logit_diff", progress=stop)
    (last,) = client.jobs.list(limit=1).jobs
    assert client.wait(last.id, timeout=120).state is State.CANCELLED


def test_a_sweep_is_drawn_on_the_terminal_and_its_job_shown_again(up: Up, tmp_path: Path) -> None:
    drawn = tmp_path / "out.svg"
    asked = (
        "--clean",
        "hello you",
        "--corrupt",
        "hallo you",
        "--answer",
        " a",
        "--foil",
        " b",
        "--metric",
        "logit_diff",
    )
    done = up.midstream("sweep", *asked, "--hooks", "resid_pre", "--heatmap", str(drawn))
    assert done.returncode == 0, done.stderr
    assert "pre_attn (resid_pre)" in done.stdout
    assert "<svg" in drawn.read_text()
    job = done.stdout.split("job: ")[1].split()[0]
    assert "Strongest cells" in up.midstream("job", "show", job).stdout


def test_conversations_run_as_one_job_through_the_models_chat_template(client: Client) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("hello", "how are you")]
    result = client.run(model="fake", messages=chats, capture=CAPTURE, timeout=120)
    reader = client.capture(result.id)
    for request, messages in enumerate(chats):
        assert reader.token_ids(request) == client.tokenize("fake", messages=messages).tokens
    single = client.run(model="fake", messages=chats[0], timeout=120)
    assert [output.prompt_tokens for output in single.outputs] == [len(reader.token_ids(0))]


def test_a_reader_shows_its_tokens_and_rows_of_several_jobs_are_one_matrix(
    client: Client, up: Up
) -> None:
    ids = [
        client.run(model="fake", prompts=prompts, capture=CAPTURE, timeout=120).id
        for prompts in (["hello", "you"], ["far away"])
    ]
    reader = client.capture(ids[0])
    assert "".join(reader.tokens(0)) == client.detokenize("fake", reader.token_ids(0)).prompt
    rows = client.captures.matrix(ids, -1)
    last = [
        client.capture(job).row(NUM_LAYERS - 1, reader.positions(request)[-1], request=request)
        for job, request in ((ids[0], 0), (ids[0], 1), (ids[1], 0))
        for reader in [client.capture(job)]
    ]
    np.testing.assert_array_equal(rows, np.stack(last))

    async def same() -> tuple[list[str], np.ndarray]:
        async with AsyncClient(up.ready()) as other:
            return (await other.capture(ids[0])).tokens(0), await other.captures.matrix(ids, -1)

    words, theirs = asyncio.run(same())
    assert words == reader.tokens(0)
    np.testing.assert_array_equal(theirs, rows)


def test_run_shows_a_prompt_count_on_terminals_and_in_notebooks(
    client: Client, up: Up, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("midstream.client.sdk.answers.progress.in_notebook", lambda: True)
    monkeypatch.setattr("midstream.client.sdk.answers.progress.DELAY_S", 0.0)
    prompts = [f"prompt {number}" for number in range(5)]
    client.run(model="fake", prompts=prompts, timeout=120)
    assert "/5" in capsys.readouterr().err
    client.run(model="fake", prompts=prompts, timeout=120, progress=False)
    assert capsys.readouterr().err == ""

    async def shown() -> None:
        async with AsyncClient(up.ready()) as other:
            await other.run(model="fake", prompts=prompts, timeout=120)

    asyncio.run(shown())
    assert "/5" in capsys.readouterr().err
