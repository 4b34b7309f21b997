"""Sweeps over heads, neurons and paths on the demo model in fp32 are what TransformerLens and hooks on transformers say, cell by cell.

`tests/data/heads.safetensors` is made by `make lens`; what is in it: `benchmarks/lens_heads.py`. The service is that of
`test_patching_service.py`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from test_patching_service import Service, service
from tolerances import LENS_LOGITS

from midstream.schemas.sweeps import SweepResult

__all__ = ["service"]
LENS = Path(__file__).resolve().parents[1] / "data" / "heads.safetensors"
with safe_open(LENS, "np") as _file:
    ABOUT: dict[str, Any] = json.loads(_file.metadata()["about"])
    GRIDS: dict[str, np.ndarray] = {name: _file.get_tensor(name) for name in _file.keys()}  # noqa: SIM118 - not a dict
PAIR = {name: ABOUT[name] for name in ("clean", "corrupt", "answer", "foil")}
HOOK = {"mlp": "mlp_out"}
HELD = ("attn+mlp", "attn")


def swept(service: Service, **fields: Any) -> tuple[np.ndarray, SweepResult]:
    """The grid of the only hook: `[layers, columns]`."""
    result = service.sweep(pairs=[PAIR], metric="logit_diff", noise=1, **fields)
    assert not result.skipped
    (grid,) = result.pairs[0].grids.values()
    return np.array(grid, dtype=np.float32), result


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= LENS_LOGITS
    assert np.abs(wanted - ABOUT["logit_diff"]["corrupt"]).max() > 10 * LENS_LOGITS, "or nothing was patched anywhere"


@pytest.mark.parametrize("layers", [[17, 20, 23, 29], pytest.param(list(range(30)), marks=pytest.mark.long)], ids=["some", "all"])
def test_a_sweep_over_heads_is_that_of_transformer_lens(service: Service, layers: list[int]) -> None:
    got, result = swept(service, hooks=["hook_z"], axis="head", layers=layers)
    same(got, GRIDS["z.all_pos"][layers])
    assert (result.axis, result.pairs[0].heads) == ("head", list(range(9)))


@pytest.mark.parametrize("heads", [[0, 3], pytest.param("all", marks=pytest.mark.long)], ids=["some", "all"])
def test_a_sweep_over_heads_and_positions_is_that_of_transformer_lens(service: Service, heads: Any) -> None:
    layers = list(range(0, 30, ABOUT["every"]))
    got, result = swept(service, hooks=["z"], axis="head_position", heads=heads, layers=layers)
    chosen = list(range(9)) if heads == "all" else heads
    wanted = GRIDS["z.by_pos"][:, :, chosen]  # layers, positions, heads
    same(got.reshape(len(layers), len(chosen), -1).transpose(0, 2, 1), wanted)
    assert result.pairs[0].heads == [head for head in chosen for _ in range(wanted.shape[1])]


def test_the_neurons_that_differ_most_are_those_of_transformers(service: Service) -> None:
    got, result = swept(service, hooks=["mlp.hook_post"], axis="neuron", neurons={"top": ABOUT["neurons"]}, layers=ABOUT["senders"])
    same(got, GRIDS["neurons"])
    for row in result.pairs[0].neurons["mlp_act"]:
        assert [len(chosen) for chosen in row] == [min(count, 16) for count in ABOUT["neurons"]]
        assert row[1][:1] == row[0]


def test_direct_paths_from_a_head_are_those_of_transformer_lens(service: Service) -> None:
    layer, head = ABOUT["sender"]
    got, result = swept(service, hooks=["q"], axis="head", path={"sender": {"layer": layer, "hook": "z", "head": head}})
    assert result.layers == list(range(layer + 1, 30)), "those that it reaches"
    same(got, GRIDS["direct.q"][layer + 1 :])
    assert result.path is not None
    assert result.path.frozen == ["attn", "mlp"]


@pytest.mark.parametrize(
    ("name", "held"),
    [
        pytest.param(name, held, marks=() if (name, held) in (("q", "attn"), ("logits", "attn+mlp"), ("mlp", "attn")) else pytest.mark.long)
        for name in ABOUT["receivers"]
        for held in HELD
    ],
)
def test_paths_to_receivers_are_those_with_the_same_branches_held(service: Service, name: str, held: str) -> None:
    """At q, k, v, the MLP and the logits."""
    wanted = GRIDS[f"{name}.{held}"]
    there = [place for place in range(len(wanted)) if not np.isnan(wanted[place]).any()]  # of the last sender, nothing reaches keys
    ends = [
        {"layer": layer, "hook": HOOK.get(part, part), **({"head": head} if head >= 0 else {})}
        for layer, part, head in ABOUT["receivers"][name]
    ]
    layers = [ABOUT["senders"][place] for place in there]
    got, result = swept(service, hooks=["z"], axis="head", layers=layers, path={"receivers": ends or "logits", "frozen": held.split("+")})
    same(got, wanted[there])
    assert result.path is not None
    assert (result.path.frozen, result.path.receivers == "logits") == (held.split("+"), not ends)


@pytest.mark.parametrize(
    ("fields", "field", "valid"),
    [
        ({"hooks": ["z"], "axis": "head", "heads": [9]}, "heads", "heads 0 to 8"),
        ({"hooks": ["mlp_act"], "axis": "neuron", "neurons": {"sets": [[1536]]}}, "neurons.sets[0]", "neurons 0 to 1535"),
        ({"hooks": ["z", "k"], "axis": "head"}, "hooks[1]", "same heads"),
        ({"hooks": ["attn_out"], "axis": "head"}, "hooks[0]", "z"),
        (
            {"hooks": ["z"], "axis": "head", "path": {"receivers": [{"layer": 20, "hook": "k", "head": 3}]}},
            "path.receivers[0].head",
            "heads 0 to 2",
        ),
        ({"hooks": ["z"], "axis": "head", "path": {"receivers": []}}, "path.receivers", "length >= 1"),
        ({"hooks": ["z"], "axis": "head_position", "pairs": [PAIR] * 8}, "pairs", "at most 20000"),
    ],
)
def test_what_a_model_has_not_is_a_400_with_what_it_has(service: Service, fields: dict[str, Any], field: str, valid: str) -> None:
    answer = service.http.post("/v1/sweeps", json={"model": "demo", "pairs": [PAIR], **fields})
    assert (answer.status_code, answer.json()["field"]) == (400, field)
    assert valid in answer.json()["detail"] + answer.json().get("allowed", "")
