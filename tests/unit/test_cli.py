"""Does the command line read what is typed, and answer mistakes with one line that names the thing?"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midstream.client import cli, cli_jobs, show
from midstream.schemas.errors import MidstreamError


@pytest.fixture(autouse=True)
def _nothing_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIDSTREAM_API_PORT", "1")  # nobody listens there


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of `midstream <arguments>`."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", "all"), ("3", 3), ("-1", -1), ("0-5", "0-5"), ("1,4,-1", [1, 4, -1]), ("0-2,7", [0, 1, 2, 7]),
        ("0-2,x", "0-2,x"), ("nonsense", "nonsense"),
    ],
)  # fmt: skip
def test_layers_are_read_as_typed(text: str, layers: Any) -> None:
    assert cli_jobs.parse_layers(text) == layers


def test_positions_are_names_or_numbers() -> None:
    assert cli_jobs.parse_positions("all_prompt") == "all_prompt"
    assert cli_jobs.parse_positions("0,5,-1") == [0, 5, -1]


def test_a_steering_vector_comes_from_a_file_with_layers_and_scale(tmp_path: Path) -> None:
    np.save(tmp_path / "joy.npy", np.ones(4, np.float32))
    entry = cli_jobs.parse_steer("joy.npy:3-5:2.5")
    assert (entry["layers"], entry["scale"], entry["vector"].tolist()) == ("3-5", 2.5, [1.0] * 4)
    assert cli_jobs.parse_steer("joy.npy:3")["scale"] == 1.0


@pytest.mark.parametrize("text", ["joy.npy", "missing.npy:3", "joy.npy:3:much"])
def test_a_bad_steering_option_names_itself(tmp_path: Path, text: str) -> None:
    np.save(tmp_path / "joy.npy", np.ones(4, np.float32))
    with pytest.raises(MidstreamError, match="--steer"):
        cli_jobs.parse_steer(text)


# field case 42
def test_a_vector_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(MidstreamError, match="--steer"):
        cli_jobs.parse_steer("evil.npy:3")


def test_prompts_come_from_lines_or_a_json_list(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    (tmp_path / "list.json").write_text('["one\\nwith a break", "two"]')
    assert cli_jobs.read_prompts(tmp_path / "lines.txt") == ["one", "two"]
    assert cli_jobs.read_prompts(tmp_path / "list.json") == ["one\nwith a break", "two"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--set", "kv_cache=2"], "MIDSTREAM_KV_CACHE"),
        (["up", "--set", "kv_cache_gib"], "NAME=VALUE"),
        (["up", "--set", "api_port=many"], "MIDSTREAM_API_PORT"),
        (["up", "--port", "70000"], "api_port"),
        (["up", "--model", "./nowhere"], "model='./nowhere'"),
        (["submit"], "prompts: give a prompt"),
        (["job", "show", "job_x"], "no Midstream answers at http://127.0.0.1:1"),
        (["capture", "show", "./nowhere"], "there is no folder ./nowhere"),
        (["submit", "--body", "missing.json"], "missing.json"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == 1
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


def test_a_setting_in_the_environment_that_is_wrong_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")])
def test_numbers_are_shown_as_spans(numbers: list[int], text: str) -> None:
    assert show.spans(numbers) == text


def test_sizes_are_for_people() -> None:
    assert [show.size(count) for count in (12, 2048, 3 << 20)] == ["12 B", "2.0 KiB", "3.0 MiB"]


def test_the_demo_names_commands_as_they_can_be_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from midstream.client import demo

    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv" / "bin" / "midstream")])
    assert demo._command() == ".venv/bin/midstream"
    monkeypatch.setattr(sys, "argv", ["midstream"])
    assert demo._command() == "midstream"
