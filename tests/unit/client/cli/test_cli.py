"""Do commands ask for what was typed, show what came back, and answer mistakes with one line?"""

import json
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from cli_kit import Cli
from http_kit import reply, server
from job_kit import job_result, listed_job

from midstream import MidstreamError
from midstream.client import Client
from midstream.client.cli import kinds, main
from midstream.schemas.access.keys import Limits, TenantUsage, TenantView
from midstream.schemas.access.webhooks import (
    DeliveryAttempt,
    DeliveryPage,
    Secret,
    SecretList,
    WebhookDelivery,
)
from midstream.schemas.base.records import from_json
from midstream.schemas.base.version import full_version
from midstream.schemas.jobs.jobs import JobPage
from midstream.schemas.readings.lens import LensReading
from midstream.schemas.requests.source_runs import RunPage, RunView

ROOT = Path(main.__file__).parents[2]
RUN = RunView(name="clean", model="m", job="job_1", tag="t", created=1.0, state="ready")
SENT = WebhookDelivery(
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


#: Commands whose first argument is a kind.
VERBS = {verb for kind in kinds.KINDS for verb in kind.acts}


def told_commands() -> Iterator[tuple[str, list[str]]]:
    """(File, words behind `midstream`) of each command that our pages, messages and the page in
    the browser tell of.
    """
    told = (
        r"(?:`|^(?:\$ )?|\$\(|[|&] )(?:[A-Z_]+=\S+ )*(?:\S*/)?midstream (?!\w+:)"
        r"""([a-z](?:'[^'\n]*'|"[^"\n]*"|[^`\n#;)…|&<>])*)"""
    )
    sources = {
        **dict.fromkeys(
            ("README.md", "CONTRIBUTING.md", "PACKAGE.md", "docs/**/*.md", "packages/**/*.md"), told
        ),
        **{f"{part}/**/*.py": told for part in ("api", "broker", "client", "packages", "workers")},
        "packages/page/midstream_page/assets/views/*.js": r'command: "midstream ([a-z ]+)',
    }
    for pattern, form in sources.items():
        for file in ROOT.glob(pattern):
            for words in re.findall(form, file.read_text().replace("\\\n", " "), re.MULTILINE):
                yield file.name, words.split()


def command_line() -> Any:
    """The command, with those of packages."""
    group = typer.main.get_command(main.app)
    group.list_commands(typer.Context(group))
    return group


#: What the pages write for any kind, and the kind that `examples/bank` brings.
NOT_OWN = {"KIND", "bank", "banks"}


def test_every_documented_command_and_option_exists() -> None:
    told = list(told_commands())
    midstream = command_line()
    assert {Path(where).suffix for where, _ in told} == {".md", ".py", ".js"}
    for where, words in told:
        command = midstream
        rest = list(words)
        while (
            (known := getattr(command, "commands", None)) and rest and not rest[0].startswith("-")
        ):
            assert rest[0] in known, f"{where}: midstream {' '.join(words)}"
            command = known[rest.pop(0)]
        if command.name in VERBS and rest[:1] and rest[0] not in NOT_OWN:
            kinds.find(rest[0], command.name)
        there = {
            option
            for parameter in command.get_params(typer.Context(command))
            for option in (*parameter.opts, *parameter.secondary_opts)
        } | {"--help"}
        used = {word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word)}
        assert used <= there, f"{where}: midstream {' '.join(words)}"


def leaves(command: Any, path: str = "midstream") -> Iterator[tuple[str, Any]]:
    """Each command that can be run, by its words."""
    if not (inner := getattr(command, "commands", None)):
        yield path, command
    for name, below in (inner or {}).items():
        yield from leaves(below, f"{path} {name}")


def test_few_commands_and_options_do_everything() -> None:
    commands = dict(leaves(command_line()))
    assert len(commands) <= 39
    assert sum(len(command.params) for command in commands.values()) <= 250


def test_every_kind_has_acts_of_known_verbs_only() -> None:
    verbs = {name.removeprefix("midstream ") for name, _ in leaves(command_line())}
    for kind in kinds.KINDS:
        assert {*kind.acts} <= verbs, kind.name
        for verb in kind.acts:
            _, act = kinds.find(kind.name, verb)
            assert callable(act if callable(act) else attrgetter(act)(Client("http://127.0.0.1:1")))


def test_hooks_and_layers_are_the_only_names_of_sites() -> None:
    found = {
        (path, option)
        for path, command in leaves(command_line())
        for parameter in command.params
        for option in parameter.opts
        if "hook" in option or "layer" in option
    }
    assert found == {
        *(
            (f"midstream {command}", option)
            for command in ("submit", "sweep", "attribute", "harvest")
            for option in ("--hooks", "--layers")
        ),
        *((f"midstream {command}", "--layers") for command in ("lens", "attention", "dose")),
    }


