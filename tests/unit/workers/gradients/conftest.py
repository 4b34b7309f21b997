"""One load of each tiny model for all tests of this folder."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from gradient_kit import tiny_points

from midstream.workers.gradients.points import Points


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradients")


@pytest.fixture(scope="session")
def points_of(tiny_root: Path) -> Callable[[str], Points]:
    return cache(lambda name: tiny_points(tiny_root, name))
