"""The wheel holds every file of the package, and the Python client works from it with nothing else
installed.
"""

import re
import shutil
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import wheel_kit
from tree import PACKAGES, ROOT, tracked

import midstream


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_kit.exported(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_kit.built(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the extra `client` alone."""
    python = wheel_kit.environment(tmp_path_factory.mktemp("client"))
    wheel_kit.install(
        python, "--no-deps", "--require-hashes", "-r", ROOT / "requirements" / "client.lock"
    )
    wheel_kit.install(python, "--no-deps", "--no-index", wheel)
    return python


def packaged() -> set[str]:
    """What git tracks of the package, as an installation names it."""
    files = {
        path
        for path in tracked()
        if path.parts[0] in PACKAGES or (len(path.parts) == 1 and path.suffix in (".py", ".typed"))
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


def test_a_wheel_from_the_source_distribution_is_the_same(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    sdist = wheel_kit.built(source, tmp_path, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = wheel_kit.built(unpacked, tmp_path / "again")
    assert files_of(again) == files_of(wheel)
    assert {"LICENSE", "README.md", "pyproject.toml"} <= {path.name for path in unpacked.iterdir()}


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
    vendored = {
        str(path)
        for path in tracked()
        if path.parts[0] in PACKAGES and re.search("LICEN[CS]E|NOTICE", path.name)
    }
    assert licences == {"LICENSE"} | vendored
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


@pytest.mark.packages
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("extra", wheel_kit.EXTRAS)
def test_each_extra_installs_alone_and_does_what_it_promises(
    extra: str, wheel: Path, tmp_path: Path
) -> None:
    promised = wheel_kit.EXTRAS[extra]
    python = wheel_kit.environment(tmp_path / "env")
    if promised.heavy:
        assert "Would install" in wheel_kit.run(
            python,
            "-m",
            "pip",
            "install",
            "--dry-run",
            f"midstream[{extra}] @ {wheel.as_uri()}",
            cwd=tmp_path,
        )
        return
    wheel_kit.install_extra(python, wheel, extra)
    assert wheel_kit.unmet(python, extra) == []
    wheel_kit.run(python, "-c", promised.program, cwd=tmp_path, HF_HUB_OFFLINE="1")
    shutil.rmtree(tmp_path / "env")  # gigabytes, which pytest would keep
