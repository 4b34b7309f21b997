"""Does the notebook of the examples run from top to bottom in a real kernel, and is what it shows
rendered?
"""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from up_kit import Up

nbformat = pytest.importorskip(
    "nbformat", reason="nbclient and ipykernel are not installed (extra `dev`)"
)
nbclient = pytest.importorskip(
    "nbclient", reason="nbclient and ipykernel are not installed (extra `dev`)"
)
pytest.importorskip("ipykernel", reason="nbclient and ipykernel are not installed (extra `dev`)")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_hour.ipynb"


def outputs(notebook: Any, source: str) -> dict[str, str]:
    """MIME type → content of what the cell with this source showed as its value, and `stream`: what
    it printed.
    """
    (cell,) = [
        cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source
    ]
    found = {
        "stream": "".join(output.text for output in cell.outputs if output.output_type == "stream")
    }
    for output in cell.outputs:
        if output.output_type == "execute_result":
            found |= output.data
    return found


@pytest.mark.long
def test_the_notebook_runs_and_its_results_are_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Up(tmp_path / "data")) as up:
        url = up.ready()
        for name in [name for name in os.environ if name.startswith("MIDSTREAM_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("MIDSTREAM_DATA_DIR", str(up.data))  # the kernel finds the stack by it
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(
            notebook,
            timeout=300,
            startup_timeout=300,
            kernel_name="python3",
            resources={"metadata": {"path": tmp_path}},
        ).execute()
        assert "fake" in outputs(notebook, "client.models()")["text/plain"]
        assert "Outputs" in outputs(notebook, "client.run(model=model, prompts=sea")["text/html"]
        assert "post_block" in outputs(notebook, "client.capture(job)")["text/html"]
        assert "consistent" in outputs(notebook, "client.completion")["text/html"]
        study = outputs(notebook, "study.sweep")
        assert "data:image/png;base64," in study["text/html"]
        assert study["image/png"]
        assert outputs(notebook, "study.plot")["image/png"]
        assert "did you mean 'prompts'?" in outputs(notebook, "promts")["stream"]
        assert url in up.output()
