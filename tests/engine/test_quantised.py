"""Rows of quantised checkpoints are those of their dequantised weights in transformers, plain,
steered and patched.

All of the table in `docs/vllm.md` is measured by `make quantised`; here Llama runs once, and some
others.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fidelity import options_of
from fidelity_page import SHORT, Way
from host import Host, capture_of, prompt_of, relative_error
from quantised import Made, compressed, make
from quantised_page import figure, tolerance
from reference import Edit
from tolerances import FP32_CODES, FP32_HOOKS
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.vllm import VllmEngine
from midstream.workers.runner.support.quantisation import UnsupportedQuantisationError

WAY = Way("v1", "eager", "float32")
MORE = [
    ("llama", Way("v1", "eager", "bfloat16")),
    ("llama", Way("v1", "compiled", "bfloat16")),
    ("gemma3", WAY),
    ("qwen3", Way("v2", "compiled", "float32")),
]
Maker = Callable[[str], Made]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    folder = tmp_path_factory.mktemp("quantised")
    return cache(lambda name: make(name, folder))


def start(model: Path, folder: Path) -> None:
    settings = Settings(
        model=str(model),
        data_dir=str(folder / "data"),
        vllm=VllmOptions(dtype="bfloat16", max_model_len=64),
    )
    asyncio.run(VllmEngine(settings).start())


def compare(name: str, way: Way, made: Maker, nurseries, folder: Path) -> None:
    found = figure(nurseries, folder, made(name), way, name)
    assert found.worst <= tolerance(SHORT[way.dtype]), str(found)


@pytest.mark.long
def test_every_hook_gives_the_rows_of_the_dequantised_checkpoint(
    made: Maker, nurseries, tmp_path
) -> None:
    """Plain, and with an addition and a replacement at each hook; replaced rows bit for bit."""
    compare("llama", WAY, made, nurseries, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "way"), MORE, ids=[f"{name} {way.name}" for name, way in MORE])
def test_other_models_and_ways_give_the_rows_of_the_dequantised_checkpoint(
    name: str, way: Way, made: Maker, nurseries, tmp_path
) -> None:
    """Compiled: a site between a norm and the rounding of its output still sees, and edits, the
    rows.
    """
    compare(name, way, made, nurseries, tmp_path)


def plain_rows(host: Host, prompt: list[int]) -> np.ndarray:
    """Its rows at the last layer's `post_block`."""
    job = host.job(prompt, max_tokens=1, capture=capture_of([3], "all_prompt"))
    host.run(job)
    return host.capture(job).array(3)


@pytest.mark.matrix
def test_other_requests_do_not_change_rounded_activations(made: Maker, tmp_path) -> None:
    """A neighbour with rows a hundred times as large would change a scale that they shared."""
    with closing(
        Host(
            tmp_path,
            made("llama").quantised,
            **options_of(WAY),
        )
    ) as host:
        large = host.steering(Edit(0, np.full(64, 100, np.float32)))
        found = []
        for steering in (None, large):
            job = host.job(
                prompt_of(20, seed=1), max_tokens=1, capture=capture_of([3], "all_prompt")
            )
            host.run_together(job, host.job(prompt_of(20, seed=2), max_tokens=1, steering=steering))
            found.append(host.capture(job).array(3))
    assert np.array_equal(*found)


@pytest.mark.matrix
def test_ranks_scale_their_own_part_of_a_row_as_the_caveat_says(
    made: Maker, two_ranks, tmp_path
) -> None:
    """Rows of two ranks differ from those of one."""
    model = made("qwen3")
    with closing(
        Host(
            tmp_path,
            model.quantised,
            **options_of(WAY),
            **{"engine.tensor_parallel_size": 2},
        )
    ) as host:
        assert any("each rank scales" in caveat for caveat in host.info["caveats"])
        rows = plain_rows(host, prompt_of(40, seed=1))
    wanted = model.reference().rows(prompt_of(40, seed=1))["post_block", 3]
    errors = np.linalg.norm(rows - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert np.median(errors) > FP32_HOOKS
    assert errors.max() <= FP32_CODES


@pytest.mark.long
def test_info_and_manifest_say_how_a_checkpoint_is_quantised(
    made: Maker, nursery, tmp_path
) -> None:
    with closing(
        nursery.host(
            tmp_path / "engine",
            made("llama").quantised,
            **options_of(WAY),
        )
    ) as host:
        assert (
            host.info["quantization"]
            == "compressed-tensors: fp8 weights, fp8 activations per token"
        )
        assert [
            "round their input" in caveat
            for caveat in host.info["caveats"]
            if "certif" not in caveat
        ] == [True]
        job = host.job(prompt_of(5), max_tokens=1, capture=capture_of([1], "all_prompt"))
        host.run(job)
        assert host.capture(job).manifest().caveats == host.info["caveats"]
        error = relative_error(
            host.capture(job).array(1),
            made("llama").reference().rows(prompt_of(5))["post_block", 1],
        )
        assert error <= FP32_HOOKS


@pytest.mark.long
@pytest.mark.slow("vLLM inspects a model's class in a process of its own")
def test_quantised_experts_are_refused_before_a_process_starts(made: Maker, tmp_path) -> None:
    with pytest.raises(UnsupportedQuantisationError, match="quantised experts need a GPU"):
        start(made("qwen3-moe").quantised, tmp_path)


@pytest.mark.long
@pytest.mark.slow("vLLM inspects a model's class in a process of its own")
def test_a_kernel_that_computes_wrong_sums_is_refused(
    made: Maker, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    apply = CompressedTensorsLinearMethod.apply
    monkeypatch.setattr(CompressedTensorsLinearMethod, "apply", lambda *given: 0.9 * apply(*given))
    with pytest.raises(UnsupportedQuantisationError, match="are wrong by up to 0"):
        start(made("llama").quantised, tmp_path)


_FP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}


#: Configs, and vLLM's reason against each. `make test` tries the first.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        compressed("nvfp4-pack-quantized", _FP4, _FP4 | {"dynamic": "local"}),
        "compressed-tensors: fp4 weights.*NVFP4 linear layer",
    ),
    (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True, "desc_act": False},
        "gptq: int8 weights .*weight_bits",
    ),
    (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "fp8 activations per tensor .*use a GPU",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        "modelopt_fp4.* NVFP4 linear layer",
    ),
    ({"quant_method": "torchao", "quant_type": {"default": "int8_weight_only"}}, "torchao"),
]


@pytest.mark.parametrize(
    ("config", "reason"),
    [REFUSED[0], *(pytest.param(*case, marks=pytest.mark.long) for case in REFUSED[1:])],
)
@pytest.mark.slow("vLLM inspects a model's class in a process of its own")
def test_formats_without_a_kernel_here_are_refused_with_vllms_reason(
    config: dict[str, Any], reason: str, made: Maker, tmp_path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(made("llama").quantised, model)
    changed = json.loads((model / "config.json").read_text()) | {"quantization_config": config}
    (model / "config.json").write_text(json.dumps(changed))
    with pytest.raises(MidstreamError, match=reason):
        start(model, tmp_path)


@pytest.mark.slow("imports vLLM")
def test_gguf_is_refused_before_vllm_looks_at_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    for model in (tmp_path, tmp_path / "tiny.gguf"):
        with pytest.raises(UnsupportedQuantisationError, match="Have transformers dequantise it"):
            asyncio.run(
                VllmEngine(Settings(model=str(model), data_dir=str(tmp_path / "data"))).start()
            )
