"""Rows of several requests and jobs become one matrix, in a known order, or an error says what is
missing.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_kit import finished, values, write
from refusal_kit import refuses

from midstream import CaptureReader, matrix, samples

POSITIONS = {"job_a": ([0, 1, 2], [0, 1]), "job_b": ([4, 6],)}


@pytest.fixture
def readers(tmp_path: Path) -> list[CaptureReader]:
    for job, requests in POSITIONS.items():
        captures = [
            finished(job=job, request=index, positions=positions)
            for index, positions in enumerate(requests)
        ]
        write(tmp_path, *captures, owner=job)
    return [CaptureReader(tmp_path, job) for job in POSITIONS]


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ("last", [[2], [1], [6]]),
        ("first", [[0], [0], [4]]),
        ("all", [[0, 1, 2], [0, 1], [4, 6]]),
        (-1, [[2], [1], None]),
        (0, [[0], [0], None]),
    ],
)
def test_a_matrix_has_the_chosen_rows_in_the_order_of_its_samples(
    readers: list[CaptureReader], rows: Any, chosen: list[Any]
) -> None:
    places = [("job_a", 0), ("job_a", 1), ("job_b", 0)]
    if None in chosen:  # the other job has no such position
        readers, places, chosen = readers[:1], places[:2], chosen[:2]
    layer = readers[0].layers()[0]
    expected = np.concatenate([values("post_block", layer, positions) for positions in chosen])
    found = matrix(readers, layer, rows=rows)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32
    wanted = [
        (*place, position)
        for place, positions in zip(places, chosen, strict=True)
        for position in positions
    ]
    assert [tuple(sample) for sample in samples(readers, rows)] == wanted


def test_a_negative_position_counts_from_the_end_of_the_prompt(tmp_path: Path) -> None:
    write(tmp_path, finished(job="job_a", positions=[4, 6, 9], prompt_tokens=7), owner="job_a")
    reader = CaptureReader(tmp_path, "job_a")
    assert samples(reader, -1) == [("job_a", 0, 6)], (
        "not the last row, and not the third from the first"
    )


def test_a_mean_is_over_the_captured_positions_of_a_request(readers: list[CaptureReader]) -> None:
    layer = readers[0].layers()[0]
    found = matrix(readers[0], layer, rows="mean")
    for row, positions in zip(found, POSITIONS["job_a"], strict=True):
        np.testing.assert_allclose(row, values("post_block", layer, positions).mean(0), rtol=1e-6)
    assert samples(readers[0], "mean")[1] == ("job_a", 1, None)


@pytest.mark.parametrize(
    ("rows", "said"),
    [("lst", "not a selection of rows"), (2, "position 2 of request 1 was not captured")],
)
def test_unavailable_rows_are_refused_with_the_available_ones(
    readers: list[CaptureReader], rows: Any, said: str
) -> None:
    with refuses(match=said, field="rows") as caught:
        matrix(readers, readers[0].layers()[0], rows=rows)
    assert caught.value.allowed


def test_without_rows_there_is_no_matrix(tmp_path: Path) -> None:
    write(
        tmp_path,
        finished(job="job_a", positions=[0, 1]),
        finished(job="job_a", request=1, positions=[]),
        owner="job_a",
    )
    reader = CaptureReader(tmp_path, "job_a")
    layer = reader.layers()[0]
    for rows in ("last", "first", "mean"):
        with refuses("request 1 has no captured rows", kind="not_found"):
            matrix(reader, layer, rows=rows)  # type: ignore[arg-type]
    assert matrix(reader, layer, rows="all").shape[0] == 2
    with refuses("no captured rows"):
        matrix([], layer)


def test_models_of_different_width_make_no_matrix(
    readers: list[CaptureReader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture_kit.HIDDEN", 4)
    write(tmp_path / "other", finished(job="job_c"), owner="job_c")
    with refuses(match=r"different width .*\[4, 5\]"):
        matrix([*readers, CaptureReader(tmp_path / "other", "job_c")], readers[0].layers()[0])
