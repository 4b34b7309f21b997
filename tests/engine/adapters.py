"""LoRA adapters for the tiny checkpoints as PEFT saves them, and transformers' checkpoint with the
same change merged into its weights.
"""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from midstream.schemas.artifacts.loras import StoredLora
from midstream.storage.formats.lora_files import read

#: Of each architecture: linear layers inside the attention and the MLP, those that vLLM packs among
#: them.
LLAMA = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
TARGETS: dict[str, tuple[str, ...]] = {
    "gpt-neox": NEOX,
    "gpt-neox-sequential": NEOX,
    "opt": ("q_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "starcoder2": ("q_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
}


def make_adapter(
    root: Path,
    name: str,
    base: Path,
    targets: Sequence[str] = LLAMA,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    **config: Any,
) -> StoredLora:
    """Write an adapter of `base` to `root/name`: every target of every layer, so large that no row
    stays the same.

    `config`: further members; a `rank_pattern` names targets.
    """
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(zlib.crc32(name.encode()))
    tensors = {}
    for module, layer in model.named_modules():
        if module.rpartition(".")[2] in targets and hasattr(layer, "weight"):
            outputs, inputs = layer.weight.shape
            own = config.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
            tensors[f"base_model.model.{module}.lora_A.weight"] = 0.3 * torch.randn(own, inputs)
            tensors[f"base_model.model.{module}.lora_B.weight"] = 0.1 * torch.randn(outputs, own)
    assert tensors
    members = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
    }
    return write_adapter(
        root, name, members | {"target_modules": list(targets), "bias": "none"} | config, tensors
    )


def write_adapter(
    root: Path, name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> StoredLora:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    content = read(folder)
    return StoredLora(name=name, digest=content.digest, path=name, bytes=content.bytes)


def merged(base: Path, adapter: Path, path: Path) -> Path:
    """`base` with W + scale · B · A in place of W, in float64 until it is written."""
    from safetensors.torch import load_file

    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    with torch.no_grad():
        for name in [name for name in tensors if ".lora_A." in name]:
            weight = model.get_submodule(
                name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            ).weight
            change = (
                scale * tensors[name.replace("lora_A", "lora_B")].double() @ tensors[name].double()
            )
            weight.copy_((weight.double() + change).float())
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(base).save_pretrained(path)
    return path
