"""Layers of pipeline stages, as vLLM distributes them."""

from vllm.distributed.utils import get_pp_indices


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """Return the layers that each pipeline stage holds."""
    return [range(*get_pp_indices(num_layers, stage, stages)) for stage in range(stages)]
