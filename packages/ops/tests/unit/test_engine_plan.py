"""What `midstream doctor --plan` says is what the engine's ranks then take."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.client.cli import main as cli
from midstream.kernels.plan import COLUMNS, COUNTS, ROWS_PER_TOKEN, Buffers
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.ring import QUEUE_BYTES, Ring, plan_queue, plan_writers
from midstream.schemas.settings.settings import Settings, load_settings
from midstream.schemas.settings.tuning import Tuning
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.dtype import choose
from midstream.workers.runner.edits import prepared_rows
from midstream.workers.runner.hooks.architectures import ARCHITECTURES, UnsupportedArchitectureError
from midstream.workers.runner.hooks.sites import Sizes, buffers_of
from midstream_ops import plan as module
from midstream_ops.checks.plan import planned
from midstream_ops.plan import model_of, plan

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
QWEN_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "intermediate_size": 160,
    "num_attention_heads": 2,
}


# -- memory
# --------------------------------------------------------------------------------------------------


def sizes_on_a_gpu(found: module.EnginePlan, settings: Settings) -> tuple[int, Sizes]:
    """Sites, and what `worker_class._sizes` gives its rank."""
    sites = len(found.hooks) * found.layers
    return sites, Sizes(
        ring_rows=2 * found.ring.step_rows,
        capacity=settings.vllm.max_num_batched_tokens,
        lists=1,
        patterns=2 * sites,
        configurations=settings.tuning.table_rows,
        entries=settings.tuning.table_entries,
    )


@pytest.mark.parametrize(
    "config", [TINY, LLAMA_8B, LLAMA_70B, QWEN_30B], ids=["tiny", "8b", "70b", "30b-a3b"]
)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {
            "hooks": "post_block,pre_attn",
            "engine.max_num_batched_tokens": 8192,
            "tuning.steering_rows": 7,
        },
    ],
)
def test_the_memory_of_buffers_is_that_of_the_buffers(
    config: dict[str, Any], given: dict[str, Any]
) -> None:
    settings = load_settings({}, **given)
    model = model_of(config)
    found = plan(model, settings)
    sites, sizes = sizes_on_a_gpu(found, settings)
    real = buffers_of(
        sites, sizes, model.hidden_size, getattr(torch, model.dtype), torch.device("meta")
    )
    wanted = {field.name: getattr(real, field.name).nbytes for field in fields(Buffers)}
    assert {part.name: part.bytes for part in found.memory if part.where == "GPU"} == wanted


@pytest.mark.parametrize(
    ("config", "ranks", "widths"),
    [
        (LLAMA_8B, 1, {"query": (3, 4096), "key": (3, 1024), "mlp_act": (1, 14336)}),
        # 8 key heads: each is on two ranks
        (LLAMA_8B, 16, {"query": (3, 256), "key": (3, 128), "mlp_act": (1, 896)}),
        (QWEN_30B, 2, {"query": (3, 2048), "key": (3, 256), "router": (1, 128)}),
    ],
)
def test_banks_inside_layers_count_with_their_own_ring_and_tables(
    config: dict[str, Any], ranks: int, widths: dict[str, tuple[int, int]]
) -> None:
    settings = Settings(hooks="all,inside", vllm=VllmOptions(tensor_parallel_size=ranks))
    model = model_of(config)
    found = plan(model, settings)
    memory = {part.name: part.bytes for part in found.memory}
    assert {name for name in memory if name.endswith(": ring")} == {
        f"{bank}: ring" for bank in widths
    }
    for bank, (hooks, width) in widths.items():
        sites = hooks * found.layers
        real = buffers_of(
            sites,
            replace(sizes_on_a_gpu(found, settings)[1], patterns=2 * sites),
            width,
            getattr(torch, model.dtype),
            torch.device("meta"),
        )
        assert memory[f"{bank}: ring"] == real.ring.nbytes
        tables = (
            sum(getattr(real, field.name).nbytes for field in fields(Buffers)) - real.ring.nbytes
        )
        assert memory[f"{bank}: tables"] == tables


def test_the_columns_are_those_of_the_kernels() -> None:
    assert module.PLAN_COLUMNS == COLUMNS
    assert module.COUNTS == COUNTS
    assert module.ROWS_PER_TOKEN == ROWS_PER_TOKEN
    assert module.KEPT_BYTES == prepared_rows.KEPT_BYTES


def test_a_pipeline_stage_holds_its_share_of_layers_and_buffers() -> None:
    model = model_of(LLAMA_70B)
    whole = plan(model, Settings())
    half = plan(model, Settings(vllm=VllmOptions(pipeline_parallel_size=2)))
    slots = {part.name: part.bytes for part in half.memory}["capture_slots"]
    assert half.layers == 40
    assert 2 * slots == {part.name: part.bytes for part in whole.memory}["capture_slots"]


@pytest.mark.parametrize("eager", [None, False])
def test_a_cpu_has_no_ring_and_no_launches(eager: bool | None) -> None:
    found = plan(model_of(TINY), Settings(vllm=VllmOptions(enforce_eager=eager)), gpu=False)
    assert found.ring is None
    assert found.work == []
    assert {part.where for part in found.memory} == {"host"}


RING = Ring(rows=65536, size=1 << 30)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"ring": None}, QUEUE_BYTES),
        ({}, 2 << 30),  # four steps of half a GiB
        ({"size_mib": 7}, 7 << 20),
        ({"host_bytes": 16 << 30}, 1 << 30),
        ({"host_bytes": 16 << 30, "ranks": 8}, QUEUE_BYTES),
    ],
)
def test_the_queue_holds_some_steps_and_leaves_the_host_its_memory(
    asked: dict[str, Any], expected: int
) -> None:
    assert plan_queue(**{"ring": RING} | asked) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"accelerator": False, "cores": 64}, 2),
        ({"accelerator": True, "cores": 4}, 2),
        ({"accelerator": True, "cores": 16}, 4),
        ({"accelerator": True, "cores": 24, "ranks": 2}, 3),
        ({"accelerator": True, "cores": 192}, 4),
        ({"accelerator": True, "cores": 16, "threads": 1}, 1),
    ],
)
def test_the_writers_of_a_rank_follow_its_cores_on_a_gpu(
    asked: dict[str, Any], expected: int
) -> None:
    assert plan_writers(**asked) == expected


# -- work and bytes
# --------------------------------------------------------------------------------------------------


def test_idle_steps_launch_nothing_and_busy_ones_more_with_more_hooks() -> None:
    work = {
        (each.hooks, each.step): each.cost for each in plan(model_of(LLAMA_8B), Settings()).work
    }
    assert work["6 hooks", "idle"].launches == 0
    assert 0 < work["post_block", "steered"].launches < work["6 hooks", "all six captured"].launches
    assert work["6 hooks", "steered"].launches == 33, "those of the stream, and the first of it"
    assert work["post_block", "captured"].host_bytes == 32 * 64 * 8192


def test_an_8b_makes_256_kib_of_rows_per_token() -> None:
    found = {
        stream.captured: stream
        for stream in plan(model_of(LLAMA_8B), Settings(), tokens_per_second=1000).streams
    }
    assert found["every layer at one hook"].token_bytes == 256 << 10
    assert found["every layer at one hook"].bytes_per_s == 256e3 * 1024
    assert found["every layer at 6 hooks"].token_bytes == 6 * (256 << 10)


@pytest.mark.parametrize(
    ("config", "billions"),
    [(LLAMA_8B, 8.03), (LLAMA_70B, 70.6), (QWEN_30B, 30.5)],
    ids=["8b", "70b", "30b-a3b"],
)
def test_parameters_are_counted_from_the_shape(config: dict[str, Any], billions: float) -> None:
    assert model_of(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


_INT4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}


@pytest.mark.parametrize(
    ("quantisation", "gib"),
    [
        ({}, 0),
        ({"quant_method": "fp8"}, 8.46),
        ({"quant_method": "awq", "bits": 4}, 5.21),
        (_INT4, 5.21),
        ({"quant_method": "new"}, 0),
    ],
)
def test_quantised_weights_count_with_their_bits_and_embeddings_with_16(
    quantisation: dict[str, Any], gib: float
) -> None:
    model = model_of(LLAMA_8B | {"quantization_config": quantisation})
    assert model.parameters * model.weight_bytes / (1 << 30) == pytest.approx(gib, rel=0.01)
    assert (plan(model, Settings()).step_s < plan(model_of(LLAMA_8B), Settings()).step_s) is (
        gib > 0
    )


@pytest.mark.parametrize(("given", "dtype"), [("auto", "bfloat16"), ("float32", "float32")])
def test_a_gpu_serves_a_checkpoint_in_float32_in_bfloat16_unless_told_otherwise(
    given: str, dtype: str
) -> None:
    config = TINY | {"dtype": "float32"}
    assert model_of(config, choose(given, config, gpu=True).dtype).dtype == dtype


def test_adapters_are_divided_on_one_side_and_experts_take_none() -> None:
    """Of Llama 8B, rank 1, inputs and outputs of a layer: 28,672 undivided ones, and 53,248 that
    two ranks divide.
    """
    found = {
        ranks: {
            part.name: part.bytes
            for part in plan(
                model_of(LLAMA_8B),
                Settings(vllm=VllmOptions(max_loras=4, tensor_parallel_size=ranks)),
            ).memory
        }
        for ranks in (1, 2)
    }
    weight = 32 * 64 * 2  # layers, largest rank, bytes
    assert found[1]["adapters"] == 4 * weight * (28672 + 53248)
    assert found[2]["adapters"] == 4 * weight * (28672 + 53248 // 2)
    assert (
        found[1]["loaded adapters"] == found[2]["loaded adapters"] == 16 * weight * (28672 + 53248)
    )
    assert "adapters" not in {part.name for part in plan(model_of(LLAMA_8B), Settings()).memory}
    assert {
        part.bytes
        for part in plan(model_of(QWEN_30B), Settings(vllm=VllmOptions(max_loras=4))).memory
        if "adapters" in part.name
    } == {0}


# -- limits
# --------------------------------------------------------------------------------------------------


def limits(config: dict[str, Any], **given: Any) -> dict[str, str]:
    return {
        text.partition(":")[0]: text
        for text in plan(model_of(config), load_settings({}, **given)).limits[::-1]
    }


def test_the_layers_that_one_step_captures_follow_from_the_ring() -> None:
    given = {"engine.max_num_batched_tokens": 8192, "tuning.capture_buffer_mib": 1024}
    assert (
        "a step of 8192 tokens captures at most 8 of 32 layers"
        in limits(LLAMA_8B, **given)["tuning.capture_buffer_mib"]
    )
    given["tuning.capture_buffer_mib"] = 16384
    assert (
        "captures every layer at 4 of 6 hooks"
        in limits(LLAMA_8B, **given)["tuning.capture_buffer_mib"]
    )


def test_a_ring_for_less_than_one_token_is_named() -> None:
    found = plan(model_of(LLAMA_70B), Settings(tuning=Tuning(capture_buffer_mib=4))).limits
    assert any("captures at most 128 of the 480 sites" in text for text in found)


def test_long_captures_take_a_window_of_memory_each() -> None:
    found = limits(
        LLAMA_8B, **{"tuning.capture_memory_mib": 4096, "tuning.capture_window_mib": 64}
    )["tuning.capture_memory_mib"]
    assert "at most 64 at a time" in found
    assert "more than 256 positions" in found


def test_too_few_steering_rows_are_named() -> None:
    assert "tuning.steering_rows" in limits(LLAMA_8B, **{"engine.max_num_seqs": 256})
    assert "tuning.steering_rows" not in limits(LLAMA_8B, **{"engine.max_num_seqs": 64})


# -- checkpoints and the command
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_plan(name: str) -> None:
    """Also with the spellings of older config files."""
    config = {
        "architectures": [name],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 100,
        "torch_dtype": "float16",
    }
    model = model_of(config)
    assert model.layers == 2
    assert model.hidden_size == 64
    assert model.row_bytes == 128
    assert plan(model, Settings()).work


def test_a_hook_that_the_model_lacks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="has no mlp_in"):
        plan(model_of({**TINY, "architectures": ["Olmo2ForCausalLM"]}), Settings(hooks="mlp_in"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "config.json"),
        ('{"architectures": ["LlamaForCausalLM"]}', "it has no 'num_hidden_layers'"),
    ],
)
def test_a_checkpoint_that_cannot_be_planned_is_an_error_with_its_reason(
    tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(MidstreamError, match=said):
        planned(Settings(model=str(tmp_path)), True, 1, 0)


def test_the_command_prints_the_plan_for_people_and_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    given = ["doctor", "--plan", "--model", str(tmp_path), "--set", "hooks=post_block"]
    cli.app([*given, "--gpu-memory-gib", "80"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM: 32 layers × 4096, bfloat16, 8.03 B parameters" in printed
    assert re.search(r"^info hooks +post_block$", printed, re.MULTILINE)
    cli.app([*given, "--tokens-per-second", "10", "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert {each["level"] for each in told} == {"info"}
    disk = [each["figures"] for each in told if each["about"] == "disk"]
    assert disk[1] == [256 << 10, 10 * (256 << 10)]
    totals = {each["about"]: each["figures"] for each in told if each["about"].startswith("total")}
    assert (
        sum(each["figures"][0] for each in told if " MiB on the GPU: " in each["found"])
        == (totals["total GPU"][0])
    )
