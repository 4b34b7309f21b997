"""Families beyond the table of architectures: a tiny checkpoint of each, whose config is generated,
with all hooks found by the probe.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import configs
import tiny
from processors import flags

#: Name → architecture.
FAMILIES: Mapping[str, str] = {
    "llama4": "Llama4ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek-v2": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4-moe": "Glm4MoeForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    "qwen3.5": "Qwen3_5ForCausalLM",
    "gemma3-mm": "Gemma3ForConditionalGeneration",
    "mistral3-mm": "Mistral3ForConditionalGeneration",
    "gemma4": "Gemma4ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite4": "GraniteMoeHybridForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "nemotron-h": "NemotronHForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
}
#: Their experts are chosen by a router, see `fidelity.ROUTED`.
ROUTED = frozenset(
    {
        "llama4",
        "gpt-oss",
        "deepseek-v2",
        "deepseek-v3",
        "glm4-moe",
        "qwen3-next",
        "granite4",
        "minimax-m2",
    }
)
#: What must be replaced in vLLM for them to run here, tests only: see `engine_process`.
CHANGED: Mapping[str, dict[str, str]] = {"minimax-m2": {"ROUTE_IN_ONE_GROUP": "1"}}
#: Latent attention.
LATENT = ("deepseek-v2", "deepseek-v3")
#: vLLM computes their linear attention in bf16 only, and with AMX latent attention.
BF16_ONLY = frozenset({"qwen3-next", "qwen3.5", *(LATENT if "amx_tile" in flags() else ())})


def checkpoint(name: str, path: Path, **more: Any) -> Path:
    """Write the named checkpoint, of a family or of `tiny`, to `path`, unless it is there.

    `more`: fields of a family's text config.
    """
    return (
        configs.checkpoint(FAMILIES[name], path, **more)
        if name in FAMILIES
        else tiny.checkpoint(name, path)
    )
