"""Is a model that cannot be served refused before anything of the engine starts?"""

import asyncio
import json
from pathlib import Path

import pytest

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.settings import Settings
from midstream.workers.engine.vllm import VllmEngine


def test_an_error_of_vllm_is_reported_in_one_line_without_its_validators_text(
    tmp_path: Path,
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = VllmEngine(
        Settings(
            model=str(tmp_path), data_dir=str(tmp_path / "data"), dtype="float32", max_model_len=65
        )
    )
    with pytest.raises(MidstreamError, match="max_model_len") as caught:
        asyncio.run(engine.start())
    assert caught.value.kind == "engine_failed"
    assert "pydantic" not in caught.value.detail
    assert "\n" not in caught.value.detail


def test_an_architecture_that_vllm_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    config = {
        "architectures": ["NobodysForCausalLM"],
        "model_type": "gptj",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = VllmEngine(
        Settings(model=str(tmp_path), data_dir=str(tmp_path / "data"), dtype="float32")
    )
    with pytest.raises(MidstreamError, match="NobodysForCausalLM"):
        asyncio.run(engine.start())
