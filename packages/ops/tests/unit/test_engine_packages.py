"""What an engine on this machine lacks is named before anything starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from missing_kit import CLI, without

from midstream_ops import engine_packages

#: An import of vLLM on a machine that is busy with other things takes less.
LONG_S = 280.0


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        (["litestar", "celery"], ["up"], "cpu"),
        (["gguf"], ["up"], "cpu"),
        (["vllm"], ["up"], "cpu"),
        (["torch"], ["serve", "org/model"], "cpu"),
        (["gguf"], ["demo"], "cpu"),
        (["vllm"], ["demo"], "cpu"),
        (["litestar"], ["up", "--set", "engine=fake"], "up"),
    ],
)
def test_what_a_command_lacks_is_named_with_its_extra(
    tmp_path: Path, missing: list[str], arguments: list[str], extra: str
) -> None:
    done = without(missing, CLI.format(arguments=arguments), tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert f"pip install 'midstream[{extra}]'" in line
    assert missing[0] in line


@pytest.mark.long
def test_a_torchvision_for_another_torch_is_named_before_anything_starts(tmp_path: Path) -> None:
    for path, text in {
        "torchvision/__init__.py": "raise RuntimeError('operator torchvision::nms is missing')",
        "torchvision-0.28.0.dist-info/METADATA": "Name: torchvision\nVersion: 0.28.0+other\n",
    }.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    patient = f"import midstream_ops.engine_packages as packages; packages.IMPORT_S = {LONG_S}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {patient}; {CLI.format(arguments=['up'])}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=2 * LONG_S,
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "torchvision 0.28.0+other: not built for torch" in line
    assert "torchvision::nms is missing" in line
    assert "pip uninstall torchvision" in line


def test_an_import_that_takes_too_long_beside_another_build_is_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: torchvision\nVersion: 0.28.0+other\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(engine_packages, "IMPORT_S", 0.01)
    trouble = engine_packages.companions_trouble()
    assert "torchvision 0.28.0+other: not built for torch" in trouble
    assert trouble.endswith("vLLM's import takes more than 0.01 s")
