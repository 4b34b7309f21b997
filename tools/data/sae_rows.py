"""What does sae-lens itself compute?

Small autoencoders of every form that is served, with its activations and reconstructions.

sae-lens is not needed to test Midstream. Where it is installed, `python tools/data/sae_rows.py`
writes `tests/data/saes` again: a folder for each, saved by sae-lens itself (and one as Gemma Scope
saves it, which its loader reads), and `rows.npz`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2] / "tests" / "data" / "saes"
D_IN = 8
D_SAE = 32
LAYER = 1
#: Folder → its members of cfg.json.
FORMS: dict[str, dict[str, Any]] = {
    "standard": {"architecture": "standard"},
    "bare": {"architecture": "standard", "apply_b_dec_to_input": False},
    "jumprelu": {"architecture": "jumprelu"},
    "gated": {"architecture": "gated"},
    "topk": {"architecture": "topk", "k": 5},
    "rescaled": {"architecture": "topk", "k": 5, "rescale_acts_by_decoder_norm": True},
    "layer_norm": {"architecture": "standard", "normalize_activations": "layer_norm"},
    "constant_norm": {"architecture": "jumprelu", "normalize_activations": "constant_norm_rescale"},
}


def tensors_of(architecture: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random ones, in which about a third of the features are active."""

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    found = {
        "W_enc": normal(D_IN, D_SAE, scale=0.4),
        "W_dec": normal(D_SAE, D_IN, scale=0.4),
        "b_dec": normal(D_IN, scale=0.3),
    }
    if architecture == "gated":
        return found | {
            "b_gate": normal(D_SAE, scale=0.3),
            "r_mag": normal(D_SAE, scale=0.3),
            "b_mag": normal(D_SAE, scale=0.3),
        }
    found["b_enc"] = normal(D_SAE, scale=0.3)
    return found | (
        {"threshold": np.abs(normal(D_SAE, scale=0.5))} if architecture == "jumprelu" else {}
    )


def make() -> None:
    import torch
    from sae_lens import SAE
    from sae_lens.loading import pretrained_sae_loaders as loaders
    from safetensors.numpy import save_file

    rows = torch.tensor(
        np.random.default_rng(1).standard_normal((9, D_IN)) * 1.5, dtype=torch.float32
    )
    kept: dict[str, np.ndarray] = {"rows": rows.numpy()}

    def keep(name: str, sae: Any) -> None:
        with torch.no_grad():
            activations = sae.encode(rows)
            kept[f"{name}.activations"] = activations.numpy()
            kept[f"{name}.decoded"] = sae.decode(activations).numpy()

    for seed, (name, form) in enumerate(FORMS.items()):
        folder = ROOT / name
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {
            "hook_name": f"blocks.{LAYER}.hook_resid_post",
            "model_name": "tiny",
            "prepend_bos": True,
            "sae_lens_version": "6.54.12",
        }
        config = {
            "d_in": D_IN,
            "d_sae": D_SAE,
            "dtype": "float32",
            "device": "cpu",
            **form,
            "metadata": metadata,
        }
        (folder / "cfg.json").write_text(json.dumps(config))
        save_file(
            tensors_of(form["architecture"], np.random.default_rng(seed)),
            folder / "sae_weights.safetensors",
        )
        sae = SAE.load_from_disk(folder)
        keep(name, sae)
        sae.save_model(folder)

    # As before version 6: one flat object.
    folder = ROOT / "flat"
    folder.mkdir(exist_ok=True)
    flat = {
        "architecture": "standard",
        "d_in": D_IN,
        "d_sae": D_SAE,
        "dtype": "float32",
        "model_name": "tiny",
        "hook_layer": LAYER,
        "hook_name": f"blocks.{LAYER}.hook_resid_pre",
        "hook_head_index": None,
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 4},
        "apply_b_dec_to_input": True,
        "finetuning_scaling_factor": False,
        "normalize_activations": "none",
        "prepend_bos": True,
        "dataset_path": "none",
        "context_size": 128,
        "dataset_trust_remote_code": True,
        "sae_lens_training_version": None,
    }
    (folder / "cfg.json").write_text(json.dumps(flat))
    save_file(tensors_of("standard", np.random.default_rng(77)), folder / "sae_weights.safetensors")
    keep("flat", SAE.load_from_disk(folder))

    # By Gemma Scope's own loader, which only fetches the file from elsewhere.
    folder = ROOT / "gemma_scope"
    folder.mkdir(exist_ok=True)
    np.savez(folder / "params.npz", **tensors_of("jumprelu", np.random.default_rng(78)))
    loaders.hf_hub_download = lambda **_: str(folder / "params.npz")
    config, state, _ = loaders.gemma_2_sae_huggingface_loader(
        "google/gemma-scope-2b-pt-res", "layer_1/width_16k/average_l0_1", "cpu"
    )
    config = loaders.handle_config_defaulting(config | {"d_in": D_IN, "d_sae": D_SAE})
    kind = SAE.get_sae_class_for_architecture(config["architecture"])
    sae = kind(SAE.get_sae_config_class_for_architecture(config["architecture"]).from_dict(config))
    sae.load_state_dict(state)
    keep("gemma_scope", sae)
    np.savez_compressed(ROOT / "rows.npz", **kept)


if __name__ == "__main__":
    sys.exit(make())
