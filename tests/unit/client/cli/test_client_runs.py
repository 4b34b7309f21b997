"""Do the clients and the command line ask for patches and source runs as was meant, and show what
came back?
"""

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_kit import reply, server
from rich.console import Console

from midstream.client import AsyncClient, Client
from midstream.client.cli import main, options
from midstream.client.render import jobs, records
from midstream.client.sdk import wire
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.jobs import JobRequest
from midstream.schemas.jobs.openai import CompletionRequest
from midstream.schemas.requests.source_runs import RunPage, RunPrompt, RunView
from midstream.schemas.requests.specs import PatchSource, PatchSpec

VECTOR = np.arange(4, dtype=np.float32)
PROMPT = RunPrompt(
    request=0,
    tokens=5,
    sites={"pre_attn": [0, 1, 2], "post_block": [2]},
    positions=[0, 1, 4],
    token_ids=[7, 8, 9],
    dtype="bfloat16",
    hidden_size=4,
    bytes=96,
)
RUN = RunView(
    name="clean",
    model="m",
    job="job_1",
    tag="t",
    created=1.0,
    state="ready",
    bytes=2048,
    in_use=2,
    held_by=["w1"],
    prompts=[PROMPT],
)
PAGE = RunPage(runs=[RUN], next="more")


# --- As Python has it
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "packed"),
    [
        ("clean", PatchSource(run="clean")),
        ({"run": "clean", "position": [1, 2]}, PatchSource(run="clean", position=[1, 2])),
        (VECTOR, PatchSource(vector=from_numpy(VECTOR))),
        (VECTOR.tolist(), PatchSource(vector=from_numpy(VECTOR))),
        (
            {"vector": VECTOR.astype(np.float16)},
            PatchSource(vector=from_numpy(VECTOR.astype(np.float16))),
        ),
        (PatchSource(zeros=True), PatchSource(zeros=True)),
    ],
)
def test_a_source_is_a_runs_name_an_array_or_fields(source: Any, packed: PatchSource) -> None:
    entry = {"layers": 3, "positions": [5], "source": source}
    assert wire.pack_patch([entry]) == [PatchSpec(layers=3, positions=[5], source=packed)]


def test_a_torch_vector_is_packed_as_numpy_would_be() -> None:
    torch = pytest.importorskip("torch")
    for dtype, kept in (
        (torch.float32, "float32"),
        (torch.float16, "float16"),
        (torch.bfloat16, "float32"),
    ):
        vector = torch.arange(4, dtype=dtype, requires_grad=True)
        (patch,) = wire.pack_patch([{"layers": 3, "positions": [5], "source": vector}])
        assert patch.source.vector == from_numpy(VECTOR.astype(kept))
        (steering,) = wire.pack_steering([{"layers": 3, "vector": vector}])
        assert steering.vector == patch.source.vector


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"positions": [5], "source": "clean"}, "patch[0].layers"),
        (
            {"layers": 3, "positions": [5], "source": {"run": "clean", "zeros": True}},
            "patch[0].source",
        ),
        ({"layers": 3, "positions": [5], "source": "clean", "alpha": 2}, "patch[0].alpha"),
        ({"layers": 3, "positions": [5], "source": ["a"]}, "patch[0].source.vector"),
    ],
)
def test_what_is_wrong_in_itself_is_said_before_anything_is_sent(entry: Any, field: str) -> None:
    with pytest.raises(MidstreamError) as found:
        wire.job_request(None, {"model": "m", "prompts": "x", "patch": [entry]})
    assert found.value.field == field


def test_patches_go_with_jobs_completions_and_chats() -> None:
    patch = [{"layers": 3, "positions": [5], "source": "clean"}]
    spec = PatchSpec(layers=3, positions=[5], source=PatchSource(run="clean"))
    assert wire.job_request(None, {"model": "m", "prompts": "x", "patch": patch}) == JobRequest(
        model="m", prompts=["x"], patch=[spec]
    )
    answer = {"choices": [{"index": 0, "text": "y", "finish_reason": "length"}]}
    with server(reply(answer)) as (url, seen), Client(url) as client:
        client.completion("m", "x", patch=patch)
        client.chat("m", [{"role": "user", "content": "x"}], patch=patch)
        assert from_json(seen.bodies[0], CompletionRequest).patch == [spec]
        assert (
            from_json(seen.bodies[1], dict[str, Any])["patch"]
            == from_json(seen.bodies[0], dict[str, Any])["patch"]
        )


def test_both_clients_ask_for_runs_alike() -> None:
    asked = [
        "GET /v1/runs?model=m&limit=3&cursor=c",
        "GET /v1/runs/clean?model=m",
        "DELETE /v1/runs/a%2Fb",
    ]
    replies = (reply(PAGE), reply(RUN), reply(None, 204))
    with server(*replies) as (url, seen), Client(url) as client:
        assert client.source_runs.list("m", limit=3, cursor="c") == PAGE
        assert client.source_runs.get("clean", "m") == RUN
        client.source_runs.delete("a/b")
        assert seen == asked

    async def ask(url: str) -> None:
        async with AsyncClient(url) as client:
            assert await client.source_runs.list("m", limit=3, cursor="c") == PAGE
            assert await client.source_runs.get("clean", "m") == RUN
            await client.source_runs.delete("a/b")

    with server(*replies) as (url, seen):
        asyncio.run(ask(url))
        assert seen == asked


