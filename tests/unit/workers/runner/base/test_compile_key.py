"""What compiled graphs depend on is in the compile cache's key, the code of the sites included."""

from pathlib import Path

import pytest

from midstream.workers.runner.base.compile_key import traced_code


@pytest.mark.parametrize("changed", ["ops.py", "plan.py", "sites.py"])
def test_another_code_of_the_sites_is_another_key(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes
    before = traced_code.__wrapped__()

    def read_changed(self: Path) -> bytes:
        return read(self) + b"#" if self.name == changed else read(self)

    monkeypatch.setattr(Path, "read_bytes", read_changed)
    assert traced_code.__wrapped__() != before


def test_the_same_code_is_the_same_key() -> None:
    assert traced_code.__wrapped__() == traced_code()
