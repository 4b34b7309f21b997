"""`midstream serve` takes the flags of `vllm serve`; help has sections; shells complete."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from midstream.client.cli import main
from midstream.client.stack import supervisor
from midstream.schemas.base.settings import Settings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """The settings of every stack that would have been started."""
    settings: list[Settings] = []

    def stack(given: Settings, say: Any, fixed: Any) -> SimpleNamespace:
        settings.append(given)
        return SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr(supervisor, "Supervisor", stack)
    monkeypatch.chdir(tmp_path)
    return settings


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code, and what is printed, in one line."""
    with pytest.raises(SystemExit) as ended:
        main.main(list(arguments))
    printed = "".join(capsys.readouterr())
    return int(ended.value.code or 0), " ".join(printed.replace("│", " ").split())


@pytest.mark.parametrize(
    "flags",
    [
        "/models/x --port 8000 -tp 2 --enforce-eager --seed=7",
        "--port=8000 --tensor-parallel-size=2 --enforce-eager --seed 7 /models/x",
        "/models/x --port 8000 --tensor_parallel_size 2 --enforce_eager --seed=7",
    ],
)
def test_serve_starts_the_stack_with_these_settings(
    capsys: pytest.CaptureFixture[str], started: list[Settings], flags: str
) -> None:
    assert call(capsys, "serve", *flags.split())[0] == 0
    (made,) = started
    assert made.model == "/models/x"
    assert (made.api_port, made.tensor_parallel_size, made.enforce_eager) == (8000, 2, True)
    assert made.engine_options == {"seed": 7}


def test_ports_that_are_chosen_anywhere_are_fixed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[set[str]] = []

    def stack(given: Settings, say: Any, fixed: set[str]) -> SimpleNamespace:
        found.append(fixed & {"api_port", "flower_port"})
        return SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr(supervisor, "Supervisor", stack)
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--port", "8321"], ["--set", "flower_port=5555"]):
        assert call(capsys, "up", "--set", "engine=fake", *options)[0] == 0
    (tmp_path / "settings.toml").write_text("flower_port = 5555")
    for variable, value in {"API_PORT": "8321", "CONFIG": "settings.toml"}.items():
        with monkeypatch.context() as environment:
            environment.setenv(f"MIDSTREAM_{variable}", value)
            assert call(capsys, "up", "--set", "engine=fake")[0] == 0
    assert found == [set(), {"api_port"}, {"flower_port"}, {"api_port"}, {"flower_port"}]


def test_serve_takes_any_setting(
    capsys: pytest.CaptureFixture[str], started: list[Settings]
) -> None:
    given = ["--set", "kv_cache_gib=2", "--data-dir", "d", "--no-enable-prefix-caching"]
    assert call(capsys, "serve", "m", *given)[0] == 0
    assert started[0].kv_cache_gib == 2
    assert (started[0].data_dir, started[0].enable_prefix_caching) == ("d", False)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--max-modl-len", "9"], 2, "--max-model-len"),
        (["--enable-dbo"], 1, "--enable-dbo: it divides a batch's rows"),
        (["--chat-template", "f"], 1, "--chat-template: chats are rendered with"),
        (["--port", "http"], 1, "--port 'http': Expected `int`, got `str`"),
        (["--api-key", "secret"], 1, "is not a key: ms_<12"),
        (["--quantization", "awq"], 1, "(--engine-unproven)"),
    ],
)
def test_serve_refuses_a_flag_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
    started: list[Settings],
    arguments: list[str],
    code: int,
    told: str,
) -> None:
    ended, printed = call(capsys, "serve", "m", *arguments)
    assert (ended, told in printed) == (code, True), printed
    assert started == []


def test_every_command_is_in_one_section_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    commands = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    listed = [name for names in main.SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(commands)
    printed = call(capsys, "--help")[1]
    places = [printed.index(f" {title} ─") for title in main.SECTIONS]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("midstream har", ["harvest"]),
        ("midstream harvest ver", ["verify"]),
        ("midstream serve m --max-num-s", ["--max-num-seqs"]),
    ],
)
def test_the_shell_completes_commands_and_flags(words: str, completed: list[str]) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert _completion(_MIDSTREAM_COMPLETE="complete_bash", **asked).split() == completed


def test_completion_is_shown_and_installed(tmp_path: Path) -> None:
    script = _completion("--show-completion", "bash")
    assert "complete -o default -F _midstream_completion midstream" in script
    assert "completion installed" in _completion("--install-completion", "bash", HOME=str(tmp_path))
    written = (tmp_path / ".bash_completions" / "midstream.sh").read_text()
    assert written.strip() == script.strip()


def _completion(*arguments: str, **environ: str) -> str:
    command = [sys.executable, "-c", "from midstream.client.__main__ import main; main()"]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