# --- As it is typed
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "source"),
    [
        ("12@5=clean:5", {"layers": 12, "positions": [5]}, {"run": "clean", "position": 5}),
        (
            "post_block:12@5=clean:5",
            {"layers": 12, "positions": [5], "hook": "post_block"},
            {"run": "clean", "position": 5},
        ),
        (
            "0-3,7@0,-1=clean:4,-1",
            {"layers": "0-3,7", "positions": [0, -1]},
            {"run": "clean", "position": [4, -1]},
        ),
        (
            "resid_pre:all@5:9=job_1",
            {"layers": "all", "positions": {"start": 5, "stop": 9}, "hook": "resid_pre"},
            {"run": "job_1"},
        ),
        (
            "3@all_generated=clean:-1:alpha=0.5",
            {"layers": 3, "positions": "all_generated", "alpha": 0.5},
            {"run": "clean", "position": -1},
        ),
        (
            "3@-1=clean:mean:positions=0:4:prompt=2",
            {"layers": 3, "positions": [-1]},
            {"run": "clean", "mean": True, "positions": {"start": 0, "stop": 4}, "prompt": 2},
        ),
        (
            'mlp_out:8@"Eiffel Tower"=zeros',
            {"layers": 8, "positions": {"text": "Eiffel Tower"}, "hook": "mlp_out"},
            {"zeros": True},
        ),
        (
            '8@"a = b: c"#-1=zeros',
            {"layers": 8, "positions": {"text": "a = b: c", "occurrence": -1}},
            {"zeros": True},
        ),
        (
            '8@"of"#all=@sea:mask=0-3',
            {"layers": 8, "positions": {"text": "of", "occurrence": None}, "mask": "0-3"},
            {"module": "sea"},
        ),
    ],
)
def test_a_patch_is_written_short(text: str, where: dict[str, Any], source: dict[str, Any]) -> None:
    assert options.parse_patch(text) == {**where, "source": source}


def test_a_patch_may_bring_its_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("row.npy", VECTOR)
    (spec,) = wire.pack_patch(options.parse_patches(["3@last_prompt=row.npy:alpha=0.5"]))
    assert spec == PatchSpec(
        layers=3, positions="last_prompt", alpha=0.5, source=PatchSource(vector=from_numpy(VECTOR))
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("12=clean:5", "is not valid"),
        ("12@5", "is not valid"),
        ("12@5=", "is not valid"),
        ("12@5=clean:five", "invalid position 'five'"),
        ("12@5=clean:5:6", "unknown part '6': use alpha, mask, prompt, positions"),
        ("12@5=clean:5:alpha=much", "invalid alpha 'much'"),
        ("12@5=zeros:prompt=1", "unknown part 'prompt=1': use alpha, mask"),
        ("12@5=clean:5:scale=2", "unknown part 'scale=2'"),
        ("12@5=gone.npy", "No such file"),
    ],
)
def test_an_unreadable_patch_is_refused_with_an_example(text: str, words: str) -> None:
    with pytest.raises(MidstreamError, match=words) as found:
        options.parse_patch(text)
    assert found.value.field == "--patch"


def test_a_capture_is_named_as_a_run() -> None:
    assert options.parse_capture(layers="all", run="clean") == {"layers": "all", "run": "clean"}
    with pytest.raises(MidstreamError, match="requires --layers"):
        options.parse_capture(run="clean")


# --- As it is shown
# --------------------------------------------------------------------------------------------------


def test_runs_are_shown_with_their_rows() -> None:
    console = Console(file=io.StringIO(), width=120)
    for shown in (records.listed([RUN], RunView), records.one(RUN), jobs.run_prompts([PROMPT])):
        console.print(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "clean",
        "ready",
        "2.0 KiB",
        "by 2 jobs",
        "w1",
        "job_1",
        "pre_attn        0-2",
        "0-1, 4",
        "bfloat16",
    ):
        assert words in text, text


def test_runs_are_deleted_by_name_and_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem = MidstreamError("not_found", "unknown source run 'b'").problem()
    with (
        server(reply(None, 204), reply(problem, 404)) as (url, seen),
        pytest.raises(SystemExit) as code,
    ):
        main.main(["runs", "delete", "a", "b", "--url", url])
    out, err = capsys.readouterr()
    assert (code.value.code, out, err) == (1, "a deleted\n", "error: unknown source run 'b'\n")
    assert seen == ["DELETE /v1/runs/a", "DELETE /v1/runs/b"]


@pytest.mark.parametrize(
    ("arguments", "value"), [(["list", "--limit", "3"], PAGE), (["show", "clean"], RUN)]
)
def test_runs_as_json_are_the_servers_answer(
    capsys: pytest.CaptureFixture[str], arguments: list[str], value: Any
) -> None:
    with server(reply(value)) as (url, _), pytest.raises(SystemExit):
        main.main(["runs", *arguments, "--json", "--url", url])
    assert from_json(capsys.readouterr().out.encode(), type(value)) == value
