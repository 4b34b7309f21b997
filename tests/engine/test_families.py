"""Families whose hook points are found in the loaded model: their rows are transformers', captured and edited; so are their tokens."""

from pathlib import Path

import pytest
from families import BF16_ONLY, CHANGED, FAMILIES, ROUTED, checkpoint
from fidelity import DRAWS, Truth, capture, judge, options_of
from fidelity_page import Way

FP32, BF16 = Way("v1", "eager", "float32"), Way("v1", "eager", "bfloat16")
#: A hybrid, and experts with sinks: the others take minutes.
SHORT = {("falcon-h1", FP32), ("gpt-oss", FP32)}
CASES = [
    pytest.param(name, way, id=f"{name} {way.name}", marks=[] if (name, way) in SHORT else pytest.mark.matrix)
    for name in FAMILIES
    for way in (FP32, BF16)
    if way == BF16 or name not in BF16_ONLY
]
#: Of layers that keep a state; in steps of 32 tokens their prompts of 40 take two.
RECURRENT = [("falcon-h1", FP32), ("nemotron-h", FP32), ("granite4", FP32), ("qwen3-next", BF16)]


def exceeded(name: str, way: Way, folder: Path, nursery, **settings: object) -> dict[str, str]:
    """Hook → figure beyond its tolerance, of the checkpoint on an engine with these settings."""
    path = checkpoint(name, folder / "checkpoint")
    host = nursery.host(folder / "engine", path, CHANGED.get(name), **(options_of(way) | {"block_size": 32} | settings))
    try:
        truth = Truth(path, way.dtype)
        assert set(host.info["hooks"]) <= set(truth.hooks)
        draws = DRAWS if name in ROUTED and way == BF16 else 1
        figures = judge([capture(host, host.info["hooks"], draw) for draw in range(draws)], truth, way.dtype)
    finally:
        host.close()
    assert truth.other_tokens == 0
    return {hook: str(figure) for hook, figure in figures.items() if figure.worst > way.tolerance}


# field case 2, field case 3
@pytest.mark.parametrize(("name", "way"), CASES)
def test_every_hook_of_a_family_gives_transformers_rows_and_tokens(name: str, way: Way, nurseries, tmp_path: Path) -> None:
    assert exceeded(name, way, tmp_path, nurseries("v1")) == {}


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "way"), RECURRENT, ids=[name for name, _ in RECURRENT])
def test_rows_of_recurrent_layers_are_right_across_chunks_of_a_prefill(name: str, way: Way, nurseries, tmp_path: Path) -> None:
    """Seven prompts of 40 tokens: a step holds parts of two of them."""
    assert exceeded(name, way, tmp_path, nurseries("v1"), max_num_batched_tokens=32) == {}
