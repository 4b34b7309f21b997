"""What tests with an engine share."""

from pathlib import Path

import pytest
from tiny import checkpoint


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return checkpoint("llama", tmp_path_factory.mktemp("tiny-llama"))
