"""Do the clients and the command line ask about steering what was meant, and show what came
back?
"""

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_kit import reply, server
from refusal_kit import refuses
from rich.console import Console
from safetensors.numpy import save_file

from midstream import AsyncClient, Client, MidstreamError, SteeringSpec
from midstream.client.cli import main, options
from midstream.client.render import records
from midstream.client.render import steering as show_steering
from midstream.client.sdk import registered
from midstream.schemas.base.records import from_json
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.requests.steering import (
    Agreement,
    Dynamic,
    EntryView,
    GlobalRequest,
    GlobalView,
    ModulePage,
    ModuleRequest,
    ModuleView,
    RankSteering,
    StageAgreement,
    WorkerSteering,
)

JOY = np.arange(4, dtype=np.float32)
ENTRY = EntryView(
    op="add",
    hook="post_block",
    layers=[3],
    positions="all",
    tensors=["ab" * 32],
    scale=2.0,
    numbers=[],
)
MODULE = ModuleView(name="joy", model="m", digest="cd" * 32, entries=[ENTRY], bytes=16, created=1.0)


def rank(number: int = 0, **given: Any) -> RankSteering:
    numbers = dict.fromkeys(
        ("tp", "pp", "step", "epoch", "vectors", "requests", "outbox", "backlog"), 0
    )
    fields = {
        "checksum": "f" * 16,
        "actions": 7,
        "global_version": 3,
        "global_digest": "",
        "modules": {"joy": "cd" * 32},
        "rows_used": 1,
        "rows": 64,
        "entries_used": 2,
        "entries": 4096,
    }
    return RankSteering(rank=number, **{**numbers, **fields, **given})


def worker(*ranks: RankSteering, **given: Any) -> WorkerSteering:
    fields: dict[str, Any] = {"state": "serving", "detail": "", "version": 5, "global_version": 3}
    return WorkerSteering(
        worker="w1", boot="b", model="m", at=1.0, ranks=list(ranks), **{**fields, **given}
    )


def everyone(**given: Any) -> GlobalView:
    fields: dict[str, Any] = {
        "version": 3,
        "digest": "ef" * 32,
        "entries": [ENTRY],
        "applied": True,
        "workers": [worker(rank())],
    }
    return GlobalView(model="m", changed=1.0, **{**fields, **given})


AGREED = Dynamic(
    workers=[worker(rank(), rank(1, tp=1))],
    determinism=Agreement(
        consistent=True,
        stages=[
            StageAgreement(
                worker="w1",
                pp=0,
                consistent=True,
                actions={0: 7, 1: 7},
                checksums={0: "f" * 16, 1: "f" * 16},
            )
        ],
    ),
)
APART = Dynamic(
    workers=[
        worker(
            rank(),
            rank(1, tp=1, checksum="e" * 16),
            state="resyncing",
            detail="ranks disagree",
            desyncs=1,
        )
    ],
    determinism=Agreement(
        consistent=False,
        stages=[
            StageAgreement(
                worker="w1",
                pp=0,
                consistent=False,
                actions={0: 7, 1: 7},
                checksums={0: "f" * 16, 1: "e" * 16},
            )
        ],
        detail="w1: ranks 0 and 1 of stage 0 have other checksums",
    ),
)


