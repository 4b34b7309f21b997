"""What two runs of a notebook print is compared up to the rounding of numbers, and no further."""

import pytest
from notebooks import difference


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
    [("a 1.00", "a 1.10"), ("layer 3", "layer 4"), ("rank 33", "rank 34"), ("a 1.00", "b 1.00"), ("a\nb", "a"), ("1.00 2.00", "1.00")],
)
def test_other_words_and_numbers_are(one: str, other: str) -> None:
    assert difference(one, other) != ""
