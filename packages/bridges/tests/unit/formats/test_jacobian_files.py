"""Files of Jacobian lenses that other tools wrote: both layouts of the field become the same
folder.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from midstream.storage.formats.lens_files import check_jacobian, directions, map_of, reading
from midstream_bridges.formats.jacobian import convert

WIDTH = 8
VOCABULARY = 20
JACOBIANS = {
    layer: torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(layer))
    for layer in (0, 2)
}
HEAD = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(9))
METADATA: dict[str, Any] = {
    "model_name": "gpt2",
    "model_revision": None,
    "processing": {"compatibility_mode": False, "weight_basis": "raw_huggingface"},
    "hook_convention": "blocks.{layer}.hook_out",
    "target_layer": 3,
    "skip_first_positions": 4,
    "max_seq_len": 64,
    "transformer_lens_fit": True,
}
HALVES = {layer: matrix.half() for layer, matrix in JACOBIANS.items()}
ARTIFACT = {"J": HALVES, "n_prompts": 7, "source_layers": [0, 2], "d_model": WIDTH}
#: Layout → (the saved value, what its record states).
LAYOUTS: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "neuronpedia": (ARTIFACT, (7, 16, 0)),
    "transformer-lens": (ARTIFACT | {"metadata": METADATA}, (7, 4, 64)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fields_files_are_imported(layout: str, tmp_path: Path) -> None:
    value, stated = LAYOUTS[layout]
    torch.save(value, tmp_path / "lens.pt")
    (tmp_path / "model").mkdir()
    save_file(
        {"model.embed_tokens.weight": HEAD * 0, "lm_head.weight": HEAD.bfloat16()},
        tmp_path / "model" / "model.safetensors",
    )
    assert convert(tmp_path / "lens.pt", tmp_path / "made", tmp_path / "model") == [0, 2]
    content = check_jacobian(tmp_path / "made", 4, WIDTH)
    assert content.layers == [0, 2]
    assert content.vocabulary == VOCABULARY
    assert content.fit.method == "imported"
    assert content.fit.prompts == stated[0]
    assert (content.fit.skip_first, content.fit.max_tokens) == stated[1:]
    with reading(tmp_path / "made") as file:
        for layer in (0, 2):
            weight, bias = map_of(file, layer)
            np.testing.assert_allclose(weight, HALVES[layer].float().numpy(), rtol=1e-6)
            assert not bias.any()
        found = directions(file, [0, 2], [5, 19])
    for (layer, token), vector in found.items():
        wanted = HALVES[layer].float().T @ HEAD[token].bfloat16().float()
        np.testing.assert_allclose(vector, wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1], "is no Jacobian lens: valid: a dictionary with J, which maps layers"),
        (ARTIFACT | {"d_model": 9}, r"J\[0\] is \[8, 8\]; valid: \[9, 9\]"),
        (ARTIFACT | {"metadata": {"target_layer": 2}}, "to the output of layer 2; valid: the last"),
        ({"J": {0: [1]}, "d_model": 8}, r"J\[0\] is list; valid: \[8, 8\]"),
    ],
)
def test_a_file_that_is_no_lens_is_refused(value: Any, says: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "lens.pt")
    with pytest.raises(ValueError, match=says):
        convert(tmp_path / "lens.pt", tmp_path / "made")
    assert not (tmp_path / "made").exists()
