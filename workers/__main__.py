"""Runs one worker with one engine: `python -m midstream.workers`.

Settings come from the file, the environment and `--engine NAME=VALUE`.
"""

import sys

from .app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
