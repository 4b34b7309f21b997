"""A rank's data plane for the tests of its parts."""

from pathlib import Path

import pytest
from plane_kit import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)
