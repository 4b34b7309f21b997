"""Metrics of pairs and scalars of gradient rows, against transformers' logits."""

import pytest
import torch
from gradient_kit import BASE, SOURCE, PointsOf, no_sae, sweep

from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.schemas.jobs.sweeps import StoredPair
from midstream.schemas.requests.scalars import StoredScalar
from midstream.workers.gradients.captured import gradient_rows, scalar_of
from midstream.workers.gradients.pairs import (
    NonFiniteGradient,
    PairMetric,
    PairRuns,
    require_finite,
)
from midstream.workers.gradients.points import Points


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
    pair = PairRuns(points, stored, 0)
    pair.run(grad=False)
    assert len(pair.metric.suffixes) == sequences
    for prompt, found in ((BASE, pair.base), (SOURCE, pair.source)):
        wanted = [logprob(points, prompt, tokens) for tokens in (answer, foil)]
        assert found.logprob == pytest.approx(wanted[0], abs=1e-5)
        assert found.value == pytest.approx(wanted[0] - wanted[1], abs=1e-5)
        assert (found.foil_logprob is None) == (not foil)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_kl_is_from_the_clean_prompt(points_of: PointsOf, direction: str) -> None:
    points = points_of("llama")
    pair = PairRuns(points, sweep(points, ["z"], metric="kl", direction=direction), 0)
    pair.run(grad=False)
    with torch.no_grad():
        base, source = (
            points.model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)
            for tokens in (BASE, SOURCE)
        )
    clean, other = (source, base) if direction == "denoise" else (base, source)
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
    read = points.run(points.batch([BASE]), [("mlp_out", 2)]).rows(("mlp_out", 2))[0].double()
    score = (read[[1, 4]] @ weight.double()).sum() + 1
    content = ProbeContent("mlp_out", 2, ["weight", "bias"], ["a", "b"], [None, None])
    probe = StoredProbe(name="p", digest="", content=content, model="m")
    tensors = {"weight": torch.stack([0 * weight, weight]), "bias": torch.tensor([9.0, 0.5])}
    cases: list[tuple[StoredScalar, torch.Tensor]] = [
        (StoredScalar(kind="logit", token=7), logits[-1, 7]),
        (StoredScalar(kind="logit", token=7, foil=8), logits[-1, 7] - logits[-1, 8]),
        (
            StoredScalar(kind="loss", positions=[4, 9]),
            -sum(logits[at - 1].log_softmax(-1)[BASE[at]] for at in (4, 9)),
        ),
        (StoredScalar(kind="probe", probe=probe, label=1, positions=[1, 4]), score),
    ]
    for stored, wanted in cases:
        scalar = scalar_of(stored, BASE, tensors, no_sae)
        value, rows = gradient_rows(points, BASE, scalar, [("post_block", 1)])
        assert value == pytest.approx(float(wanted), abs=1e-5)
        assert rows["post_block", 1].shape == (len(BASE), points.hidden_size)
        assert rows["post_block", 1].abs().max() > 0


def test_first_site_that_is_not_finite_is_named() -> None:
    fine, bad = torch.zeros(2, 3), torch.tensor([[0.0, float("nan"), float("inf")]])
    with pytest.raises(NonFiniteGradient, match="z of layer 4: not finite: 2 of 3"):
        require_finite({("post_block", 1): fine, ("z", 4): bad, ("q", 5): bad})
