"""The example of draft training harvests the layers that vLLM feeds an EAGLE-3 drafter."""

import ast
from types import SimpleNamespace

from tree import ROOT
from vllm.model_executor.models.interfaces import SupportsEagle3

EXAMPLE = ROOT / "examples" / "draft_training.py"
#: Of the demo model, which the example takes.
DEMO_LAYERS = 30


def test_the_example_takes_the_outputs_that_vllm_numbers_from_the_embedding() -> None:
    """vLLM's id k is what enters layer k: the output of layer k - 1."""
    model = SimpleNamespace(model=SimpleNamespace(layers=[None] * DEMO_LAYERS))
    ids = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(model)  # type: ignore[arg-type]
    assigned = {
        node.targets[0].id: node.value
        for node in ast.parse(EXAMPLE.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert ast.literal_eval(assigned["LAYERS"]) == [number - 1 for number in ids]
