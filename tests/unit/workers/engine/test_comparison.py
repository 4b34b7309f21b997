"""Which errors of rows are a difference from transformers, and which are rounding?"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.settings.settings import Settings
from midstream.workers.engine.proof.comparison import (
    LONGEST,
    ComparedPrompt,
    Difference,
    FinalLogits,
    _error,
    differences,
    figures,
    longer,
    source_of,
    suspects,
    verdict,
)
from midstream.workers.engine.proof.reference import NamedTensors, NotComparableError
from midstream.workers.runner.hooks.config_rules import as_served

ROWS = 6
HIDDEN = 32


class Model:
    """What `Reference` gives: two layers, whose second adds little to a large stream; `noise`: of
    its own rounding.
    """

    routed = (False, True)

    def __init__(self, noise: float = 0.0) -> None:
        torch.manual_seed(1)
        self._noise = noise
        self._now = 0.0
        stream = 100 * torch.randn(ROWS, HIDDEN)
        branches = torch.randn(2, 2, ROWS, HIDDEN)
        self.layers: list[dict[str, torch.Tensor]] = []
        for attention, mlp in branches:
            middle = stream + attention
            self.layers.append(
                {
                    "input": stream,
                    "attn.output": attention,
                    "norm.input": middle,
                    "mlp.output": mlp,
                    "output": middle + mlp,
                }
            )
            stream = middle + mlp

    def round(self, dtype: torch.dtype) -> None:
        self._now = self._noise

    def trace(self, tokens: Any, positions: Any) -> list[NamedTensors]:
        return [{name: self._off(each) for name, each in layer.items()} for layer in self.layers]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._off(rows @ torch.ones(HIDDEN, 7))

    def _off(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self._now * rows.norm(dim=-1, keepdim=True) / HIDDEN**0.5


NAMES = {
    "pre_attn": "input",
    "attn_out": "attn.output",
    "post_attn": "norm.input",
    "mlp_out": "mlp.output",
    "post_block": "output",
}


def served(model: Model) -> dict[tuple[Any, int], torch.Tensor]:
    return {
        (hook, layer): tensors[name].clone()
        for layer, tensors in enumerate(model.layers)
        for hook, name in NAMES.items()
    }


def found(
    rows: dict[tuple[Any, int], torch.Tensor],
    dtype: str = "float32",
    noise: float = 0.0,
    logits: float = 1.0,
) -> list[Difference]:
    model = Model(noise)
    last = model.layers[-1]["output"]
    head = FinalLogits(
        last,
        logits
        * torch.cat([last @ torch.ones(HIDDEN, 7), torch.full((ROWS, 1), -torch.inf)], dim=1),
    )
    return differences(model, [ComparedPrompt([], [], rows)], head, dtype)  # type: ignore[arg-type]


def test_equal_rows_and_logits_are_laws_that_hold() -> None:
    each = found(served(Model()))
    assert verdict(each) is None
    laws, lacking = figures(each, HOOKS)
    assert [law.law.split()[0] for law in laws] == [
        *(hook for hook in HOOKS if hook in NAMES),
        "logits",
    ]
    assert all(law.ok for law in laws)
    assert lacking == {}


def test_a_layer_that_adds_something_else_to_a_large_stream_differs() -> None:
    """The stream is off by less than a thousandth; the first hook that shows it is named."""
    rows = served(Model())
    wrong = 0.05 * rows["mlp_out", 1]
    rows["mlp_out", 1] += wrong
    rows["post_block", 1] += wrong
    assert float((wrong.norm(dim=-1) / rows["post_block", 1].norm(dim=-1)).max()) < 1e-3
    first = verdict(found(rows))
    assert first.hook == "mlp_out"
    assert first.layer == 1
    assert str(first).startswith("mlp_out of layer 1 differs from transformers' by 0.05")


def test_a_branch_without_a_tensor_in_transformers_is_not_compared() -> None:
    rows = served(Model())
    rows["attn_out", 0] *= 0.7
    each = found(rows)
    assert verdict(each) is None
    assert figures(each, HOOKS)[1] == {
        "attn_out = transformers'": "transformers' layer 0 has no tensor with these rows"
    }


def test_other_logits_differ() -> None:
    assert verdict(found(served(Model()), logits=1.01)).hook == "logits"


@pytest.mark.parametrize(("off", "differs"), [(0.03, False), (0.3, True)])
def test_bf16_may_be_off_by_as_much_as_transformers_is(off: float, differs: bool) -> None:
    rows = {
        place: each + off * each.norm(dim=-1, keepdim=True) / HIDDEN**0.5
        for place, each in served(Model()).items()
    }
    assert (verdict(found(rows, "bfloat16", noise=0.02)) is not None) is differs


@pytest.mark.parametrize(("count", "differs"), [(2, False), (4, True)])
def test_above_a_router_the_median_row_counts_in_bf16(count: int, differs: bool) -> None:
    rows = served(Model())
    rows["post_block", 1][:count] *= 2
    assert (verdict(found(rows, "bfloat16", noise=0.01)) is not None) is differs
    assert verdict(found(rows)) is not None, "in float32 every row counts"
    two = torch.tensor([[1.1], [1.3]])
    of = torch.ones(2, 1)
    assert _error(two, of, of[:, 0], median=True) == pytest.approx(0.2), "the mean of both"


def test_rows_that_are_not_finite_differ_and_transformers_own_prove_nothing() -> None:
    rows = served(Model())
    rows["post_block", 0][0, 0] = torch.nan
    assert verdict(found(rows)) is not None
    model = Model()
    model.layers[0]["output"][0, 0] = torch.nan
    with pytest.raises(NotComparableError, match="not finite"):
        differences(model, [ComparedPrompt([], [], served(Model()))], None, "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, (0, [])),
        ({"sliding_window": None}, (0, [])),
        ({"sliding_window": 16}, (0, [])),  # the first prompt is longer
        ({"sliding_window": 512}, (520, [])),
        ({"sliding_window": 128, "chunk_size": 256}, (264, [])),
        ({"sliding_window": 4096}, (0, ["sliding_window=4096"])),
        ({"sliding_window": LONGEST}, (0, [f"sliding_window={LONGEST}"])),
    ],
)
def test_a_longer_prompt_passes_the_windows_of_a_model(
    fields: dict[str, Any], wanted: tuple[int, list[str]]
) -> None:
    assert longer(SimpleNamespace(**fields), 26, 2000) == wanted


def test_suspects_are_fields_that_are_not_defaults_but_no_sizes() -> None:
    config = transformers.OlmoeConfig(
        hidden_size=64,
        num_experts=8,
        clip_qkv=0.5,
        rms_norm_eps=0.1,
        architectures=["OlmoeForCausalLM"],
    )
    assert suspects(config) == ["rms_norm_eps=0.1", "clip_qkv=0.5"]


@pytest.mark.parametrize(
    ("options", "quantization", "refused"),
    [
        ({}, "", ""),
        ({"compare": "off"}, "", "the setting compare=off"),
        ({"engine_options": {"load_format": "dummy"}}, "", "load_format=dummy"),
        ({"engine_options": {"moe_backend": "triton"}}, "", ""),
        ({}, "fp8: float8 weights", "its weights are quantised (fp8: float8 weights)"),
    ],
)
def test_what_is_not_compared_has_a_reason(
    options: dict[str, Any], quantization: str, refused: str
) -> None:
    config = SimpleNamespace(
        model="folder",
        architectures=["LlamaForCausalLM"],
        revision=None,
        trust_remote_code=False,
        max_model_len=128,
        hf_config=transformers.LlamaConfig(),
        hf_text_config=transformers.LlamaConfig(),
    )
    assert source_of(Settings(**options), config, quantization).refused == refused


def test_what_a_caveat_says_is_no_difference() -> None:
    """transformers computes longrope with the long factors, and no least time step, as the served
    model does.
    """
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0],
        "long_factor": [4.0],
        "original_max_position_embeddings": 64,
    }
    config = SimpleNamespace(rope_parameters=rope)
    assert as_served("Phi3ForCausalLM", config, 64) == {}
    assert as_served("Phi3ForCausalLM", config, 65)["rope_parameters"]["short_factor"] == [4.0]
    assert (
        as_served("NemotronHForCausalLM", transformers.NemotronHConfig(), 64)["time_step_min"]
        < 1e-6
    )
