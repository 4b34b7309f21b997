"""Which hooks inside attention and MLP are proven when an engine starts, for each kind of layer; and that their rows are transformers'."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from host import Host, prompt_of, relative_error
from inside_reference import InsideReference
from nursery import Nursery
from test_inside import captured, served
from tiny import LAYERS, checkpoint
from tolerances import FP32_HOOKS

from midstream.schemas.selectors import INSIDE

pytestmark = pytest.mark.matrix

DENSE = {hook for hook in INSIDE if hook != "router"}
EXPERTS = {hook for hook in INSIDE if hook != "mlp_act"}
#: transformers scales OPT's queries before its attention, vLLM in it.
SCALED_BEFORE = {"opt": {"q"}}
SERVED = {
    "llama": DENSE,
    "qwen3": DENSE,
    "gemma2": DENSE,
    "gemma3": DENSE,
    "gpt2": DENSE,
    "opt": DENSE,
    "mixtral": EXPERTS,
    "qwen3-moe": EXPERTS,
    "olmo2": DENSE - {"q_proj", "k_proj"},  # its rotary embedding is not in the layer
}


@pytest.fixture(scope="module")
def start(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Host, InsideReference]]:
    folder = tmp_path_factory.mktemp("families")

    @cache
    def host(name: str) -> tuple[Host, InsideReference]:
        path = checkpoint(name, folder / name)
        settings = {"hooks": "all,inside", "certify": True, "enable_prefix_caching": False}
        return nursery.host(folder / f"{name}-engine", path, **settings), InsideReference(path)

    return host


@pytest.mark.parametrize("name", SERVED)
def test_hooks_inside_are_proven_at_the_start_and_equal_to_transformers(start, name: str) -> None:
    host, reference = start(name)
    assert set(served(host)) == SERVED[name], host.info["absent"]
    assert set(host.info["certificate"]["proven"]) >= SERVED[name]
    assert all(host.info["absent"][hook] for hook in set(INSIDE) - SERVED[name])
    job = captured(host, host.job(prompt_of(40), max_tokens=1), hooks=dict.fromkeys(served(host), "all"), positions="all_prompt")
    host.run(job)
    rows, reader = reference.rows(prompt_of(40)), host.capture(job)
    for hook in SERVED[name] - SCALED_BEFORE.get(name, set()):
        for layer in range(LAYERS):
            assert relative_error(reader.array(layer, hook), rows[hook, layer]) <= FP32_HOOKS, (hook, layer)
    for layer in range(LAYERS) if "router" in SERVED[name] else ():
        theirs, ours = np.zeros((2, *rows["router", layer].shape))
        weights, chosen = rows["experts", layer]
        np.put_along_axis(theirs, chosen.numpy(), weights.numpy(), axis=1)
        own = reader.experts(layer)
        np.put_along_axis(ours, *own, axis=1)
        assert np.abs(ours - theirs).max() <= FP32_HOOKS, layer
