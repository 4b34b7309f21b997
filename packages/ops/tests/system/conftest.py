"""A stack that the tests of a module share."""

from collections.abc import Iterator

import pytest
from up_kit import Up


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A whole stack with the fake engine, shared by the tests of a module."""
    started = Up(tmp_path_factory.mktemp("up") / "data", steering_wait_s=90)
    started.ready()
    yield started
    started.close()
