"""Benchmarks, which only people run, keep up with what they import, and say how they are run.

What times steps is run by `tests/engine/test_host_bound.py`, all stages for GPUs by
`tests/long/test_gpu_bench.py`.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tree import ROOT, module_name, product, sources

BENCHMARKS = sources("benchmarks")
#: Takes options, by its own parser or by that of the stages for GPUs.
STARTED = [
    path
    for path in BENCHMARKS
    if "__main__" in (text := path.read_text())
    and ("ArgumentParser(" in text or path.name.startswith("stage_"))
]
#: Runs each file that is named as a program that is asked for its options.
ASK = """
import runpy
import sys

for path in sys.argv[1:]:
    sys.path.insert(0, path.rpartition("/")[0])
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, path
    else:
        raise AssertionError(f"{path} has run")
"""


@cache
def names_of(path: Path) -> frozenset[str]:
    """The names that a module binds, at any depth outside of functions."""
    bound = set[str]()
    left: list[ast.AST] = [*ast.parse(path.read_text()).body]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        else:
            left += ast.iter_child_nodes(node)
    return frozenset(bound)


def test_what_benchmarks_import_of_the_product_is_there() -> None:
    """Also what they import in functions, where nothing but a run would notice."""
    modules = {module_name(path): path for path in product()}
    missing = []
    for path in BENCHMARKS:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                ("midstream.", "midstream_")
            ):
                continue
            for alias in node.names:
                owner = modules.get(node.module or "")
                if f"{node.module}.{alias.name}" in modules:
                    continue
                if owner is None or alias.name not in names_of(owner):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    missing.append(f"{where}: {node.module}.{alias.name}")
    assert missing == []


@pytest.mark.slow("what all of them import is imported: torch, aiohttp, …")
def test_every_benchmark_says_how_it_is_run() -> None:
    assert len(STARTED) > 12
    done = subprocess.run(
        [sys.executable, "-c", ASK, *map(str, STARTED)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("usage:") == len(STARTED)
