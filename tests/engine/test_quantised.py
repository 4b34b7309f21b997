"""Rows of quantised checkpoints are those of their dequantised weights in transformers, plain,
steered and patched.

All of the table in `docs/vllm.md` is measured by `make quantised`; here each format runs once
on Llama, and some others.
"""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fidelity import options_of
from fidelity_page import SHORT, Way
from host import Host, capture_of, prompt_of, relative_error
from processors import OLDER, environment, flags, refusal
from quantised import FORMATS, Made, _compressed, make
from quantised_page import figure, tolerance
from reference import Edit
from tolerances import FP32_CODES, FP32_HOOKS

from midstream.schemas.base import MidstreamError
from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.vllm import VllmEngine
from midstream.workers.runner.support.quantisation import UnsupportedQuantisationError

#: Format → the dtype in which it is no row of the matrix: one of each kind of kernel.
SHORTLY = {
    "int8 per token": "float32",
    "fp8 static": "bfloat16",
    "fp8 per token": "float32",
    "awq": "float16",
    "gptq": "bfloat16",
}
LONG = [
    *(
        ("llama", form, Way("v1", "eager", dtype))
        for form, each in FORMATS.items()
        for dtype in each.dtypes
        if SHORTLY.get(form) != dtype
    ),
    ("gemma3", "int8 static", Way("v1", "eager", "float32")),
    ("gpt-neox", "gptq", Way("v1", "eager", "float16")),
    ("opt", "awq", Way("v1", "compiled", "bfloat16")),
    ("llama", "fp8 static", Way("v1", "compiled", "bfloat16")),
    ("llama", "int8 per token", Way("v1", "compiled", "float32")),
    ("qwen3", "fp8 per tensor", Way("v2", "compiled", "float32")),
]
Maker = Callable[[str, str], Made]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    folder = tmp_path_factory.mktemp("quantised")
    return cache(lambda name, form: make(name, form, folder))


def start(model: Path, folder: Path, dtype: str = "bfloat16") -> None:
    settings = Settings(
        model=str(model),
        data_dir=str(folder / "data"),
        vllm=VllmOptions(dtype=dtype, max_model_len=64),
    )
    asyncio.run(VllmEngine(settings).start())


def compare(name: str, form: str, way: Way, made: Maker, nurseries, folder: Path) -> None:
    """Where the processor cannot compute the format, no engine starts."""
    if reason := refusal(form, way.dtype):
        with pytest.raises(UnsupportedQuantisationError, match=reason):
            start(made(name, form).quantised, folder, way.dtype)
        return
    found = figure(nurseries, folder, made(name, form), way, f"{name} {form}")
    assert found.worst <= tolerance(SHORT[way.dtype]), str(found)


@pytest.mark.long
@pytest.mark.parametrize("form", SHORTLY)
def test_every_hook_gives_the_rows_of_the_dequantised_checkpoint(
    form: str, made: Maker, nurseries, tmp_path
) -> None:
    """Plain, and with an addition and a replacement at each hook; replaced rows bit for bit."""
    compare("llama", form, Way("v1", "eager", SHORTLY[form]), made, nurseries, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "form", "way"), LONG, ids=[f"{name} {form} {way.name}" for name, form, way in LONG]
)
def test_other_models_and_ways_give_the_rows_of_the_dequantised_checkpoint(
    name: str, form: str, way: Way, made: Maker, nurseries, tmp_path
) -> None:
    """Compiled: a site between a norm and the rounding of its output still sees, and edits, the
    rows.
    """
    compare(name, form, way, made, nurseries, tmp_path)


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
            made("llama", "fp8 per token").quantised,
            **options_of(Way("v1", "eager", "float32")),
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
@pytest.mark.skipif(
    bool(refusal("fp8 static", "bfloat16")), reason="static scales are not served on this processor"
)
def test_scales_of_fused_weights_that_differ_are_said_in_a_caveat(
    made: Maker, nursery, tmp_path
) -> None:
    """The rows then differ from those of the checkpoint by the second rounding; with equal scales
    they are equal.
    """
    found = {}
    for form in ("fp8 static", "fp8 static, own scales"):
        model = made("llama", form)
        with closing(
            nursery.host(
                tmp_path / form.replace(" ", "-"),
                model.quantised,
                **options_of(Way("v1", "eager", "bfloat16")),
            )
        ) as host:
            assert any("rounds these weights again" in caveat for caveat in host.info["caveats"])
            rows = plain_rows(host, prompt_of(40, seed=1))
        wanted = model.reference().rows(prompt_of(40, seed=1))["post_block", 3]
        own = model.reference(torch.bfloat16).rows(prompt_of(40, seed=1))["post_block", 3]
        found[form] = np.linalg.norm(rows - wanted) / np.linalg.norm(own - wanted)
    assert found["fp8 static"] <= 1.1
    assert found["fp8 static, own scales"] >= 1.15, found


