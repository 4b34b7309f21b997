"""The relay process: `python -m midstream.broker.relay`, with the settings of the environment."""

import sys

from .receipts.relay import main

if __name__ == "__main__":
    sys.exit(main())
