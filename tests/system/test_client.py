"""Do the Python client, blocking and awaiting, and the command line do against the real stack what
they say?

The calls of both clients are written once, and `test_client_surface.py` compares what they send.
"""

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE, NUM_LAYERS, residual_rows
from ports import free_port
from refusal_kit import refuses
from safetensors.numpy import save_file
from stack import Stack
from wait_kit import wait_until

from midstream import AsyncClient, Client, returned_rows
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.results import JobResult

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

MODEL = "fake-model"
CAPTURE = {"layers": "all", "positions": "all_prompt", "tag": "mine"}


def expected(layer: int, token_ids: list[int], hook: str = "post_block") -> np.ndarray:
    return residual_rows(layer, np.arange(len(token_ids)), np.array(token_ids), hook)


def test_a_job_runs_from_keyword_arguments_to_arrays(client: Client) -> None:
    result = client.run(prompts=["hello", "you"], capture=CAPTURE, max_tokens=5, timeout=120)
    assert [len(output.token_ids) for output in result.outputs] == [5, 5]
    reader = client.capture(result.id)
    assert [len(reader.token_ids(request)) for request in reader.requests()] == [5, 3]
    for request in (0, 1):
        for layer in range(NUM_LAYERS):
            np.testing.assert_array_equal(
                reader.array(layer, request=request), expected(layer, reader.token_ids(request))
            )


@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [("hello", [5]), (["hello", "you"], [5, 3]), ([5, 6], [2]), ([[5, 6], [7]], [2, 1])],
)
def test_rows_of_prompts_come_in_one_call_without_a_token(
    client: Client, prompts: Any, lengths: list[int]
) -> None:
    reader = client.rows(prompts, layers="0-1", hook="pre_attn", timeout=120)
    assert [len(reader.token_ids(request)) for request in reader.requests()] == lengths
    for request in reader.requests():
        found = reader.array(1, "pre_attn", request)
        np.testing.assert_array_equal(found, expected(1, reader.token_ids(request), "pre_attn"))
    result = client.result(reader.job)
    assert [output.token_ids for output in result.outputs] == [[]] * len(lengths)
    assert result.layers == client.jobs.get(reader.job).layers == 2
    plain = client.run(prompts=["hello"], capture=CAPTURE, max_tokens=1, timeout=120)
    assert plain.layers is None
    assert len(plain.outputs[0].token_ids) == 1


def test_rows_of_a_conversation_are_those_of_its_prompt(client: Client) -> None:
    said = [{"role": "user", "content": "hello"}]
    alone, listed = (client.rows(chat, layers=0, timeout=120) for chat in (said, [said]))
    words = client.tokenize(MODEL, messages=said).tokens
    assert alone.token_ids() == listed.token_ids() == words


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"max_tokens": 1}, "max_tokens"), ({"capture": CAPTURE}, "capture"), ({"layer": 1}, "layer")],
)
def test_rows_take_no_tokens_and_no_capture_of_their_own(
    client: Client, wrong: Any, field: str
) -> None:
    with refuses(field=field):
        client.rows("hello", **wrong)


def test_small_captures_come_back_in_the_answer_as_arrays(client: Client) -> None:
    capture = {
        "hooks": {"post_block": "all", "pre_attn": 1},
        "positions": "all_prompt",
        "consumers": ["memory"],
    }
    answer = client.completion(MODEL, ["one", "three"], capture=capture, max_tokens=3)
    for request in (0, 1):
        tokens = answer.rows.token_ids(request)
        np.testing.assert_array_equal(answer.rows.array(2, request=request), expected(2, tokens))
        np.testing.assert_array_equal(
            answer.rows.array(1, "pre_attn", request), expected(1, tokens, "pre_attn")
        )
    result = client.run(prompts=["one"], capture=capture, timeout=120)
    np.testing.assert_array_equal(
        returned_rows(result.capture_results).stack(), answer.rows.stack(request=0)
    )


def test_an_answer_without_rows_says_how_to_ask_for_them(client: Client) -> None:
    answer = client.completion(MODEL, "one", capture=CAPTURE, capture_wait=True, max_tokens=2)
    assert client.capture(answer.job).requests() == [0]
    with pytest.raises(MidstreamError, match=r"captures: ok.*\"memory\""):
        assert answer.rows


