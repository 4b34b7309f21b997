"""Does the command line read what is typed, and answer mistakes with one line that names the
thing?
"""

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import typer
from http_kit import reply, server
from rich.console import Console

from midstream.client.cli import main, options
from midstream.client.render import jobs, records
from midstream.client.sdk import wire
from midstream.client.sdk.service import key_request
from midstream.schemas.access.keys import SCOPES, KeyView, Limits, TenantView, Usage
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.captures import CaptureEntry
from midstream.schemas.jobs.jobs import (
    CaptureResults,
    Determinism,
    FileEntry,
    JobView,
    RankReport,
    StageReport,
    State,
)
from midstream.schemas.prompts.selectors import as_ranges
from midstream.schemas.requests.source_runs import RunView
from midstream.schemas.requests.specs import SteeringSpec
from midstream.schemas.requests.steering import EntryView, ModuleView


@pytest.fixture(autouse=True)
def _nothing_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIDSTREAM_API_PORT", "1")  # nobody listens there


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of `midstream <arguments>`."""
    with pytest.raises(SystemExit) as caught:
        main.main(list(arguments))
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", "all"),
        ("3", 3),
        ("-1", -1),
        ("0-5", "0-5"),
        ("1,4,-1", "1,4,-1"),
        ("0-2,7", "0-2,7"),
        ("nonsense", "nonsense"),
    ],
)
def test_layers_are_read_as_typed(text: str, layers: Any) -> None:
    assert options.parse_layers(text) == layers


def test_positions_are_names_or_numbers() -> None:
    assert options.parse_positions("all_prompt") == "all_prompt"
    assert options.parse_positions("0,5,-1") == [0, 5, -1]


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("5:", {"start": 5}),
        ("5:9", {"start": 5, "stop": 9}),
        ("last:64", {"last": 64}),
        ("-4:", {"start": -4}),
        (":9", {"stop": 9}),
        ("0,5:9,-1", [0, {"start": 5, "stop": 9}, -1]),
        (":", ":"),
        ("5:x", "5:x"),
    ],
)
def test_ranges_of_positions_are_written_with_a_colon(text: str, positions: Any) -> None:
    assert options.parse_positions(text) == positions


def steered(text: str) -> list[SteeringSpec]:
    """The entries of a file."""
    entries = options.parse_steering([text])
    assert all(isinstance(entry, SteeringSpec) for entry in entries)
    return cast(list[SteeringSpec], entries)


def given(spec: SteeringSpec) -> dict[str, Any]:
    """Its fields that are not null, positions as JSON has them."""
    found = {
        name: value for name in spec.__struct_fields__ if (value := getattr(spec, name)) is not None
    }
    return (
        found
        if "positions" not in found
        else found | {"positions": msgspec.to_builtins(spec.positions)}
    )


def test_a_steering_vector_comes_from_a_file_with_layers_and_scale(tmp_path: Path) -> None:
    np.save(tmp_path / "joy.npy", np.ones(4, np.float32))
    (entry,) = steered("joy.npy:3-5:2.5")
    assert (entry.layers, entry.scale, entry.vector) == (
        "3-5",
        2.5,
        from_numpy(np.ones(4, np.float32)),
    )
    assert given(steered("joy.npy:3")[0]).keys() == {"layers", "vector"}
    assert steered("joy.npy:resid_pre:0,3")[0].hook == "resid_pre"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("joy.npy:3:op=ablate", {"layers": 3, "op": "ablate"}),
        ("joy.npy:all:0.2:norm_match=true", {"layers": "all", "scale": 0.2, "norm_match": True}),
        (
            "joy.npy:resid_pre:3:2:positions=0,-1",
            {"layers": 3, "scale": 2.0, "hook": "resid_pre", "positions": [0, -1]},
        ),
        (
            "joy.npy:0-2:op=clamp:low=-1:high=2.5:strength=0.5:positions=all_generated",
            {
                "layers": "0-2",
                "op": "clamp",
                "low": -1.0,
                "high": 2.5,
                "strength": 0.5,
                "positions": "all_generated",
            },
        ),
        ("joy.npy:3:positions=5:", {"layers": 3, "positions": {"start": 5}}),
        ("joy.npy:3:positions=5::scale=2", {"layers": 3, "positions": {"start": 5}, "scale": 2.0}),
        (
            "joy.npy:3:positions=0,5:-1:op=ablate",
            {"layers": 3, "positions": [0, {"start": 5, "stop": -1}], "op": "ablate"},
        ),
        (
            "joy.npy:mlp_out:3:op=replace:alpha=0.5",
            {"layers": 3, "op": "replace", "alpha": 0.5, "hook": "mlp_out"},
        ),
    ],
)
def test_the_cli_names_the_op_of_a_vector(
    tmp_path: Path, text: str, fields: dict[str, Any]
) -> None:
    np.save(tmp_path / "joy.npy", np.ones(4, np.float32))
    (spec,) = steered(text)
    assert {name: value for name, value in given(spec).items() if name != "vector"} == fields
    assert spec.vector is not None


def test_a_trained_intervention_comes_from_a_file_with_its_matrices(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "reft.npz", rotation=np.ones((2, 4)), weight=np.ones((2, 4)), bias=np.zeros(2)
    )
    (spec,) = steered("reft.npz:3:op=lowrank:strength=0.5")
    assert (spec.op, spec.strength, spec.vector) == ("lowrank", 0.5, None)
    assert [tensor.shape for tensor in (spec.rotation, spec.weight, spec.bias) if tensor] == [
        [2, 4],
        [2, 4],
        [2],
    ]


def test_capture_options_send_only_what_was_typed() -> None:
    assert options.parse_capture() is None
    assert options.parse_capture(layers="all", positions=None, spans=[]) == {"layers": "all"}
    assert options.parse_capture(layers="3", positions="0,-1", tag="mine") == {
        "layers": 3,
        "positions": [0, -1],
        "tag": "mine",
    }
    assert options.parse_capture(layers="3", positions="5:", spans=["a"]) == {
        "layers": 3,
        "positions": [{"start": 5}, {"text": "a"}],
    }
    assert options.parse_capture(hooks="resid_pre") == {"hooks": {"resid_pre": "all"}}
    assert options.parse_capture(hooks="resid_pre, mlp_out:1", layers="3") == {
        "hooks": {"resid_pre": 3, "mlp_out": 1}
    }
    rest = {
        "every_n": 4,
        "at": "after",
        "dtype": "float32",
        "layout": "segment",
        "consumers": ["memory"],
    }
    assert options.parse_capture(hooks="post_block:all;pre_attn:0-3", **rest) == {
        "hooks": {"post_block": "all", "pre_attn": "0-3"},
        **rest,
    }


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("Eiffel Tower", {"text": "Eiffel Tower"}),
        ("Eiffel#1", {"text": "Eiffel", "occurrence": 1}),
        ("the#-1", {"text": "the", "occurrence": -1}),
        ("the#all", {"text": "the", "occurrence": None}),
        ("C#", {"text": "C#"}),
        ("C#1#0", {"text": "C#1", "occurrence": 0}),
        ("#1", {"text": "#1"}),
        ("a#b", {"text": "a#b"}),
    ],
)
def test_a_span_is_a_text_with_an_occurrence(text: str, span: dict[str, Any]) -> None:
    assert options.parse_span(text) == span


def test_spans_are_added_to_numbers_and_not_to_a_name() -> None:
    wish = options.parse_capture(layers="0", positions="0,-1", spans=["Tower", "the#all"])
    assert wish is not None
    assert wish["positions"] == [0, -1, {"text": "Tower"}, {"text": "the", "occurrence": None}]
    with pytest.raises(MidstreamError, match="--span: cannot be added to --positions all"):
        options.parse_capture(layers="0", positions="all", spans=["Tower"])


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--positions", {"positions": "all"}),
        ("--tag", {"tag": "mine"}),
        ("--consumer", {"consumers": ["memory"]}),
    ],
)
def test_an_option_that_would_capture_nothing_is_refused(
    option: str, given: dict[str, Any]
) -> None:
    with pytest.raises(MidstreamError) as caught:
        options.parse_capture(**given)
    assert caught.value.field == option


def test_hooks_that_cannot_be_read_name_their_option() -> None:
    with pytest.raises(MidstreamError, match="--hooks: 'pre_mlp' is not a hook"):
        options.parse_capture(hooks="pre_mlp:0")


def told_commands() -> list[tuple[str, list[str]]]:
    """(File, words behind `midstream`) of each command that our pages and messages tell of."""
    root = Path(main.__file__).parents[1]
    pages = [
        root / "README.md",
        *root.glob("docs/**/*.md"),
        *(root / part for part in ("api", "broker", "client", "workers")),
    ]
    files = [
        file for page in pages for file in ([page] if page.is_file() else page.glob("**/*.py"))
    ]
    told = re.compile(r"(?:`|^\$ |\$\()(?:[A-Z_]+=\S+ )*midstream ([a-z][^`\n#;)]*)", re.MULTILINE)
    return [
        (file.name, words.split()) for file in files for words in told.findall(file.read_text())
    ]


def test_every_documented_command_and_option_exists() -> None:
    for where, words in told_commands():
        command, rest = typer.main.get_command(main.app), list(words)
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


def test_submit_and_sweep_take_the_same_options_of_handling() -> None:
    commands = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    there = [
        {
            option
            for parameter in commands[name].params
            for option in parameter.opts
            if parameter.rich_help_panel == "Handling"
        }
        for name in ("submit", "sweep")
    ]
    assert there == [{f"--{name.replace('_', '-')}" for name in options.HANDLING}] * 2


def test_key_expiry_is_within_the_calendar() -> None:
    assert key_request("x", "default", ["read"], 20 * 365 * 86400.0).expires_in == 20 * 365 * 86400
    with pytest.raises(MidstreamError) as refused:
        key_request("x", "default", ["read"], 1e18)  # no listing could show it
    assert refused.value.field == "expires_in"


def test_a_misspelt_scope_of_a_key_is_answered_with_the_right_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = call(capsys, "keys", "create", "x", "--scope", "read", "--scope", "submitt")
    assert code == 1
    assert (
        "'submitt'; did you mean 'submit'? (allowed: submit, read, steer-global, observe, admin)"
        in " ".join(err.split())
    )


def test_readings_of_submit_take_a_number_behind_a_colon() -> None:
    assert options.parse_lens("0-5,-1") == {"layers": "0-5,-1"}
    assert options.parse_lens("12:3") == {"layers": 12, "top_k": 3}
    assert options.parse_features("words:7") == {"sae": "words", "top_k": 7}
    for text in (":3", "3:", "3:x", "3:1:2"):
        with pytest.raises(MidstreamError, match="--lens"):
            options.parse_lens(text)


def test_every_capture_option_of_submit_is_read() -> None:
    submit = typer.main.get_command(main.app).commands["submit"]  # type: ignore[attr-defined]
    there = {option for parameter in submit.params for option in parameter.opts}
    assert set(options.CAPTURE_OPTIONS) <= there


@pytest.mark.parametrize(
    "text",
    [
        "joy.npy",
        "joy.npy:",
        "joy.npy:op=add",
        "missing.npy:3",
        "empty.npz:3",
        "torn.npz:3",
        "joy.npy:3:much",
        "joy.npy:3:strength=much",
        "joy.npy:3:norm_match=maybe",
        "joy.npy:3:sclae=2",
        "joy.npy:3:1:post_block:4",
        "joy.npy:op=add:3",
    ],
)
def test_a_bad_steering_option_names_itself(tmp_path: Path, text: str) -> None:
    np.save(tmp_path / "joy.npy", np.ones(4, np.float32))
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04torn")
    with pytest.raises(MidstreamError, match="--steer"):
        options.parse_steering([text])


# field case 42
def test_a_vector_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(MidstreamError, match="--steer"):
        options.parse_steering(["evil.npy:3"])


def test_prompts_come_from_lines_or_a_json_list(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    (tmp_path / "list.json").write_text('["one\\nwith a break", "two"]')
    assert options.read_prompts(tmp_path / "lines.txt") == ["one", "two"]
    assert options.read_prompts(tmp_path / "list.json") == ["one\nwith a break", "two"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--set", "kv_cache=2"], "--set kv_cache: "),
        (["up", "--set", "kv_cache_gib"], "NAME=VALUE"),
        (["up", "--set", "api_port=many"], "--set api_port="),
        (["up", "--port", "70000"], "api_port"),
        (["up", "--global-capture", "pre_mlp:0"], "global_capture: 'pre_mlp' is not a hook"),
        (
            ["up", "--set", "global_capture=post_block", "--set", "global_capture_positions=first"],
            "'first' is not a position selector",
        ),
        (["up", "--model", "./nowhere"], "model='./nowhere'"),
        (["submit"], "prompts: give a prompt"),
        (["job", "show", "job_x"], "no Midstream server answers at http://127.0.0.1:1"),
        *(
            ([group, "list"], "no Midstream server answers")
            for group in ("modules", "probe", "sae", "tuned", "loras")
        ),
        (["capture", "show", "./nowhere"], "no such folder: ./nowhere"),
        (["submit", "--body", "missing.json"], "missing.json"),
    ],
)
def test_cli_errors_are_one_line_naming_the_option(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == 1
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


def test_a_setting_in_the_environment_that_is_wrong_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_ENABLE_PREFIX_CACHING", "perhaps")
    code, _, err = call(capsys, "up")
    assert (code, "MIDSTREAM_ENABLE_PREFIX_CACHING" in err) == (1, True)


def test_an_unknown_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "dance")
    assert code == 2
    assert "dance" in err


def test_version_names_this_version_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    from midstream import __version__

    code, out, _ = call(capsys, "version")
    assert code == 0
    assert f"midstream {__version__}" in out


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")]
)
def test_numbers_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    assert as_ranges(numbers) == text


def test_the_list_of_jobs_keeps_a_line_and_a_whole_id_for_each_on_a_narrow_terminal() -> None:
    job_id = "job_" + "x" * 35
    views = [
        JobView(
            id=job_id,
            kind="generate",
            model="SmolLM2-135M-Instruct",
            state=state,
            attempt=attempt,
            version=1,
            created=0.0,
            finished=0.29,
        )
        for state, attempt in ((State.SUCCEEDED, 1), (State.CANCELLED, 2))
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(jobs.jobs(views))
    heading, _, first, second = [
        line for line in console.file.getvalue().splitlines() if line.strip()
    ]  # type: ignore[attr-defined]
    assert heading.split()[:5] == ["job", "state", "prompts", "captures", "took"]
    assert first.split()[:2] == [job_id, "succeeded"]
    assert second.split()[:3] == [job_id, "cancelled", "×2"]


def test_receipts_count_the_rows_of_all_files_of_a_rank() -> None:
    def file(rows: int, request: int = 0) -> FileEntry:
        return FileEntry(
            path="p",
            request=request,
            rank=0,
            pp=0,
            bytes=1,
            crc32=0xAB,
            rows=rows,
            sites={},
            positions=1,
        )

    def report(request: int) -> RankReport:
        return RankReport(
            rank=0,
            tp=0,
            request=request,
            step=1,
            checksum="0" * 16,
            actions=0,
            applied=0,
            status="ok",
        )

    captures = CaptureResults(
        status="ok", job="job_x", files=[file(3), file(4), file(5, request=1)]
    )
    stages = [StageReport(pp=0, consistent=True, ranks=[report(0), report(1)])]
    console = Console(width=120, file=io.StringIO())
    console.print(
        jobs.receipts(
            "Receipts", [("job_x", captures, Determinism(consistent=True, stages=stages))]
        )
    )
    first, second = [line for line in console.file.getvalue().splitlines() if "…" in line]  # type: ignore[attr-defined]
    assert first.split()[-3:] == ["7", "2", "files"]
    assert second.split()[-2:] == ["5", "000000ab"]


def test_sizes_are_human_readable() -> None:
    assert [jobs.size(count) for count in (12, 2048, 3 << 20)] == ["12 B", "2.0 KiB", "3.0 MiB"]


def test_the_demo_names_commands_as_they_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from midstream.client.cli import demo

    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv" / "bin" / "midstream")])
    assert demo._command() == ".venv/bin/midstream"
    monkeypatch.setattr(sys, "argv", ["midstream"])
    assert demo._command() == "midstream"


JOB_ID = "job_1m7vjx8kxwmbmsgdtc9whv0838jage76jzk"


def narrow(*shown: Any) -> str:
    console = Console(width=80, file=io.StringIO())
    for each in shown:
        console.print(each)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_ids_stay_whole_in_every_table_on_80_columns() -> None:
    key = KeyView(
        id="k3y0k3y0k3y0",
        name="ada of vision",
        tenant="vision-department",
        scopes=list(SCOPES),
        created=1.79e9,
        expires=1.8e9,
    )
    run = RunView(
        name="eiffel-tower-clean",
        state="ready",
        model="m",
        job=JOB_ID,
        tag="t",
        created=1.79e9,
        bytes=3 << 20,
        in_use=2,
        held_by=["w1"],
    )
    captured = CaptureEntry(
        job=JOB_ID, tags=["default", "tour"], created=1.79e9, status="ok", bytes=1 << 20, rows=4200
    )
    entry = EntryView(
        layers=[14],
        hook="post_block",
        positions="all",
        op="add",
        scale=1.0,
        numbers=[],
        tensors=["0" * 64],
    )
    module = ModuleView(
        name="sea-not-office",
        model="m",
        digest="461a7232b345" + "0" * 52,
        bytes=2304,
        created=1.79e9,
        entries=[entry],
    )
    text = narrow(
        records.listed([key], KeyView),
        records.listed([run], RunView),
        records.listed([captured], CaptureEntry),
        records.listed([module], ModuleView),
    )
    for whole in (key.id, run.name, JOB_ID, "461a7232b345", module.name):
        assert whole in text
    assert text.count(JOB_ID) == 2
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_every_command_accepts_h_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    from midstream import __version__

    assert call(capsys, "--version")[:2] == (0, f"midstream {__version__}\n")
    for words in (
        (),
        ("submit",),
        ("job",),
        ("webhooks", "list"),
        ("status",),
        ("down",),
        ("logs",),
        ("demo",),
    ):
        code, out, _ = call(capsys, *words, "-h")
        assert (code, "Usage: " in out) == (0, True)


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


def test_nothing_running_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "status")
    assert (code, "no stack is running on" in out) == (3, True)
    code, out, _ = call(capsys, "down")
    assert (code, "no stack is running on" in out) == (0, True)
    code, _, err = call(capsys, "logs")
    assert (code, "no logs in" in err) == (1, True)


def test_an_unknown_tenant_is_named_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = TenantView(
        name="vision",
        limits=Limits(),
        usage=Usage(
            jobs_in_flight=0,
            sweep_cells=0,
            capture_bytes=0,
            tokens_this_minute=0,
            requests_this_minute=0,
        ),
    )
    with server(reply({"tenants": [view]})) as (url, _):
        code, _, err = call(capsys, "tenants", "show", "visoin", "--url", url)
    assert (code, "unknown tenant 'visoin'" in err, "did you mean 'vision'?" in err) == (
        1,
        True,
        True,
    )


def test_a_command_of_a_group_is_suggested_by_its_full_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["list"])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert (ended.value.code, "'midstream job list'" in said) == (2, True)


def test_a_feature_of_an_autoencoder_steers_from_the_command_line() -> None:
    assert options.parse_steering(["%tiny:123:4.5"]) == [
        {"sae": "tiny", "feature": 123, "value": 4.5}
    ]
    ablated = {"sae": "tiny", "feature": 123, "op": "ablate", "positions": "all_generated"}
    assert options.parse_steering(["%tiny:123:op=ablate:positions=all_generated"]) == [ablated]
    (spec,) = wire.pack_steering(options.parse_steering(["%tiny:7:2:op=clamp"]))
    assert (spec.sae, spec.feature, spec.op, spec.value) == ("tiny", 7, "clamp", 2.0)
    for wrong in ("%", "%tiny:x", "%tiny:1:2:3", "%tiny:1:scale=2"):
        with pytest.raises(MidstreamError):
            options.parse_steering([wrong])


def test_commands_that_the_page_names_exist() -> None:
    views = Path(main.__file__).parents[2] / "api" / "assets" / "page" / "views"
    named = {
        tuple(words.split())
        for view in views.glob("*.js")
        for words in re.findall(r'command: "midstream ([a-z ]+)', view.read_text())
    }
    assert ("probe", "train") in named
    for group, name in named:
        (commands,) = (each for each in main.app.registered_groups if each.name == group)
        assert commands.typer_instance is not None
        assert name in [each.name for each in commands.typer_instance.registered_commands]


LINES = '{"positive": "a", "negative": "b"}\n\n{"prompt": "c", "target": "d"}\n{"text": "e"}\n'


@pytest.mark.parametrize(
    ("arguments", "asked", "body"),
    [
        (
            ["modules", "fit", "n", "FILE", "--method", "pca", "--layers", "1-2", "--rank", "2"],
            "POST /v1/modules/fit",
            {"method": "pca", "layers": "1-2", "rank": 2, "positive": ["a"], "negative": ["b"],
             "examples": [{"prompt": "c", "target": "d"}]},
        ),
        (
            ["jacobian", "fit", "n", "FILE", "--seed", "3"],
            "POST /v1/jacobians/fit",
            {"prompts": ["e"], "seed": 3},
        ),
        (["jacobian", "register", "n", "p"], "POST /v1/jacobians", {"path": "p"}),
        (["loras", "add", "n", "p"], "POST /v1/loras", {"path": "p"}),
        (
            ["sae", "register", "n", "p", "--reads", "post_block:12"],
            "POST /v1/saes",
            {"path": "p", "hook": "post_block", "layer": 12},
        ),
        (
            ["tuned", "register", "n", "p", "--residual"],
            "POST /v1/lenses",
            {"path": "p", "hook": "post_block", "residual": True},
        ),
    ],
)  # fmt: skip
def test_commands_that_make_an_artifact_send_what_was_typed(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    asked: str,
    body: dict[str, Any],
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(LINES)
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    refusal = MidstreamError("invalid_request", "refused here").problem()
    with server(reply(refusal, 400)) as (url, seen):
        status, _, err = call(capsys, *given, "--model", "m", "--description", "mine", "--url", url)
    assert (status, "refused here" in err) == (1, True)
    assert seen[0].startswith(asked)
    wanted = body | {"name": "n", "model": "m", "description": "mine"}
    sent = msgspec.json.decode(seen.bodies[0])
    assert {name: sent[name] for name in wanted} == wanted


def test_a_line_that_is_no_object_is_refused_with_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("[1]\n")
    arguments = ["jacobian", "fit", "n", str(file), "--model", "m", "--url", "http://127.0.0.1:1"]
    status, _, err = call(capsys, *arguments)
    assert (status, "lines.jsonl" in err, "an object on each line" in err) == (1, True, True)
