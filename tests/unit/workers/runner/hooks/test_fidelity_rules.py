"""Is a config refused by name that is known to give other numbers, or served with a caveat?"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import CHECKPOINTS, Checkpoint

from midstream.workers.runner.hooks import config_rules as fidelity
from midstream.workers.runner.hooks.architectures import UnsupportedArchitectureError, describe
from midstream.workers.runner.hooks.config_rules import EVERYWHERE, ROPE_KEYS, RULES


def package(name: str) -> Path:
    """Its folder; nothing is imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_keys_of_rope_parameters_are_read_by_both_libraries() -> None:
    def words(*paths: Path) -> set[str]:
        return {
            str(node.value)
            for path in paths
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Constant)
        }

    theirs = words(package("transformers") / "modeling_rope_utils.py")
    ours = words(package("vllm") / "model_executor" / "layers" / "rotary_embedding" / "__init__.py")
    assert ROPE_KEYS - theirs == set()
    assert ROPE_KEYS - ours == set()


# -- refusals and caveats
# ----------------------------------------------------------------------------------------------

OF = {made.architecture: name for name, made in reversed(CHECKPOINTS.items())}


def changed(name: str, **options: Any) -> Checkpoint:
    return dataclasses.replace(CHECKPOINTS[name], options=CHECKPOINTS[name].options | options)


def adapter(name: str, max_model_len: int = 128, **options: Any):
    made = changed(name, **options)
    return describe(made.architecture, made.hf_config(), max_model_len)


#: Values of fields that are neither flags nor integers.
OTHER: dict[str, Any] = {
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "attn_logit_softcapping": 7.0,
}


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        (name, rule.field)
        for name, rules in RULES.items()
        if name in OF
        for rule in (*EVERYWHERE, *rules)
    ],
)
def test_another_value_of_the_field_is_refused_by_name_with_the_served_ones(
    architecture: str, field: str
) -> None:
    (rule,) = [rule for rule in (*EVERYWHERE, *RULES[architecture]) if rule.field == field]
    flags = [not value for value in rule.served if isinstance(value, bool)]
    config = CHECKPOINTS[OF[architecture]].hf_config()
    setattr(config, field, flags[0] if flags else OTHER.get(field, 7))
    with pytest.raises(
        UnsupportedArchitectureError,
        match=rf"{architecture}: {field}=.* is not served: .*; served: ",
    ):
        describe(architecture, config)


def test_every_checkpoint_that_is_measured_is_served_without_a_caveat() -> None:
    assert {name: adapter(name).caveats for name in CHECKPOINTS} == dict.fromkeys(CHECKPOINTS, ())


SHARP = {"short_factor": [1.0] * 16, "long_factor": [8.0] * 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    **SHARP,
    "original_max_position_embeddings": 64,
}


def test_longrope_beyond_the_original_length_is_served_with_a_caveat() -> None:
    options = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    assert adapter("phi3", 64, **options).caveats == ()
    (caveat,) = adapter("phi3", 65, **options).caveats
    assert "long factors" in caveat
    assert "max_model_len=64" in caveat


@pytest.mark.parametrize(
    ("name", "rope", "match"),
    [
        ("olmo", LONGROPE, "others in its batch"),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, "set max_model_len to 4096"),
        (
            "llama",
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor is not served",
        ),
    ],
)
def test_a_rotary_embedding_that_is_computed_otherwise_is_refused(
    name: str, rope: dict[str, Any], match: str
) -> None:
    config = CHECKPOINTS[name].hf_config()
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    with pytest.raises(UnsupportedArchitectureError, match=match):
        describe(CHECKPOINTS[name].architecture, config, 5000)


@pytest.mark.parametrize(
    ("name", "rope", "caveat"),
    [
        ("llama", {"rope_type": "default", "mrope_section": [8, 4, 4]}, "mrope_section"),
        ("gemma3", {"full_attention": {"rope_type": "default", "use_fope": True}}, "use_fope"),
        ("llama", {"rope_type": "ntk", "factor": 2.0}, "the rope_type 'ntk'"),
    ],
)
def test_a_rotary_embedding_that_no_test_ran_with_has_a_caveat(
    name: str, rope: dict[str, Any], caveat: str
) -> None:
    config = CHECKPOINTS[name].hf_config()
    config.rope_parameters = rope
    found = describe(CHECKPOINTS[name].architecture, config, 5000).caveats
    assert found == (f"unproven: rope_parameters: {caveat}",)


