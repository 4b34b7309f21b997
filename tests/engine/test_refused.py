"""Is a model that cannot be served refused before anything of the engine starts?"""

import asyncio
import json
from pathlib import Path

import pytest

from midstream.schemas.settings import Settings
from midstream.workers.runner.architectures import UnsupportedArchitectureError
from midstream.workers.vllm_engine import VllmEngine


def test_an_architecture_without_an_entry_is_refused_with_the_list_and_without_a_process(tmp_path: Path) -> None:
    config = {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = VllmEngine(Settings(model=str(tmp_path), data_dir=str(tmp_path / "data"), dtype="float32"))
    with pytest.raises(UnsupportedArchitectureError, match=r"GPTJForCausalLM is not supported; supported: .*LlamaForCausalLM"):
        asyncio.run(engine.start())
