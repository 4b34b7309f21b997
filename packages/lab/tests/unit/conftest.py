"""What tests of the command line share."""

import pytest
from cli_kit import Cli


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls `midstream` in this process."""
    return Cli(capsys)
