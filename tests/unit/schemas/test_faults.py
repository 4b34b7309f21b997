"""Do the crash points of the table and those in the code agree, and is nobody killed who was not
asked for?
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tree import CORE, sources

from midstream.schemas.settings.faults import CRASH_POINTS, FOLDER, arm, crash_point
from midstream.schemas.settings.settings import SettingsError

NAMED = re.compile(
    r'"((?:api|worker|capture|segment|receipt|relay|sweep|attribution|harvest|sweeper|webhook)\.[a-z]+)"'
)
DIE = (
    "import sys; from midstream.schemas.settings.faults import arm, crash_point; "
    "arm(*sys.argv[1:3]); crash_point(sys.argv[3]); print('alive')"
)


def test_the_crash_point_table_matches_the_code() -> None:
    lines = [
        line
        for path in sources(*CORE, "packages")
        if path.name != "faults.py"
        for line in path.read_text().splitlines()
    ]
    found = {name for line in lines if "crash_point(" in line for name in NAMED.findall(line)}
    assert found == set(CRASH_POINTS)


def test_an_armed_crash_point_kills_once(tmp_path: Path) -> None:
    def run(point: str) -> int:
        return subprocess.run(
            [sys.executable, "-c", DIE, "slow;crash:at=relay.committed", str(tmp_path), point],
            check=False,
        ).returncode

    assert run("relay.received") == 0
    assert run("relay.committed") == -9
    assert run("relay.committed") == 0, "the next one lives"
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["relay.committed"]


def test_crash_points_are_off_by_default(tmp_path: Path) -> None:
    arm("", tmp_path)
    for name in ("", *CRASH_POINTS):
        crash_point(name)
    assert not list(tmp_path.iterdir())


def test_an_unknown_crash_point_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"unknown crash point 'relay\.lost'; valid: api\.committed"
    ):
        arm("crash:at=relay.lost", tmp_path)
