"""How an attribution is resolved, and which requests are refused by name."""

from typing import Any

import msgspec
import pytest
from plan_kit import model, pair, plan
from refusal_kit import refuses

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.jobs.models import GradientInfo
from midstream_lab.admit.attribution import attributed, check_exact, check_method, on_its_site
from midstream_lab.admit.gradient_rows import check_gradients
from midstream_lab.records.attributions import AttributionRequest
from midstream_lab.records.sweep_units import Units

INFO = GradientInfo(model="m", identity="", dtype="float32", device="cpu")
SAE = StoredSae(name="s", digest="", path="s", hook="post_block", layer=1, bytes=1)


def body(**fields: Any) -> AttributionRequest:
    return msgspec.convert({"model": "m", "pairs": [pair()], **fields}, AttributionRequest)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"path": {"receivers": "logits"}}, "path"),
        ({"lora": "tuned"}, "lora"),
        ({"method": "edges", "verify": {}}, "verify"),
        ({"method": "edges", "hooks": ["pre_attn"]}, "hooks"),
        ({"method": "edges", "axis": "head"}, "axis"),
        ({"method": "edges", "ablation": "zeros"}, "ablation"),
        ({"method": "attribution", "steps": 4}, "steps"),
        ({"method": "adaptive", "steps": 4}, "steps"),
        ({"method": "integrated", "steps": 1}, "steps"),
        ({"metric": "kl", "direction": "noise"}, "metric"),
        ({"metric": "kl", "ablation": "zeros"}, "metric"),
        ({"verify": {"budget": 3}}, "verify.budget"),
        ({"verify": {"top": 0, "random": 0, "doubtful": 0}}, "verify"),
        ({"method": "adaptive", "verify": {"top": 0}}, "verify.top"),
        ({"sae": "s", "verify": {"doubtful": 3}}, "verify.doubtful"),
        ({"sae": "s", "verify": {"budget": 3}}, "verify.budget"),
        ({"sae": "s", "verify": {"top": 30}, "keep": 29}, "verify.top"),
        ({"sae": "s", "verify": {"top": 0, "random": 0}}, "verify"),
        ({"sae": "s", "method": "edges"}, "method"),
        ({"sae": "s", "method": "integrated"}, "method"),
        ({"sae": "s", "method": "adaptive", "verify": {}}, "method"),
    ],
)
def test_what_cannot_be_estimated_or_checked_is_refused(fields: Any, field: str) -> None:
    with refuses(status=400, field=field):
        check_method(body(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"metric": "kl"},
        {"metric": "kl", "direction": "noise", "method": "integrated"},
        {"method": "edges", "steps": 5},
        {"method": "adaptive"},
        {"sae": "s"},
        {"sae": "s", "verify": {}},
        {"sae": "s", "verify": {"top": 1, "random": 0, "doubtful": 0}},
        {"ablation": "mean", "metric": "logprob", "verify": {}},
    ],
)
def test_what_can_be_estimated_is_accepted(fields: Any) -> None:
    check_method(body(**fields))


@pytest.mark.parametrize(
    ("check", "status", "field", "words"),
    [
        (
            lambda: check_gradients({"hooks[0]": "post_block"}, model(), None, False),
            400,
            "model",
            "gradients=true",
        ),
        (
            lambda: gradients(refused="rows of post_block 3 differ by 0.2"),
            400,
            "model",
            "post_block 3 differ",
        ),
        (
            lambda: gradients(absent={"post_block": "the norm comes after"}),
            400,
            "hooks[0]",
            "the norm comes after",
        ),
        (lambda: gradients(identity="another"), 503, "model", "different models"),
        (lambda: gradients(steered=True), 409, None, "global steering"),
        (lambda: on_its_site(body(sae="s", layers=[0]), SAE), 400, "layers", ""),
    ],
)
def test_gradients_that_cannot_be_had_are_refused_with_the_reason(
    check: Any, status: int, field: str | None, words: str
) -> None:
    gradients()
    with refuses(words, status=status, field=field):
        check()


def test_the_plan_bounds_the_exact_cells_and_draws_a_seed() -> None:
    asked = body(verify={"top": 2, "random": 1, "doubtful": 0})
    sweep = attributed(plan().sweep, asked, None)
    assert sweep.num_exact == 3 < sweep.num_cells
    assert sweep.attributed is not None
    assert sweep.attributed.steps == 1
    assert sweep.attributed.budget == 0
    other = attributed(plan().sweep, asked, None).attributed
    assert other is not None
    assert other.seed != sweep.attributed.seed
    adaptive = attributed(plan().sweep, body(method="adaptive"), None)
    assert adaptive.num_exact == adaptive.num_cells, "the grid is smaller than its least budget"
    assert attributed(plan().sweep, body(), None).num_exact == 0


def test_features_are_of_the_autoencoders_site_and_cost_exact_cells() -> None:
    few = attributed(plan().sweep, body(sae="s", verify={"top": 2, "random": 1}), SAE)
    assert few.attributed is not None
    assert few.attributed.verify is not None
    assert few.attributed.verify.doubtful == 0
    assert few.num_exact == 3
    wide = attributed(plan().sweep, body(sae="s", verify={"top": 500, "random": 500}), SAE)
    assert wide.num_exact == 1000 > wide.num_cells
    check_exact(wide, 1000)
    with refuses(status=400, field="verify"):
        check_exact(wide, 999)
    assert Units(wide).tokens > Units(plan().sweep).tokens > Units(few).tokens
    request = on_its_site(body(sae="s"), SAE)
    assert request.hooks == ["post_block"]
    assert request.layers == [1]


def test_estimates_cost_three_passes_and_exact_cells_as_those_of_a_sweep() -> None:
    both = sum(len(pair.base) + len(pair.source) for pair in plan().sweep.pairs)
    assert Units(attributed(plan().sweep, body(), None)).tokens == 3 * both
    integrated = attributed(plan().sweep, body(method="integrated", steps=5), None)
    assert Units(integrated).tokens == 15 * both
    every = body(verify={"top": 10_000})
    assert (
        Units(attributed(plan().sweep, every, None)).tokens == 3 * both + Units(plan().sweep).tokens
    )
    few = Units(
        attributed(plan().sweep, body(verify={"top": 1, "random": 0, "doubtful": 0}), None)
    ).tokens
    assert few < Units(plan().sweep).tokens


def gradients(steered: bool = False, **facts: str | dict[str, str]) -> None:
    served = msgspec.structs.replace(INFO, **facts)
    check_gradients({"hooks[0]": "post_block"}, model(), served, steered)
