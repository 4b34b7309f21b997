"""What `midstream serve`, `up` and `doctor --deep` start, and with which settings; help has
sections; shells complete.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from cli_kit import Cli

from midstream.client.cli import main
from midstream.schemas.settings.settings import Settings
from midstream_ops import beside_stock, supervisor
from midstream_ops.checks.finding import CheckFinding
from midstream_ops.checks.promises import PROMISES, judge


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Settings, set[str]]]:
    """The settings of every stack that would have been started, and those that are fixed."""
    stacks: list[tuple[Settings, set[str]]] = []

    def stack(given: Settings, say: Any, fixed: set[str]) -> SimpleNamespace:
        stacks.append((given, fixed & {"api_port", "flower_port"}))
        return SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr(supervisor, "Supervisor", stack)
    monkeypatch.chdir(tmp_path)
    return stacks


@pytest.mark.parametrize(
    "flags",
    [
        "/models/x --port 8000 -tp 2 --enforce-eager --seed=7",
        "--port=8000 --tensor-parallel-size=2 --enforce-eager --seed 7 /models/x",
        "/models/x --port 8000 --tensor_parallel_size 2 --enforce_eager --seed=7",
    ],
)
def test_serve_starts_the_stack_with_these_settings(
    cli: Cli, started: list[tuple[Settings, set[str]]], flags: str
) -> None:
    own = ["--set", "kv_cache_gib=2", "--data-dir", "d", "--no-enable-prefix-caching"]
    assert cli("serve", *flags.split(), *own).code == 0
    ((made, _),) = started
    assert made.model == "/models/x"
    assert made.api_port == 8000
    assert made.vllm.tensor_parallel_size == 2
    assert made.vllm.enforce_eager is True
    assert made.engine_options == {"seed": 7}
    assert made.kv_cache_gib == 2
    assert made.data_dir == "d"
    assert not made.vllm.enable_prefix_caching


def test_ports_that_are_chosen_anywhere_are_fixed(
    cli: Cli,
    started: list[tuple[Settings, set[str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for options in ([], ["--port", "8321"], ["--set", "flower_port=5555"]):
        assert cli("up", "--set", "engine=fake", *options).code == 0
    (tmp_path / "settings.toml").write_text("flower_port = 5555")
    for variable, value in {"API_PORT": "8321", "CONFIG": "settings.toml"}.items():
        with monkeypatch.context() as environment:
            environment.setenv(f"MIDSTREAM_{variable}", value)
            assert cli("up", "--set", "engine=fake").code == 0
    assert [fixed for _, fixed in started] == [
        set(), {"api_port"}, {"flower_port"}, {"api_port"}, {"flower_port"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--max-modl-len", "9"], 2, "--max-model-len"),
        (["--enable-dbo"], 1, "--enable-dbo: it divides a batch's rows"),
        (["--chat-template", "f"], 1, "--chat-template: chats are rendered with"),
        (["--port", "http"], 1, "--port 'http': Expected `int`, got `str`"),
        (["--api-key", "secret"], 1, "is not a key: ms_<12"),
        (["--seed", "seven"], 1, "[engine] seed: "),
    ],
)
def test_serve_refuses_a_flag_before_anything_starts(
    cli: Cli,
    started: list[tuple[Settings, set[str]]],
    arguments: list[str],
    code: int,
    told: str,
) -> None:
    ended = cli("serve", "m", *arguments)
    assert ended.code == code, ended
    assert told in ended.said, ended
    assert started == []


def test_every_command_is_in_one_section_of_the_help(cli: Cli) -> None:
    group: Any = typer.main.get_command(main.app)
    commands = group.list_commands(None)
    assert sorted([name for names in main.SECTIONS.values() for name in names]) == sorted(commands)
    said = cli("--help").said
    places = [said.index(f" {title} ─") for title in main.SECTIONS]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("midstream har", "harvest"),
        ("midstream list har", "harvest"),
        ("midstream create adm", "admin-key"),
        ("midstream serve m --max-num-s", "--max-num-seqs"),
    ],
)
def test_the_shell_completes_commands_and_flags(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: str, completed: str
) -> None:
    monkeypatch.setenv("_MIDSTREAM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert cli().out.split() == [completed]


def test_completion_is_shown_and_installed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    script = cli("--show-completion", "bash").out
    assert "complete -o default -F _midstream_completion midstream" in script
    assert "completion installed" in cli("--install-completion", "bash").out
    assert (tmp_path / ".bash_completions" / "midstream.sh").read_text().strip() == script.strip()


# --- midstream doctor --deep


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """The settings of every run; of its promises, only the cost named by `model` is too high."""
    settings: list[Settings] = []

    def run(given: Settings, seconds: float, killed: Any, say: Any) -> list[CheckFinding]:
        settings.append(given)
        Path(given.data_dir).mkdir(parents=True)
        figures = {name: promise.limit for name, promise in PROMISES.items()}
        return [
            judge(name, [9.0 if name == given.model else figures[name]], "") for name in figures
        ]

    monkeypatch.setattr(beside_stock, "measured", run)
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")  # also removes what the command sets
    monkeypatch.chdir(tmp_path)
    return settings


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("--model m", 0),
        *((f"--model {name}", 1) for name in PROMISES),
        ("--modle m", 2),
        ("--seconds -1", 2),
        ("--set kv_cache", 2),
        ("--set kv_cache_gbi=1", 2),
        ("--engine enable_dbo=true", 2),
        ("--plan", 2),
    ],
)
def test_the_exit_code_says_whether_every_promise_holds(
    cli: Cli, verified: list[Settings], typed: str, code: int
) -> None:
    assert cli("doctor", "--deep", *typed.split()).code == code
    assert len(verified) == (code != 2)


def test_deep_checks_take_settings_and_print_json(
    cli: Cli, verified: list[Settings], tmp_path: Path
) -> None:
    given = ["--engine", "dtype=float32", "--data-dir", "d", "--model", "idle"]
    ended = cli("doctor", "--deep", *given)
    assert ended.code == 1
    assert "ok: 9, warnings: 0, failures: 1 (idle)" in ended.out
    (made,) = verified
    assert made.vllm.dtype == "float32"
    assert str(Path(made.data_dir).parent) == str(tmp_path / "d")
    written = json.loads(cli("doctor", "--deep", *given, "--json").out)
    assert [each["about"] for each in written if each["level"] != "ok"] == ["idle"]


def test_deep_checks_delete_what_it_wrote_and_nothing_else(
    cli: Cli, verified: list[Settings], tmp_path: Path
) -> None:
    (tmp_path / "d" / "deep").mkdir(parents=True)
    for model, kept in (("m", 1), ("idle", 2)):
        cli("doctor", "--deep", "--data-dir", "d", "--model", model)
        assert len(list((tmp_path / "d").iterdir())) == kept, "logs stay where a promise fails"
