"""Which hooks inside attention and MLP are proven when an engine starts, for each architecture;
rows and edits are transformers'.
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fidelity_inside import beyond, engine, measure, read_table
from fidelity_page import PAGE
from host import Host, prompt_of
from inside_reference import InsideReference
from nursery import Nursery
from test_inside import captured
from tiny import CHECKPOINTS, LAYERS, checkpoint
from tolerances import FP32_HOOKS

from midstream.schemas.prompts.selectors import INSIDE

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_hooks_inside_are_proven_at_the_start_and_equal_to_transformers(
    name: str, nursery: Nursery, tmp_path: Path
) -> None:
    """The same hooks as on the page; all others are absent with a reason."""
    path = checkpoint(name, tmp_path / "checkpoint")
    host = engine(nursery, tmp_path / "engine", name, path)
    reference = InsideReference(path)
    with closing(host):
        found = measure(host, reference)
        if "router" in found:
            check_experts(host, reference)
    assert {hook: cell for hook, cell in found.items() if beyond(cell)} == {}
    assert found.keys() == read_table(PAGE.read_text())[name].keys()
    assert set(host.info["certificate"]["proven"]) >= found.keys()
    assert all(host.info["absent"][hook] for hook in INSIDE if hook not in found)


def check_experts(host: Host, reference: InsideReference) -> None:
    """Chosen experts and their weights are those that transformers' router gives, whatever their
    order.
    """
    job = captured(
        host,
        host.job(prompt_of(40), max_tokens=1),
        hook="router",
        layers="all",
        positions="all_prompt",
    )
    host.run(job)
    rows, reader = reference.rows(prompt_of(40)), host.capture(job)
    for layer in range(LAYERS):
        theirs, ours = np.zeros((2, *rows["router", layer].shape))
        weights, chosen = rows["experts", layer]
        np.put_along_axis(theirs, chosen.numpy(), weights.numpy(), axis=1)
        np.put_along_axis(ours, *reader.experts(layer), axis=1)
        assert np.abs(ours - theirs).max() <= FP32_HOOKS, layer
