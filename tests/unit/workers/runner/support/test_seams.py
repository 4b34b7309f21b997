"""What we rely on inside vLLM is written down, is there, and is named where it is missing."""

import ast
from pathlib import Path

import pytest
from tree import ROOT, imports_of, sources

from midstream.workers.runner.support import seams
from midstream.workers.runner.support.seams import (
    READ,
    SEAMS,
    WINDOW,
    Seam,
    SeamError,
    mismatches,
    verify,
)
from midstream.workers.runner.support.vllm_source import Source, installed

#: What vLLM documents, or exports for users, and what only types need.
PUBLIC = {
    "vllm",
    "vllm.config",
    "vllm.platforms",
    "vllm.outputs",
    "vllm.sampling_params",
    "vllm.usage.usage_lib",
    "vllm.lora.request",
    "vllm.v1.engine.exceptions",
    "vllm.distributed",
}


def names() -> set[str]:
    return {wanted.partition("(")[0] for seam in SEAMS for wanted in seam.has}


def test_the_installed_vllm_has_every_seam() -> None:
    assert list(mismatches(installed())) == []
    assert verify() == []


def test_every_module_of_vllm_that_workers_import_is_a_seam() -> None:
    found = {
        each.module
        for path in sources("workers")
        for each in imports_of(path)
        if each.module.partition(".")[0] == "vllm"
    }
    known = {seam.where.partition(":")[0] for seam in SEAMS}
    roots = {module for module in found if module not in PUBLIC and module not in known}
    # `imports_of` gives `module.name` for a name that is imported.
    assert {each for each in roots if each.rpartition(".")[0] not in known | PUBLIC} == set()


@pytest.mark.parametrize(
    "file", ["runner_adapters.py", "scheduler.py", "graph_families.py", "worker_class.py"]
)
def test_every_method_that_is_extended_is_a_seam(file: str) -> None:
    extended = {
        node.attr
        for node in ast.walk(ast.parse((ROOT / "workers" / "runner" / "vllm" / file).read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "super"
    }
    assert extended - {"__init__"} - names() == set()


def test_the_page_shows_the_seams() -> None:
    mark = "written by `python -m midstream.workers.runner.support.seams --table` -->"
    page = (ROOT / "docs" / "vllm-versions.md").read_text()
    assert page.split(f"<!-- {mark}")[1].split(f"<!-- end of the part {mark}")[
        0
    ].strip() == "\n".join(seams.table())


def test_every_user_of_a_seam_exists() -> None:
    for seam in SEAMS:
        for user in seam.by.split(", "):
            assert any((ROOT / "workers" / folder / user).is_file() for folder in ("runner", "")), (
                seam.where,
                user,
            )


@pytest.fixture
def package(tmp_path: Path) -> Source:
    """A `vllm` with a class in two parts."""
    folder = tmp_path / "vllm"
    (folder / "v1").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .v1.base import helper\n")
    (folder / "v1" / "__init__.py").write_text("")
    (folder / "v1" / "base.py").write_text(
        "def helper(a, b): ...\nclass Base:\n    field: int = 0\n    def "
        "__init__(self): self.held, self.other = 1, 2\n"
        "    def step(self, output, more=None): ...\n"
    )
    (folder / "v1" / "made.py").write_text(
        "from vllm.v1.base import Base as Root\nclass Made(Root):\n    def own(self, "
        "*, named): ...\n"
    )
    (folder / "_version.py").write_text("__version__ = version = '0.32.0'\n")
    return Source(folder)


@pytest.mark.parametrize(
    ("where", "wanted", "problem"),
    [
        ("vllm.v1.made:Made", "own(named)", ""),
        ("vllm.v1.made:Made", "step(output, more)", ""),
        ("vllm.v1.made:Made", "field", ""),
        ("vllm.v1.made:Made", "held", ""),
        ("vllm.v1.made:Made", "other", ""),
        ("vllm", "helper(a, b)", ""),
        ("vllm.v1.made:Made", "gone", "expected gone, found no gone"),
        (
            "vllm.v1.made:Made",
            "step(scheduler_output)",
            "expected step(scheduler_output), found step(output, more)",
        ),
        ("vllm.v1.base", "helper(b, a)", "expected helper(b, a), found helper(a, b)"),
        ("vllm.v1.made:Made", "held(a)", "expected held(a), found held, which is no function"),
        ("vllm.v1.made:Gone", "own", "there is no Gone in it"),
        ("vllm.v1.gone:Made", "own", "there is no such module"),
    ],
)
def test_a_mismatch_names_the_seam_what_was_expected_and_what_is_there(
    package: Source, monkeypatch: pytest.MonkeyPatch, where: str, wanted: str, problem: str
) -> None:
    monkeypatch.setattr(seams, "SEAMS", (Seam(where, (wanted,), "adapters.py"),))
    found = list(mismatches(package))
    assert found == ([f"{where} (used by adapters.py): {problem}"] if problem else [])
    if problem:
        with pytest.raises(SeamError, match="is not built as Midstream expects"):
            verify(package)


def test_a_version_outside_the_window_is_refused_before_its_seams(package: Source) -> None:
    (package.folder / "_version.py").write_text("version = '0.30.0'\n")
    with pytest.raises(
        SeamError, match=rf"vLLM 0\.30\.0 is not supported; install one of {', '.join(WINDOW)}"
    ):
        verify(Source(package.folder))


def test_a_version_that_was_only_read_takes_a_switch_and_is_stamped(
    package: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "SEAMS", ())
    (package.folder / "_version.py").write_text(f"version = '{READ[0]}'\n")
    with pytest.raises(SeamError, match="engine_unproven"):
        verify(Source(package.folder))
    (caveat,) = verify(Source(package.folder), unproven=True)
    assert READ[0] in caveat
