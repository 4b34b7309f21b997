"""The wheel holds every file of the package, and the Python client works from it with nothing else
installed.
"""

import json
import re
import shutil
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import wheel_kit
from tree import CORE, PACKAGES, ROOT, part_of, tracked

import midstream
from midstream_ops.engine_packages import COMPANIONS, COMPANIONS_ADVICE


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_kit.exported(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_kit.all_built(source, tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the extra `client` alone."""
    python = wheel_kit.environment(tmp_path_factory.mktemp("client"))
    wheel_kit.install(
        python, "--no-deps", "--require-hashes", "-r", ROOT / "requirements" / "client.lock"
    )
    wheel_kit.install(python, "--no-deps", "--no-index", *wheel_kit.beside(wheel))
    return python


#: Modules for packages that the extra `cpu` does not include.
OPTIONAL = ("kernels/triton_rows.py", "kernels/triton_site.py")


def packaged() -> set[str]:
    """What git tracks of the package, as an installation names it."""
    files = {
        path
        for path in tracked()
        if path.parts[0] in CORE
        or (len(path.parts) == 1 and path.suffix in (".py", ".typed") and path.name != "setup.py")
    }
    return {f"midstream/{path}" for path in files}


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")
        }


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    there = files_of(wheel)
    assert {
        "midstream/py.typed",
        "midstream/broker/ledger/lua/jobs/submit.lua",
        "midstream/api/assets/pages.css",
    } <= there
    assert sorted(there ^ packaged()) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_the_wheel_of_a_package_has_its_files_and_no_other(name: str, wheel: Path) -> None:
    (own,) = wheel.parent.glob(f"midstream_{name}-*.whl")
    there = {"/".join(path.parts[2:]) for path in tracked() if part_of(path) == name}
    assert files_of(own) == there


def test_a_wheel_from_the_source_distribution_is_the_same(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(wheel_kit.built(source, tmp_path, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert files_of(wheel_kit.built(unpacked, tmp_path / "again")) == files_of(wheel)
    assert {"LICENSE", "PACKAGE.md", "pyproject.toml"} <= {path.name for path in unpacked.iterdir()}


def test_a_wheel_and_its_source_say_which_commit_they_were_built_from(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILD_COMMIT", "1a2b3c4d5")
    monkeypatch.setenv("BUILD_DATE", "20261130")
    with tarfile.open(wheel_kit.built(source, tmp_path, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    monkeypatch.delenv("BUILD_COMMIT")
    monkeypatch.delenv("BUILD_DATE")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(wheel_kit.built(unpacked, tmp_path / "again")) as archive:
        said = json.loads(archive.read("midstream/schemas/base/build.json"))
    assert said == {"commit": "1a2b3c4d5", "date": "20261130"}


def test_the_wheel_names_its_version_extras_commands_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist()} - {"midstream"}
        head = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        assert (
            "midstream = midstream.client.__main__:main"
            in archive.read(f"{folder}/entry_points.txt").decode()
        )
        licences = {
            name.removeprefix(f"{folder}/licenses/")
            for name in archive.namelist()
            if name.startswith(f"{folder}/licenses/")
        }
    assert licences == {"LICENSE"} | {
        str(path)
        for path in tracked()
        if path.parts[0] in CORE and re.search("LICEN[CS]E|NOTICE", path.name)
    }
    assert head["Version"] == midstream.__version__
    assert set(head.get_all("Provides-Extra", [])) == set(wheel_kit.EXTRAS)
    assert head["License-Expression"] == "Apache-2.0"


def test_the_client_alone_imports_helps_and_renders(client: Path, tmp_path: Path) -> None:
    program = """
import sys, midstream
for name in midstream.__all__:
    getattr(midstream, name)
answer = midstream.Answer("job_1", ["<b>4</b>"], ["stop"], None, None, {})
print(midstream.__file__, answer._repr_html_())
assert not {"torch", "vllm", "celery", "litestar"} & set(sys.modules)
"""
    said = wheel_kit.run(client, "-c", program, cwd=tmp_path)
    assert str(client.parent.parent) in said
    assert "&lt;b&gt;4" in said
    assert "submit" in wheel_kit.run(client.parent / "midstream", "--help", cwd=tmp_path)


@pytest.fixture
def interpreter(request: pytest.FixtureRequest) -> str:
    """The Python of the version that the test is given; without it, the test is skipped."""
    found = wheel_kit.interpreter(request.param)
    if not found:
        pytest.skip(f"no python{request.param}, neither on the PATH nor in ~/.pyenv/versions")
    return found


VERSIONS = pytest.mark.parametrize("interpreter", ["3.11", "3.12", "3.13"], indirect=True)


@pytest.mark.packages
@pytest.mark.timeout(600)
@VERSIONS
def test_the_bare_wheel_imports_and_names_what_commands_need(
    interpreter: str, wheel: Path, tmp_path: Path
) -> None:
    python = wheel_kit.environment(tmp_path / "env", interpreter)
    wheel_kit.install(python, "--constraint", wheel_kit.pins(tmp_path / "env"), wheel)
    program = "import midstream, midstream.schemas.jobs.jobs; print(midstream.__version__)"
    assert midstream.__version__ in wheel_kit.run(python, "-c", program, cwd=tmp_path)
    for argument, extra in {"--help": "client", "up": "cpu", "demo": "cpu"}.items():
        said = wheel_kit.run(python.parent / "midstream", argument, cwd=tmp_path, code=1)
        assert f"pip install 'midstream[{extra}]'" in said
        assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env"]


@pytest.mark.packages
@pytest.mark.timeout(3600)
@VERSIONS
def test_the_extra_cpu_is_complete(interpreter: str, wheel: Path, tmp_path: Path) -> None:
    python = wheel_kit.with_extra(tmp_path / "env", wheel, "cpu", interpreter)
    command = python.parent / "midstream"
    data = tmp_path / "data"
    assert wheel_kit.unmet(python, "cpu") == []
    program = "import importlib; print(len([importlib.import_module(name) for name in {}]))"
    modules = sorted(
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in packaged()
        if path.endswith(".py") and not path.endswith(("__main__.py", *OPTIONAL))
    )
    redis = {"MIDSTREAM_REDIS_URL": "redis://127.0.0.1:1/0"}  # `workers.remote` reads it at import
    said = wheel_kit.run(python, "-c", program.format(modules), cwd=tmp_path, **redis)
    assert said.splitlines()[-1] == str(len(modules))
    assert "submit" in wheel_kit.run(command, "--help", cwd=tmp_path)
    report = wheel_kit.run(command, "doctor", cwd=tmp_path, code=1)  # nothing runs yet
    assert re.search(r"^fail api +no answer", report, re.MULTILINE)
    assert "hooks" in wheel_kit.run(
        command, "up", "--data-dir", data, "--set", "hooks=x", cwd=tmp_path, code=1
    )
    assert not data.exists()
    said = wheel_kit.run(command, "demo", "--data", data, cwd=tmp_path)
    assert "failures: 0" in said
    assert "300 cells, each confirmed by every rank" in said
    shutil.rmtree(tmp_path / "env")


@pytest.mark.packages
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("extra", [name for name in wheel_kit.EXTRAS if name != "cpu"])
@VERSIONS
def test_each_extra_installs_alone_and_does_what_it_promises(
    interpreter: str, extra: str, wheel: Path, tmp_path: Path
) -> None:
    promised = wheel_kit.EXTRAS[extra]
    if promised.heavy:
        python = wheel_kit.environment(tmp_path / "env", interpreter)
        assert "Would install" in wheel_kit.run(
            python,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--find-links",
            wheel.parent,
            f"midstream[{extra}] @ {wheel.as_uri()}",
            cwd=tmp_path,
        )
        return
    python = wheel_kit.with_extra(tmp_path / "env", wheel, extra, interpreter)
    assert wheel_kit.unmet(python, extra) == []
    wheel_kit.run(python, "-c", promised.program, cwd=tmp_path, HF_HUB_OFFLINE="1")
    shutil.rmtree(tmp_path / "env")  # gigabytes, which pytest would keep


def test_pypis_builds_of_torchs_companions_are_named_before_a_start(
    wheel: Path, tmp_path: Path
) -> None:
    """An environment with the packages of this one, and what pip's default index has beside the
    CPU build of torch.
    """
    python = wheel_kit.environment(tmp_path / "cpu")
    here = sysconfig.get_path("purelib")
    (tmp_path / "cpu" / wheel_kit.SITE / "here.pth").write_text(here)
    wheel_kit.install(python, "--no-deps", *wheel_kit.beside(wheel), *COMPANIONS)
    up = (python.parent / "midstream", "up", "--model", "org/model")
    assert COMPANIONS_ADVICE in wheel_kit.run(*up, cwd=tmp_path, code=1)
