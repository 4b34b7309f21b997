"""Which quantised checkpoints are served, with which caveats; and the page of their figures."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fidelity_page import parse
from quantised import CONFIG
from quantised_page import PAGE, cases, read_page, tolerance
from tolerances import QUANTISED
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)

from midstream.workers.runner.support.quantisation import (
    CAVEATS,
    MEASURED,
    REFUSED,
    W4A8,
    UnsupportedQuantisationError,
    WeightFacts,
    judge,
    refuse_gguf,
    refuse_shared_scales,
    roundings,
)

#: Configs of checkpoints.
CONFIGS = {
    "fp8 per token": CONFIG,
    "fp8 static": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8 dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
}


def facts(form: str, **changes: Any) -> WeightFacts:
    """Of a checkpoint in this format, in bf16 on a CPU unless `changes` says otherwise."""
    raw = CONFIGS[form]
    method = str(raw["quant_method"])
    return WeightFacts(method, raw, *roundings(method, raw))._replace(**changes)


def other(method: str, **changes: Any) -> WeightFacts:
    return WeightFacts(method, {"quant_method": method}, frozenset(), frozenset())._replace(
        **changes
    )


def ct(weights: dict[str, Any], activations: dict[str, Any]) -> WeightFacts:
    """A checkpoint of compressed-tensors."""
    raw = {"config_groups": {"group_0": {"weights": weights, "input_activations": activations}}}
    return WeightFacts("compressed-tensors", raw, *roundings("compressed-tensors", raw))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("fp8 per token", "compressed-tensors: fp8 weights, fp8 activations per token"),
        ("fp8 static", "fp8: fp8 weights, fp8 activations static"),
        ("awq", "awq: int4 weights"),
        ("gptq", "gptq: int4 weights"),
    ],
)
def test_the_name_says_how_weights_and_activations_are_rounded(form: str, name: str) -> None:
    assert judge(facts(form, cpu=False)).name == name


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (facts("fp8 per token", experts=True), "quantised experts need a GPU"),
        (other("gpt_oss_mxfp4", experts=True), "quantised experts need a GPU"),
        (facts("gptq", dtype=torch.float32), "set dtype to bfloat16 or float16"),
        (facts("fp8 static"), "round activations with other scales"),
        (facts("fp8 dynamic"), "round activations with other scales"),
    ],
)
def test_what_this_machine_cannot_compute_is_refused_with_the_reason(
    case: WeightFacts, reason: str
) -> None:
    with pytest.raises(UnsupportedQuantisationError, match=reason) as refusal:
        judge(case)
    assert refusal.value.field == "model"
    assert case.name in refusal.value.detail


@pytest.mark.parametrize(
    ("case", "caveats"),
    [
        (facts("fp8 per token"), ["round their input"]),
        (facts("fp8 per token", ranks=2), ["round their input", "each rank scales its own part"]),
        (
            facts("fp8 static", cpu=False),
            ["round their input", "rounds these weights again", "unproven: quantisation fp8"],
        ),
        (facts("awq"), ["unproven: quantisation awq"]),
        (
            facts("gptq", raw={"kv_cache_scheme": {"num_bits": 8}}),
            ["quantised KV cache", "unproven: quantisation gptq"],
        ),
        (other("torchao"), ["unproven: quantisation torchao"]),
        (
            ct({"num_bits": 4}, {"num_bits": 8, "strategy": "token", "dynamic": True}),
            ["round their input", "unproven: quantisation"],
        ),
        (
            ct({"num_bits": 8}, {"num_bits": 8, "strategy": "token", "symmetric": False}),
            ["round their input", "unproven: quantisation"],
        ),
    ],
)
def test_caveats_say_in_what_rows_differ(
    case: WeightFacts, caveats: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(W4A8, "0")
    found = judge(case).caveats
    assert len(found) == len(caveats)
    assert all(words in caveat for words, caveat in zip(caveats, found, strict=True))


def test_4_bit_weights_with_8_bit_activations_have_a_caveat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(W4A8, "1")
    assert "8 bits on some CPUs" in judge(facts("gptq")).caveats[0]
    assert len(judge(facts("gptq", cpu=False)).caveats) == 1


def test_experts_that_a_checkpoint_leaves_out_are_not_quantised() -> None:
    from midstream.workers.runner.support.quantisation import _leaves_out_experts

    assert _leaves_out_experts({"ignore": ["re:.*experts.*"]})
    assert not _leaves_out_experts({"ignored_layers": ["lm_head"]})


@pytest.mark.parametrize(
    "model", ["some/model.gguf", "org/Model-GGUF:Q4_K_M", "org/Model-GGUF:IQ2_XS", "org/Model:BF16"]
)
def test_gguf_is_refused_by_name(model: str) -> None:
    with pytest.raises(UnsupportedQuantisationError, match="Have transformers dequantise it"):
        refuse_gguf(model)


def test_a_folder_of_gguf_files_is_refused_and_one_with_safetensors_is_not(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UnsupportedQuantisationError, match="GGUF is not served"):
        refuse_gguf(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    refuse_gguf(str(tmp_path))
    refuse_gguf("org/Model")


# -- loaded layers ---------------------------------------------------------------------------------


def loaded(part: Any) -> torch.nn.Module:
    layer = torch.nn.Linear(1, 1)
    layer.quant_method = SimpleNamespace(part=part)  # as vLLM hangs one on a layer
    return torch.nn.ModuleDict({"down_proj": layer})


def linear(activation: Any, kernel: Any = PerTensorTorchFP8ScaledMMLinearKernel) -> Any:
    bf16 = torch.bfloat16
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=kFp8StaticTensorSym,
        activation_quant_key=activation,
        input_dtype=bf16,
        out_dtype=bf16,
        weight_shape=(64, 64),
    )
    with set_current_vllm_config(
        VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    ):
        return kernel(config, ["weight", "weight_scale", "input_scale", "input_scale_ub"])


def experts(**options: Any) -> Any:
    return fp8_w8a8_moe_quant_config(torch.ones(2), torch.ones(2), **options)


Part = Callable[[], Any]


@pytest.mark.parametrize("part", [lambda: linear(kFp8DynamicTensorSym), experts])
def test_a_loaded_layer_with_one_scale_for_a_step_is_refused(part: Part) -> None:
    with pytest.raises(
        UnsupportedQuantisationError, match="down_proj rounds all rows of a step with one scale"
    ):
        refuse_shared_scales(loaded(part()))


@pytest.mark.parametrize(
    "part",
    [
        lambda: linear(kFp8StaticTensorSym),
        lambda: linear(kFp8DynamicTokenSym, ChannelWiseTorchFP8ScaledMMLinearKernel),
        lambda: experts(per_act_token_quant=True),
        lambda: experts(a1_scale=torch.ones(1), a2_scale=torch.ones(1)),
        lambda: experts(block_shape=[128, 128]),
        lambda: None,
    ],
)
def test_loaded_layers_with_scales_of_their_own_are_served(part: Part) -> None:
    refuse_shared_scales(loaded(part()))


# -- the page --------------------------------------------------------------------------------------


def test_every_checkpoint_has_figures_within_their_tolerance() -> None:
    table = read_page(PAGE.read_text())
    wanted = {(row, column) for row, column, _ in cases()}
    found = {
        (row, column) for row, columns in table.items() for column, cell in columns.items() if cell
    }
    assert found == wanted
    cells = {(row, column): table[row][column] for row, column in found}
    assert {
        (row, column): cell
        for (row, column), cell in cells.items()
        if parse(cell).worst > tolerance(row[1])
    } == {}


def test_the_page_quotes_the_tolerances_and_lists_every_refusal_and_caveat() -> None:
    page = PAGE.read_text()
    assert all(
        f"| {dtypes} | {each.limit:g} | {each.reason} |" in page
        for dtypes, each in QUANTISED.items()
    )
    assert all(f"`{method}`" in page for method, _, _ in MEASURED)
    assert (
        page.count("| refused: ") == len(REFUSED) + 3
    )  # and what vLLM's choice of a kernel says, and its trial
    assert page.count("| caveat: ") == len(CAVEATS) + 1  # and that no test compared the format
