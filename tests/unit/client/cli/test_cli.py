"""Do commands ask for what was typed, show what came back, and answer mistakes with one line?"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from cli_kit import Cli
from http_kit import reply, server

from midstream import MidstreamError, __version__
from midstream.client.cli import demo, main, options
from midstream.schemas.access.keys import Limits, TenantView, Usage
from midstream.schemas.access.webhooks import (
    Delivery,
    DeliveryAttempt,
    DeliveryPage,
    DisabledEndpoint,
    DisabledList,
    Secret,
    SecretList,
)
from midstream.schemas.base.records import from_json
from midstream.schemas.requests.source_runs import RunPage, RunView

ROOT = Path(main.__file__).parents[2]
RUN = RunView(name="clean", model="m", job="job_1", tag="t", created=1.0, state="ready")
SENT = Delivery(
    id=f"msg_{'1' * 35}_succeeded",
    job="job_1",
    event="job.succeeded",
    tenant="lab",
    url="https://hooks.lab.example/midstream",
    state="failed",
    created=1.0,
    attempts=[
        DeliveryAttempt(at=2.0, status=500, error="not accepted", seconds=0.25),
        DeliveryAttempt(at=9.0, error="no answer", seconds=20),
    ],
)


@pytest.fixture(autouse=True)
def _nothing_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIDSTREAM_API_PORT", "1")  # nobody listens there


def told_commands() -> Iterator[tuple[str, list[str]]]:
    """(File, words behind `midstream`) of each command that our pages, messages and the page in
    the browser tell of.
    """
    told = r"(?:`|^\$ |\$\()(?:[A-Z_]+=\S+ )*midstream ([a-z][^`\n#;)…]*)"
    sources = {
        "README.md": told,
        "docs/**/*.md": told,
        **{f"{part}/**/*.py": told for part in ("api", "broker", "client", "workers")},
        "api/assets/page/views/*.js": r'command: "midstream ([a-z ]+)',
    }
    for pattern, form in sources.items():
        for file in ROOT.glob(pattern):
            for words in re.findall(form, file.read_text(), re.MULTILINE):
                yield file.name, words.split()


def test_every_documented_command_and_option_exists() -> None:
    told, midstream = list(told_commands()), typer.main.get_command(main.app)
    assert {Path(where).suffix for where, _ in told} == {".md", ".py", ".js"}
    for where, words in told:
        command, rest = midstream, list(words)
        while (
            (known := getattr(command, "commands", None)) and rest and not rest[0].startswith("-")
        ):
            assert rest[0] in known, f"{where}: midstream {' '.join(words)}"
            command = known[rest.pop(0)]
        there = {
            option
            for parameter in command.get_params(typer.Context(command))
            for option in (*parameter.opts, *parameter.secondary_opts)
        } | {"--help"}
        used = {word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word)}
        assert used <= there, f"{where}: midstream {' '.join(words)}"


def test_submit_and_sweep_take_the_options_of_handling_and_submit_those_of_captures() -> None:
    commands = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    there = {
        name: {
            option: parameter.rich_help_panel
            for parameter in commands[name].params
            for option in parameter.opts
        }
        for name in ("submit", "sweep")
    }
    for options_of in there.values():
        handling = {option for option, panel in options_of.items() if panel == "Handling"}
        assert handling == {f"--{name.replace('_', '-')}" for name in options.HANDLING}
    assert set(options.CAPTURE_OPTIONS) <= there["submit"].keys()


def test_every_cli_group_has_a_list_command() -> None:
    groups = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    assert {
        name
        for name, group in groups.items()
        if hasattr(group, "commands") and "list" not in group.commands
    } == {"global", "curve"}


def test_hooks_and_layers_are_the_only_names_of_sites() -> None:
    def options_of(command: Any, path: str) -> Iterator[tuple[str, str]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from options_of(inner, f"{path} {name}")
        for parameter in command.params:
            yield from (
                (path, option) for option in parameter.opts if "hook" in option or "layer" in option
            )

    found = set(options_of(typer.main.get_command(main.app), "midstream"))
    assert found == {
        *(
            (f"midstream {command}", option)
            for command in ("submit", "sweep", "attribute", "capture export", "harvest run")
            for option in ("--hooks", "--layers")
        ),
        ("midstream attention", "--layers"),
        ("midstream jacobian fit", "--layers"),
        *(("midstream modules fit", option) for option in ("--hook", "--layers")),  # one hook
        *(("midstream lens", option) for option in ("--hooks", "--layers")),
        *(
            (f"midstream probe {verb}", option)
            for verb in ("register", "train")
            for option in ("--hook", "--layer")
        ),  # a probe has one
    }


def test_every_command_accepts_h_and_version(cli: Cli) -> None:
    assert cli("--version")[:2] == (0, f"midstream {__version__}\n")
    assert f"midstream {__version__}" in cli("version").out, "without a server"
    for words in ("", "submit", "job", "webhooks list", "status", "down", "logs", "demo"):
        assert cli(*words.split(), "-h").out.strip().startswith("Usage: "), words


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("dance", 2, "dance"),
        ("list", 2, "'midstream job list'"),
        ("loras remove x", 2, "'remove'. Did you mean 'midstream loras delete'?"),
        ("status", 3, "no stack is running on"),
        ("down", 0, "no stack is running on"),
        ("logs", 1, "no logs in"),
    ],
)
def test_commands_end_with_their_exit_codes(cli: Cli, typed: str, code: int, said: str) -> None:
    ended = cli(*typed.split())
    assert (ended.code, said in ended.said) == (code, True)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("up --set kv_cache=2", "--set kv_cache: "),
        ("up --set kv_cache_gb=2", "unknown setting; did you mean 'kv_cache_gib'?"),
        ("up --set kv_cache_gib", "NAME=VALUE"),
        ("up --set api_port=many", "--set api_port='many': Expected `int`"),
        ("up --port 70000", "api_port"),
        ("up --global-capture pre_mlp:0", "global_capture: 'pre_mlp' is not a hook"),
        (
            "up --set global_capture.sites=post_block --set global_capture.positions=first",
            "'first' is not a position selector",
        ),
        ("up --model ./nowhere", "model='./nowhere'"),
        ("submit", "prompts: give a prompt"),
        ("submit --body missing.json", "missing.json"),
        ("job show job_x", "no Midstream server answers at http://127.0.0.1:1"),
        *(
            (f"{group} list", "no Midstream server answers")
            for group in ("modules", "probe", "sae", "tuned", "loras")
        ),
        ("capture show ./nowhere", "no such folder: ./nowhere"),
        ("jacobian fit n lines.jsonl --model m", "lines.jsonl: Expected `object`, got `array`"),
        ("probe train p lines.csv --layer 1", "line 1 is not a JSON object: "),
        (
            "probe train p lines.csv --layer 1",
            "this is a CSV file: convert it (allowed: JSON lines",
        ),
        ("policy register p policy.json", "policy.json: condition.threshold: unknown field"),
        ("policy register p policy.json", "(allowed: at_least, "),
        (
            "keys create x --scope read --scope submitt",
            "did you mean 'submit'? (allowed: submit, read, steer-global, observe, admin)",
        ),
    ],
)
def test_cli_errors_are_one_line_naming_the_option(cli: Cli, typed: str, words: str) -> None:
    Path("lines.jsonl").write_text("[1]\n")
    Path("lines.csv").write_text("text,label\n")
    Path("policy.json").write_text('{"probe": "p", "actions": [], "condition": {"threshold": 2}}')
    ended = cli(*typed.split())
    assert (ended.code, ended.out) == (1, "")
    assert words in ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1


def test_a_setting_in_the_environment_that_is_wrong_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_ENABLE_PREFIX_CACHING", "perhaps")
    ended = cli("up")
    assert (ended.code, "MIDSTREAM_ENABLE_PREFIX_CACHING" in ended.err) == (1, True)


def test_the_demo_names_commands_as_they_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv" / "bin" / "midstream")])
    assert demo._command() == ".venv/bin/midstream"
    monkeypatch.setattr(sys, "argv", ["midstream"])
    assert demo._command() == "midstream"


def test_an_unknown_tenant_is_named_with_those_there_are(cli: Cli) -> None:
    usage = Usage(**dict.fromkeys(Usage.__struct_fields__, 0))
    view = TenantView(name="vision", limits=Limits(), usage=usage)
    ended, _ = cli.served("tenants", "show", "visoin", by=[reply({"tenants": [view]})])
    assert ended.code == 1
    assert "unknown tenant 'visoin'" in ended.err
    assert "did you mean 'vision'?" in ended.err


LINES = '{"positive": "a", "negative": "b"}\n\n{"prompt": "c", "target": "d"}\n{"text": "e"}\n'


@pytest.mark.parametrize(
    ("typed", "asked", "body"),
    [
        (
            "modules fit n lines.jsonl --method pca --layers 1-2 --rank 2 --read 1:",
            "POST /v1/modules/fit",
            {"method": "pca", "layers": "1-2", "rank": 2, "read": {"start": 1}, "positive": ["a"],
             "negative": ["b"], "examples": [{"prompt": "c", "target": "d"}]},
        ),
        (
            "jacobian fit n lines.jsonl --seed 3",
            "POST /v1/jacobians/fit",
            {"prompts": ["e"], "seed": 3},
        ),
        ("jacobian register n p", "POST /v1/jacobians", {"path": "p"}),
        ("loras add n p", "POST /v1/loras", {"path": "p"}),
        (
            "sae register n p --reads post_block:12",
            "POST /v1/saes",
            {"path": "p", "hook": "post_block", "layer": 12},
        ),
        (
            "tuned register n p --residual",
            "POST /v1/lenses",
            {"path": "p", "hook": "post_block", "residual": True},
        ),
    ],
)  # fmt: skip
def test_commands_that_make_an_artifact_send_what_was_typed(
    cli: Cli, typed: str, asked: str, body: dict[str, Any]
) -> None:
    Path("lines.jsonl").write_text(LINES)
    refusal = MidstreamError("invalid_request", "refused here").problem()
    ended, seen = cli.served(
        *typed.split(), "--model", "m", "--description", "mine", by=[reply(refusal, 400)]
    )
    assert (ended.code, "refused here" in ended.err) == (1, True)
    assert seen[0].startswith(asked)
    wanted = body | {"name": "n", "model": "m", "description": "mine"}
    sent = msgspec.json.decode(seen.bodies[0])
    assert {name: sent[name] for name in wanted} == wanted


# --- Source runs ---


def test_runs_are_deleted_by_name_and_mistakes_are_one_line(cli: Cli) -> None:
    problem = MidstreamError("not_found", "unknown source run 'b'").problem()
    ended, seen = cli.served("runs", "delete", "a", "b", by=[reply(None, 204), reply(problem, 404)])
    assert ended == (1, "a deleted\n", "error: unknown source run 'b'\n")
    assert seen == ["DELETE /v1/runs/a", "DELETE /v1/runs/b"]


@pytest.mark.parametrize(
    ("typed", "value"),
    [("list --limit 3", RunPage(runs=[RUN], next="more")), ("show clean", RUN)],
)
def test_runs_as_json_are_the_servers_answer(cli: Cli, typed: str, value: Any) -> None:
    ended, _ = cli.served("runs", *typed.split(), "--json", by=[reply(value)])
    assert from_json(ended.out.encode(), type(value)) == value


# --- Webhooks ---


def test_deliveries_are_filtered_and_listed_with_whole_ids_and_receivers(cli: Cli) -> None:
    ended, seen = cli.served(
        "webhooks",
        "list",
        "--job",
        "job_1",
        "--state",
        "failed",
        by=[reply(DeliveryPage(deliveries=[SENT]))],
    )
    assert seen == ["GET /v1/webhooks/deliveries?job=job_1&state=failed&limit=20"]
    lines = [line.strip() for line in ended.out.splitlines()]
    assert any(line.startswith(SENT.id) and "failed" in line for line in lines)
    assert f"→ {SENT.url}" in lines
    assert "no answer" in ended.said


def test_a_delivery_is_shown_with_its_attempts_and_resent(cli: Cli) -> None:
    with server(reply(SENT)) as (url, seen):
        assert "500 not accepted" in cli("webhooks", "show", SENT.id, "--url", url).out
        cli("webhooks", "redeliver", SENT.id, "msg_2", "--url", url)
    assert seen == [
        f"GET /v1/webhooks/deliveries/{SENT.id}",
        f"POST /v1/webhooks/deliveries/{SENT.id}/redeliver",
        "POST /v1/webhooks/deliveries/msg_2/redeliver",
    ]


def test_the_new_secret_alone_goes_to_standard_output(cli: Cli) -> None:
    new, old = Secret(secret="whsec_new", created=1.0), Secret(secret="whsec_old", created=0.0)
    ended, seen = cli.served(
        "webhooks",
        "rotate",
        "--keep-former",
        "12h",
        "--own",
        by=[reply(SecretList(of="tenant", secrets=[new, old]), 201)],
    )
    assert json.loads(seen.bodies[0]) == {"keep_former_s": 43200.0, "own": True}
    assert (ended.out, "whsec_old" in ended.err) == ("whsec_new\n", True)


def test_disabled_receivers_are_listed_and_enabled(cli: Cli) -> None:
    disabled = DisabledEndpoint(tenant="lab", url=SENT.url, since=1.0)
    with server(reply(DisabledList(endpoints=[disabled])), (204, {}, b"")) as (url, seen):
        assert SENT.url in cli("webhooks", "list", "--disabled", "--url", url).out
        cli("webhooks", "enable", SENT.url, "--url", url)
    assert seen[1] == (
        "DELETE /v1/webhooks/disabled?url=https%3A%2F%2Fhooks.lab.example%2Fmidstream"
    )
