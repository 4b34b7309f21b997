"""What we rely on inside vLLM is written down, is there, and is named where it is missing; what we
put in its place accepts all its calls.
"""

import ast
from pathlib import Path

import pytest
import vllm_extract
from tree import ROOT, imports_of, sources

from midstream.workers.runner.support import seams, vllm_source
from midstream.workers.runner.support.seam_table import SEAMS, Seam
from midstream.workers.runner.support.seams import SeamError, mismatches, verify
from midstream.workers.runner.support.vllm_source import VllmFolder, installed

#: Versions that are not installed, with signatures in `tests/data`.
EXTRACTED = ("0.33.0",)
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


@pytest.mark.parametrize("version", EXTRACTED)
def test_a_version_that_is_not_installed_has_every_seam(version: str, tmp_path: Path) -> None:
    source = vllm_extract.unpack(version, tmp_path)
    assert source.version == version
    assert list(mismatches(source)) == []


def with_scheduler(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Compare vLLM with a scheduler of ours in which `old` is `new`."""
    text = (ROOT / "workers" / "runner" / "vllm" / "scheduler.py").read_text()
    assert text.count(old) == 1
    changed = ast.parse(text.replace(old, new))
    parsed = vllm_source._parsed
    monkeypatch.setattr(
        vllm_source,
        "_parsed",
        lambda file: changed if file == "vllm/scheduler.py" else parsed(file),
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "request: Any, max_cache_hit_length: int | None = None",
            "request: Any",
            "get_computed_blocks does not accept "
            "get_computed_blocks(request, max_cache_hit_length)",
        ),
        (
            "request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any",
            "request: Any, new_token_ids: list[int], *args: Any",
            "_Midstream._update_request_with_output does not accept "
            "_update_request_with_output(request=…, new_token_ids=…, is_stale=…)",
        ),
        (
            "    def midstream_end(self,",
            "    def gone(self): super().gone()\n\n    def midstream_end(self,",
            "_Midstream.gone extends gone, which is not there",
        ),
    ],
)
def test_a_function_in_place_of_vllms_accepts_all_its_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str, problem: str
) -> None:
    """The first is our scheduler as it was before vLLM 0.33, which fails at the first request."""
    with_scheduler(monkeypatch, old, new)
    found = mismatches(vllm_extract.unpack("0.33.0", tmp_path))
    assert {line.partition("): ")[2] for line in found} == {problem}


def test_a_function_that_has_a_name_of_vllms_by_accident_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_scheduler(monkeypatch, "def midstream_end(self, ends", "def finish_requests(self, ends")
    monkeypatch.setattr(seams, "SEAMS", tuple(seam for seam in SEAMS if "_Midstream" in seam.ours))
    problem = "_Midstream.finish_requests hides finish_requests, which Midstream does not know"
    assert {line.partition("): ")[2] for line in mismatches(installed())} == {problem}


@pytest.mark.parametrize(
    ("theirs", "ours", "call"),
    [
        ("a, b=0", "a, b=0", ""),
        ("self, a, b=0", "self, *args, **kwargs", ""),
        ("a, b=0", "a, *args, **kwargs", ""),
        ("a, *, b", "a, **kwargs", ""),
        ("a, /", "b", "a"),
        ("a, b=0", "a", "a, b"),
        ("a, b=0", "a, *args", "a=…, b=…"),
        ("a, b=0", "a, *, b=0", "a, b"),
        ("a, b=0", "a, b", "a=…"),
        ("a, b", "b, a", "a, b"),
        ("a, *, b", "a", "a, b=…"),
        ("*args", "a=0", "args"),
        ("**kwargs", "a=0", "kwargs=…"),
    ],
)
def test_a_call_that_one_function_accepts_and_another_does_not(
    theirs: str, ours: str, call: str
) -> None:
    given = []
    for parameters in (theirs, ours):
        function = ast.parse(f"def f({parameters}): ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        given.append(vllm_source.signature_of(function))
    assert vllm_source.refused_call(*given) == call


def test_everything_in_place_of_vllms_is_compared() -> None:
    """Classes that extend a class of vLLM's, and functions that are assigned to a name of vLLM's;
    an object of ours that keeps something in `self` assigns nothing of vLLM's.

    A model's `forward` is wrapped in functions that take any arguments.
    """
    known = {name for seam in SEAMS for name in seam.ours}
    seam_names = names() - {"__init__"}
    missed: list[str] = []
    for path in sources("workers"):
        tree = ast.parse(path.read_text())
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in classes:
            heirs = {other.name for other in classes if node.name in map(ast.unparse, other.bases)}
            if not {node.name, *heirs} & known:
                extended = {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute)
                    and isinstance(part.value, ast.Call)
                    and ast.unparse(part.value) == "super()"
                }
                missed += [f"{path.name}: {node.name}.{name}" for name in extended & seam_names]
        for node in ast.walk(tree):
            match node:
                case ast.Assign([ast.Attribute(value=ast.Name(id="self")), *_], ast.Name()):
                    pass
                case ast.Assign([ast.Attribute(attr=name), *_], ast.Name() | ast.Lambda()):
                    if name in seam_names - known - {"forward"}:
                        missed.append(f"{path.name}: {ast.unparse(node)}")
    assert missed == []


def test_every_user_of_a_seam_exists() -> None:
    for seam in SEAMS:
        for user in seam.by.split(", "):
            assert any((ROOT / "workers" / folder / user).is_file() for folder in ("runner", "")), (
                seam.where,
                user,
            )


@pytest.fixture
def package(tmp_path: Path) -> VllmFolder:
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
    return VllmFolder(folder)


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
    package: VllmFolder, monkeypatch: pytest.MonkeyPatch, where: str, wanted: str, problem: str
) -> None:
    monkeypatch.setattr(seams, "SEAMS", (Seam(where, (wanted,), "adapters.py"),))
    found = list(mismatches(package))
    assert found == ([f"{where} (used by adapters.py): {problem}"] if problem else [])
    if problem:
        with pytest.raises(SeamError, match="is not built as Midstream expects"):
            verify(package)


def test_a_version_that_no_test_ran_with_has_a_caveat(
    package: VllmFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "SEAMS", ())
    for version, caveats in (
        ("0.32.0+cpu", []),
        ("0.34.0", ["unproven: vLLM 0.34.0: all tests ran with 0.32.0 only"]),
    ):
        (package.folder / "_version.py").write_text(f"version = '{version}'\n")
        assert verify(VllmFolder(package.folder)) == caveats
