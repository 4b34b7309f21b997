"""The local stack, and what looks after it: `midstream up`, `doctor`, `demo`."""
