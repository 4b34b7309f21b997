"""Effects of an autoencoder's features and of its error, and gradients of an activation."""

from typing import Any

import numpy as np
import pytest
import sae_rows
import torch
from gradient_kit import BASE, SOURCE, PointsOf, positions, sweep

from midstream.schemas.artifacts.saes import SaeForm, StoredSae
from midstream.schemas.requests.scalars import StoredScalar
from midstream.workers.runner.readings.sae import NORMALISATIONS, Autoencoder
from midstream_lab.gradients.attribution import estimate_pair
from midstream_lab.gradients.captured import gradient_rows, scalar_of
from midstream_lab.gradients.estimates import feature_effects
from midstream_lab.gradients.points import Points, SiteKey
from midstream_lab.records.estimates import Estimate, StoredAttribution, Verify

SITE: SiteKey = ("post_block", 1)
FEATURES = 96


def autoencoder(width: int, name: str) -> Autoencoder:
    """A random one of a form of `sae_rows.FORMS`."""
    options = sae_rows.FORMS[name]
    rng = np.random.default_rng(3)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.from_numpy((scale * rng.standard_normal(shape)).astype(np.float32))

    tensors = {
        "W_enc": normal(width, FEATURES, scale=0.2),
        "W_dec": normal(FEATURES, width, scale=0.2),
        "b_dec": normal(width, scale=0.1),
        "b_enc": normal(FEATURES, scale=0.3),
        "threshold": normal(FEATURES, scale=0.2).abs(),
        **{part: normal(FEATURES, scale=0.3) for part in ("b_gate", "r_mag", "b_mag")},
    }
    return Autoencoder(SaeForm(d_in=width, d_sae=FEATURES, **options), tensors)


def estimate(
    points: Points, sae: Autoencoder, keep: int, draw: int = 0, seed: int = 0, **given: Any
) -> Estimate:
    named = StoredSae(name="s", digest="", path="", hook=SITE[0], layer=SITE[1], bytes=0)
    verify = Verify(random=draw) if draw else None
    how = StoredAttribution("attribution", 1, seed, keep, verify=verify, sae=named)
    asked = sweep(points, ["post_block"], attribution=how, **given)
    return feature_effects(points, asked, 0, sae)


def effects(points: Points, sae: Autoencoder, **given: Any) -> np.ndarray:
    """Of each column, all features and then the error: `[columns, features + 1]`."""
    found = estimate(points, sae, len(BASE) * (FEATURES + 1), **given).features
    result = np.full((len(BASE), FEATURES + 1), np.nan)
    for each in found:
        result[each.column, each.feature] = each.score
    return result


@pytest.mark.parametrize("form", ["standard", "jumprelu", "topk", "rescaled", "layer_norm"])
@pytest.mark.parametrize("given", [{}, {"ablation": "mean"}, {"alpha": 0.5}])
def test_features_and_error_sum_to_the_row(
    points_of: PointsOf, form: str, given: dict[str, Any]
) -> None:
    points = points_of("llama")
    found = effects(points, autoencoder(points.hidden_size, form), **given)
    whole = estimate_pair(points, sweep(points, ["post_block"], layers=[1], **given), 0)
    assert found.sum(1) == pytest.approx(whole.effects["post_block"][0], abs=1e-6)
    few = estimate(points, autoencoder(points.hidden_size, form), 3, **given).features
    sizes = [abs(each.score) for each in few]
    assert sizes == pytest.approx(np.sort(np.abs(found).ravel())[:-4:-1])


def test_zeros_remove_features_and_error_but_not_biases(points_of: PointsOf) -> None:
    points = points_of("llama")
    sae = autoencoder(points.hidden_size, "standard")
    found = effects(points, sae, ablation="zeros", columns=positions(len(BASE)))
    run = points.run(points.batch([BASE]), [SITE], grad=True)
    slope = run.gradients(run.logits[0, -1, 100] - run.logits[0, -1, 200])[SITE][0]
    wanted = ((sae.decode(torch.zeros(1, FEATURES))[0] - run.rows(SITE)[0]) * slope).sum(1).numpy()
    assert found.sum(1) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("form", sorted(sae_rows.FORMS))
