"""Programs in whose environment modules are missing."""

import subprocess
import sys
from pathlib import Path

#: Has these modules missing, then runs a program.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Missing())
{program}
"""
CLI = "import midstream.client.__main__ as m; sys.argv = ['midstream', *{arguments!r}]; m.main()"


def without(missing: list[str], program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(missing=missing, program=program)
    return subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=300
    )
