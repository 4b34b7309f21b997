"""A checkpoint is loaded where there is memory for it, and refused with the reason elsewhere."""

import json
from pathlib import Path

import pytest
import torch
from gradient_kit import small_llama
from refusal_kit import refuses
from transformers import CTRLConfig

from midstream.schemas.base.errors import MidstreamError
from midstream.workers.engine.proof.reference import Checkpoint
from midstream_lab.gradients import loading
from midstream_lab.gradients.loading import device_for, load_points

LLAMA = "LlamaForCausalLM"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    small_llama(architectures=[LLAMA]).save_pretrained(tmp_path)
    return tmp_path


def refusal(source: Checkpoint, dtype: str = "float32") -> str:
    with refuses(kind="gradients_refused") as refused:
        load_points(source, dtype, "cpu")
    return refused.value.detail


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_in_the_served_dtype_and_take_no_gradients(
    checkpoint: Path, dtype: str
) -> None:
    weights = list(load_points(Checkpoint(str(checkpoint), LLAMA), dtype, "cpu").model.parameters())
    assert {weight.dtype for weight in weights} == {getattr(torch, dtype)}
    assert not any(weight.requires_grad for weight in weights)


def test_overrides_of_the_config_apply(checkpoint: Path) -> None:
    source = Checkpoint(str(checkpoint), LLAMA, overrides={"rms_norm_eps": 0.5})
    assert load_points(source, "float32", "cpu").model.config.rms_norm_eps == 0.5


def test_a_quantised_checkpoint_is_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert "it is quantised" in refusal(Checkpoint(str(checkpoint), LLAMA))


def test_a_reason_of_the_worker_is_passed_on(checkpoint: Path) -> None:
    source = Checkpoint(str(checkpoint), LLAMA, refused="its weights are quantised (awq)")
    assert refusal(source).endswith("its weights are quantised (awq)")


def test_an_architecture_without_hook_points_is_refused_by_name(tmp_path: Path) -> None:
    config = CTRLConfig(n_embd=16, n_layer=2, n_head=2, dff=32, vocab_size=32)
    config.save_pretrained(tmp_path)  # it is refused before weights are read
    assert "CTRLLMHeadModel" in refusal(Checkpoint(str(tmp_path), "CTRLLMHeadModel"))


def test_float16_is_refused(checkpoint: Path) -> None:
    assert "the model is in float16" in refusal(Checkpoint(str(checkpoint), LLAMA), "float16")


def test_missing_weights_are_refused_by_name(checkpoint: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(Checkpoint(str(checkpoint), LLAMA))


def test_too_little_memory_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_bytes", lambda: 3 << 30)
    with pytest.raises(MidstreamError, match=r"8\.0 GiB in float32, and 3\.0 GiB are free on cpu"):
        device_for(8 << 30, "float32", "auto")


GPUS = {0: 10 << 30, 1: 20 << 30}


@pytest.mark.parametrize(
    ("needed_gib", "setting", "place"),
    [(15, "auto", "cuda:1"), (25, "auto", "auto"), (5, "cuda:0", "cuda:0"), (1, "cpu", "cpu")],
)
def test_the_device_is_the_emptiest_gpu_or_all_of_them(
    monkeypatch: pytest.MonkeyPatch, needed_gib: int, setting: str, place: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (GPUS[index], 80 << 30))
    assert device_for(needed_gib << 30, "bfloat16", setting).place == place


@pytest.mark.parametrize(
    ("needed_gib", "setting", "words"),
    [
        (31, "auto", "30.0 GiB are free on all GPUs together"),
        (11, "cuda:0", "10.0 GiB are free on cuda:0"),
        (1, "cuda:7", "valid: auto, cpu, cuda:0, cuda:1"),
    ],
)
def test_gpus_without_room_are_refused(
    monkeypatch: pytest.MonkeyPatch, needed_gib: int, setting: str, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (GPUS[index], 80 << 30))
    with refuses(words):
        device_for(needed_gib << 30, "bfloat16", setting)