@pytest.mark.parametrize(
    ("name", "interleaved"), [("Qwen2VL", False), ("Qwen2_5_VL", False), ("Qwen3VL", True)]
)
def test_three_positions_are_served_as_transformers_rotates_by_them(
    name: str, interleaved: bool
) -> None:
    """transformers' model interleaves, or does not, whatever the config says; vLLM reads the
    config.
    """
    classes = importlib.import_module(
        getattr(transformers, f"{name}Config").__module__.replace("configuration", "modeling")
    )
    embedding = next(
        getattr(classes, f"{name}{kind}")
        for kind in ("TextRotaryEmbedding", "RotaryEmbedding")
        if hasattr(classes, name + kind)
    )
    shape = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}

    def config(**rope: Any) -> Any:
        return getattr(transformers, f"{name}Config")(text_config=shape | {"rope_parameters": rope})

    positions = torch.arange(15).view(3, 1, 5) % 7  # in time, height and width
    wanted, other = (
        embedding(config(**rope, mrope_interleaved=said).get_text_config())(
            torch.zeros(1), positions
        )[0]
        for said in (False, True)
    )
    assert torch.equal(wanted, other)
    describe(f"{name}ForConditionalGeneration", config(**rope, mrope_interleaved=interleaved))
    with pytest.raises(
        UnsupportedArchitectureError,
        match=f"mrope_interleaved=.* is not served: .*; served: {interleaved}",
    ):
        describe(
            f"{name}ForConditionalGeneration", config(**rope, mrope_interleaved=not interleaved)
        )
    with pytest.raises(
        UnsupportedArchitectureError,
        match="mrope_interleaved=False is not served"
        if interleaved
        else "mrope_section is missing",
    ):
        describe(
            f"{name}ForConditionalGeneration",
            config(**rope) if interleaved else config(rope_type="default", rope_theta=1e4),
        )


OTHERS = [
    ("BloomForCausalLM", transformers.BloomConfig(), "its tanh approximation"),
    ("Lfm2ForCausalLM", transformers.Lfm2Config(), "is not served on a CPU: vLLM's CPU kernel"),
    (
        "Mamba2ForCausalLM",
        transformers.Mamba2Config(n_groups=8),
        r"n_groups=8 is not served: .*; served: 1",
    ),
    (
        "DeepseekV3ForCausalLM",
        transformers.DeepseekV3Config(),
        "the rope_type 'default' is not served on a CPU",
    ),
    (
        "PhiMoEForCausalLM",
        transformers.PhimoeConfig(lm_head_bias=True),
        "leaves out the bias of the output matrix",
    ),
    (
        "Cohere2ForCausalLM",
        transformers.Cohere2Config(sliding_window=4096),
        "set max_model_len to 4096 or less",
    ),
]


@pytest.mark.parametrize(
    ("architecture", "config", "match"), OTHERS, ids=[name for name, *_ in OTHERS]
)
def test_what_the_walk_found_to_differ_is_refused_with_the_reason(
    architecture: str, config: Any, match: str
) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=match):
        describe(architecture, config, 5000)


def test_what_differs_on_a_cpu_only_is_served_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "_on_cpu", lambda: False)
    for name, config in (
        ("Lfm2ForCausalLM", transformers.Lfm2Config()),
        ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config()),
    ):
        assert describe(name, config, 5000).caveats == ()


def test_a_least_time_step_is_a_caveat() -> None:
    assert [
        "time_step_min" in each
        for each in describe("NemotronHForCausalLM", transformers.NemotronHConfig()).caveats
    ] == [True]
    assert (
        describe("NemotronHForCausalLM", transformers.NemotronHConfig(time_step_min=1e-8)).caveats
        == ()
    )


def test_a_least_time_step_that_matters_is_refused() -> None:
    why = r"time_step_min=0.5: .* served up to 0.001"
    with pytest.raises(UnsupportedArchitectureError, match=why):
        describe("NemotronHForCausalLM", transformers.NemotronHConfig(time_step_min=0.5))


def test_heads_that_vllm_reorders_as_it_loads_them_have_a_caveat() -> None:
    """Drafters aside, no other model file of vLLM has such a step."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    models = (Path(spec.origin).parent / "model_executor" / "models").glob("*.py")
    assert {path.name for path in models if "def permute_qk" in path.read_text()} == {
        "llama4.py",
        "llama4_eagle.py",
    }
    (caveat,) = fidelity.caveats(
        "Llama4ForCausalLM", transformers.Llama4TextConfig(), 64, backend=False
    )
    assert "in vLLM's order" in caveat
    assert fidelity.caveats("LlamaForCausalLM", transformers.LlamaConfig(), 64, backend=False) == ()
