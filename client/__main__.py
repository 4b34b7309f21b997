"""The command `midstream`: runs `cli`, or names the extra that must be installed for it."""

import sys
from typing import Any

from .extras import MissingExtraError, explained


def main() -> Any:
    """Run the console script."""
    try:
        from .cli.main import main as run
    except ModuleNotFoundError as error:
        explanation = explained(error, next(iter(sys.argv[1:]), ""))
        if not isinstance(explanation, MissingExtraError):
            raise
        sys.exit(f"error: {explanation}")
    return run()


if __name__ == "__main__":
    main()
