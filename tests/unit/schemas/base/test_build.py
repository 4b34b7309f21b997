"""Builds of one version tell themselves apart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tree import ROOT

from midstream.schemas.base import build as building
from midstream.schemas.base.version import __version__, full_version


@pytest.fixture(autouse=True)
def _anew() -> None:
    building.build.cache_clear()
    full_version.cache_clear()


def test_a_clone_names_its_commit_and_a_changed_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-qm", "First")
    monkeypatch.setattr(building, "_ROOT", tmp_path)
    commit, date = building.build()
    assert git("rev-parse", "HEAD").startswith(commit)
    assert len(date) == 8
    assert full_version() == f"{__version__}+{date}.g{commit}"
    building.build.cache_clear()
    full_version.cache_clear()
    (tmp_path / "file").write_text("2")
    assert full_version() == f"{__version__}+{date}.g{commit}.changed"


def test_outside_of_a_clone_a_file_says_it_or_nothing_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "build.py"
    copy.write_text((ROOT / "schemas/base/build.py").read_text())
    program = f"import runpy; print(tuple(runpy.run_path({str(copy)!r})['build']()))"

    def said() -> str:
        return subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert said() == "('', '')"
    (tmp_path / building.FILE).write_text(json.dumps({"commit": "abc", "date": "20261130"}))
    assert said() == "('abc', '20261130')"