def test_gradient_of_an_activation(points_of: PointsOf, form: str) -> None:
    points = points_of("llama")
    sae = autoencoder(points.hidden_size, form)
    rows = points.run(points.batch([BASE]), [SITE]).rows(SITE)[0]
    encoded = sae.encode(rows[4:6])
    feature = int(encoded.sum(0).argmax())
    stored = StoredSae(name="s", digest="", path="", hook=SITE[0], layer=SITE[1], bytes=0)
    wanted_scalar = StoredScalar(kind="feature", sae=stored, feature=feature, positions=[4, 5])
    scalar = scalar_of(wanted_scalar, BASE, {}, lambda _: sae)
    value, found = gradient_rows(points, BASE, scalar, [SITE, ("mlp_out", 0)])
    assert value == pytest.approx(float(encoded[:, feature].sum()), rel=1e-6)
    direction = torch.randn(points.hidden_size, generator=torch.Generator().manual_seed(1))
    moved = [sae.encode(rows[4:6] + by * direction)[:, feature].sum() for by in (1e-3, -1e-3)]
    slope = float(moved[0] - moved[1]) / 2e-3
    assert slope == pytest.approx(float((found[SITE] @ direction).sum()), rel=2e-2, abs=1e-3)
    assert found["mlp_out", 0].abs().max() > 0


@pytest.mark.parametrize("form", ["jumprelu", "rescaled", "layer_norm"])
def test_an_estimate_is_the_slope_of_the_exact_patch(points_of: PointsOf, form: str) -> None:
    """The exact patch writes row + delta · W_dec, by a hook of the model's own; a small share of
    it, in both directions, changes the metric by what is estimated of that share.
    """
    points = points_of("llama")
    alpha = 2e-3
    sae = autoencoder(points.hidden_size, form)
    found = effects(points, sae, alpha=alpha)
    rows, source = (
        points.run(points.batch([prompt]), [SITE]).rows(SITE)[0].float()
        for prompt in (BASE, SOURCE)
    )
    parts = sae.exchange(rows, source)
    one = torch.eye(FEATURES)
    directions = sae.decode(one) - sae.decode(0 * one)  # with the biases taken away
    scale = NORMALISATIONS[sae.form.normalize_activations](rows).scale
    change = (sae.encode(source) - sae.encode(rows)) * scale

    def metric(position: int, row: torch.Tensor) -> float:
        def patch(_module: object, _args: object, output: Any) -> None:
            whole = output[0] if isinstance(output, tuple) else output
            whole[0, position] = row

        handle = points.model.model.layers[SITE[1]].register_forward_hook(patch)
        with torch.no_grad():
            logits = points.model(input_ids=torch.tensor([BASE])).logits[0, -1].double()
        handle.remove()
        return float(logits[100] - logits[200])

    for column in (3, 7):  # where the prompts differ
        strongest = np.argsort(-np.abs(found[column, :-1]))[:3].tolist()
        moves = {feature: change[column, feature] * directions[feature] for feature in strongest}
        moves[-1] = source[column] - rows[column] - change[column] @ directions
        for feature, whole in moves.items():
            exact = sae.exchanged(rows, parts, feature)[column]
            torch.testing.assert_close(exact, rows[column] + whole, atol=1e-5, rtol=1e-5)
            more, less = (metric(column, rows[column] + by * whole) for by in (alpha, -alpha))
            effect = found[column, feature]
            assert (more - less) / 2 == pytest.approx(effect, rel=0.03, abs=1e-6)


def test_random_features_are_drawn_from_all_that_differ(points_of: PointsOf) -> None:
    points = points_of("llama")
    sae = autoencoder(points.hidden_size, "jumprelu")
    known = effects(points, sae)
    every = estimate(points, sae, 3, draw=10_000, seed=1).drawn
    differ = {*map(tuple, np.argwhere(known).tolist())}
    assert {(each.column, each.feature % (FEATURES + 1)) for each in every} == differ
    assert all(each.score == pytest.approx(known[each.column, each.feature]) for each in every)
    few = [
        {(each.column, each.feature) for each in estimate(points, sae, 3, 20, seed).drawn}
        for seed in (1, 1, 2)
    ]
    assert len(few[0]) == 20 < len(every)
    assert few[0] == few[1] != few[2]
    assert few[0] < {(each.column, each.feature) for each in every}
    assert {column for column, _ in few[0]} > {3, 7}, "not only the first columns"
