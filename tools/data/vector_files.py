"""What do other tools write?

Steering vectors as repeng, llama.cpp, EasySteer, pyreft, assistant-axis, refusal_direction,
persona_vectors and notebooks save them, with 8 numbers for each layer, in the folder
`packages/bridges/tests/data/vectors`: names begin with the producer and its version.

None of them is needed to test Midstream. With repeng, gguf, torch and safetensors installed,
`python tools/data/vector_files.py` writes the files again. repeng writes its own; the other forms
are those of the writers that are named beside them.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2].joinpath("packages/bridges/tests/data/vectors")
WIDTH = 8


def row(layer: int) -> np.ndarray:
    """The vector of a layer: `layer`, `layer` + 1/8, …"""
    return np.arange(WIDTH, dtype=np.float32) / WIDTH + np.float32(layer)


def rows(layers: int) -> np.ndarray:
    return np.stack([row(layer) for layer in range(layers)])


def write_gguf(path: Path, keys: dict[str, Any]) -> None:
    """With gguf's own writer, as llama.cpp's cvector-generator and EasySteer's `export_gguf` do."""
    import gguf

    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    for name, value in keys.items():
        writer.add_string(f"controlvector.{name}", value)
    writer.add_uint32("controlvector.layer_count", 2)
    for layer in (1, 2):
        writer.add_tensor(f"direction.{layer}", row(layer))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def easysteer(component: str) -> dict[str, str]:
    """EasySteer's `StatisticalControlVector.export_gguf` (easysteer/extraction/result.py)."""
    native = {"version": 1, "component": component, "metadata": {"mapping": []}}
    return {"method": "diffmean", "easysteer": json.dumps(native, separators=(",", ":"))}


def write_repeng(path: Path) -> None:
    np.float_ = np.float64  # type: ignore[attr-defined]  # repeng 0.4 needs it; numpy 2 has it not
    from repeng import ControlVector

    ControlVector("llama", {layer: row(layer) for layer in (1, 2)}).export_gguf(path)


def torch_files() -> dict[str, Any]:
    """File → what its producer passes to `torch.save`."""
    import torch

    axis = torch.from_numpy(rows(4))
    vector = torch.from_numpy(row(2))
    capped = {
        "vectors": {"layer_2/axis": {"vector": vector, "layer": 2}},
        "experiments": [
            {"id": "layers_2:3-p0.25", "interventions": [{"vector": "layer_2/axis", "cap": 1.5}]}
        ],
    }
    return {
        # safety-research/assistant-axis: pipeline/4_vectors.py, pipeline/5_axis.py, its data set
        "assistant-axis-role.pt": {"vector": axis, "type": "pos_3", "role": "pirate"},
        "assistant-axis.pt": {
            "axis": axis,
            "default_mean": axis + 1,
            "role_mean": axis - 1,
            "n_default": 1,
            "n_roles": 275,
        },
        "assistant-axis-published.pt": {"axis": axis, "metadata": {"model": "tiny", "layers": 4}},
        "assistant-axis-capping.pt": capped,
        # andyrdt/refusal_direction: pipeline/run_pipeline.py
        "refusal-direction.pt": vector,
        "refusal-mean_diffs.pt": axis.double().expand(5, 4, WIDTH).contiguous(),
        # safety-research/persona_vectors: generate_vec.py; row 0 is the embedding's
        "persona_response_avg_diff.pt": torch.from_numpy(rows(5)),
        # EasySteer's vectors/*.pt, and its BiasIntervention
        "easysteer-array.pt": row(2),
        "easysteer-bias.bin": {"bias": vector},
        # pyreft's LoreftIntervention
        "pyreft-loreft.bin": {
            "rotate_layer": torch.from_numpy(np.eye(WIDTH, 2, dtype=np.float32)),
            "weight": torch.from_numpy(rows(2)),
            "bias": torch.zeros(2),
        },
        "notebook-layers.pt": {1: torch.from_numpy(row(1)), 2: vector},
        "notebook-modules.pt": {"model.layers.1": torch.from_numpy(row(1))},
    }


def main() -> None:
    import torch
    from safetensors.numpy import save_file

    ROOT.mkdir(exist_ok=True)
    write_repeng(ROOT / f"repeng-{version('repeng')}.gguf")
    write_gguf(ROOT / f"llamacpp-gguf-{version('gguf')}.gguf", {})
    write_gguf(ROOT / "easysteer-states.gguf", easysteer("hidden_states"))
    write_gguf(ROOT / "easysteer-heads.gguf", easysteer("attention_heads"))
    for name, value in torch_files().items():
        torch.save(value, ROOT / name)
    named = {"layer_1": row(1), "layer_2": row(2)}
    np.savez(ROOT / "notebook-layers.npz", **named)  # type: ignore[arg-type]
    save_file(named, ROOT / "notebook-layers.safetensors")
    save_file({"1": row(1), "2": row(2)}, ROOT / "notebook-numbers.safetensors")
    save_file({"steering_vector": row(2)}, ROOT / "notebook-vector.safetensors")


if __name__ == "__main__":
    sys.exit(main())
