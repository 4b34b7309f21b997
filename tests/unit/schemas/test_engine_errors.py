"""vLLM's reasons not to start are answered with the name of our setting."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from midstream.schemas.service.engine_errors import REASONS, in_our_settings

SAID = {
    "ValueError: To serve at least one request with the model's max seq len "
    "(8192), (0.18 GiB KV cache is needed, which is larger than the "
    "available KV cache memory (0.01 GiB). Based on the available memory, the "
    "estimated maximum model length is 448. Try increasing "
    "`gpu_memory_utilization`": (
        "Increase the setting kv_cache_gib (on a CPU), or decrease max_model_len to 448"
    ),
    "ValueError: To serve at least one request with the model's max seq len "
    "(8192), (0.18 GiB KV cache is needed, which is larger than the "
    "available KV cache memory (0.0 GiB). Try increasing": "or decrease max_model_len",
    (
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization`"
    ): "setting kv_cache_gib",
    "ValueError: Available memory on node 0 (20.1/23.54 GiB) on kv cache "
    "allocation is less than requested memory for kv (1000.0 GiB). "
    "Decrease --kv-cache-memory-bytes": (
        "kv_cache_gib asks for 1000.0 GiB, and 20.1 of 23.54 GiB are free"
    ),
    "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 99 bytes. "
    "Error code 12": "an allocation of 99 bytes failed. Decrease the setting kv_cache_gib",
    "1 validation error for ModelConfig\n  Value error, User-specified "
    "max_model_len (1000000) is greater than the derived max_model_len "
    "(max_position_embeddings=8192.0 or model_max_length=8192 in model's "
    "config.json).": "max_model_len=1000000 exceeds the model",
    (
        "max_num_batched_tokens (16) must be greater than or equal to max_num_seqs (64)."
    ): "max_num_batched_tokens=16 is less than",
    "The repository /models/own contains custom code which must be executed to "
    "correctly load the model. Please pass the argument "
    "`trust_remote_code=True` to allow custom code to be run.": (
        "the checkpoint comes with code of its own"
    ),
    (
        "Total number of attention heads (9) must be divisible by tensor parallel size (7)."
    ): "tensor_parallel_size=7 does not divide",
}


@pytest.mark.parametrize("said", SAID, ids=[str(number) for number in range(len(SAID))])
def test_vllm_errors_are_translated_to_settings(said: str) -> None:
    answer = in_our_settings(said)
    assert SAID[said] in answer
    assert "gpu_memory_utilization" not in answer
    assert in_our_settings(f"worker failed: {answer}") == f"worker failed: {answer}"


def test_every_reason_is_tried_and_other_text_stays() -> None:
    assert [
        pattern
        for pattern, _ in REASONS
        if not any(re.search(pattern, " ".join(said.split())) for said in SAID)
    ] == []
    assert in_our_settings("ValueError: something\n else") == "ValueError: something\n else"


@pytest.mark.parametrize(
    ("file", "fragments"),
    [
        (
            "v1/core/kv_cache_utils.py",
            [
                "max seq len",
                "GiB KV cache is needed, which is larger than the available KV cache memory",
            ],
        ),
        (
            "v1/core/kv_cache_utils.py",
            ["No available memory for the cache blocks", "the estimated maximum model length is"],
        ),
        (
            "v1/worker/cpu_worker.py",
            [
                "Available memory on node",
                "on kv cache allocation is less than requested memory for kv",
            ],
        ),
        (
            "config/model.py",
            [
                "User-specified max_model_len",
                "than the derived max_model_len",
                "must be divisible by tensor parallel size",
            ],
        ),
        ("config/scheduler.py", ["must be greater than or equal to max_num_seqs"]),
    ],
)
def test_the_installed_vllm_still_raises_these_errors(file: str, fragments: list[str]) -> None:
    spec = find_spec("vllm")
    source = Path(
        str(spec.submodule_search_locations[0]) if spec.submodule_search_locations else "", file
    ).read_text()
    literals = " ".join("".join(re.findall(r'f?"((?:[^"\\]|\\.)*)"', source)).split())
    assert [fragment for fragment in fragments if fragment not in literals] == []
