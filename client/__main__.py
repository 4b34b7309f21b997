"""The command `midstream`: hands over to `cli`, or names the extra that the command line needs."""

import sys
from typing import Any

from .extras import MissingExtraError, explained


def main() -> Any:
    """The console script."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        explanation = explained(error)
        if not isinstance(explanation, MissingExtraError):
            raise
        sys.exit(f"error: {explanation}")
    return run()


if __name__ == "__main__":
    main()