def test_a_table_of_jobs_says_what_they_are_and_counts_no_hand_over(cli: Cli) -> None:
    handed = listed_job(kind="attribution", attempt=2, cells_expected=9, model="m")
    again = listed_job(
        attempt=2, retry_reason="worker_lost", prompts=3, model="m", prompt="Why is it so?"
    )
    ended, _ = cli.served("list", "jobs", by=[reply(JobPage(jobs=[handed, again]))])
    found = {
        words: ended.out.count(words)
        for words in ("attribution", "of 9", "3 p", "attempt 2", "Why is it so?")
    }
    assert found == dict.fromkeys(found, 1)


def test_an_attribution_that_computes_no_cell_has_estimates_only(cli: Cli) -> None:
    bare = listed_job(kind="attribution", cells_expected=0, model="m")
    ended, _ = cli.served("list", "jobs", by=[reply(JobPage(jobs=[bare]))])
    assert "estimates only" in ended.out
    assert "0 of 0" not in ended.out


@pytest.mark.parametrize(
    ("word", "written"),
    [
        (" sky", " sky"),
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("-2+3", "'-2+3"),
        ("-2.5", "-2.5"),
        ("-", "-"),
    ],
)
def test_an_exported_lens_has_the_texts_of_its_tokens_and_no_formulas(
    cli: Cli, word: str, written: str
) -> None:
    reading = LensReading(
        request=0, hook="post_block", layers=[0], positions=[0], token_ids=[7],
        top_tokens=[[[8]]], top_logprobs=[[[-1.0]]], named_tokens=[], named_ranks=[[[]]],
        named_logprobs=[[[]]],
    )  # fmt: skip
    answers = [
        job_result("a", lens=[reading]),
        {"prompt": "The sky", "token_strs": ["The", word]},
    ]
    ended, _ = cli.served("export", "job", "job_1", "-o", "lens.csv", by=[*map(reply, answers)])
    assert ended.code == 0, ended.err
    assert Path("lens.csv").read_text().splitlines()[1] == f"0,0,0,8,{written},-1.0"


def test_a_dose_is_asked_for_like_a_job(cli: Cli) -> None:
    typed = "dose Hi --model m --steer @joy --layers 2 --set scales=[1] --set held_out=[no]"
    refusal = MidstreamError("invalid_request", "refused here").problem()
    _, seen = cli.served(*typed.split(), "--set", 'effect.target=" good"', by=[reply(refusal, 400)])
    asked = json.loads(seen.bodies[0])
    assert asked["prompts"] == ["Hi"]
    assert asked["layers"] == 2
    assert asked["steering"][0]["module"] == "joy"


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("The cat sat", "POST /v1/jobs"),
        ("Hello", "POST /v1/jobs"),
        ("Either/or is a choice", "POST /v1/jobs"),
        ("job_1", "GET /v1/captures/job_1"),
    ],
)
def test_attention_takes_a_prompt_or_a_job(cli: Cli, source: str, asked: str) -> None:
    refusal = MidstreamError("invalid_request", "refused here").problem()
    _, seen = cli.served("attention", source, "--model", "m", by=[reply(refusal, 400)])
    assert seen[0].startswith(asked)