@pytest.mark.matrix
@pytest.mark.skipif(
    bool(refusal("int8 per token", "float32")), reason="int8 is not served on this processor"
)
def test_ranks_scale_their_own_part_of_a_row_as_the_caveat_says(
    made: Maker, two_ranks, tmp_path
) -> None:
    """Scales per token: rows of two ranks differ from those of one. Static scales: they do not."""
    for form, alike in (("int8 per token", False), ("int8 static", True)):
        model = made("qwen3", form)
        folder = tmp_path / form.replace(" ", "-")
        folder.mkdir()
        with closing(
            Host(
                folder,
                model.quantised,
                **options_of(Way("v1", "eager", "float32")),
                **{"engine.tensor_parallel_size": 2},
            )
        ) as host:
            assert any("each rank scales" in caveat for caveat in host.info["caveats"]) is not alike
            rows = plain_rows(host, prompt_of(40, seed=1))
        wanted = model.reference().rows(prompt_of(40, seed=1))["post_block", 3]
        errors = np.linalg.norm(rows - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
        assert bool(np.median(errors) <= FP32_HOOKS) is alike
        assert errors.max() <= FP32_CODES


@pytest.mark.long
def test_info_and_manifest_say_how_a_checkpoint_is_quantised(
    made: Maker, nursery, tmp_path
) -> None:
    with closing(
        nursery.host(
            tmp_path / "engine",
            made("llama", "fp8 per token").quantised,
            **options_of(Way("v1", "eager", "float32")),
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
            made("llama", "fp8 per token").reference().rows(prompt_of(5))["post_block", 1],
        )
        assert error <= FP32_HOOKS


@pytest.mark.parametrize(
    ("name", "form", "reason"),
    [
        ("llama", "fp8 blocks", "requires AMX tile support"),
        ("llama", "fp8 dynamic", "rounds all rows of a step with one scale"),
        pytest.param(
            "qwen3-moe",
            "gptq",
            "a GPU or a CPU with AMX for quantised experts",
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="they are served on this CPU")
@pytest.mark.slow("vLLM inspects a model's class in a process of its own")
def test_what_this_cpu_cannot_run_is_refused_before_a_process_starts(
    name: str, form: str, reason: str, made: Maker, tmp_path
) -> None:
    with pytest.raises(UnsupportedQuantisationError, match=reason):
        start(made(name, form).quantised, tmp_path)


_TRY = """
import sys
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.vllm import configured
from midstream.workers.engine.options.engine_arguments import prepare_environment
from midstream.workers.runner.support.quantisation import check_kernels
for model, dtype in zip(sys.argv[1::2], sys.argv[2::2]):
    settings = Settings(model=model, vllm=VllmOptions(dtype=dtype, max_model_len=64))
    prepare_environment(settings)
    try:
        check_kernels(configured(settings)[0], model)
        print("\\nserved")
    except MidstreamError as error:
        print("\\n" + " ".join(error.detail.split()))
"""


@pytest.mark.skipif(
    "avx512_bf16" not in flags(),
    reason="older processors are simulated on one with AVX-512, bf16 and VNNI",
)
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [name if name == "avx2" else pytest.param(name, marks=pytest.mark.matrix) for name in OLDER],
)
def test_kernels_are_tried_on_the_processor(
    name: str, made: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each format, as vLLM and oneDNN run it on an older processor: served, or refused with the
    reason.
    """
    for key, value in environment(name).items():
        monkeypatch.setenv(key, value)
    cases = [
        (form, dtype)
        for form, each in FORMATS.items()
        for dtype in each.dtypes
        # PyTorch looks at this processor's own flags for float16 and for FP8 with AMX, and oneDNN
        # has no kernel for the older one's
        if not (dtype == "float16" and "avx512_fp16" in flags())
        and not (form.startswith("fp8") and torch.cpu._is_amx_tile_supported())
    ]
    models = [text for form, dtype in cases for text in (str(made("llama", form).quantised), dtype)]
    done = subprocess.run(
        [sys.executable, "-c", _TRY, *models],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers = [
        line
        for line in done.stdout.splitlines()
        if line == "served" or line.startswith("quantisation ")
    ]
    wanted = {case: refusal(*case) or "^served$" for case in cases}
    assert len(answers) == len(cases), done.stdout
    assert not {
        case: answer
        for (case, reason), answer in zip(wanted.items(), answers, strict=True)
        if not re.search(reason, answer)
    }


_FP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            _compressed("nvfp4-pack-quantized", _FP4, _FP4 | {"dynamic": "local"}),
            "compressed-tensors: fp4 weights.*NVFP4 linear layer",
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True, "desc_act": False},
            "gptq: int8 weights .*weight_bits",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
            "modelopt_fp4.* NVFP4 linear layer",
        ),
        ({"quant_method": "torchao", "quant_type": {"default": "int8_weight_only"}}, "torchao"),
    ],
)
@pytest.mark.slow("vLLM inspects a model's class in a process of its own")
def test_formats_without_a_kernel_here_are_refused_with_vllms_reason(
    config: dict[str, Any], reason: str, made: Maker, tmp_path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(made("llama", "awq").quantised, model)
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
