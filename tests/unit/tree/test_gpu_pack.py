"""What the GPU benchmarks import is there on a machine that has only the packed packages."""

import json
import subprocess
import sys

import pytest
from gpu_packages import environment
from tree import ROOT

FOLDER = ROOT / "benchmarks" / "gpu"
#: Rooms of the product that a stage's processes run. What their functions import is imported too.
ROOMS = ("workers.engine", "workers.runner", "kernels", "storage", "schemas", "broker.receipts")
#: Classes that vLLM's processes import by name.
BY_NAME = ("midstream.workers.runner.vllm.worker_class", "midstream.workers.runner.vllm.scheduler")
#: Imported only for a setting, a platform or a model that the benchmarks do not have.
OTHERWISE = ("obstore", "opentelemetry", "torch_npu")
#: Modules that the stages share with the other benchmarks.
SHARED = ("engines.py", "shares.py")
#: Prints import statement → error, of the given files, of the modules by name, and then of the
#: functions of all product modules that were imported.
PROGRAM = """
import ast, json, sys
from pathlib import Path
files, by_name, rooms, otherwise, folder = json.loads(sys.stdin.read())
sys.path.insert(0, folder)
import kit

def statements(path, package=""):
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.Import):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and not (node.level and not package):
            yield ast.unparse(node)

faults, done = {}, set()

def run(statement, package=""):
    if (statement, package) in done or any(name in statement for name in otherwise):
        return
    done.add((statement, package))
    try:
        exec(statement, {"__package__": package, "__name__": package + ".x" if package else "x"})
    except ImportError as error:
        faults[f"{package}: {statement}"] = repr(error)

for file in files:
    for statement in statements(file):
        run(statement)
for name in by_name:
    run(f"import {name}")
while True:
    modules = {
        name: module for name, module in sorted(sys.modules.items())
        if any(name.startswith(f"midstream.{room}") for room in rooms)
        and getattr(module, "__file__", None) and name not in done
    }
    if not modules:
        break
    for name, module in modules.items():
        done.add(name)
        for statement in statements(module.__file__, module.__package__):
            if "TYPE_CHECKING" not in statement:
                run(statement, module.__package__)
print(json.dumps([faults, len(done)]))
"""


# Half a minute of imports. The same packages carry `test_every_stage_runs_on_a_cpu`.
@pytest.mark.long
def test_what_the_stages_import_is_packed() -> None:
    files = [*sorted(FOLDER.glob("*.py")), *(ROOT / "benchmarks" / name for name in SHARED)]
    given = json.dumps([list(map(str, files)), BY_NAME, ROOMS, OTHERWISE, str(FOLDER)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=given,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    faults, tried = json.loads(done.stdout.splitlines()[-1])
    assert faults == {}
    assert tried > 400, "the product's modules are among them"
