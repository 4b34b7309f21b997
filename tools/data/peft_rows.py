"""What does PEFT itself write, and what does it compute?

Adapters of the tiny Llama as PEFT saves them, `tests/data/peft/{name}` (each config has the version
of PEFT), and the last layer's rows under those that are served, `tests/data/peft/rows.npz`.

PEFT is not needed to test Midstream. With it installed, this writes the files again:

    PYTHONPATH=tests/fake_engine:tests/engine python tools/data/peft_rows.py
"""

import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from host import prompt_of
from tiny import LAYERS, checkpoint

ADAPTERS = Path(__file__).resolve().parents[2] / "tests" / "data" / "peft"
ROWS = ADAPTERS / "rows.npz"
PROMPT = prompt_of(6, seed=77)
_SMALL = {"r": 1, "target_modules": ["q_proj", "down_proj"]}
_ONE = {"r": 2, "target_modules": ["v_proj"], "layers_to_transform": [1]}
#: Adapter → arguments of `LoraConfig`, beside its defaults.
SERVED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all_linear": {"r": 1, "target_modules": "all-linear"},
    "rslora": _SMALL | {"r": 2, "use_rslora": True, "lora_alpha": 3},
    "patterns": _SMALL
    | {
        "rank_pattern": {"down_proj": 3},
        "alpha_pattern": {"down_proj": 7, "model.layers.1.self_attn.q_proj": 30},
    },
    "unsloth": {
        "r": 2,
        "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward"
        r"|ffn|dense).*?(?:q_proj|o_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention"
        r"|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|o_proj)))",
    },
    "layers": _SMALL | {"layers_to_transform": [0, 3], "layers_pattern": "layers"},
    "excluded": _SMALL | {"exclude_modules": ["0.mlp.down_proj"]},
    "gaussian": _SMALL | {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
    "orthogonal": _SMALL | {"r": 2, "init_lora_weights": "orthogonal"},
    "eva": _SMALL | {"init_lora_weights": "eva"},
    "bfloat16": _SMALL,
    "pissa_converted": _ONE | {"init_lora_weights": "pissa"},
}
#: Adapters that are refused, each for one member of its config.
REFUSED: dict[str, dict[str, Any]] = {
    "activated": _ONE | {"alora_invocation_tokens": [5, 6]},
    "bias": _ONE | {"lora_bias": True},
    "dora": _ONE | {"use_dora": True},
    "kasa": _ONE,
    "pissa": _ONE | {"init_lora_weights": "pissa"},
    "qalora": _ONE | {"use_qalora": True},
    "repeated": {"r": 1, "target_modules": ["v_proj"], "layer_replication": [[0, 4], [3, 4]]},
    "tokens": _ONE | {"trainable_token_indices": [3]},
    "whole_norm": _ONE | {"modules_to_save": ["norm"]},
}


def config_of(name: str, arguments: dict[str, Any]) -> Any:
    from peft import EvaConfig, KasaConfig, LoraConfig

    own = {"eva": {"eva_config": EvaConfig()}, "kasa": {"kasa_config": KasaConfig()}}
    return LoraConfig(**arguments, **own.get(name, {}), task_type="CAUSAL_LM")


def adapted(name: str, arguments: dict[str, Any], base: Path) -> Any:
    """The tiny Llama under a new adapter that changes every row."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(zlib.crc32(name.encode()))
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    model.name_or_path = model.config._name_or_path = "tiny-llama"
    return get_peft_model(model, config_of(name, arguments)).eval()


def save(name: str, model: Any, folder: Path) -> None:
    """Saves an adapter whose products are large; `pissa_converted` as plain LoRA."""
    import torch

    options = {}
    if name == "pissa_converted":
        start = folder.parent / "start"
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(start)
        model.peft_config["default"].init_lora_weights = "pissa"
        options = {"path_initial_model_for_weight_conversion": str(start)}
    for module, weight in model.named_parameters():
        if ".lora_B." in module:
            weight.data += 0.1 * torch.randn_like(weight)
    if name == "bfloat16":
        model.to(torch.bfloat16)
    model.save_pretrained(folder, **options)


def rows_of(model: Any) -> np.ndarray:
    """What leaves the last layer, `[tokens, hidden]`."""
    import torch

    rows: list[np.ndarray] = []

    def look(_module: Any, _inputs: Any, output: Any) -> None:
        last = output[0] if isinstance(output, tuple) else output
        rows.append(last.reshape(len(PROMPT), -1).numpy())

    model.base_model.model.model.layers[LAYERS - 1].register_forward_hook(look)
    with torch.no_grad():
        model(torch.tensor([PROMPT]), use_cache=False)
    return rows[0]


def main() -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shutil.rmtree(ADAPTERS, ignore_errors=True)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        base = checkpoint("llama", Path(folder, "llama"))
        for name, arguments in (SERVED | REFUSED).items():
            save(name, adapted(name, arguments, base), Path(folder, name))
            (ADAPTERS / name).mkdir(parents=True)
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copy(Path(folder, name, file), ADAPTERS / name)
        for name in SERVED:
            model = AutoModelForCausalLM.from_pretrained(
                base, dtype=torch.float32, attn_implementation="eager"
            )
            found[name] = rows_of(PeftModel.from_pretrained(model, str(ADAPTERS / name)).eval())
    np.savez_compressed(ROWS, **found)
    print(f"{ROWS}: {', '.join(found)}")


if __name__ == "__main__":
    sys.exit(main())
