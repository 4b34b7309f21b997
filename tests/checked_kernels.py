"""Runs the Triton kernels as they are compiled for a GPU, under ttsem: no access is out of bounds,
no two programs touch an element that one of them writes, and no result has memory that nobody
wrote.

`.cache/ttsem/bin/python tests/checked_kernels.py`. Each planted fault has to be found.
"""

import subprocess
import sys
from pathlib import Path

from ttsem_programs import PLANTED

PROGRAMS = Path(__file__).with_name("ttsem_programs.py")


def report(name: str) -> tuple[int, str]:
    """Run a program under ttsem; return its exit code and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "ttsem.sanitize", str(PROGRAMS), "--", name],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def check() -> None:
    code, text = report("kernels")
    assert code == 0, text
    print(text.strip().splitlines()[-1])
    for fault, said in PLANTED.items():
        code, text = report(fault.__name__)
        assert code != 0, f"{fault.__name__} was not found: {text}"
        assert said in text, f"{fault.__name__}: {text}"
        print(f"found: {fault.__doc__}")


if __name__ == "__main__":
    check()
