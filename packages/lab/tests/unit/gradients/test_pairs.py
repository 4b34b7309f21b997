"""Metrics of pairs and scalars of gradient rows, against transformers' logits; and which rows a
request gets, of which scalar, in which dtype and columns.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gradient_kit import BASE, SOURCE, PointsOf, model_info, no_sae, small_llama, sweep

from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.schemas.jobs.jobs import Sampling
from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.scalars import StoredScalar
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.engine.protocol import EngineRequest
from midstream.workers.runner.files.finished_rows import FinishedCapture
from midstream_lab.gradients.captured import finished, gradient_rows, scalar_of
from midstream_lab.gradients.pairs import NonFiniteGradient, PairMetric, PairRuns, require_finite
from midstream_lab.gradients.points import Points
from midstream_lab.records.sweeps import StoredPair


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
        assert found == pytest.approx(wanted[0] - wanted[1], abs=1e-5)


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
    values = [pair.base, pair.source]
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
    fine = torch.zeros(2, 3)
    bad = torch.tensor([[0.0, float("nan"), float("inf")]])
    with pytest.raises(NonFiniteGradient, match="z of layer 4: not finite: 2 of 3"):
        require_finite({("post_block", 1): fine, ("z", 4): bad, ("q", 5): bad})


TOKENS = [3, 1, 4, 1, 5, 9, 2]
LOGIT = StoredScalar(kind="logit", token=7, foil=8)


@pytest.fixture(scope="module")
def points() -> Points:
    return Points(small_llama())


INFO = model_info(hidden_size=16)


def rows(
    points: Points,
    *captures: StoredCapture,
    check: Callable[[], None] = lambda: None,
    **tensors: torch.Tensor,
) -> list[FinishedCapture]:
    ask = EngineRequest("job_1", 0, 1, TOKENS, Sampling(max_tokens=1), captures=list(captures))
    return finished(points, ask, INFO, "w1", tensors, load_sae=no_sae, check=check)


def array(part: FinishedCapture, hook: str, layer: int) -> np.ndarray:
    (buffer,) = part.rows(hook, layer)
    return np.frombuffer(buffer, dtype=part.dtype).reshape(len(part.positions), -1)


def by_hand(points: Points, scalar: str) -> np.ndarray:
    """d scalar / d (output of layer 0), `[tokens, hidden]`, by autograd on transformers' model."""
    kept = []

    def keep(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        kept.append(output.requires_grad_())
        return kept[0]

    handle = points.model.model.layers[0].register_forward_hook(keep)
    logits = points.model(input_ids=torch.tensor([TOKENS])).logits[0]
    handle.remove()
    values = {
        "logit": logits[-1, 7] - logits[-1, 8],
        "loss": -sum(logits[at - 1].log_softmax(-1)[TOKENS[at]] for at in range(1, len(TOKENS))),
        "probe": (kept[0][0, [2, 4]] @ torch.arange(16.0)).sum(),
    }
    (gradient,) = torch.autograd.grad(values[scalar], kept)
    return gradient[0].numpy()


PROBE = StoredProbe(
    name="p",
    digest="",
    content=ProbeContent("post_block", 0, ["weight", "bias"], ["a", "b"], [None, None]),
    model="m",
)
SCALARS = {
    "logit": LOGIT,
    "loss": StoredScalar(kind="loss", positions=list(range(1, len(TOKENS)))),
    "probe": StoredScalar(kind="probe", probe=PROBE, label=1, positions=[2, 4]),
}


@pytest.mark.parametrize("name", SCALARS)
def test_rows_are_those_of_autograd_by_hand(points: Points, name: str) -> None:
    capture = StoredCapture({"post_block": [0]}, "all_prompt", "t", gradient=SCALARS[name])
    tensors = {
        "weight": torch.stack([torch.zeros(16), torch.arange(16.0)]),
        "bias": torch.zeros(2),
    }
    (part,) = rows(points, capture, **tensors)
    np.testing.assert_allclose(array(part, "post_block", 0), by_hand(points, name), atol=1e-6)


def test_a_score_has_no_gradient_at_what_comes_after_the_row_that_it_reads(points: Points) -> None:
    """`pre_attn` of the next layer is the same tensor in transformers, and a patch of it comes too
    late.
    """
    sites = {"pre_attn": [0, 1], "post_block": [0, 1], "attn_out": [1]}
    capture = StoredCapture(sites, "all_prompt", "t", gradient=SCALARS["probe"])  # type: ignore[arg-type]
    (part,) = rows(points, capture, weight=torch.ones(2, 16), bias=torch.zeros(2))
    moved = {site for site in part.rows.args[0] if array(part, *site).any()}  # type: ignore[attr-defined]
    assert moved == {("pre_attn", 0), ("post_block", 0)}


def test_only_the_selected_positions_and_heads_are_kept(points: Points) -> None:
    whole = StoredCapture(
        {"z": [1]}, "all_prompt", "a", gradient=LOGIT, row=RowShape(heads=4, width=4)
    )
    part = StoredCapture(
        {"z": [1]}, [0, 6], "b", gradient=LOGIT, row=RowShape(heads=4, width=4), heads=[1, 3]
    )
    every, chosen = rows(points, whole, part)
    expected = array(every, "z", 1).reshape(7, 4, 4)[[0, 6]][:, [1, 3]].reshape(2, 8)
    np.testing.assert_array_equal(array(chosen, "z", 1), expected)


def test_rows_that_overflow_the_stored_dtype_are_counted(points: Points) -> None:
    large = StoredScalar(kind="probe", probe=PROBE, label=0, positions=[2])
    capture = StoredCapture({"post_block": [0]}, [1, 2], "t", dtype="float16", gradient=large)
    (part,) = rows(points, capture, **{"weight": torch.full((2, 16), 1e6), "bias": torch.zeros(2)})
    assert part.non_finite == {("post_block", 0): 1}


def test_the_finished_capture_has_the_manifest_of_any_capture(points: Points) -> None:
    (part,) = rows(points, StoredCapture({"post_block": [0, 1]}, [2, 5], "t", gradient=LOGIT))
    manifest = part.manifest(part.sites)
    assert manifest.positions == [2, 5]
    assert manifest.token_ids == [4, 9]
    assert manifest.sites == {"post_block": [0, 1]}
    assert manifest.dtype == "float32"
    assert manifest.identity == "i" * 64
    assert manifest.worker == "w1"
    assert part.size == 256
    assert len(part.rows("post_block", 1)[0]) == 128


def test_a_stopped_job_computes_no_further_capture(points: Points) -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("stopped")

    capture = StoredCapture({"post_block": [0]}, [1], "t", gradient=LOGIT)
    with pytest.raises(RuntimeError, match="stopped"):
        rows(points, capture, capture, check=check)
