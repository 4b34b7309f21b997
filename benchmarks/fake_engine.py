"""The fake engine of the tests, for the processes that a benchmark starts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fake_engine"))

from midstream_fake_engine import install

__all__ = ["install"]
