"""The unit that `midstream up --systemd` writes."""

import configparser
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import chosen, load_settings
from midstream_ops import systemd


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, list[str]]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    given = {
        "data_dir": str(tmp_path / "team" / "data"),
        "model": "/models/m",
        "engine_options": {"seed": 1, "word": 'with "quotes" and \\'},
        "admin_key": "ms_admin0000000_" + "a" * 43,
    }
    lines = systemd.write(load_settings({}, **given), chosen({}, **given), user=True)
    unit = tmp_path / "config" / "systemd" / "user" / "midstream-team-data.service"
    return unit, tmp_path / "team" / "data" / "systemd.env", lines


def test_the_unit_runs_up_with_the_given_settings_and_says_how(
    written: tuple[Path, Path, list[str]],
) -> None:
    unit, environment, lines = written
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(unit.read_text())
    service = parsed["Service"]
    assert service["ExecStart"].endswith("-m midstream.client up")
    assert service["EnvironmentFile"] == str(environment)
    assert service["KillMode"] == "mixed"
    assert any("systemctl --user enable --now midstream-team-data" in line for line in lines)
    assert any("loginctl enable-linger" in line for line in lines)
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    names = {line.partition("=")[0] for line in environment.read_text().splitlines()}
    assert names == {
        f"MIDSTREAM_{name}" for name in ("ADMIN_KEY", "DATA_DIR", "ENGINE_OPTIONS", "MODEL")
    }


def test_systemd_reads_the_values_as_they_are(written: tuple[Path, Path, list[str]]) -> None:
    _, environment, _ = written
    (line,) = (line for line in environment.read_text().splitlines() if "OPTIONS" in line)
    value = line.partition("=")[2]
    assert value[0] == value[-1] == '"'
    plain = value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    assert load_settings({"MIDSTREAM_ENGINE_OPTIONS": plain}).engine_options == {
        "seed": 1,
        "word": 'with "quotes" and \\',
    }
    with pytest.raises(MidstreamError, match="line break"):
        systemd.write(
            load_settings({}, data_dir=str(environment.parent), model="/a\nb"), {"model": 1}, True
        )


def test_systemd_itself_accepts_the_unit(written: tuple[Path, Path, list[str]]) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on the PATH")
    unit, *_ = written
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", unit],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(unit.parent)},
    )
    assert "midstream" not in done.stderr
