"""What does PEFT itself compute with an adapter?

Its rows of the tiny Llama, kept in `tests/data/peft_rows.npz`.

PEFT is not needed to test Midstream. With it installed, this writes the file again:

    PYTHONPATH=tests/fake_engine:tests/engine python tools/data/peft_rows.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from adapters import LLAMA, make_adapter
from host import prompt_of
from tiny import checkpoint

ROWS = Path(__file__).resolve().parents[2] / "tests" / "data" / "peft_rows.npz"
PROMPT = prompt_of(12, seed=77)
#: Adapter → what it says besides the usual: everything that decides how its product is scaled.
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "alpha": 3.0},
    "patterns": {
        "rank_pattern": {"v_proj": 3},
        "alpha_pattern": {"v_proj": 7.0, "model.layers.1.mlp.down_proj": 30.0},
    },
}


def write(root: Path, base: Path) -> dict[str, Any]:
    """Every adapter, in a folder of its name."""
    return {
        name: make_adapter(root, name, base, LLAMA, **config) for name, config in ADAPTERS.items()
    }


def rows_of(adapted: Any) -> list[np.ndarray]:
    """What leaves each layer, `[tokens, hidden]`."""
    import torch

    rows: list[np.ndarray] = []

    def look(_module: Any, _inputs: Any, output: Any) -> None:
        rows.append(
            (output[0] if isinstance(output, tuple) else output).reshape(len(PROMPT), -1).numpy()
        )

    for layer in adapted.base_model.model.model.layers:
        layer.register_forward_hook(look)
    with torch.no_grad():
        adapted(torch.tensor([PROMPT]), use_cache=False)
    return rows


def main() -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        base, found = checkpoint("llama", Path(folder, "llama")), {}
        write(Path(folder), base)
        for name in ADAPTERS:
            model = AutoModelForCausalLM.from_pretrained(
                base, dtype=torch.float32, attn_implementation="eager"
            )
            adapted = PeftModel.from_pretrained(model, str(Path(folder, name))).eval()
            found[name] = np.stack(rows_of(adapted))
    np.savez_compressed(ROWS, **found)
    print(f"{ROWS}: {', '.join(found)}")


if __name__ == "__main__":
    sys.exit(main())
