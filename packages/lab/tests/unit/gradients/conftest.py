"""One load of each tiny model for all tests of this folder."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from gradient_kit import tiny_points

from midstream_lab.gradients.points import Points


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and the tests run beside others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradients")


@pytest.fixture(scope="session")
def points_of(tiny_root: Path) -> Callable[[str], Points]:
    return cache(lambda name: tiny_points(tiny_root, name))