def test_every_command_accepts_h_and_version(cli: Cli) -> None:
    assert cli("--version")[:2] == (0, f"midstream {full_version()}\n")
    for words in ("", "submit", "list", "create", "status", "down", "logs", "demo"):
        assert cli(*words.split(), "-h").out.strip().startswith("Usage: "), words


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("dance", 2, "dance"),
        ("lst jobs", 2, "Did you mean 'list'?"),
        ("jobs", 2, "Did you mean 'midstream list jobs'?"),
        ("job list", 2, "Did you mean 'midstream list jobs'?"),
        ("loras remove x", 2, "'loras'. Did you mean 'midstream delete lora'?"),
        ("modules register x", 2, "Did you mean 'midstream put module'?"),
        ("rm module x", 2, "'rm'. Did you mean 'midstream delete'?"),
        ("dynamic", 2, "Did you mean 'midstream get ranks'?"),
        ("version", 2, "Did you mean 'midstream get server'?"),
        ("get module a b", 2, "unexpected extra argument"),
        ("enable policy guard", 2, "'midstream change policy NAME --set mode=active'?"),
        ("policy enable guard", 2, "'midstream change policy NAME --set mode=active'?"),
        ("change policy guard --mode active", 2, "a field is given as --set mode=VALUE"),
        ("change policy p mode=active", 2, "a field is given as --set mode=active"),
        ("fit probe p x.csv --top-layer 2", 2, "a field is given as --set top_layer=VALUE"),
        ("up --prot 3", 2, "No such option: --prot (did you mean --port?)"),
        ("submit x --max-token 3", 2, "(did you mean --max-tokens?); a field is given as"),
        ("--url http://x list jobs", 2, "options stand behind the command"),
        ("status", 3, "no stack is running on"),
        ("down", 0, "no stack is running on"),
        ("logs", 1, "no logs in"),
    ],
)
def test_commands_end_with_their_exit_codes(cli: Cli, typed: str, code: int, said: str) -> None:
    ended = cli(*typed.split())
    assert ended.code == code
    assert said in ended.said


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
        ("submit --file missing.json", "--file: missing.json: No such file"),
        ("submit --file missing.jsonl", "FILE: missing.jsonl: No such file"),
        ("submit --file torn.json", "--file: torn.json: "),
        ("submit x --set max_tokens", "--set: 'max_tokens' is not FIELD=VALUE"),
        ("submit x --set lens=1 --set lens.layers=2", "'lens' has a value, and no fields"),
        ("submit x --set model=m --set tempreature=0", "did you mean 'temperature'?"),
        ("submit x --set model=m --set capture.tagg=a", "capture.tagg: unknown field"),
        ("submit x --set model=m --set max_tokens=many", "sampling.max_tokens: Expected `int`"),
        ("get job job_x", "no Midstream server answers at http://127.0.0.1:1"),
        *(
            (f"list {kind}", "no Midstream server answers")
            for kind in ("modules", "probe", "saes", "lenses", "loras")
        ),
        ("get server", "no Midstream server answers"),
        ("submit --file wrong.json", "promts: unknown field; did you mean 'prompts'?"),
        ("submit --file torn.json", "Expecting value: line 2 column 1"),
        (
            "dose --prompts Hello",
            "--prompts: Hello: No such file or directory; a prompt itself is given without the "
            "option: midstream dose 'TEXT' (allowed: FILE",
        ),
        ("sweep -f pairs.json --model m", "pair: unknown field; did you mean 'pairs'?"),
        ("attribute -f pairs.json --model m", "pair: unknown field; did you mean 'pairs'?"),
        ("dose --held-out Hello", "--held-out: Hello: No such file"),
        ("list steerings", "KIND: unknown kind 'steerings' (allowed: job, "),
        ("create key eve --set scopes=submit,red", "or --set scopes=… for each (allowed: submit, "),
        ("list modul", "KIND: unknown kind 'modul'; did you mean 'module'? (allowed: job, "),
        ("put ranks x", "KIND: 'put' is not for ranks (allowed: get ranks)"),
        ("get module", "NAME: get module: missing a required argument: 'name'"),
        ("list modules --set modell=m", "modell: unknown field; did you mean 'model'?"),
        ("list modules --limit 3", "limit: unknown field (allowed: model)"),
        ("get capture ./nowhere", "no such folder: ./nowhere"),
        ("get capture ./nowhere --set layer=x", "layer: Expected `int | null`, got `str`"),
        ("get capture ./nowhere --set partial=yes", "partial: Expected `bool`, got `str`"),
        ("export harvest h -o file:x --set limit=0", "limit: Expected `int` >= 1"),
        ("get capture ./nowhere --set tagg=a", "tagg: unknown field; did you mean 'tag'?"),
        ("put probe p lines.csv", "FILE: lines.csv: "),
        ("put module n gone.npy:3", "FILE: 'gone.npy:3': "),
        ("create curve boss w1", "role: unknown role 'boss' (allowed: relay, worker)"),
        ("create acl --set database=-1", "database: Expected `int` >= 0"),
        ("fit module n lines.jsonl --model m", "lines.jsonl, line 1 has no columns"),
        (
            "fit module n labels.csv --model m",
            "labels.csv has none of positive, negative, prompt, target: it has text, id; name "
            "columns as in labels.csv:positive=text,negative=id",
        ),
        ("fit jacobian n lines.csv --model m", "FILE: lines.csv has no rows"),
        ("fit probe p lines.csv --set layer=1", "FILE: lines.csv has no rows"),
        ("fit probe p labels.csv --set layer=1", "labels.csv, line 2 has no 'label'"),
        ("fit probe p labels.csv:text,x --set layer=1", "has no 'x': it has text, id"),
        ("fit probe p labels.jsonl --set layer=1", "FILE[0].label: Expected `bool | int | str`"),
        (
            "fit probe p labelled.csv --set layer=1",
            "positive: is required: the classes are 'harmful' and 'ok'; name the class",
        ),
        (
            "fit probe p labelled.csv --set layer=1 --set positive=ok --set labels=harmful",
            "labels: 'harmful' is another class than the one with this score, 'ok'; positive=",
        ),
        (
            "fit probe p labelled.csv:text,id --set layer=1",
            "FILE: has 8 classes in 8 rows, '0' in 1 (allowed: 4 or more rows of each class)",
        ),
        (
            "submit --file torn.jsonl --model m",
            "torn.jsonl cannot be read after line 0: JSON is malformed",
        ),
        ("dose --prompts labels.csv:verse", "name columns as in labels.csv:text=COLUMN"),
        ("fit probe p labels.csv", "name columns as in labels.csv:text=text,label=COLUMN"),
        ("fit probe p lines.csv --set layr=1", "layr: unknown field; did you mean 'layer'?"),
        ("put policy p mode=active", "a field is given as --set mode=active"),
        ("delete key colleague", "`midstream list keys` shows the id of each label"),
        (
            "dose --set model=m --set scales=[0,1] --set prompts=a --set held_out=b "
            "--set steering.module=m --set effect.target=c",
            "scales: must differ from each other and from 0",
        ),
        (
            "fit probe p lines.csv --set layer=1 --set rows=some",
            "rows: Invalid enum value 'some' (allowed: last, mean, all)",
        ),
        ("put policy p --file policy.json", "condition.threshold: unknown field"),
        ("put policy p --file policy.json", "(allowed: at_least, "),
        (
            "create key x --set scopes=read --set scopes=submitt",
            "did you mean 'submit'? (allowed: submit, read, steer-global, observe, admin)",
        ),
    ],
)
def test_cli_errors_are_one_line_naming_the_option(cli: Cli, typed: str, words: str) -> None:
    Path("lines.jsonl").write_text("[1]\n")
    Path("torn.json").write_text('{"prompts":\n')
    Path("pairs.json").write_text('{"pair": [{"clean": "x", "corrupt": "y"}]}')
    Path("wrong.json").write_text('{"promts": ["x"]}')
    Path("torn.jsonl").write_text("text,label\n")
    Path("lines.csv").write_text("text,label\n")
    Path("labels.csv").write_text("text,id\na,1\n")
    rows = [f"{n},words,{('ok', 'harmful')[n % 2]}\n" for n in range(8)]
    Path("labelled.csv").write_text("id,text,label\n" + "".join(rows))
    Path("labels.jsonl").write_text('{"text": "a", "label": [1]}\n')
    Path("policy.json").write_text('{"probe": "p", "actions": [], "condition": {"threshold": 2}}')
    ended = cli(*typed.split())
    assert ended.code == 1
    assert ended.out == ""
    assert words in ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1


