"""The notebooks of `examples/` are stored with what a reader sees who runs nothing."""

import re
from pathlib import Path

import pytest
from notebooks import TUTORIALS, code, lines, peer_code, read
from tree import ROOT


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_shows_lines_and_seconds_of_both(path: Path) -> None:
    notebook = read(path)
    found = re.findall(
        r"(Midstream|TransformerLens): (\d+) lines, (\d+\.\d) s", notebook.cells[-1].source
    )
    assert {name: int(count) for name, count, _ in found} == {
        "Midstream": lines(code(notebook)),
        "TransformerLens": lines(peer_code(notebook)),
    }


def test_the_first_hour_is_stored_with_its_outputs() -> None:
    """`tests/system/test_notebook.py` runs the cells."""
    notebook = read(ROOT / "examples" / "first_hour.ipynb")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds == {"stream", "execute_result"}, "no errors, no progress bars"
