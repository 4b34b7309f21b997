"""`python -m midstream.workers`: one worker, one engine; settings from the file, the environment
and `--engine NAME=VALUE`.
"""

import sys

from .app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