def test_a_fit_without_its_layer_names_those_of_the_model(cli: Cli) -> None:
    Path("lines.csv").write_text("text,label\n" + "a,0\nb,1\n" * 4)
    facts = reply({"id": "m", "num_layers": 30})
    answers = [reply({"object": "list", "data": [{"id": "m"}]}), facts]
    ended, _ = cli.served("fit", "probe", "p", "lines.csv", by=answers)
    assert ended.err == "error: layer: is required; give it as --set layer=… (allowed: 0 to 29)\n"
    assert "of a probe layer, hook, rows" in " ".join(cli("fit", "-h").out.replace("│", "").split())


def test_a_setting_in_the_environment_that_is_wrong_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_ENGINE_ENABLE_PREFIX_CACHING", "perhaps")
    ended = cli("up")
    assert ended.code == 1
    assert "MIDSTREAM_ENGINE_ENABLE_PREFIX_CACHING" in ended.err


def test_an_unknown_tenant_is_named_with_those_there_are(cli: Cli) -> None:
    usage = TenantUsage(**dict.fromkeys(TenantUsage.__struct_fields__, 0))
    view = TenantView(name="vision", limits=Limits(), usage=usage)
    ended, _ = cli.served("get", "tenant", "visoin", by=[reply({"tenants": [view]})])
    assert ended.code == 1
    assert "unknown tenant 'visoin'" in ended.err
    assert "did you mean 'vision'?" in ended.err


LINES = '{"positive": "a", "negative": "b"}\n\n{"prompt": "c", "target": "d"}\n{"text": "e"}\n'


