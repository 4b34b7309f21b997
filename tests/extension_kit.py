"""Packages with extensions, installed for tests: the examples, and one whose readers misbehave on
demand.
"""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "extension"
#: A kind of jobs.
ECHO = EXAMPLE.parent / "echo"
#: A kind of registered artifacts, and a reader that takes one.
BANK = EXAMPLE.parent / "bank"

#: `along` doubles what a row has in a direction; `unruly` does what its number says.
OPS = """

class Along:
    vector = True

    def edit(self, rows, vector):
        unit = vector / np.linalg.norm(vector)
        return rows + (rows @ unit)[:, None] * unit[None]

class UnrulyOp:
    options = {"mood": Option(default=0.0)}

    def edit(self, rows, vector, mood):
        if mood == 1:
            raise ValueError("no such luck")
        if mood == 2:
            return rows[:, :1]
        if mood == 3:
            return rows / np.float32(0)
        if mood == 4:
            sys.exit(2)
        if mood == 5 and np.abs(rows).max() > 1000:
            raise ValueError("a row is too long")
        return rows + np.float32(1)
"""

#: `unruly`: raises, hangs, or answers otherwise than declared, as its option says.
UNRULY = '''
import sys
import time
import numpy as np
from midstream.schemas.extensions import Option

class Unruly:
    """Does what its option says."""

    returns = {"rows": "int64"}
    fixed_bytes = 8
    moods = ["good", "raise", "exit", "hang", "large", "other", "write"]
    options = {"mood": Option(default="good", choices=moods)}

    def read(self, rows):
        mood = rows.options["mood"]
        if mood == "raise":
            raise ValueError("no such luck")
        if mood == "exit":
            sys.exit(3)
        if mood == "hang":
            time.sleep(7)
        if mood == "write":
            next(iter(rows.sites.values()))[:] = 0
        if mood == "other":
            return {"columns": np.zeros(1)}
        return {"rows": np.array([len(rows.positions)] * (9 if mood == "large" else 1))}
'''


def install(folder: Path, name: str, version: str, modules: dict[str, str], entries: str) -> Path:
    """As pip leaves a package: modules (file → source), and entry points in a dist-info folder.

    Returns the folder, for `sys.path`.
    """
    module = name.replace("-", "_")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for file, source in modules.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)
    return folder


def install_example(folder: Path, example: Path = EXAMPLE) -> Path:
    """A package in `examples`."""
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    sources = {str(path.relative_to(example)): path.read_text() for path in example.glob("*/*.py")}
    groups = project["entry-points"].items()
    entries = "\n".join(
        [
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in each.items())
            for group, each in groups
        ]
    )
    return install(folder, project["name"], project["version"], sources, entries)


def pip_install(example: Path, folder: Path) -> Path:
    """Build a package in `examples`, and install it to a folder below this one as its users do.

    Returns that folder.
    """
    source = folder / "source"
    shutil.copytree(example, source)
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(site), str(source)],
        check=True,
        timeout=300,
    )
    return site


def with_package(*arguments: str) -> str:
    """What a Python program prints, in this process's environment."""
    done = subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def install_unruly(folder: Path) -> Path:
    entries = (
        "[midstream.readers]\nunruly = unruly:Unruly\n[midstream.ops]\nalong = "
        "unruly:Along\nunruly = unruly:UnrulyOp\n"
    )
    return install(folder, "unruly", "0.1", {"unruly.py": UNRULY + OPS}, entries)
