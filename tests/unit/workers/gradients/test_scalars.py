"""Metrics of pairs and scalars of gradient rows, against transformers' logits."""

from collections.abc import Callable

import pytest
import torch
from gradient_kit import BASE, SOURCE, sweep

from midstream.schemas.jobs.sweeps import StoredPair
from midstream.workers.gradients.attribution import Pair
from midstream.workers.gradients.points import Points
from midstream.workers.gradients.scalars import (
    NonFiniteGradient,
    PairMetric,
    Scalar,
    gradient_rows,
    logit,
    loss,
    probe_score,
    require_finite,
)

PointsOf = Callable[[str], Points]


def logprob(points: Points, prompt: list[int], continuation: list[int]) -> float:
    """Σ log P of each token after those before it, one forward pass for each."""
    total = 0.0
    for place, token in enumerate(continuation):
        tokens = torch.tensor([[*prompt, *continuation[:place]]])
        with torch.no_grad():
            total += float(points.model(tokens).logits[0, -1].double().log_softmax(-1)[token])
    return total


@pytest.mark.parametrize(
    ("answer", "foil", "sequences"),
    [
        ([100], [200], 1),
        ([100, 5, 6], [200, 7], 2),
        ([100, 5], [100, 6, 7], 1),
        ([100, 5, 6], [], 1),
        ([100], [200, 7], 1),
    ],
)
def test_continuations_are_graded_token_by_token(
    points_of: PointsOf, answer: list[int], foil: list[int], sequences: int
) -> None:
    points = points_of("llama")
    metric = "logit_diff" if foil else "logprob"
    stored = sweep(points, ["z"], metric=metric, pair={"answer": answer, "foil": foil})
    pair = Pair(points, stored, 0)
    pair.run(grad=False)
    assert len(pair.metric.suffixes) == sequences
    for prompt, found in ((BASE, pair.base), (SOURCE, pair.source)):
        assert found is not None
        wanted = [logprob(points, prompt, tokens) for tokens in (answer, foil)]
        assert found.logprob == pytest.approx(wanted[0], abs=1e-5)
        assert found.value == pytest.approx(wanted[0] - wanted[1], abs=1e-5)
        assert (found.foil_logprob is None) == (not foil)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_kl_is_from_the_clean_prompt(points_of: PointsOf, direction: str) -> None:
    points = points_of("llama")
    pair = Pair(points, sweep(points, ["z"], metric="kl", direction=direction), 0)
    pair.run(grad=False)
    with torch.no_grad():
        base, source = (
            points.model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)
            for tokens in (BASE, SOURCE)
        )
    clean, other = (source, base) if direction == "denoise" else (base, source)
    assert pair.source is not None
    values = [pair.base.value, pair.source.value]
    divergence = float((clean.exp() * (clean - other)).sum())
    wanted = [divergence, 0.0] if direction == "denoise" else [0.0, divergence]
    assert values == pytest.approx(wanted, abs=1e-6)


def test_kl_needs_no_answer() -> None:
    pair = StoredPair(base=BASE, source=SOURCE, columns=[])
    assert PairMetric("kl", pair).sequences(BASE) == [BASE]


def test_values_of_scalars(points_of: PointsOf) -> None:
    points = points_of("llama")
    weight = torch.linspace(-1, 1, points.hidden_size)
    with torch.no_grad():
        logits = points.model(torch.tensor([BASE])).logits[0].double()
    rows = points.run(points.batch([BASE]), [("mlp_out", 2)]).rows(("mlp_out", 2))[0].double()
    score = (rows[[1, 4]] @ weight.double()).sum() + 1
    cases: list[tuple[Scalar, torch.Tensor]] = [
        (logit(7), logits[-1, 7]),
        (logit(7, 8), logits[-1, 7] - logits[-1, 8]),
        (
            loss(BASE, [4, 9]),
            -sum(logits[at - 1].log_softmax(-1)[BASE[at]] for at in (4, 9)),
        ),
        (probe_score(("mlp_out", 2), weight, 0.5, [1, 4]), score),
    ]
    for scalar, wanted in cases:
        found = gradient_rows(points, BASE, scalar, [("post_block", 1)])
        assert found.value == pytest.approx(float(wanted), abs=1e-5)
        assert found.rows["post_block", 1].shape == (len(BASE), points.hidden_size)
        assert found.rows["post_block", 1].abs().max() > 0


def test_gradient_of_a_logit_equals_autograd(points_of: PointsOf) -> None:
    points = points_of("gpt2")
    found = gradient_rows(points, BASE, logit(7), [("pre_attn", 0), ("post_block", 2)])
    model = points.model
    embeddings = (
        model.transformer.wte(torch.tensor([BASE])) + model.transformer.wpe.weight[: len(BASE)]
    ).requires_grad_()
    given = embeddings - model.transformer.wpe.weight[: len(BASE)]
    logits = model(inputs_embeds=given).logits
    (wanted,) = torch.autograd.grad(logits[0, -1, 7], embeddings)
    distance = (found.rows["pre_attn", 0] - wanted[0]).abs().max()
    assert distance <= 1e-5 * wanted.abs().max()


def test_gradient_is_zero_after_what_the_scalar_reads(points_of: PointsOf) -> None:
    points = points_of("llama")
    found = gradient_rows(points, BASE, loss(BASE, [4]), [("post_block", 1), ("z", 3)])
    assert found.rows["post_block", 1][4:].abs().max() == 0
    assert found.rows["post_block", 1][:4].abs().max() > 0


def test_first_site_that_is_not_finite_is_named() -> None:
    fine, bad = torch.zeros(2, 3), torch.tensor([[0.0, float("nan"), float("inf")]])
    with pytest.raises(NonFiniteGradient, match="z of layer 4: not finite: 2 of 3"):
        require_finite({("post_block", 1): fine, ("z", 4): bad, ("q", 5): bad})
