"""Does the demo's last page name the place where the captures are?"""

import shlex
import sys
from pathlib import Path

import pytest
from capture_kit import finished, write
from rich.console import Console
from s3_kit import FaultProxy, new_bucket
from typer.testing import CliRunner

from midstream.client.cli.main import app
from midstream.schemas.settings.settings import Settings
from midstream.storage.store import open_store
from midstream_ops.demo import LAYER, _command, _farewell


@pytest.mark.parametrize("kind", ["default", "folder", "bucket"])
def test_the_command_that_the_demo_proposes_shows_its_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: FaultProxy, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    stores = {
        "default": "",
        "folder": str(tmp_path / "kept elsewhere"),
        "bucket": f"s3://{new_bucket()}/lab?endpoint={s3.url}&region=us-east-1",
    }
    settings = Settings(data_dir="demo", artifact_store=stores[kind])
    write(
        open_store(settings.artifacts), finished("job_1", tag="demo", sites={"post_block": [LAYER]})
    )
    console = Console(record=True, width=60)
    _farewell(console, settings, "job_1", 1.0)
    text = console.export_text()
    place = {"default": "demo/captures", "folder": "kept elsewhere", "bucket": settings.artifacts}[
        kind
    ]
    assert f"captures: {place}\n" in text
    (line,) = [line for line in text.splitlines() if " get capture " in line]
    words = shlex.split(line)
    done = CliRunner().invoke(app, words[words.index("get") :])
    assert done.exit_code == 0, done.output
    assert "post_block" in done.output


def test_the_demo_names_commands_as_they_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv" / "bin" / "midstream")])
    assert _command() == ".venv/bin/midstream"
    monkeypatch.setattr(sys, "argv", ["midstream"])
    assert _command() == "midstream"
