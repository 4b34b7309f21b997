"""Configs with a field changed are served with transformers' numbers, or refused at the start with
a reason.

The table is `perturbed.CHANGES`; its page, a section of `docs/reference/fidelity.md`, is written
by `make perturbed`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from perturbed import SHOWS, attempt, cases, label


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param(name, change, id=f"{name} {label(change)}") for name, change in cases()],
)
def test_a_changed_field_is_served_as_transformers_or_refused(
    name: str, change: Mapping[str, Any], nursery, tmp_path: Path
) -> None:
    row = attempt(name, change, tmp_path, nursery)
    assert row.right, row
    assert row.outcome == "refused" or row.shows is None or row.shows >= SHOWS, (
        f"{row}: the change shows nothing"
    )
    if "differs from transformers" in row.why:
        assert all(field in row.why for field in change), row.why
