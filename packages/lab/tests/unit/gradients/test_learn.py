"""Learned steering: directions against scikit-learn and repeng's definition, LoReFT's form against
pyreft's output, and trainings on a tiny model.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_kit import PointsOf

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.requests.steering import SteeringTemplate
from midstream_lab.gradients import learn
from midstream_lab.gradients.points import Points
from midstream_lab.records.fits import FitRequest, FitTokens, StoredModuleFit

PYREFT = json.loads((Path(__file__).parents[2] / "data" / "pyreft.json").read_text())


def rows(seed: int, n: int = 24, width: int = 10) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.1, 5, width, dtype=torch.float64)
    return torch.randn(n, width, generator=generator, dtype=torch.float64) * scale


@pytest.fixture(scope="module")
def points(points_of: PointsOf) -> Points:
    return points_of("llama")


def prompts(count: int, first: int, length: int = 7) -> list[FitTokens]:
    """Prompts whose last token depends on the class `first`, the others are random."""
    draw = np.random.default_rng(first)
    return [
        FitTokens(
            token_ids=[*draw.integers(20, 500, length - 1 + i % 3).tolist(), first],
            prompt_tokens=length + i % 3,
            at="last_prompt",
        )
        for i in range(count)
    ]


def targets(count: int, target: int, at: Any = "all") -> list[FitTokens]:
    draw = np.random.default_rng(5)
    return [
        FitTokens(
            token_ids=[*draw.integers(20, 500, 4 + i % 4).tolist(), target, target + 1],
            prompt_tokens=4 + i % 4,
            at=at,
        )
        for i in range(count)
    ]


def stored(method: str, layers: Any = (1, 2), hook: Any = "post_block", **fields: Any) -> Any:
    examples = {
        name: fields.pop(name) for name in ("positive", "negative", "examples") if name in fields
    }
    request = FitRequest(model="m", name="n", method=method, layers=list(layers), **fields)
    template = SteeringTemplate(
        layers=list(layers), hook=hook, positions="all", family="add", tensors=[]
    )
    return StoredModuleFit(request=request, template=template, **examples)


# --- Closed forms


def test_pca_equals_scikit_learn_with_the_sign_of_most_pairs() -> None:
    positive = rows(1)
    negative = rows(2)
    found = learn.pca(positive, negative)
    differences = (positive - negative).numpy()
    reference = (
        pytest.importorskip("sklearn.decomposition")
        .PCA(n_components=1)
        .fit(differences)
        .components_[0]
    )
    shares = differences @ reference
    reference = -reference if (shares < 0).mean() > (shares > 0).mean() else reference
    np.testing.assert_allclose(found.numpy(), reference, atol=1e-12)
    np.testing.assert_allclose(learn.pca(negative, positive).numpy(), -reference, atol=1e-12)


def test_logistic_equals_scikit_learn_on_standardised_rows() -> None:
    positive = rows(1) + 0.3
    negative = rows(2)
    every = torch.cat([positive, negative]).numpy()
    scale = every.std(0)
    model = (
        pytest.importorskip("sklearn.linear_model")
        .LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000)
        .fit((every - every.mean(0)) / scale, [1] * 24 + [0] * 24)
    )
    found = learn.logistic(positive, negative).numpy()
    np.testing.assert_allclose(found, model.coef_[0] / scale, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", learn.DIRECTIONS)
def test_scale_1_moves_the_negative_mean_to_the_positive(method: str) -> None:
    positive = rows(1) + 0.5
    negative = rows(2)
    vector = learn.scaled(learn.DIRECTIONS[method](positive, negative), positive, negative)
    unit = vector / vector.norm()
    moved = (negative + vector).mean(0) @ unit
    assert float(moved) == pytest.approx(float(positive.mean(0) @ unit))


def test_equal_rows_are_refused() -> None:
    with pytest.raises(MidstreamError, match="do not differ"):
        learn.scaled(learn.difference_of_means(rows(1), rows(1)), rows(1), rows(1))


def test_the_dose_of_an_even_number_of_rows_is_the_mean_of_the_middle_ones(
    points: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = stored(
        "difference_of_means", layers=[1], positive=prompts(9, 1), negative=prompts(9, 2)
    )
    run = learn._Fit(points, wanted, lambda: None)
    held = torch.arange(1.0, 9.0)[:, None] * torch.eye(4)[0]
    sides = iter([held[:1] * 3, held[:1], held[:4], held[4:]])
    monkeypatch.setattr(run, "_read", lambda _: {1: next(sides)})
    assert run.direction().sites[0].dose == pytest.approx(2 * (1 / 4 + 1 / 5) / 2)


def test_auroc_equals_scikit_learn_with_ties() -> None:
    positive = torch.tensor([1.0, 2.0, 2.0, 5.0], dtype=torch.float64)
    negative = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64)
    expected = pytest.importorskip("sklearn.metrics").roc_auc_score(
        [1] * 4 + [0] * 3, [*positive.tolist(), *negative.tolist()]
    )
    assert learn.auroc(positive, negative) == pytest.approx(expected)


# --- LoReFT


def test_lowrank_edit_equals_pyreft() -> None:
    tensors = {
        "rotation": torch.tensor(PYREFT["rotate_layer"]).T,
        "weight": torch.tensor(PYREFT["weight"]),
        "bias": torch.tensor(PYREFT["bias"]),
    }
    given = torch.tensor(PYREFT["rows"])
    expected = torch.tensor(PYREFT["edited"])
    torch.testing.assert_close(learn.edited(given, tensors), expected, rtol=1e-5, atol=1e-5)


def test_orthonormal_keeps_orthonormal_rows() -> None:
    basis = torch.tensor(PYREFT["rotate_layer"]).T
    torch.testing.assert_close(learn.orthonormal(basis), basis, rtol=1e-5, atol=1e-6)
    other = learn.orthonormal(torch.randn(3, 12, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(other @ other.T, torch.eye(3), rtol=1e-5, atol=1e-6)


# --- Fits on a model


def test_direction_is_the_difference_of_the_models_rows(points: Points) -> None:
    positive = prompts(40, 7)
    negative = prompts(40, 9)
    fitted = learn.fit(points, stored("difference_of_means", positive=positive, negative=negative))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()[10:]
    means = []
    for side in (positive, negative):
        states = [
            points.model(
                torch.tensor([side[i].token_ids]), output_hidden_states=True
            ).hidden_states[2][0, -1]
            for i in order
        ]
        means.append(torch.stack(states).mean(0))
    vector = fitted.tensors[1]["vector"]
    torch.testing.assert_close(vector, means[0] - means[1], rtol=1e-4, atol=1e-5)
    assert fitted.examples == 60
    assert fitted.effect.examples == 20
    assert fitted.effect.measure == "auroc"
    assert fitted.effect.after == pytest.approx(sum(site.auroc or 0 for site in fitted.sites) / 2)
    assert fitted.effect.better


def test_random_labels_have_no_effect(points: Points) -> None:
    every = prompts(64, 7)
    wanted = stored("difference_of_means", positive=every[::2], negative=every[1::2], held_out=0.5)
    effect = learn.fit(points, wanted).effect
    assert abs(effect.after - 0.5) < 3 * effect.error


def test_direction_measures_targets_if_there_are_any(points: Points) -> None:
    wanted = stored(
        "pca", positive=prompts(12, 7), negative=prompts(12, 9), examples=targets(6, 33)
    )
    effect = learn.fit(points, wanted).effect
    assert effect.measure == "logprob"
    assert effect.examples == 6


@pytest.mark.parametrize("method", ["vector", "reft"])
def test_training_raises_the_targets_probability(points: Points, method: str) -> None:
    seen = []
    wanted = stored(method, layers=[2], examples=targets(16, 33), steps=40, learning_rate=0.05)
    fitted = learn.fit(points, wanted, seen.append)
    assert fitted.effect.better
    assert fitted.effect.after - fitted.effect.before > 2.0
    assert fitted.losses[0].step == 0
    assert seen == list(fitted.losses[1:])
    assert 0 < fitted.steps <= 40
    assert min(fitted.losses, key=lambda point: point.validation_loss).step == fitted.steps


def test_training_is_deterministic(points: Points) -> None:
    asked = {"layers": [0], "examples": targets(8, 33), "steps": 5}
    one, two = (learn.fit(points, stored("reft", **asked)) for _ in range(2))
    other = learn.fit(points, stored("reft", seed=1, **asked))
    for name, tensor in one.tensors[0].items():
        assert torch.equal(tensor, two.tensors[0][name])
    assert one.effect == two.effect
    assert one.losses != other.losses


def test_reft_rotation_is_orthonormal_after_training(points: Points) -> None:
    wanted = stored("reft", layers=[1], examples=targets(8, 33), steps=3, rank=3)
    rotation = learn.fit(points, wanted).tensors[1]["rotation"]
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(3), rtol=1e-5, atol=1e-5)


def test_effect_is_that_of_the_edited_model(points: Points) -> None:
    """The reported log-probability equals that of a plain forward with an ordinary torch hook."""
    examples = targets(8, 33, at=[1, 3])
    wanted = stored("vector", layers=[1], examples=examples, steps=5, learning_rate=0.1)
    fitted = learn.fit(points, wanted)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()[:4][1::2]

    def add(_: Any, __: Any, output: Any) -> Any:
        output[:, [1, 3]] += fitted.tensors[1]["vector"]
        return output

    handle = points.model.model.layers[1].register_forward_hook(add)
    sums = []
    for index in order:
        tokens = examples[index].token_ids
        logits = points.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        first = examples[index].prompt_tokens
        sums.append(sum(float(logits[p - 1, tokens[p]]) for p in range(first, len(tokens))))
    handle.remove()
    assert fitted.effect.after == pytest.approx(np.mean(sums), abs=1e-4)


def test_training_stops_when_the_validation_loss_rises(points: Points) -> None:
    """Targets without a pattern can only be memorised."""
    examples = [targets(8, 33 + 40 * i)[i] for i in range(8)]
    wanted = stored("reft", layers=[1], examples=examples, steps=200, learning_rate=0.1)
    fitted = learn.fit(points, wanted)
    best = min(fitted.losses, key=lambda point: point.validation_loss)
    assert fitted.losses[-1].step == best.step + 10 * learn.PATIENCE < 200
    assert fitted.steps == best.step
    assert (fitted.losses[-1].loss or 0) < (fitted.losses[1].loss or 0)
    run = learn._Fit(points, wanted, lambda: None)
    validation = run._split(examples)[1][::2]
    total = run._log_probabilities(validation, fitted.tensors).sum()
    assert -float(total) / (2 * len(validation)) == pytest.approx(best.validation_loss, abs=1e-4)


def test_check_ends_a_fit(points: Points) -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn.fit(points, stored("vector", examples=targets(8, 33)), check=check)
    assert len(calls) == 6


def test_passes_are_bounded_and_change_nothing(
    points: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = stored("vector", layers=[1], examples=targets(12, 33), steps=4)
    whole = learn.fit(points, wanted)
    monkeypatch.setattr(learn, "PASS_TOKENS", 16)
    passes = learn._passes(wanted.examples, 16)
    assert all(len(p) * max(len(example.token_ids) for example in p) <= 16 for p in passes)
    assert [example for p in passes for example in p] == wanted.examples
    cut = learn.fit(points, wanted)
    torch.testing.assert_close(
        whole.tensors[1]["vector"], cut.tensors[1]["vector"], rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("method", ["vector", "difference_of_means"])
def test_fit_that_does_not_fit_into_memory_is_refused_with_figures(
    points: Points, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    wanted = stored(method, layers=[1], examples=targets(12, 33))
    monkeypatch.setattr(learn, "free_on", lambda points: 1 << 20)
    with pytest.raises(MidstreamError, match=r"need about 0\.\d+ GiB, and 0\.00 GiB are free"):
        learn.fit(points, wanted)
