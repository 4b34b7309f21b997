"""Writes the commit into what is built: many builds have one version.

`BUILD_COMMIT` and `BUILD_DATE` name it where there is no repository, as in a container.
"""

import json
import os
import runpy
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

SOURCE = "schemas/base/build.py"


def stamp(folder: Path) -> None:
    """Write the file with the build, if it is known."""
    parts = runpy.run_path(SOURCE)
    found = parts["build"]()
    commit = os.environ.get("BUILD_COMMIT") or found.commit
    date = os.environ.get("BUILD_DATE") or found.date
    path = folder / parts["FILE"]
    if commit and not path.exists():
        path.write_text(json.dumps({"commit": commit, "date": date}) + "\n")


class StampedBuild(build_py):
    """What becomes a wheel: with the file, and without this one."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] != ("midstream", "setup")]

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            stamp(Path(self.build_lib) / "midstream" / Path(SOURCE).parent)


class StampedSource(sdist):
    """The source distribution, which no longer has a repository."""

    def make_release_tree(self, base_dir: str, files: Any) -> None:
        super().make_release_tree(base_dir, files)
        stamp(Path(base_dir) / Path(SOURCE).parent)


setup(cmdclass={"build_py": StampedBuild, "sdist": StampedSource})
