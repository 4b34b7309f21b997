"""The command `midstream`: runs `cli`, or names the extra that must be installed for it."""

import sys
from typing import Any

from .extras import COMMANDS, MissingExtraError, explained, need


def main() -> Any:
    """Run the console script."""
    try:
        from .cli.main import main as run
    except ModuleNotFoundError as error:
        command = next(iter(sys.argv[1:]), "")
        try:
            if command in COMMANDS:
                need("cpu", f"`midstream {command}`", *COMMANDS[command])
        except MissingExtraError as missing:
            sys.exit(f"error: {missing}")
        explanation = explained(error)
        if not isinstance(explanation, MissingExtraError):
            raise
        sys.exit(f"error: {explanation}")
    return run()


if __name__ == "__main__":
    main()
