"""An engine without a model, for tests and benchmarks of everything around the model.

`engine=fake` names it where this package's folder is on the path (see the entry point beside it).
"""

import os
from pathlib import Path

_FOLDER = str(Path(__file__).parents[1])


def install() -> None:
    """Let the processes that this one starts find the engine."""
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if _FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *paths])
