"""A fitted Jacobian lens is the mean Jacobian that autograd computes by definition; a sketch states
its error.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from midstream.schemas.artifacts.jacobian_lenses import JacobianFit, StoredLensFit
from midstream.storage.formats.lens_files import check_jacobian, directions, reading
from midstream_lab.gradients.jacobian import fit_jacobian_lens, fit_to_folder
from midstream_lab.gradients.points import ATTENTION, Points

WIDTH = 16
LAYERS = 4
SKIP = 2
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(
        vocab_size=50,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=50, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64, initializer_range=0.3
    ),
}


def tiny(name: str) -> Points:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name](), dtype=torch.float32, attn_implementation=ATTENTION
    )
    return Points(model.eval())


def corpus(count: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(49, (6 + n % 5,), generator=random).tolist() for n in range(count)]


def by_definition(points: Points, tokens: list[int], layer: int) -> torch.Tensor:
    """Of one prompt, from `torch.autograd.functional.jacobian` of the layers behind `layer`."""
    model = points.model
    stack = points.layers

    def final(hidden: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        handles = [
            stack[layer].register_forward_hook(lambda *_: hidden),
            stack[-1].register_forward_hook(lambda _, __, output: seen.append(output)),
        ]
        model(torch.tensor([tokens]), use_cache=False)
        for handle in handles:
            handle.remove()
        return seen[0]

    with torch.no_grad():
        start = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[layer + 1]
    every = torch.autograd.functional.jacobian(final, start)[0, :, :, 0]  # [t', out, t, in]
    valid = range(SKIP, len(tokens) - 1)
    each = [sum(every[after, :, t] for after in valid if after >= t) for t in valid]
    return torch.stack(each).mean(dim=0)


@pytest.mark.parametrize(("name", "batch"), [("llama", 1), ("gpt2", 5)])
def test_an_exact_fit_is_the_mean_jacobian_by_definition(name: str, batch: int) -> None:
    points = tiny(name)
    prompts = corpus(3)
    jacobians, record = fit_jacobian_lens(
        points, prompts, [0, 2], JacobianFit(skip_first=SKIP), batch=batch
    )
    assert record.method == "exact"
    assert record.prompts == 3
    assert record.errors == []
    for layer, found in jacobians.items():
        wanted = torch.stack([by_definition(points, tokens, layer) for tokens in prompts]).mean(0)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert not any(parameter.requires_grad for parameter in points.model.parameters())


def test_a_sketch_states_its_error_and_repeats_from_its_seed() -> None:
    points = tiny("llama")
    prompts = corpus(12)
    exact, _ = fit_jacobian_lens(points, prompts, [1], JacobianFit(skip_first=SKIP))
    stated = []
    real = []
    for rank in (2, 8):
        fit = JacobianFit(skip_first=SKIP, rank=rank, seed=7)
        found, record = fit_jacobian_lens(points, iter(prompts), [1], fit)
        again, _ = fit_jacobian_lens(points, iter(prompts), [1], fit, batch=3)
        torch.testing.assert_close(found[1], again[1], atol=1e-6, rtol=1e-5)
        other, _ = fit_jacobian_lens(
            points, prompts, [1], JacobianFit(skip_first=SKIP, rank=rank, seed=8)
        )
        assert not torch.allclose(found[1], other[1], rtol=1e-3)
        stated.append(record.errors[0])
        real.append(float((found[1] - exact[1]).norm() / exact[1].norm()))
    assert stated == pytest.approx(real, rel=0.5)
    assert real[1] < 0.7 * real[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fit_job_writes_a_folder_that_can_be_registered(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    points = tiny("llama")
    points.model.to(dtype)
    stored = StoredLensFit(
        name="mine",
        layers=[0, 2],
        prompts=corpus(4),
        fit=JacobianFit(skip_first=SKIP, rank=4),
        hidden_size=WIDTH,
    )
    record = fit_to_folder(points, stored, tmp_path)
    content = check_jacobian(tmp_path, LAYERS, WIDTH)
    assert content.layers == [0, 2]
    assert content.vocabulary == 50
    assert content.fit == record
    jacobians, _ = fit_jacobian_lens(points, corpus(4), [0, 2], stored.fit)
    with reading(tmp_path) as file:
        found = directions(file, [2], [7])[2, 7]
    head = points.model.get_output_embeddings().weight[7].detach().float()
    torch.testing.assert_close(torch.from_numpy(found), jacobians[2].T @ head)


@pytest.mark.parametrize(
    ("prompts", "layers", "fit", "words"),
    [
        (
            [*corpus(2), [1, 2]],
            [0],
            JacobianFit(skip_first=SKIP, rank=4),
            r"8 of 16 .* rank 4 needs at least 4 prompts",
        ),
        (corpus(1), [3], JacobianFit(), "valid: some of 0 to 2"),
    ],
)
def test_too_few_prompts_and_layers_without_a_map_are_refused(
    prompts: list[list[int]], layers: list[int], fit: JacobianFit, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        fit_jacobian_lens(tiny("llama"), prompts, layers, fit)


def test_a_fit_ends_with_what_its_check_raises() -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    points = tiny("llama")
    with pytest.raises(InterruptedError):
        fit_jacobian_lens(points, corpus(1), [0], JacobianFit(skip_first=SKIP), check)
    assert len(calls) == 3
    assert not points.layers[0]._forward_hooks


def test_gradients_that_are_not_finite_are_left_out_and_counted() -> None:
    points = tiny("llama")
    prompts = corpus(3)
    with torch.no_grad():
        points.model.get_input_embeddings().weight[49] = torch.nan
    spoilt = [*prompts[:1], [49] * 8, *prompts[1:]]
    wanted, _ = fit_jacobian_lens(tiny("llama"), prompts, [0], JacobianFit(skip_first=SKIP))
    found, record = fit_jacobian_lens(points, spoilt, [0], JacobianFit(skip_first=SKIP))
    assert record.prompts == 4
    assert record.not_finite == WIDTH
    torch.testing.assert_close(found[0], wanted[0])
