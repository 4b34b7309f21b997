"""Which exit code has `midstream verify`, and what does it start?"""

import json
from pathlib import Path
from typing import Any

import pytest

from midstream.client.cli import main
from midstream.client.stack import verify
from midstream.client.stack.promises import PROMISES, Measured, Report
from midstream.schemas.base.settings import Settings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """The settings of every run; of its promises, only the cost named by `model` is too high."""
    settings: list[Settings] = []

    def verified(given: Settings, seconds: float, killed: Any, say: Any) -> Report:
        settings.append(given)
        figures = {promise.name: Measured([promise.limit]) for promise in PROMISES}
        if given.model in figures:
            figures[given.model] = Measured([9.0])
        return Report("now", 1.0, {}, {}, {}, verify.outcomes(figures))

    monkeypatch.setattr(verify, "verify", verified)
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")  # also removes what the command sets
    monkeypatch.chdir(tmp_path)
    return settings


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["verify", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--model", "m"], 0),
        *((["--model", promise.name], 1) for promise in PROMISES),
        (["--modle", "m"], 2),
        (["--seconds", "-1"], 2),
        (["--set", "kv_cache"], 2),
        (["--set", "kv_cache_gbi=1"], 2),
        (["--engine", "enable_dbo=true"], 2),
        (["--json", "no/such/folder.json"], 2),
    ],
)
def test_the_exit_code_says_whether_every_promise_holds(
    started: list[Settings], arguments: list[str], code: int
) -> None:
    assert call(*arguments) == code
    assert len(started) == (code != 2)


def test_verify_takes_settings_and_writes_json(
    started: list[Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--set", "dtype=float32", "--data-dir", "d", "--model", "idle", "--json", "out.json"]
    assert call(*given) == 1
    (made,) = started
    assert (made.dtype, made.data_dir) == ("float32", str(tmp_path / "d" / "verify"))
    written = json.loads((tmp_path / "out.json").read_text())
    verdicts = {outcome["name"]: outcome["verdict"] for outcome in written["outcomes"]}
    assert [name for name, verdict in verdicts.items() if verdict != "PASS"] == ["idle"]
    assert "9 of 10 promises hold; FAILED: idle" in capsys.readouterr().out