def shown(what: Any) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(what, soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


# --- The clients ---


def test_each_call_is_the_request_that_the_page_says() -> None:
    answers = (
        MODULE,
        ModulePage(modules=[MODULE]),
        MODULE,
        {},
        everyone(),
        everyone(),
        everyone(version=4, entries=[], digest=""),
        AGREED,
    )
    with server(*map(reply, answers)) as (url, seen), Client(url) as client:
        assert (
            client.modules.register("joy", [{"layers": 3, "vector": JOY}], description="to smile")
            == MODULE
        )
        assert client.modules.list() == [MODULE]
        assert client.modules.get("joy.v2", model="m") == MODULE
        client.modules.delete("joy")
        assert client.global_steering.set([{"module": "joy", "scale": 2}]) == everyone()
        assert client.global_steering.get().applied
        assert client.global_steering.clear(model="m").version == 4
        assert client.global_steering.dynamic() == AGREED
    assert seen == [
        "PUT /v1/steering/modules/joy",
        "GET /v1/steering/modules",
        "GET /v1/steering/modules/joy.v2?model=m",
        "DELETE /v1/steering/modules/joy",
        "PUT /v1/steering/global",
        "GET /v1/steering/global",
        "DELETE /v1/steering/global?model=m",
        "GET /v1/steering/dynamic",
    ]
    registered = from_json(seen.bodies[0], ModuleRequest)
    assert registered == ModuleRequest(
        steering=[SteeringSpec(layers=3, vector=from_numpy(JOY))], description="to smile"
    )
    assert from_json(seen.bodies[4], GlobalRequest) == GlobalRequest(
        steering=[SteeringSpec(module="joy", scale=2)]
    )


def test_the_async_client_sends_the_same_requests() -> None:
    async def ask(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.modules.register("joy", {"post_block.3": JOY})
            await client.modules.list()
            await client.modules.get("joy")
            await client.modules.delete("joy")
            await client.global_steering.set([{"layers": 3, "vector": JOY}])
            await client.global_steering.get()
            await client.global_steering.clear()
            await client.global_steering.dynamic()

    answers = (
        MODULE,
        ModulePage(modules=[]),
        MODULE,
        {},
        everyone(),
        everyone(),
        everyone(),
        AGREED,
    )
    with server(*map(reply, answers)) as (url, seen):
        asyncio.run(ask(url))
    assert [entry.replace("/v1/steering/", "") for entry in seen] == [
        "PUT modules/joy", "GET modules", "GET modules/joy", "DELETE modules/joy",
        "PUT global", "GET global", "DELETE global", "GET dynamic",
    ]  # fmt: skip


def test_entries_sites_and_a_file_are_equivalent(tmp_path: Path) -> None:
    save_file({"resid_post.3": JOY}, tmp_path / "joy.safetensors")
    wanted = [SteeringSpec(layers=3, hook="post_block", vector=from_numpy(JOY))]
    for given in (
        wanted,
        [{"layers": 3, "hook": "post_block", "vector": JOY}],
        {"post_block.3": JOY},
        tmp_path / "joy.safetensors",
    ):
        assert registered.entries_of(given) == wanted  # type: ignore[arg-type]
    assert registered.entries_of(str(tmp_path / "joy.safetensors")) == wanted


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"post_blok.3": JOY}, "steering: 'post_blok.3' is not a site"),
        ({"post_block.3": ["x"]}, r"steering\.post_block\.3: must be numeric, not an array of <U1"),
        ([{"layers": 3, "vector": JOY, "sclae": 2}], r"steering\[0\]\.sclae: unknown field"),
    ],
)
def test_what_is_wrong_in_itself_is_said_before_anything_is_sent(given: Any, says: str) -> None:
    with refuses(match=says):
        Client("http://127.0.0.1:1").modules.register("joy", given)


# field case 40
@pytest.mark.parametrize("name", ["", "..", "../jobs", "a/b", "joy\n", "x" * 129])
def test_invalid_names_cannot_change_the_request_path(name: str) -> None:
    with server(reply(MODULE)) as (url, seen), Client(url) as client:
        for ask in (
            client.modules.get,
            client.modules.delete,
            lambda name: client.modules.register(name, {"post_block.3": JOY}),
        ):
            with refuses(match=r"^name: ", kind="invalid_request"):
                ask(name)
    assert seen == []


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "joy.safetensors").write_bytes(b"PK")
    with refuses("joy.safetensors: its format is unknown"):
        registered.entries_of(tmp_path / "joy.safetensors")


# --- What is typed ---


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("@joy", {"module": "joy"}),
        ("@joy:2.0", {"module": "joy", "scale": 2.0}),
        ("@joy:scale=-1", {"module": "joy", "scale": -1.0}),
        (
            "@joy:2:positions=all_generated",
            {"module": "joy", "scale": 2.0, "positions": "all_generated"},
        ),
        ("@joy:positions=5:9", {"module": "joy", "positions": {"start": 5, "stop": 9}}),
    ],
)
def test_at_prefix_names_a_module(text: str, entry: dict[str, Any]) -> None:
    assert options.parse_steering([text]) == [entry]


@pytest.mark.parametrize(
    "text",
    ["@", "@:2", "@joy:much", "@joy:2:3", "@joy:op=ablate", "@joy:scale=2:3", "@joy:layers=3"],
)
def test_options_invalid_for_a_module_are_refused(text: str) -> None:
    with refuses("--steer"):
        options.parse_steering([text])


def test_entry_files_combine_with_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"post_block.3": JOY, "mlp_out.2": JOY}, "joy.safetensors")
    np.save("calm.npy", JOY)
    entries = options.parse_steering(["joy.safetensors", "calm.npy:1:0.5", "@old"])
    assert [
        entry.layers if isinstance(entry, SteeringSpec) else entry.get("layers")
        for entry in entries
    ] == [2, 3, 1, None]


@pytest.mark.parametrize("text", ["missing.safetensors", "torn.safetensors", "joy.npy"])
def test_a_file_that_cannot_be_used_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.safetensors").write_bytes(b"torn")
    with refuses(match=f"^FILE: '{text}': ", field="FILE"):
        options.parse_steering([text], "FILE")