@pytest.mark.long
def test_global_captures_are_taken_of_every_request(stack: Stack, client: Client) -> None:
    stack.end("worker")
    captured = {"global_capture.sites": "post_block:all;pre_attn:0-1", "global_capture.tag": "ops"}
    stack.restart("worker", **{"global_capture.positions": "0,-1"}, **captured)
    plain = client.completion(MODEL, "hello", max_tokens=2)
    assert plain.capture_results is None
    assert client.wait(plain.job, timeout=120).capture_status == "ok"
    reader = client.capture(plain.job)
    assert reader.positions() == [0, 4]
    assert reader.layers(hook="pre_attn") == [0, 1]
    assert len(reader.layers()) == NUM_LAYERS
    with pytest.raises(MidstreamError, match="choose another"):
        client.submit(prompts=["hello"], capture={"tag": "ops"})
    stack.replace("worker")


@pytest.mark.long
def test_a_response_that_was_held_too_long_is_fetched_as_a_job(stack: Stack) -> None:
    port = free_port()
    stack.add("api-2", api_port=port, max_wait_s=0.5)
    with Client(f"http://127.0.0.1:{port}") as client:
        answer = client.completion(
            MODEL, "slow", capture=CAPTURE, capture_wait=True, max_tokens=150
        )
    stack.end("api-2")
    assert answer.finish_reasons == ["length"]
    assert answer.capture_results is not None
    assert answer.capture_results.status == "ok"


def test_conversations_run_as_one_job_through_the_models_chat_template(client: Client) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("hello", "how are you")]
    reader = client.capture(client.run(messages=chats, capture=CAPTURE, timeout=120).id)
    for request, messages in enumerate(chats):
        assert reader.token_ids(request) == client.tokenize(MODEL, messages=messages).tokens
    single = client.run(messages=chats[0], timeout=120)
    assert [output.prompt_tokens for output in single.outputs] == [len(reader.token_ids(0))]


def test_a_reader_shows_its_tokens_and_rows_of_several_jobs_are_one_matrix(client: Client) -> None:
    readers = [
        client.capture(client.run(prompts=prompts, capture=CAPTURE, timeout=120))
        for prompts in (["hello", "you"], ["far away"])
    ]
    first, second = readers
    assert "".join(first.tokens) == client.detokenize(MODEL, first.token_ids(0)).prompt
    last = [
        reader.row(NUM_LAYERS - 1, reader.positions(request)[-1], request=request)
        for reader, request in ((first, 0), (first, 1), (second, 0))
    ]
    rows = client.captures.matrix([reader.job for reader in readers], -1)
    np.testing.assert_array_equal(rows, np.stack(last))


def test_hooks_are_answered_under_the_names_that_were_asked_for(
    client: Client, midstream: Callable[..., str]
) -> None:
    named = ["resid_pre", "post_block"]
    capture = {"hooks": dict.fromkeys(named, 1), "consumers": ["filesystem", "memory"]}
    result = client.run(prompts=["one"], capture=capture, timeout=120)
    answer = client.completion(MODEL, "one", capture=capture)
    readers = [client.capture(result), returned_rows(result.capture_results), answer.rows]
    assert [reader.hooks() for reader in readers] == [named] * 3
    assert list(readers[0].arrays()) == ["resid_pre.1", "post_block.1"]
    assert list(result.capture_results.files[0].sites) == named
    sites = [readers[0].site(1, hook) for hook in ("resid_pre", "pre_attn")]
    assert sites == [("resid_pre", 1)] * 2
    assert client.jobs.get(result).hook_names == {"pre_attn": "resid_pre"}
    shown = midstream("get", "capture", result.id) + midstream("get", "job", result.id)
    assert "resid_pre" in shown
    assert "pre_attn" not in shown