@pytest.mark.parametrize(
    ("typed", "asked", "body"),
    [
        (
            "fit module n lines.jsonl --set method=pca --set layers=1-2 --set rank=2 "
            "--set read.start=1",
            "POST /v1/modules/fit",
            {"name": "n", "method": "pca", "layers": "1-2", "rank": 2, "read": {"start": 1},
             "positive": ["a"], "negative": ["b"], "examples": [{"prompt": "c", "target": "d"}]},
        ),
        (
            "fit jacobian n lines.jsonl --set seed=3",
            "POST /v1/jacobians/fit",
            {"name": "n", "prompts": ["e"], "seed": 3},
        ),
        ("put jacobian n p", "PUT /v1/artifacts/jacobians/n", {"path": "p"}),
        ("put lora n p", "PUT /v1/artifacts/loras/n", {"path": "p"}),
        (
            "put sae n p --set hook=post_block --set layer=12",
            "PUT /v1/artifacts/saes/n",
            {"path": "p", "hook": "post_block", "layer": 12},
        ),
        (
            "put lens n p --set residual=true",
            "PUT /v1/artifacts/lenses/n",
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
        *typed.split(), "--model", "m", "--set", "description=mine", by=[reply(refusal, 400)]
    )
    assert ended.code == 1
    assert "refused here" in ended.err
    assert seen[0].startswith(asked)
    wanted = body | {"model": "m", "description": "mine"}
    sent = msgspec.json.decode(seen.bodies[0])
    assert {name: sent[name] for name in wanted} == wanted


@pytest.mark.parametrize(("typed", "column"), [("big.csv", "text"), ("big.csv:verse", "verse")])
def test_a_harvests_source_is_typed_with_its_column(cli: Cli, typed: str, column: str) -> None:
    _, seen = cli.served("harvest", typed, "--model", "m", by=[reply({}, 400)])
    sent = msgspec.json.decode(seen.bodies[0])["source"]
    assert sent["path"] == "big.csv"
    assert sent["field"] == column


# --- Source runs ---


def test_runs_are_deleted_by_name_and_mistakes_are_one_line(cli: Cli) -> None:
    problem = MidstreamError("not_found", "unknown source run 'b'").problem()
    ended, seen = cli.served("delete", "run", "a", "b", by=[reply(None, 204), reply(problem, 404)])
    assert ended == (1, "a deleted\n", "error: unknown source run 'b'\n")
    assert seen == ["DELETE /v1/runs/a", "DELETE /v1/runs/b"]


@pytest.mark.parametrize(
    ("typed", "value"),
    [("list runs --limit 3", RunPage(runs=[RUN], next="more")), ("get run clean", RUN)],
)
def test_runs_as_json_are_the_servers_answer(cli: Cli, typed: str, value: Any) -> None:
    ended, _ = cli.served(*typed.split(), "--json", by=[reply(value)])
    assert from_json(ended.out.encode(), type(value)) == value


# --- Webhooks ---


def test_deliveries_are_filtered_and_listed_with_whole_ids_and_receivers(cli: Cli) -> None:
    ended, seen = cli.served(
        *("list", "webhooks", "--set", "job=job_1", "--set", "state=failed"),
        by=[reply(DeliveryPage(deliveries=[SENT]))],
    )
    assert seen == ["GET /v1/webhooks/deliveries?job=job_1&state=failed&limit=20"]
    lines = [line.strip() for line in ended.out.splitlines()]
    assert any(line.startswith(SENT.id) and "failed" in line for line in lines)
    assert f"→ {SENT.url}" in lines
    assert "no answer" in ended.said


def test_a_delivery_is_shown_with_its_attempts_and_resent(cli: Cli) -> None:
    with server(reply(SENT)) as (url, seen):
        assert "500 not accepted" in cli("get", "webhook", SENT.id, "--url", url).out
        cli("redeliver", SENT.id, "msg_2", "--url", url)
    assert seen == [
        f"GET /v1/webhooks/deliveries/{SENT.id}",
        f"POST /v1/webhooks/deliveries/{SENT.id}/redeliver",
        "POST /v1/webhooks/deliveries/msg_2/redeliver",
    ]


def test_the_new_secret_alone_goes_to_standard_output(cli: Cli) -> None:
    new = Secret(secret="whsec_new", created=1.0)
    old = Secret(secret="whsec_old", created=0.0)
    ended, seen = cli.served(
        *("create", "secret", "--set", "keep_former_s=12h", "--set", "own=true"),
        by=[reply(SecretList(of="tenant", secrets=[new, old]), 201)],
    )
    assert json.loads(seen.bodies[0]) == {"keep_former_s": 43200.0, "own": True}
    assert ended.out == "whsec_new\n"
    assert "whsec_old" in ended.err
