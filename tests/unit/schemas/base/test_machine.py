"""Which memory this process may take."""

import os
from pathlib import Path

import pytest

from midstream.schemas.base import machine


@pytest.mark.parametrize(
    ("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None), ("9223372036854771712\n", None)]
)
@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_that_of_the_container(
    version: int, text: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "of version 2", tmp_path / "of version 1"
    files[2 - version].write_text(text)
    monkeypatch.setattr(machine, "_LIMITS", files)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.host_bytes() == (limit or physical)
