"""Estimates of cells and edges: against TransformerLens, exact cells and a hand-written reference,
by linearity, and the completeness of a path.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_kit import (
    BASE,
    LENS,
    SOURCE,
    PointsOf,
    exact,
    golden,
    heads_at,
    load,
    positions,
    sweep,
)
from torch.nn import functional

from midstream.schemas.prompts.selectors import Hook
from midstream.workers.runner.hooks.architectures import UnsupportedArchitectureError
from midstream_lab.gradients import attribution as edges_module
from midstream_lab.gradients.attribution import PairEstimate, estimate_pair
from midstream_lab.gradients.edges import edge_scores
from midstream_lab.gradients.pairs import NonFiniteGradient, PairError, PairRuns
from midstream_lab.gradients.points import Points, SiteKey
from midstream_lab.records.estimates import EdgeEnd
from midstream_lab.records.sweeps import Column, PatchWindow

DEMO = Path.home() / ".cache" / "midstream" / "models" / "SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    "name", [pytest.param("demo", marks=pytest.mark.long), "gpt2", "llama", "gpt-neox"]
)
def test_grids_equal_transformer_lens(points_of: PointsOf, name: str) -> None:
    if name == "demo" and not DEMO.exists():
        pytest.skip("make model")
    points = Points(load(DEMO, torch.float32)) if name == "demo" else points_of(name)
    pair, numbers = golden(name)
    stream: list[Hook] = ["pre_attn", "attn_out", "mlp_out", "post_block"]
    every = len(pair["base"])
    for hooks, columns in ((stream, positions(every)), (["z"], heads_at(points, "z", every))):
        found = estimate_pair(points, sweep(points, hooks, columns, pair=pair), 0)
        for hook in hooks:
            wanted = numbers[hook].reshape(points.num_layers, -1)
            assert np.abs(found.effects[hook] - wanted).max() <= LENS * np.abs(wanted).max(), hook


CASES: dict[str, dict[str, Any]] = {
    "one token": {},
    "several tokens": {"pair": {"answer": [100, 5, 6], "foil": [200, 7]}},
    "answer begins as foil": {"pair": {"answer": [100, 5], "foil": [100]}},
    "logprob": {"metric": "logprob"},
    "kl": {"metric": "kl"},
    "kl noise": {"metric": "kl", "direction": "noise"},
    "alpha": {"alpha": 0.5},
    "zeros": {"ablation": "zeros"},
    "mean": {"ablation": "mean"},
}


@pytest.mark.parametrize("case", CASES)
def test_integral_along_a_cell_is_its_exact_effect(points_of: PointsOf, case: str) -> None:
    points = points_of("llama")
    hooks: list[Hook] = ["post_attn", "z", "q", "mlp_out"]
    if case == "zeros":  # the path of the stream would end where its norm is discontinuous
        hooks.remove("post_attn")
    for column in (3, 7):
        # the places of one column alone are the cell's
        stored = sweep(points, hooks, [positions(len(BASE))[column]], layers=[1], **CASES[case])
        found = estimate_pair(points, stored, 0, steps=24, batch=96)
        for hook in hooks:
            wanted = exact(points, stored, (hook, 1))(0)
            assert found.effects[hook].item() == pytest.approx(wanted, abs=2e-3), hook


def test_joint_path_sums_to_patching_every_place(points_of: PointsOf) -> None:
    points = points_of("gpt2")
    stored = sweep(points, ["post_block"], layers=[1])
    found = estimate_pair(points, stored, 0, steps=48, batch=48)
    # all positions of the stream: the source prompt itself
    whole = found.source - found.base
    assert float(found.effects["post_block"].sum()) == pytest.approx(whole, abs=2e-3)


def test_columns_are_sums_of_elements(points_of: PointsOf) -> None:
    points = points_of("llama")
    span = Column(label="span", places=[(3, 3), (7, 7)])
    skipped = Column(label="", places=[], reason="no counterpart")
    single = estimate_pair(points, sweep(points, ["post_block"]), 0).effects["post_block"]
    both = estimate_pair(points, sweep(points, ["post_block"], [span, skipped]), 0)
    assert both.effects["post_block"][:, 0] == pytest.approx(single[:, [3, 7]].sum(1))
    assert np.isnan(both.effects["post_block"][:, 1]).all()
    windowed = sweep(points, ["post_block"], window=PatchWindow(layers=2, positions=2))
    wide = estimate_pair(points, windowed, 0).effects["post_block"]
    assert wide[1, 3] == pytest.approx(single[1:3, 3:5].sum())
    every = [(at, at) for at in range(len(BASE))]
    dims = [Column(label="", places=every, dims=part) for part in ("0-19", "20-63")]
    parts = estimate_pair(points, sweep(points, ["post_block"], dims), 0).effects["post_block"]
    assert parts.sum(1) == pytest.approx(single.sum(1))
    mask = torch.arange(points.hidden_size) < 20
    masked = estimate_pair(points, sweep(points, ["post_block"]), 0, mask=mask)
    assert masked.effects["post_block"].sum(1) == pytest.approx(parts[:, 0])


def test_ranked_columns_take_the_dimensions_that_differ_most(points_of: PointsOf) -> None:
    points = points_of("llama")
    every = [(at, at) for at in range(len(BASE))]
    ranked = [Column(label="", places=every, ranks=ranks) for ranks in ((0, 3), (3, 64))]
    stored = sweep(points, ["post_block"], ranked, axis="neuron")
    found = estimate_pair(points, stored, 0)
    whole = estimate_pair(points, sweep(points, ["post_block"]), 0).effects["post_block"].sum(1)
    assert found.effects["post_block"].sum(1) == pytest.approx(whole)
    rows = [
        points.run(points.batch([tokens]), [("post_block", 2)]).rows(("post_block", 2))[0]
        for tokens in (BASE, sweep(points, ["post_block"]).pairs[0].source)
    ]
    distance = (rows[0] - rows[1]).abs().sum(0)
    pair = PairRuns(points, stored, 0)
    first = pair.columns.parts(pair.replaced(("post_block", 2), pair.run(grad=False))[1])[0]
    assert first.columns == [0]
    assert first.dims.tolist() == distance.argsort(descending=True)[:3].tolist()


def test_recovered_is_a_share_of_the_difference(points_of: PointsOf) -> None:
    points = points_of("llama")
    nats = estimate_pair(points, sweep(points, ["post_block"]), 0)
    share = estimate_pair(points, sweep(points, ["post_block"], metric="recovered"), 0)
    difference = nats.source - nats.base
    assert share.effects["post_block"] * difference == pytest.approx(nats.effects["post_block"])
    assert share.values()["post_block"] == pytest.approx(share.effects["post_block"])
    assert nats.values()["post_block"] == pytest.approx(nats.base + nats.effects["post_block"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metric": "kl", "direction": "noise"}, "gradient of zero"),
        ({"metric": "recovered", "pair": {"source": BASE}}, "differ too little"),
    ],
)
def test_pairs_without_a_slope_are_refused(
    points_of: PointsOf, fields: dict[str, Any], words: str
) -> None:
    points = points_of("llama")
    with pytest.raises(PairError, match=words):
        estimate_pair(points, sweep(points, ["z"], **fields), 0)


def test_pair_that_is_not_finite_fails_alone(points_of: PointsOf) -> None:
    points = points_of("llama")
    weight = points.layers[2].mlp.down_proj.weight
    kept = weight[0, 0].item()
    weight[0, 0] = float("inf")
    try:
        with pytest.raises(NonFiniteGradient, match="not finite"):
            estimate_pair(points, sweep(points, ["post_block"]), 0)
    finally:
        weight[0, 0] = kept
    assert isinstance(estimate_pair(points, sweep(points, ["post_block"]), 0), PairEstimate)


def test_check_stops_between_passes(points_of: PointsOf) -> None:
    points = points_of("llama")

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        estimate_pair(points, sweep(points, ["z"]), 0, check=stop)


# --- Saturated attention


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("hook", ["q", "k"])
def test_last_layer_correction_is_exact_but_for_later_curvature(
    points_of: PointsOf, name: str, hook: Hook
) -> None:
    # A metric linear in `z` of the last layer: the corrected estimate must then be exact. The rest
    # of the layer is not linear, so the patch is made small by `alpha`, and the softmax steep.
    points = points_of(name)
    last = points.num_layers - 1
    columns = heads_at(points, hook, len(BASE))
    module = points.layers[last].self_attn
    steep = module.scaling
    module.scaling = steep * 8
    try:
        stored = sweep(points, [hook], columns, layers=[last])
        pair = PairRuns(points, stored, 0)
        run = pair.run()
        slope = pair.slope(run.gradients(pair.value)[hook, last])
        plain = pair.cells((hook, last), run, slope)
        found = estimate_pair(points, stored, 0).effects[hook][0]
        cell = exact(points, stored, (hook, last))
        wanted = np.array([cell(column) for column in range(len(columns))])
    finally:
        module.scaling = steep
    assert np.abs(found - wanted).max() < 0.5 * np.abs(plain - wanted).max()


def test_small_patches_leave_no_doubt(points_of: PointsOf) -> None:
    points = points_of("gemma2")
    large, small = (
        estimate_pair(points, sweep(points, ["q"], alpha=alpha), 0, doubtful=True).doubts["q"]
        for alpha in (1.0, 1e-3)
    )
    assert large.max() > 1e-3
    assert small.max() < 1e-4 * large.max()  # of second order


def test_doubts_rank_cells_with_large_errors(points_of: PointsOf) -> None:
    points = points_of("llama")
    stored = sweep(points, ["pre_attn"])
    found = estimate_pair(points, stored, 0, doubtful=True)
    errors = []
    doubts = []
    for layer in range(points.num_layers):
        cell = exact(points, stored, ("pre_attn", layer))
        for column in range(3, len(BASE)):
            errors.append(abs(found.effects["pre_attn"][layer, column] - cell(column)))
            doubts.append(found.doubts["pre_attn"][layer, column])
    assert np.corrcoef(*[np.argsort(np.argsort(values)) for values in (errors, doubts)])[0, 1] > 0.4


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox"])
def test_edges_equal_transformer_lens(points_of: PointsOf, name: str) -> None:
    points = points_of(name)
    pair, numbers = golden(name)
    wanted = dict(zip(numbers["names of edges"], numbers["edges"], strict=True))
    found = edge_scores(points, sweep(points, ["z"], positions(12), pair=pair), 0)
    top = found.top(10**6)
    edges = {f"{label(edge.sender)}>{label(edge.receiver)}": edge.score for edge in top}
    assert edges.keys() == wanted.keys()
    sizes = [abs(edge.score) for edge in top]
    assert sizes == sorted(sizes, reverse=True)
    assert found.top(5) == top[:5]
    distance = max(abs(edges[name] - wanted[name]) for name in wanted)
    assert distance <= LENS * max(map(abs, wanted.values()))


def label(node: EdgeEnd) -> str:
    """As the golden file has it: the logits are those of the last layer."""
    layer = {"embed": [], "logits": [node.layer - 1]}.get(node.kind, [node.layer])
    return ".".join(map(str, [node.kind, *layer, *([node.head] if node.head >= 0 else [])]))


def differences_of(points: Points, sender: EdgeEnd) -> torch.Tensor:
    """What the sender adds to the stream in the source prompt, minus the same in the other:
    `[tokens, hidden_size]`. The rows are those of transformers (test_points.py).
    """
    site: SiteKey = {
        "embed": ("pre_attn", 0),
        "head": ("z", sender.layer),
        "mlp": ("mlp_out", sender.layer),
    }[sender.kind]
    source, base = (
        points.run(points.batch([tokens]), [site]).rows(site)[0] for tokens in (SOURCE, BASE)
    )
    if sender.kind != "head":
        return source - base
    part = slice(sender.head * points.head_size, (sender.head + 1) * points.head_size)
    return (source - base)[:, part] @ points.layers[sender.layer].self_attn.o_proj.weight[:, part].T


def reference(points: Points, sender: EdgeEnd, receiver: EdgeEnd) -> float:
    """d metric / d t, if t times the sender's difference is added to the receiver's input alone."""
    added = differences_of(points, sender)
    t = torch.zeros((), requires_grad=True)
    stream: list[torch.Tensor] = []
    with ExitStack() as stack:

        def hook(module: Any, function: Callable[..., Any]) -> None:
            stack.callback(module.register_forward_hook(function).remove)

        if receiver.kind == "logits":
            hook(points.layers[-1], lambda _, args, output: output + t * added)
        else:
            layer = points.layers[receiver.layer]
            attends = receiver.kind != "mlp"
            norm = layer.input_layernorm if attends else layer.post_attention_layernorm
            hook(norm, lambda _, args, output: stream.append(args[0]))
            eps = norm.variance_epsilon
            gamma = norm.weight

            def normed() -> torch.Tensor:
                rows = stream[0] + t * added
                return gamma * rows * (rows.pow(2).mean(-1, keepdim=True) + eps).rsqrt()

            if attends:
                module = getattr(layer.self_attn, f"{receiver.kind}_proj")
                part = slice(
                    receiver.head * points.head_size, (receiver.head + 1) * points.head_size
                )

                def project(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
                    edited = output.clone()
                    edited[..., part] = functional.linear(normed(), module.weight)[..., part]
                    return edited

                hook(module, project)
            else:
                handle = layer.mlp.register_forward_pre_hook(lambda _, args: (normed(),))
                stack.callback(handle.remove)
        logits = points.model(torch.tensor([BASE])).logits[0, -1]
        (slope,) = torch.autograd.grad(logits[100] - logits[200], t)
    return float(slope)


def test_scores_equal_a_reference_with_grouped_queries(points_of: PointsOf) -> None:
    points = points_of("llama")
    found = edge_scores(points, sweep(points, ["z"]), 0)
    largest = np.nanmax(np.abs(found.scores))
    senders = [
        EdgeEnd("embed", -1),
        EdgeEnd("head", 0, 3),
        EdgeEnd("mlp", 1),
        EdgeEnd("head", 2, 1),
    ]
    receivers = [
        *(EdgeEnd(kind, 3, 1) for kind in ("q", "k", "v")),
        EdgeEnd("q", 2, 3),
        EdgeEnd("mlp", 2),
        EdgeEnd("logits", 4),
    ]
    compared = 0
    for sender in senders:
        for receiver in receivers:
            score = found.scores[found.senders.index(sender), found.receivers.index(receiver)]
            if np.isnan(score):
                assert sender == senders[3]
                assert receiver == EdgeEnd("q", 2, 3)
                continue
            assert score == pytest.approx(reference(points, sender, receiver), abs=LENS * largest)
            compared += 1
    assert compared == 23


def test_scores_of_the_embedding_sum_to_the_whole_difference(points_of: PointsOf) -> None:
    # completeness of integrated gradients over the path of the embeddings
    points = points_of("gpt2")
    found = edge_scores(points, sweep(points, ["z"]), 0, steps=24)
    whole = found.source - found.base
    assert float(np.nansum(found.scores[0])) == pytest.approx(whole, abs=2e-3)


def test_places_in_chunks_give_the_same_scores(
    points_of: PointsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = points_of("llama")
    stored = sweep(points, ["z"], pair={"answer": [100, 5], "foil": [200]})
    whole = edge_scores(points, stored, 0).scores
    monkeypatch.setattr(edges_module, "CHUNK_BYTES", 1)
    parts = edge_scores(points, stored, 0).scores
    assert np.nan_to_num(parts) == pytest.approx(np.nan_to_num(whole), abs=1e-5)


def test_only_places_of_columns_count(points_of: PointsOf) -> None:
    points = points_of("llama")
    same = [Column(label="", places=[(0, 0), (1, 1), (2, 2)])]  # before the prompts differ
    assert np.nanmax(np.abs(edge_scores(points, sweep(points, ["z"], same), 0).scores)) == 0


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_norm_after_a_branch_is_refused(points_of: PointsOf, name: str) -> None:
    points = points_of(name)
    with pytest.raises(UnsupportedArchitectureError, match="norm follows"):
        edge_scores(points, sweep(points, ["z"]), 0)
