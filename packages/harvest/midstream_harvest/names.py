"""What is known of harvests where none are run: the name of their rows' consumer, their states, and
how many of their parts a worker holds.
"""

from typing import Literal

#: The consumer of rows that become shards; users cannot name it.
HARVEST = "harvest"
#: Parts under way for each live worker: one that runs, and one that can follow immediately. A
#: worker holds as many surveys in addition, of which one is computed.
PARTS_PER_WORKER = 2

HarvestState = Literal[
    "planning", "running", "sealing", "paused", "succeeded", "failed", "cancelled"
]
OVER: frozenset[HarvestState] = frozenset({"succeeded", "failed", "cancelled"})
