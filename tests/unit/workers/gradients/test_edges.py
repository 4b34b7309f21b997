"""Edges: against TransformerLens, a hand-written reference, and the completeness of a path."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from gradient_kit import BASE, LENS, SOURCE, PointsOf, golden, positions, sweep
from torch.nn import functional

from midstream.schemas.jobs.sweeps import Column
from midstream.schemas.requests.attributions import EdgeEnd
from midstream.workers.gradients import edges as edges_module
from midstream.workers.gradients.edges import edge_scores
from midstream.workers.gradients.points import Points, SiteKey
from midstream.workers.runner.hooks.architectures import UnsupportedArchitectureError


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
    assert (sizes, found.top(5)) == (sorted(sizes, reverse=True), top[:5])
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
            eps, gamma = norm.variance_epsilon, norm.weight

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
                assert (sender, receiver) == (senders[3], EdgeEnd("q", 2, 3))
                continue
            assert score == pytest.approx(reference(points, sender, receiver), abs=LENS * largest)
            compared += 1
    assert compared == 23


def test_scores_of_the_embedding_sum_to_the_whole_difference(points_of: PointsOf) -> None:
    # completeness of integrated gradients over the path of the embeddings
    points = points_of("gpt2")
    found = edge_scores(points, sweep(points, ["z"]), 0, steps=24)
    whole = found.source.value - found.base.value
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