def test_run_shows_a_prompt_count_on_terminals_and_in_notebooks(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("midstream.client.sdk.answers.progress.in_notebook", lambda: True)
    monkeypatch.setattr("midstream.client.sdk.answers.progress.DELAY_S", 0.0)
    prompts = [f"prompt {number}" for number in range(5)]
    client.run(prompts=prompts, timeout=120)
    assert "/5" in capsys.readouterr().err
    client.run(prompts=prompts, timeout=120, progress=False)
    assert capsys.readouterr().err == ""


# --- The command line
# --------------------------------------------------------------------------------------------------


def test_submit_shows_outputs_first_and_receipts_if_asked(midstream: Callable[..., str]) -> None:
    options = ("submit", "hello", "you", "--layers", "0-2", "--positions", "all_prompt")
    for verbose in (["-v"], []):
        done = midstream(*options, *verbose)
        assert done.strip().startswith("Outputs")
        for words in ("captures ok: 2 files", "midstream get capture job_"):
            assert words in done
        for words in ("succeeded", "Receipts", "consistent"):
            assert (words in done) is bool(verbose)
    assert "more: midstream get job job_" in done


def test_the_capture_options_of_submit_reach_the_worker(midstream: Callable[..., str]) -> None:
    consumers = ["--set", 'capture.consumers=["filesystem", "memory"]']
    fields = {"every_n": 2, "at": "after", "dtype": "float16", "layout": "per_file", "tag": "cli"}
    spans = '[0, {"text": "o", "occurrence": -1}, {"text": "l", "occurrence": null}]'
    options = ["--hooks", "resid_pre:0;post_block:all", "--set", f"capture.positions={spans}"]
    for name, value in fields.items():
        options += ["--set", f"capture.{name}={value}"]
    options += consumers
    result = from_json(midstream("submit", "hello world", *options, "--json"), JobResult)
    files = result.capture_results.files
    assert {(file.layout, file.tag) for file in files} == {("per_file", "cli")}
    assert len(files) == 1 + NUM_LAYERS, "one file for each hook and layer"
    rows = returned_rows(result.capture_results)
    assert rows.positions() == [0, 2, 3, 7, 9]
    assert rows.layers(hook="pre_attn") == [0]
    assert len(rows.layers()) == NUM_LAYERS
    shown = midstream("submit", "hello", "--hooks", "mlp_in", "--layers", "1", *consumers)
    assert "mlp_in" in shown
    assert re.search(r"\d B in the response", shown)


def test_a_job_of_a_file_is_submitted_now_and_looked_at_later(
    midstream: Callable[..., str], tmp_path: Path
) -> None:
    body = {"model": MODEL, "prompts": [[1, 2, 3]], "capture": {"layers": "all"}}
    (tmp_path / "job.json").write_text(json.dumps(body))
    job_id = midstream("submit", "--file", str(tmp_path / "job.json"), "--no-wait").strip()
    waited = json.loads(midstream("wait", job_id, "--json"))
    assert waited["capture_results"]["status"] == "ok"
    assert waited["outputs"][0]["prompt_tokens"] == 3
    assert job_id in midstream("list", "jobs")
    assert "succeeded" in midstream("get", "job", job_id)
    assert "done" in midstream("events", job_id)
    shown = midstream("get", "capture", job_id, "--set", "layer=1")
    assert "[4, 1, 8]" in shown
    assert "float32 [1, 8]" in shown


def test_cancel_stops_a_running_job_and_waiting_for_it_fails(
    client: Client, midstream: Callable[..., str]
) -> None:
    job = client.submit(prompts=["hello"], max_tokens=4000)
    wait_until(lambda: client.jobs.get(job.id).state is State.RUNNING)
    midstream("cancel", job.id)
    with pytest.raises(AssertionError, match="cancelled"):
        midstream("wait", job.id)


def test_captures_are_listed_exported_and_deleted(
    client: Client, midstream: Callable[..., str], tmp_path: Path
) -> None:
    job = client.run(prompts=["hello"], capture={**CAPTURE, "tag": "passing"}, timeout=120).id
    assert [entry.job for entry in client.captures.list(tag="passing", limit=1).captures] == [job]
    assert job in midstream("list", "captures", "--set", "tag=passing")
    midstream("export", "capture", job, "-o", str(tmp_path / "rows.npz"), "--set", "layers=1")
    with np.load(tmp_path / "rows.npz") as arrays:
        np.testing.assert_array_equal(
            arrays["post_block.1"], expected(1, arrays["token_ids"].tolist())
        )
    midstream("delete", "capture", job)
    for gone in (client.capture, client.captures.delete):
        with refuses(kind="gone"):
            gone(job)
    assert client.captures.list(tag="passing").captures == []


async def refused(call: Awaitable[Any], kind: str) -> None:
    with refuses(kind=kind):
        await call


async def jobs(client: AsyncClient) -> None:
    assert await client.ready()
    assert await client.models() == ["fake-model"]
    assert (await client.model("fake-model"))["num_layers"] == NUM_LAYERS
    job = await client.submit(prompts=["hello", "you"], capture=CAPTURE, max_tokens=3)
    assert [event.event async for event in client.jobs.events(job)][-1] == "done"
    assert (await client.wait(job, timeout=120)).state is State.SUCCEEDED
    assert (await client.jobs.get(job)).state is State.SUCCEEDED
    listed = {each.id: each.prompt for each in (await client.jobs.list(limit=5)).jobs}
    assert listed[job.id] == "hello"
    assert len((await client.result(job)).outputs) == 2
    await refused(client.jobs.cancel(job), "conflict")
    with pytest.raises(TimeoutError):
        await client.wait(job, timeout=0)
    answer = await client.chat("fake-model", [{"role": "user", "content": "hi"}], max_tokens=2)
    assert (
        answer.texts == (await client.result(answer.job)).outputs[0].text.splitlines()
        or answer.text
    )
    assert [
        item.index async for item in client.map(["a", "b", "c"], job_prompts=2, max_tokens=2)
    ] == [0, 1, 2]
    result = await client.dose(
        model="fake-model",
        prompts=["hello"],
        steering=[{"vector": [1.0] * HIDDEN_SIZE, "layers": 1}],
        scales=[1.0],
        effect={"words": ["a"]},
        held_out=["you"],
        max_tokens=4,
    )
    assert [cell.scale for cell in result.dose.cells] == [1.0]
    assert (await client.status()).version


async def captures(client: AsyncClient, folder: Path) -> None:
    result = await client.run(prompts=["hello"], capture=CAPTURE, progress=False)
    reader = await client.capture(result, folder)
    tokens = reader.token_ids()
    np.testing.assert_array_equal(
        reader.array(2), residual_rows(2, np.arange(len(tokens)), np.array(tokens))
    )
    assert reader.tokens == (await client.detokenize("fake-model", tokens)).token_strs
    assert (await client.tokenize("fake-model", "hello")).tokens[-len("hello") :] == tokens[
        -len("hello") :
    ]
    assert (await client.captures.matrix([result], 0)).shape == (1, HIDDEN_SIZE)
    assert result.id in [each.job for each in (await client.captures.list()).captures]
    await client.captures.delete(result)
    await refused(client.capture(result), "gone")


async def test_the_awaiting_client_works(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.client.sdk.captures.CHUNK", 64)  # files come in several pieces
    async with AsyncClient(stack.url) as client:
        await jobs(client)
        await captures(client, tmp_path)


# --- Steering -------------------------------------------------------------------------------------


JOY = np.ones(HIDDEN_SIZE, np.float32)
CALM = np.linspace(-1, 1, HIDDEN_SIZE, dtype=np.float32)


def text(client: Client, *steering: Any) -> str:
    """What the fake engine says: steering decides it."""
    return client.completion(
        "fake-model", "once upon a time", steering=list(steering), max_tokens=12
    ).text


@pytest.mark.usefixtures("nameless")
def test_a_module_steers_like_its_scaled_entries(client: Client) -> None:
    view = client.modules.put(
        "joy", {"post_block.2": JOY, "mlp_out.1": CALM}, description="to smile"
    )
    assert [(entry.hook, entry.layers) for entry in view.entries] == [
        ("mlp_out", [1]),
        ("post_block", [2]),
    ]
    entries = [{"layers": 1, "hook": "mlp_out", "vector": CALM}, {"layers": 2, "vector": JOY}]
    named = text(client, {"module": "joy"})
    assert named == text(client, *entries) != text(client)
    doubled = text(client, {"module": "joy", "scale": 2})
    assert doubled == text(client, *({**entry, "scale": 2.0} for entry in entries)) != named


@pytest.mark.usefixtures("nameless")
@pytest.mark.long
def test_the_command_line_uses_and_exports_modules(
    client: Client, midstream: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "joy.safetensors"
    save_file({"post_block.2": JOY}, file, {"op": "add", "scale": "0.5"})
    midstream("put", "module", "joy", str(file), "--set", "description=to smile")
    done = midstream("submit", "once upon a time", "--steer", "@joy:4", "--max-tokens=12", "--json")
    assert json.loads(done)["outputs"][0]["text"] == text(
        client, {"layers": 2, "vector": JOY, "scale": 2.0}
    )
    written = midstream("export", "module", "joy", "-o", str(tmp_path / "joy.gguf"))
    assert written == f"joy written to {tmp_path}/joy.gguf as gguf\n"


@pytest.mark.usefixtures("nameless")
def test_the_command_line_sets_global_steering_and_shows_ranks(
    client: Client, midstream: Callable[..., str], tmp_path: Path
) -> None:
    np.save(tmp_path / "joy.npy", JOY)
    plain = text(client)
    midstream("put", "global", f"{tmp_path}/joy.npy:2:2.0")
    assert text(client) != plain
    assert "add at post_block 2" in midstream("get", "global")
    for _ in range(20):  # a worker that is too busy for two seconds does not answer
        dynamic = midstream("get", "ranks")
        if "did not answer" not in dynamic:
            break
    assert "determinism: consistent, 2 ranks in 1 stage of 1 worker, checksum " in dynamic
    midstream("delete", "global")
    assert text(client) == plain


@pytest.mark.usefixtures("nameless")
def test_steering_of_another_width_is_refused_and_changes_nothing(client: Client) -> None:
    before = client.global_steering.get()
    for ask in (
        client.global_steering.put,
        lambda entries: client.modules.put("wide", entries),
        lambda entries: text(client, *entries),
    ):
        with refuses(kind="invalid_request", field="steering[0].vector.shape"):
            ask([{"layers": 2, "vector": [1.0, 2.0]}])
    assert client.global_steering.get().version == before.version
    assert client.modules.list() == []


MATRICES = {
    "rotation": np.eye(2, HIDDEN_SIZE, dtype=np.float32),
    "weight": np.ones((2, HIDDEN_SIZE), np.float32),
    "bias": np.ones(2, np.float32),
}


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize(
    "entry",
    [
        {"layers": "0-2", "vector": JOY, "scale": 0.5, "positions": "all_generated"},
        {
            "layers": 2,
            "hook": "pre_attn",
            "vector": CALM,
            "scale": 0.1,
            "norm_match": True,
            "positions": [0, {"text": "upon"}],
        },
        {
            "layers": 1,
            "hook": "mlp_out",
            "vector": CALM.astype(np.float16),
            "op": "clamp",
            "low": -1.0,
        },
        {"layers": [0, 2], "vector": JOY, "op": "ablate", "strength": 0.5},
        {"layers": 1, "vector": JOY, "op": "replace", "alpha": 0.5},
        {"layers": 2, "op": "lowrank", **MATRICES},
    ],
)
def test_an_exported_module_is_the_same_when_registered_again(
    client: Client, tmp_path: Path, entry: dict[str, Any]
) -> None:
    view = client.modules.put("mood", [entry, {"layers": 1, "hook": "attn_out", "vector": JOY}])
    assert client.modules.export("mood", tmp_path / "mood.safetensors") == "safetensors"
    assert client.modules.put("again", tmp_path / "mood.safetensors").digest == view.digest


@pytest.mark.usefixtures("nameless")
def test_an_export_that_cannot_be_made_is_refused(client: Client, tmp_path: Path) -> None:
    client.modules.put("joy", {"mlp_out.2": JOY})
    for name, path, says in (
        ("joy", "joy.gguf", "cannot hold mlp_out"),
        ("joy", "joy.bin", "implies no format"),
        ("no", "no.pt", "unknown module"),
    ):
        with pytest.raises(MidstreamError, match=says):
            client.modules.export(name, tmp_path / path)
    assert list(tmp_path.iterdir()) == []
