"""The logit lens equals transformers' on architectures whose ends differ: norms, tied and scaled
heads, soft caps, the backend.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from families import CHANGED, checkpoint
from host import Host, prompt_of
from lens_kit import Truth, check, lens, lenses
from tiny import LAYERS

ALL = list(range(LAYERS))
SMALL = {
    "certify": True,
    "engine.max_model_len": 128,
    "engine.max_num_seqs": 16,
    "kv_cache_gib": 0.125,
    "engine.block_size": 32,
}
#: A soft cap and the embedding as head; the others take minutes.
SHORT = {"gemma2"}
NAMES = (
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt-neox",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "starcoder2",
    "granite",
    "cohere2",
    "olmo3",
    "glm4",
    "gpt-oss",
    "gemma4",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in SHORT else pytest.mark.matrix)
        for name in NAMES
    ],
)
def test_lens_equals_transformers_on_each_architecture(
    name: str, nurseries: Callable, tmp_path: Path
) -> None:
    path = checkpoint(name, tmp_path / "checkpoint")
    host: Host = nurseries("v1").host(tmp_path / "engine", path, CHANGED.get(name), **SMALL)
    with closing(host):
        assert host.info["readings"] == {**host.info["readings"], "lens": ""}
        layers = list(range(host.info["num_layers"]))
        job = host.job(
            prompt_of(40, seed=3),
            max_tokens=3,
            capture=lens(layers, "all", tokens=(9, 400), at="after"),
        )
        (output,) = host.run(job)[job.id]
        (reading,) = lenses(host, job)
        check(reading, Truth(path).logprobs((job.prompts[0].token_ids + output.token_ids)[:-1]))
        assert [row[0] for row in reading.top_tokens[-1][39:]] == output.token_ids
