"""Hook points of transformers models: rows, replacement, gradients, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from gradient_kit import BASE, PointsOf, load
from inside_reference import InsideReference
from reference import Edit, Reference

from midstream.workers.runner.hooks.architectures import UnsupportedArchitectureError
from midstream_lab.gradients.points import Points, SiteKey

#: Layouts that differ: fused norms, Conv1D and fused projections, parallel branches, two norms for
#: each branch, norms after branches, two-dimensional MLP, experts.
LAYOUTS = ("llama", "gpt2", "gpt-neox", "gemma2", "olmo2", "opt", "phi3", "mixtral")
#: fp32 sums in another order, of the largest element.
SAME = 5e-6


def every(points: Points) -> list[SiteKey]:
    return [(hook, layer) for layer in range(points.num_layers) for hook in points.hooks]


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_equal_forward_hooks_on_transformers(
    points_of: PointsOf, tiny_root: Path, name: str
) -> None:
    points = points_of(name)
    path = tiny_root / name
    run = points.run(points.batch([BASE]), every(points), keep=range(len(BASE)))
    reference = Reference(path)
    wanted = {**InsideReference(path).rows(BASE), **reference.rows(BASE)}
    assert set(reference.hooks) <= set(points.hooks)
    for site in every(points):
        assert run.rows(site).shape == (1, len(BASE), points.width(site[0]))
        distance = np.abs(run.rows(site)[0].numpy() - wanted[site]).max()
        assert distance <= SAME * np.abs(wanted[site]).max(), site
    assert np.abs(run.logits[0].numpy() - reference.logits).max() <= 2e-5


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "olmo2"])
def test_replaced_rows_reach_every_reader(points_of: PointsOf, tiny_root: Path, name: str) -> None:
    points = points_of(name)
    reference = Reference(tiny_root / name)
    vector = np.random.default_rng(1).normal(size=points.hidden_size).astype(np.float32)
    for hook in reference.hooks:

        def edit(_: SiteKey, rows: torch.Tensor) -> torch.Tensor:
            edited = rows.clone()
            edited[:, 4] = torch.from_numpy(vector)
            return edited

        run = points.run(points.batch([BASE]), [(hook, 1)], keep=range(len(BASE)), edit=edit)
        reference.rows(BASE, [Edit(1, vector, [4], hook, "replace")])
        assert np.abs(run.logits[0].numpy() - reference.logits).max() <= 2e-5, hook


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_gradient_is_that_of_a_patch(points_of: PointsOf, name: str) -> None:
    # The derivative along a random direction, by a central difference; float32 sets the step and
    # the tolerance.
    points = points_of(name)
    batch = points.batch([BASE])
    sites = [site for site in every(points) if site[1] == 1]
    run = points.run(batch, sites, grad=True)
    gradients = run.gradients(run.logits[0, -1, 100])
    generator = torch.Generator().manual_seed(0)
    for site in sites:
        direction = torch.randn((1, points.width(site[0])), generator=generator)

        def moved(by: float, site: SiteKey = site, direction: torch.Tensor = direction) -> float:
            def edit(_: SiteKey, rows: torch.Tensor) -> torch.Tensor:
                edited = rows.clone()
                edited[:, 3] += by * direction
                return edited

            return points.run(batch, [site], edit=edit).logits[0, -1, 100].item()

        slope = (moved(4e-3) - moved(-4e-3)) / 8e-3
        wanted = float((gradients[site][0, 3] * direction).sum())
        assert slope == pytest.approx(wanted, rel=1e-2, abs=5e-4), site


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    model = load(tiny.checkpoint("bloom", tmp_path / "bloom"), torch.float32)
    with pytest.raises(UnsupportedArchitectureError, match="BloomForCausalLM"):
        Points(model)


def test_absent_hook_is_refused_with_reason(points_of: PointsOf) -> None:
    points = points_of("gpt-neox")
    with pytest.raises(UnsupportedArchitectureError, match=r"post_attn.*parallel"):
        points.run(points.batch([BASE]), [("post_attn", 0)])
    assert "mlp_act" in points_of("mixtral").absent
