"""What two runs of a notebook print is compared up to the rounding of numbers, and no further."""

import re
from pathlib import Path

import pytest
from notebooks import TUTORIALS, code, difference, lines, peer_code, printed, read, shown
from tree import ROOT


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a 1.00 b", "a  1.01 b"),
        ("layer 3: -40.60", "layer 3: -40.20"),
        ("rank 5065", "rank   5070"),
        ("-0.00", "0.00"),
        ("a\nb", "a\nb\n"),
    ],
)
def test_rounding_and_spaces_are_no_difference(one: str, other: str) -> None:
    assert difference(one, other) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a 1.00", "a 1.10"),
        ("layer 3", "layer 4"),
        ("rank 33", "rank 34"),
        ("a 1.00", "b 1.00"),
        ("a\nb", "a"),
        ("1.00 2.00", "1.00"),
    ],
)
def test_other_words_and_numbers_are(one: str, other: str) -> None:
    assert difference(one, other) != ""


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
    """What a reader sees who runs nothing: `tests/system/test_notebook.py` runs the cells."""
    cells = [
        cell
        for cell in read(ROOT / "examples" / "first_hour.ipynb").cells
        if cell.cell_type == "code"
    ]
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds == {"stream", "execute_result"}, "no errors, no progress bars"
    silent = [cell.source for cell in cells if not (shown(cell) or printed(cell))]
    assert [source.splitlines()[-1] for source in silent] == ["client.close()"]
    assert any("image/png" in shown(cell) for cell in cells)
    assert "did you mean 'prompts'?" in printed(cells[-2])
