"""Steering by a token's direction is what the definition computes: v = Jᵀ W_U[t], added, projected
out, or exchanged with another token's; what a lens cannot do is refused by field.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from model_kit import model
from refusal_kit import refuses
from site_plans import SitePlan

from midstream.api.resolve.edits.directions import DirectionFiles, check_directed
from midstream.api.resolve.edits.features import NamedFeatures
from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.steering import resolve_edits, resolve_module
from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.api.resolve.readings.lens import check_shape
from midstream.kernels import single_site
from midstream.kernels.plan import does_of
from midstream.schemas.artifacts.jacobian_lenses import (
    JacobianLens,
    JacobianLensRequest,
    JacobianRecord,
)
from midstream.schemas.base.limits import MAX_ENTRIES
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import Tensor, to_numpy
from midstream.schemas.requests.specs import SteeringSpec
from midstream.storage.formats.lens_files import Matrix, lens_of, write

WIDTH = 12
VOCABULARY = 30
LAYERS = [0, 1, 2]
MODEL = model(vocab_size=VOCABULARY, hidden_size=WIDTH, dtype="float32")
RANDOM = np.random.default_rng(2)
J = {layer: RANDOM.normal(size=(WIDTH, WIDTH)).astype(np.float32) for layer in LAYERS}
HEAD = RANDOM.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
HEAD[9] = 2 * HEAD[8]
HEAD[10] = 0
ROWS = torch.tensor(RANDOM.normal(size=(5, WIDTH)) * 10, dtype=torch.float32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lenses")
    write(folder / "mine", J, JacobianRecord(method="exact", prompts=1), Matrix(HEAD))
    return folder


def lens_in(root: Path) -> JacobianLens:
    return lens_of(JacobianLensRequest(path="mine"), "mine", MODEL, str(root))


def named(root: Path, *specs: SteeringSpec) -> NamedFeatures:
    lenses = {"mine": lens_in(root)}
    files = DirectionFiles(str(root))
    plain = {
        directed.at: files.plain_specs(directed, list(directed.tokens.values()))  # type: ignore[arg-type]
        for directed in check_directed(specs, lenses, MODEL)
    }
    return NamedFeatures(directions=plain)


def steered(root: Path, spec: SteeringSpec) -> dict[int, torch.Tensor]:
    """What the kernels make of `ROWS` at each layer."""
    state = ModelState(features=named(root, spec))
    (entries,), blobs = resolve_edits([], [spec], Bounds(MODEL, [PromptFacts(5)]), state)
    result = {}
    for entry in entries:
        assert entry.hook == "post_block"
        assert entry.positions == "all"
        tensors = [
            torch.tensor(to_numpy(from_msgpack(blobs[name], Tensor))) for name in entry.tensors
        ]
        does = does_of(entry.family, entry.numbers, tensors, entry.scale)
        plan = SitePlan(WIDTH, [{entry.family: does}], {token: [1] for token in range(len(ROWS))})
        stream = ROWS.clone()
        single_site(stream, torch.zeros(1, WIDTH), *plan.build(len(ROWS), torch.float32))
        result[entry.layers[0]] = stream
    return result


def directions(layer: int, *tokens: int) -> torch.Tensor:
    """float64 `[tokens, hidden]`, by definition."""
    return torch.tensor(HEAD[list(tokens)].astype(np.float64) @ J[layer].astype(np.float64))


def swapped(layer: int, strength: float) -> torch.Tensor:
    basis = directions(layer, 4, 7).T
    rows = ROWS.double()
    coordinates = rows @ torch.linalg.pinv(basis).T
    return rows + strength * (coordinates[:, [1, 0]] - coordinates) @ basis.T


def unit(layer: int) -> torch.Tensor:
    (vector,) = directions(layer, 4)
    return vector / vector.norm()


#: Fields of a spec → what they make of `ROWS`, float64, by layer.
EDITS: list[tuple[dict[str, Any], Any]] = [
    ({"scale": 0.5}, lambda layer: ROWS.double() + 0.5 * directions(layer, 4)),
    (
        {"op": "add", "scale": 0.5, "norm_match": True},
        lambda layer: ROWS.double() + 0.5 * ROWS.double().norm(dim=1)[:, None] * unit(layer),
    ),
    (
        {"op": "ablate"},
        lambda layer: ROWS.double() - (ROWS.double() @ unit(layer))[:, None] * unit(layer),
    ),
    ({"swap": 7}, lambda layer: swapped(layer, 1.0)),
    ({"swap": 7, "strength": 2.0}, lambda layer: swapped(layer, 2.0)),
]


@pytest.mark.parametrize(("fields", "wanted"), EDITS)
def test_an_edit_is_what_the_definition_computes(
    root: Path, fields: dict[str, Any], wanted: Any
) -> None:
    found = steered(root, SteeringSpec(jacobian="mine", token=4, layers=[0, 2], **fields))
    assert sorted(found) == [0, 2]
    for layer, rows in found.items():
        torch.testing.assert_close(rows.double(), wanted(layer), atol=2e-5, rtol=1e-5)
        assert (rows != ROWS).any()


def test_all_layers_are_those_of_the_lens_also_in_a_module(root: Path) -> None:
    spec = SteeringSpec(jacobian="mine", token=4, layers="all", scale=3.0)
    other = SteeringSpec(layers=3, vector=[1.0] * WIDTH)
    content = resolve_module([spec, other], MODEL, named(root, spec, other))
    assert [entry.layers for entry in content.entries] == [[0], [1], [2], [3]]
    largest = [3 * float(directions(layer, 4).abs().max()) for layer in LAYERS]
    assert content.reach == pytest.approx([*largest, 1.0])
    state = ModelState(features=named(root, spec, other))
    low = msgspec.structs.replace(MODEL, dtype="float16")
    with refuses("times steering[0]'s scaled vector", field="scales[1]"):
        resolve_edits([], [spec], Bounds(low, [PromptFacts(1)]), state, scales=[1.0, -3e5])


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"token": None}, "token", "is required with jacobian"),
        ({"token": 30}, "token", "outside the output matrix of 'mine'"),
        ({"token": 10}, "token", "its direction at layer 0 is zero"),
        ({"layers": None}, "layers", "is required: the layers to edit"),
        ({"layers": "1-3"}, "layers", "'mine' has no map of layer 3"),
        ({"layers": 9}, "layers", "9"),
        ({"hook": "pre_attn"}, "hook", "'mine' maps post_block"),
        ({"op": "lowrank"}, "op", "'lowrank' is not valid here"),
        ({"op": "ablate", "swap": 7}, "op", "'ablate' is not valid here"),
        ({"op": "clamp", "low": 0.0}, "op", "'clamp' is not valid here"),
        ({"op": "ablate", "scale": 2.0}, "scale", "for op 'ablate'; valid fields: jacobian"),
        ({"vector": [1.0]}, "vector", "is not valid together with jacobian"),
        ({"token": 8, "swap": 9}, "swap", "nothing to exchange"),
        ({"jacobian": None}, "token", "is not valid without `jacobian`"),
        ({"scale": 1e9}, "scale", "out of range"),
    ],
)
def test_what_a_lens_cannot_do_is_refused_by_field(
    root: Path, fields: dict[str, Any], field: str, says: str
) -> None:
    spec = SteeringSpec(**({"jacobian": "mine", "token": 4, "layers": [0]} | fields))
    with refuses(match=says, field=f"steering[0].{field}"):
        steered(root, spec)


def test_a_lens_that_has_changed_is_refused_and_many_layers_are_limited(tmp_path: Path) -> None:
    write(tmp_path / "mine", J, JacobianRecord(method="exact", prompts=1), Matrix(HEAD))
    lens = lens_in(tmp_path)
    spec = SteeringSpec(jacobian="mine", token=4, layers="all")
    (directed,) = check_directed([spec], {"mine": lens}, MODEL)
    write(
        tmp_path / "mine", {**J, 1: J[0]}, JacobianRecord(method="exact", prompts=1), Matrix(HEAD)
    )
    with refuses("has changed since it was registered"):
        DirectionFiles(str(tmp_path)).plain_specs(directed, [4])
    with refuses("has directions for"):
        check_directed([spec] * (MAX_ENTRIES // len(LAYERS) + 1), {"mine": lens}, MODEL)
    with refuses("another shape"):
        check_shape(lens, msgspec.structs.replace(MODEL, hidden_size=9), "lens.jacobian")
