"""Which build of Midstream this is: its commit, and the date of that.

Wheels and images have both in a file that is written while they are built (`setup.py`, which runs
this file by itself); a clone asks git.
"""

import json
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

#: Beside this file.
FILE = "build.json"
_ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which git is not waited for.
_GIT_S = 5.0
#: What git appends to a commit whose files were changed since.
_CHANGED = "-changed"


class Build(NamedTuple):
    """A build; without its commit, if nothing says that."""

    commit: str = ""  # the first digits; with `-changed`, if files were changed since
    date: str = ""  # of the commit, such as 20261130


@cache
def build() -> Build:
    """Return this build."""
    with suppress(OSError, ValueError):
        return Build(**json.loads(Path(__file__).with_name(FILE).read_text()))
    if not (_ROOT / ".git").exists():
        return Build()
    with suppress(OSError, subprocess.SubprocessError):
        commit = _git("describe", "--always", "--abbrev=9", "--exclude=*", f"--dirty={_CHANGED}")
        return Build(commit, _git("log", "-1", "--format=%cd", "--date=format:%Y%m%d"))
    return Build()


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", f"--git-dir={_ROOT / '.git'}", f"--work-tree={_ROOT}", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_S,
    )
    return done.stdout.strip()
