"""Each folder of `packages` is a package of its own, of the core's version: the core imports none
of them, and they import what their row names.
"""

import tomllib
from functools import cache
from typing import Any

import pytest
from tree import NODES, PACKAGES, ROOT, TYPED, imports_of, part_of, product, tracked

#: Package → the rooms of the core that it may import.
ROOMS: dict[str, set[str]] = {
    "page": {"api", "broker.artifacts", "broker.ledger", "schemas", "storage"},
    "bridges": {"client", "schemas", "storage"},
    "harvest": {"api", "broker", "client", "schemas", "storage", "workers"},
    "lab": {
        *("api", "broker.ledger", "broker.prompts", "broker.receipts"),
        *("client", "schemas", "storage", "workers"),
    },
    "ops": {"broker", "client", "schemas", "storage", "workers"},
    "review": {"api", "broker.ledger", "client", "schemas"},
    "s3": {"schemas.jobs", "schemas.settings", "storage"},
    "webhooks": {"api", "broker.ledger", "schemas"},
}
#: What a package's folder has, beside its code and its tests.
LAYOUT = {"pyproject.toml", "README.md"}


@cache
def project(name: str = "") -> dict[str, Any]:
    """The table `project` of a package's `pyproject.toml`, or of the core's."""
    file = ROOT / "packages" / name / "pyproject.toml" if name else ROOT / "pyproject.toml"
    return dict(tomllib.loads(file.read_text())["project"])


def test_the_core_imports_no_package() -> None:
    names = {f"midstream_{name}" for name in PACKAGES}
    wrong = [
        f"{found.where} imports {found.module}"
        for path in product("core")
        for found in imports_of(path)
        if found.module.partition(".")[0] in names and not (found.typing and path == ROOT / TYPED)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_imports_only_the_rooms_of_the_core_that_it_names(name: str) -> None:
    found = [found for path in product(name) for found in imports_of(path)]
    used = {
        room
        for each in found
        for room in ROOMS[name]
        if each.module.startswith(f"midstream.{room}.")
    }
    others = {f"midstream_{other}" for other in PACKAGES if other != name}
    wrong = [
        f"{each.where} imports {each.module}"
        for each in found
        if each.module.partition(".")[0] in {"midstream", *others}
        and not any(each.module.startswith(f"midstream.{room}.") for room in ROOMS[name])
    ]
    assert wrong == []
    assert used == ROOMS[name], "its row names no room that it does not import"


def test_every_package_has_a_budget_and_a_row() -> None:
    assert set(NODES) - {"core"} == ROOMS.keys() == set(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_the_names_and_the_version_of_the_core(name: str) -> None:
    own = project(name)
    core = project()
    distribution = f"midstream-{name}=={core['version']}"
    assert f"{own['name']}=={own['version']}" == distribution
    assert own["requires-python"] == core["requires-python"]
    needed = [line for line in own["dependencies"] if line.startswith("midstream")]
    assert [line.partition("==")[2] for line in needed] == [core["version"]]
    assert distribution in core["optional-dependencies"][name]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_folder_of_a_package_has_its_parts(name: str) -> None:
    own = [path for path in tracked() if path.parts[:2] == ("packages", name)]
    assert {path.name for path in own if len(path.parts) == 3} == LAYOUT
    folders = {path.parts[2] for path in own if len(path.parts) > 3}
    assert {f"midstream_{name}", "tests"} <= folders <= {f"midstream_{name}", "tests", "docs"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_s_wheel_has_its_folders_and_its_types(name: str) -> None:
    tool = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["tool"]
    code = [path for path in tracked() if part_of(path) == name]
    folders = {".".join(path.parts[2:-1]) for path in code if path.suffix == ".py"}
    assert set(tool["setuptools"]["packages"]) == folders
    assert "py.typed" in {path.name for path in code}


def test_pytest_and_ruff_know_every_package() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    paths = tool["pytest"]["ini_options"]["pythonpath"]
    ours = tool["ruff"]["lint"]["isort"]["known-first-party"]
    assert [path for path in paths if path.startswith("packages/")] == [
        f"packages/{name}/tests" for name in PACKAGES
    ]
    assert ours == ["midstream", *(f"midstream_{name}" for name in PACKAGES)]
