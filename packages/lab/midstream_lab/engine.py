"""Makes the engine of a gradient worker."""

import os

from midstream.schemas.settings.settings import Settings
from midstream.workers.engines import NEEDS_LIBRARIES

from .gradients.protocol import GradientEngine


def gradients(settings: Settings) -> GradientEngine:
    """Return the engine `gradients`, not started yet. Raises MidstreamError("engine_failed") where
    its libraries are not installed.
    """
    # Before torch is loaded: threads that spin while they wait would take the cores from the vLLM
    # worker beside this one, and from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with NEEDS_LIBRARIES:
        from .gradients.engine import TransformersEngine
    return TransformersEngine(settings)