# --- The command line ---


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout without the breaks of a narrow terminal, stderr of `midstream
    <arguments>`.
    """
    with pytest.raises(SystemExit) as caught:
        main.main(list(arguments))
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_a_module_is_registered_from_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "joy.npy", JOY)
    with server(reply(MODULE)) as (url, seen):
        code, out, _ = call(
            capsys,
            "modules",
            "register",
            "joy",
            f"{tmp_path}/joy.npy:3:2",
            "--description",
            "to smile",
            "--url",
            url,
        )
    assert code == 0
    assert "cdcdcd" in out
    request = from_json(seen.bodies[0], ModuleRequest)
    assert (request.description, request.steering[0].layers, request.steering[0].scale) == (
        "to smile",
        3,
        2.0,
    )


def test_global_steering_is_set_from_the_same_options(capsys: pytest.CaptureFixture[str]) -> None:
    with server(reply(everyone())) as (url, seen):
        code, out, _ = call(capsys, "global", "set", "--steer", "@joy:2", "--url", url)
    assert (code, "version 3" in out, "applied by 1 worker on every rank" in out) == (0, True, True)
    assert from_json(seen.bodies[0], GlobalRequest).steering == [
        SteeringSpec(module="joy", scale=2.0)
    ]


def test_a_refusal_is_a_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    problem = MidstreamError("intervention_failed", "w1, rank 1: cannot hold it").problem()
    with server(reply(problem, 500)) as (url, _):
        code, out, err = call(capsys, "global", "set", "--steer", "@joy", "--url", url)
    assert (code, out, err) == (1, "", "error: w1, rank 1: cannot hold it\n")


@pytest.mark.parametrize("arguments", [("dynamic",), ("dynamic", "--json")])
def test_ranks_that_disagree_are_shown_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with server(reply(APART)) as (url, _):
        code, out, err = call(capsys, *arguments, "--url", url)
    assert code == 1
    assert "e" * 16 in out
    assert err == "error: w1: ranks 0 and 1 of stage 0 have other checksums\n"


def test_ranks_that_agree_are_one_line_with_checksum_and_actions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with server(reply(AGREED)) as (url, _):
        code, out, err = call(capsys, "dynamic", "--url", url)
    assert (code, err) == (0, "")
    assert (
        f"determinism: consistent, 2 ranks in 1 stage of 1 worker, checksum {'f' * 16} "
        "over 7 actions"
    ) in out
    assert "w1 of m: serving, desired state 5, global 3, 0 requests wait for rows" in out


def test_each_rank_keeps_a_line_of_its_own_on_a_narrow_terminal() -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(show_steering.ranks(AGREED.workers[0], AGREED.determinism))
    _, _, first, second = [line for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]
    assert first.split() == [
        "0",
        "0",
        "f" * 16,
        "7",
        "3",
        "1",
        "1/64",
        "2/4096",
        "0",
        "0,",
        "0",
        "B",
    ]
    assert second.split()[:3] == ["1", "0", "f" * 16]


def test_the_ranks_of_a_stage_that_disagrees_are_red() -> None:
    def coloured(found: Dynamic) -> str:
        console = Console(
            width=100, file=io.StringIO(), force_terminal=True, color_system="standard"
        )
        console.print(show_steering.ranks(found.workers[0], found.determinism))
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    red = "\x1b[31m"
    assert red in coloured(APART)
    assert red not in coloured(AGREED)


def test_a_change_that_a_worker_does_not_have_yet_names_it() -> None:
    behind = worker(rank(), global_version=2, state="resyncing", detail="ranks disagree")
    line = show_steering.global_line(everyone(applied=False, workers=[worker(rank()), behind]))
    assert "not applied everywhere" in line
    assert "w1 has version 2, resyncing ranks disagree" in line
    assert "no worker is running" in show_steering.global_line(everyone(workers=[]))


def test_entries_are_listed_with_their_scalars() -> None:
    clamp = EntryView(
        op="clamp",
        hook="mlp_out",
        layers=[1, 2, 3, 7],
        positions=[0, -1],
        tensors=["12" * 32],
        scale=1.0,
        numbers=[0.5, -1.0, 2.0],
    )
    text = shown(show_steering.entries([ENTRY, clamp]))
    assert [
        word in text for word in ("post_block", "1-3, 7", "[0,-1]", "0.5, -1, 2", "121212121212")
    ] == [True] * 5
    assert (
        show_steering.what([ENTRY, clamp, ENTRY]) == "add at post_block 3; clamp at mlp_out 1-3, 7"
    )


def test_modules_are_listed_one_per_line() -> None:
    text = shown(records.listed([MODULE], ModuleView))
    assert [word in text for word in ("joy", "cdcdcdcdcdcd", "add at post_block 3", "16 B")] == [
        True
    ] * 4


@pytest.mark.parametrize(
    ("typed", "sent"), [("last_prompt", "last_prompt"), ("1:", {"start": 1}), ("0,-1", [0, -1])]
)
def test_a_fit_reads_the_positions_that_are_typed(tmp_path: Path, typed: str, sent: Any) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"positive": "a", "negative": "b"}\n')
    fit = ["modules", "fit", "joy", str(file), "--method", "logistic", "--layers", "3"]
    problem = {"type": "urn:midstream:invalid_request", "title": "no", "detail": "no"}
    with server(reply(problem, 400)) as (url, seen), pytest.raises(SystemExit):
        main.main([*fit, "--read", typed, "--model", "m", "--url", url])
    assert from_json(seen.bodies[0], dict[str, Any])["read"] == sent
