"""`python -m midstream.workers`: one worker, one engine; settings from the environment."""

import sys

from .app import main

if __name__ == "__main__":
    sys.exit(main())
