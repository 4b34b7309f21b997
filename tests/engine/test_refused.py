"""Is a model that cannot be served refused before anything of the engine starts?"""

import asyncio
import json
from pathlib import Path

import pytest

from midstream.schemas.errors import MidstreamError
from midstream.schemas.settings import Settings
from midstream.workers.engine.vllm import VllmEngine
from midstream.workers.runner.architectures import UnsupportedArchitectureError


@pytest.mark.parametrize(
    "architecture", ["Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration"]
)
def test_a_multimodal_model_is_refused_by_name_before_vllm_looks_at_it(tmp_path: Path, architecture: str) -> None:
    """What vLLM would import for it may be missing; its config may be of a kind that this transformers does not know."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "unknown_to_all"}))
    engine = VllmEngine(Settings(model=str(tmp_path), data_dir=str(tmp_path / "data"), dtype="float32"))
    with pytest.raises(UnsupportedArchitectureError, match=rf"{architecture} is not supported; supported: .*LlamaForCausalLM"):
        asyncio.run(engine.start())


def test_an_error_of_vllm_is_reported_in_one_line_without_its_validators_text(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = VllmEngine(Settings(model=str(tmp_path), data_dir=str(tmp_path / "data"), dtype="float32", max_model_len=65))
    with pytest.raises(MidstreamError, match="max_model_len") as caught:
        asyncio.run(engine.start())
    assert caught.value.kind == "engine_failed"
    assert "pydantic" not in caught.value.detail
    assert "\n" not in caught.value.detail


def test_an_unknown_architecture_is_refused_with_the_list_before_a_process_starts(tmp_path: Path) -> None:
    config = {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = VllmEngine(Settings(model=str(tmp_path), data_dir=str(tmp_path / "data"), dtype="float32"))
    with pytest.raises(UnsupportedArchitectureError, match=r"GPTJForCausalLM is not supported; supported: .*LlamaForCausalLM"):
        asyncio.run(engine.start())
