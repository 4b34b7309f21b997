"""The queues of a model, and the captures that its gradient workers make for themselves."""

from typing import Literal

#: The queue of a model that a job waits in: that of its vLLM workers, or that of its gradient
#: workers.
#: Not two names of tasks in one queue: kombu delivers from a list to any consumer, so workers would
#: take messages that they must put back.
Queue = Literal["", "gradients"]
GRADIENTS: Queue = "gradients"
#: Tag and tenant of the captures that a gradient worker compares its rows with, and the age in
#: seconds above which such captures are left over from a worker that was killed.
COMPARISONS = "gradient-worker"
COMPARISON_S = 600.0
