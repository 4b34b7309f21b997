"""Steering vectors as other tools wrote them are read as those tools apply them, or refused with
what to do. `tools/data/vector_files.py` writes the files.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save

from midstream.client import vectors
from midstream.client.vectors import from_bytes
from midstream.schemas.base.tensors import to_numpy
from midstream_bridges.formats.array_files import OLD_MAGIC

FILES = Path(__file__).parents[2] / "data" / "vectors"


def row(layer: int) -> np.ndarray:
    return np.arange(8, dtype=np.float32) / 8 + np.float32(layer)


#: File → the selection of layers that it needs, the layers of its entries.
READ = {
    "assistant-axis.pt": ("0-3", [0, 1, 2, 3]),
    "assistant-axis-published.pt": ("0-3", [0, 1, 2, 3]),
    "assistant-axis-role.pt": ("0-3", [0, 1, 2, 3]),
    "easysteer-states.gguf": (None, [1, 2]),
    "llamacpp-gguf-0.19.0.gguf": (None, [1, 2]),
    "notebook-layers.npz": (None, [1, 2]),
    "notebook-layers.pt": (None, [1, 2]),
    "notebook-layers.safetensors": (None, [1, 2]),
    "notebook-modules.pt": (None, [1]),
    "notebook-numbers.safetensors": (None, [1, 2]),
    "notebook-vector.safetensors": (2, [2]),
    "refusal-direction.pt": (2, [2]),
    "repeng-0.4.0.gguf": (None, [1, 2]),
}
#: File → the layers that its user would name, what the refusal says.
REFUSED = {
    "assistant-axis-capping.pt": (None, "it holds no tensors by name: save a tensor"),
    "easysteer-array.pt": (2, r"as of a numpy array: save torch.from_numpy\(array\)"),
    "easysteer-bias.bin": (2, "only tensor is 'bias'; valid: a vector to add, named 'vector'"),
    "easysteer-heads.gguf": (None, "not those of layers' outputs: .* 'attention_heads'"),
    "persona_response_avg_diff.pt": ("0-3", "5 rows for 4 layers.* may be the embedding's, in row"),
    "refusal-mean_diffs.pt": (2, r"shape \[5, 4, 8\]; valid: one or two dimensions"),
}


def test_every_file_is_read_or_refused_here() -> None:
    listed = {*READ, *REFUSED, "pyreft-loreft.bin"}
    assert listed == {file.name for file in FILES.iterdir()}


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_as_its_producer_applies_it(name: str) -> None:
    selected, layers = READ[name]
    specs = vectors.read(FILES / name, selected)
    assert [spec.layers for spec in specs] == layers
    assert {spec.op for spec in specs} == {None}
    for spec, layer in zip(specs, layers, strict=True):
        assert spec.vector is not None
        np.testing.assert_array_equal(to_numpy(spec.vector), row(layer))


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_means_something_else_is_refused(name: str) -> None:
    layers, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        vectors.read(FILES / name, layers)


def test_a_loreft_needs_no_op_beside_it() -> None:
    (spec,) = vectors.read(FILES / "pyreft-loreft.bin", 2)
    assert spec.op == "lowrank"


@pytest.mark.parametrize("beside", [{"scale": 2.0}, {"op": "ablate"}, {"metadata": {}}])
def test_a_vector_beside_what_may_change_it_is_refused(beside: dict, tmp_path: Path) -> None:
    torch.save({"vector": torch.ones(8), **beside}, tmp_path / "joy.pt")
    with pytest.raises(ValueError, match=f"its '{next(iter(beside))}' is not a tensor"):
        vectors.read(tmp_path / "joy.pt", 2)


@pytest.mark.parametrize("key", ["ds4.steering.mode", "glp.operation", "general.operation"])
def test_a_gguf_key_of_another_group_that_may_change_it_is_refused(
    key: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "joy.gguf", "controlvector")
    writer.add_string(key, "project")
    writer.add_tensor("direction.3", row(3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"its key '{key}' may change how it is applied"):
        vectors.read(tmp_path / "joy.gguf")


def test_a_gguf_file_that_does_not_say_what_it_is_is_refused() -> None:
    raw = (FILES / "llamacpp-gguf-0.19.0.gguf").read_bytes()
    other = raw.replace(b"general.architecture", b"general.organization")
    with pytest.raises(ValueError, match=r"general.architecture is None; valid: 'controlvector'"):
        from_bytes(other)


def test_a_safetensors_file_may_begin_with_the_byte_of_a_pickle() -> None:
    """`READ` reads it: the length of its header is 128."""
    assert (FILES / "notebook-layers.safetensors").read_bytes().startswith(OLD_MAGIC)


def test_the_metadata_of_a_file_of_layers_applies_to_all() -> None:
    specs = from_bytes(save({"1": row(1), "2": row(2)}, {"op": "ablate"}))
    assert [spec.op for spec in specs] == ["ablate", "ablate"]
