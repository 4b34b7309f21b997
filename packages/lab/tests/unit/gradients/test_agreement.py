"""The gradient worker's rows are judged as the certificate judges rows: each hook at its scale."""

import copy

import pytest
import torch
from gradient_kit import small_llama
from refusal_kit import refuses
from transformers import LlamaForCausalLM

from midstream.workers.engine.proof.comparison import ComparedPrompt
from midstream_lab.gradients.agreement import Traces, compared, prompt_of
from midstream_lab.gradients.points import Points

HOOKS = ["pre_attn", "attn_out", "mlp_out", "post_block", "z"]
TOKENS = list(range(3, 15))
POSITIONS = [0, 2, 5, 11]


def model_of(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return small_llama(num_hidden_layers=3, num_key_value_heads=2).to(dtype)


def served_by(points: Points) -> ComparedPrompt:
    """Rows as a vLLM worker would have supplied them, with its own rounding."""
    rows = Traces(points, HOOKS).trace(TOKENS, POSITIONS)
    return ComparedPrompt(
        TOKENS,
        POSITIONS,
        {
            (hook, layer): of_layer[hook] * (1 + 1e-6)
            for layer, of_layer in enumerate(rows)
            for hook in HOOKS
        },
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_the_same_model_agree_in_every_hook_and_layer(dtype: str) -> None:
    points = Points(model_of(getattr(torch, dtype)))
    found = compared(points, served_by(points), dtype)
    assert {(item.hook, item.layer) for item in found} == {
        (hook, layer) for hook in HOOKS for layer in range(3)
    }


def test_a_hook_that_differs_is_refused_with_its_layer_and_figure() -> None:
    points = Points(model_of())
    served = served_by(points)
    served.rows["mlp_out", 1][:] *= 1.001  # type: ignore[index]
    with refuses(
        "mlp_out of layer 1 differs from transformers' by 0.001",
        "tolerance 0.0001",
        kind="gradients_refused",
    ):
        compared(points, served, "float32")


def test_rounding_of_a_huge_first_token_is_no_difference() -> None:
    model = model_of()
    model.model.embed_tokens.weight[TOKENS[0]] *= 3e5
    points = Points(model)
    served = served_by(points)
    rounded = {site: row * (1 + 2**-22) for site, row in served.rows.items()}
    added = served.rows["post_block", 1][0] - served.rows["pre_attn", 1][0]
    error = rounded["post_block", 1][0] - served.rows["post_block", 1][0]
    assert error.norm() / added.norm() > 1e-4  # what the layer adds is the wrong scale
    compared(points, served._replace(rows=rounded), "float32")


def test_exact_rows_of_a_bfloat16_model_are_those_in_float32() -> None:
    model = model_of(torch.bfloat16)
    expected = Traces(Points(copy.deepcopy(model).float()), HOOKS).trace(TOKENS, POSITIONS)
    traces = Traces(Points(model), HOOKS)
    exact = traces.trace(TOKENS, POSITIONS)
    traces.round(torch.bfloat16)
    own = traces.trace(TOKENS, POSITIONS)
    assert torch.equal(exact[2]["post_block"], expected[2]["post_block"])
    assert not torch.equal(own[2]["post_block"], expected[2]["post_block"])
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_the_prompt_has_its_first_token_among_the_compared_positions() -> None:
    tokens, positions = prompt_of(100, 30, 512)
    assert len(tokens) == 34
    assert positions[0] == 0
    assert positions[-1] == 33
    assert min(tokens) >= 12
    assert max(tokens) < 50
    assert len(prompt_of(100, 30, 10)[0]) == 9
