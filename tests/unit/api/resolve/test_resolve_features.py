"""Steering by a feature becomes vectors and numbers that do what it says; what an autoencoder
cannot do is refused by field.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from model_kit import model
from refusal_kit import refuses
from sae_rows import D_IN, D_SAE, ROOT
from site_plans import SitePlan

from midstream.api.resolve.edits.features import (
    FeatureFiles,
    FeatureVectors,
    NamedFeatures,
    check_range,
    check_specs,
)
from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.steering import resolve_edits, resolve_global, resolve_module
from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.api.resolve.readings.saes import resolve_sae
from midstream.kernels import single_site
from midstream.kernels.plan import does_of
from midstream.schemas.artifacts.saes import Sae, SaeRequest
from midstream.schemas.base.edit_sizes import EditLimit
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import Tensor, to_numpy
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.requests.specs import SteeringSpec, StoredSteering
from midstream.storage.formats.sae_files import ThresholdFeature
from midstream.workers.runner.readings.sae import NORMALISATIONS, load

MODEL = model(hidden_size=D_IN, dtype="float32")
RULED = ["standard", "bare", "jumprelu", "gated", "gemma_scope", "layer_norm", "constant_norm"]


def registered(name: str, served: ModelInfo = MODEL) -> Sae:
    place = {"hook": "post_block", "layer": 1} if name == "gemma_scope" else {}
    return resolve_sae(SaeRequest(path=name, **place), name, served, str(ROOT))  # type: ignore[arg-type]


def named(*specs: SteeringSpec, served: ModelInfo = MODEL) -> NamedFeatures:
    saes = {spec.sae: registered(spec.sae, served) for spec in specs if spec.sae}
    rows = {}
    for name, features in check_specs(specs, saes).items():
        rows |= {
            (name, feature): each
            for feature, each in FeatureFiles(str(ROOT)).read(saes[name], features).items()
        }
    return NamedFeatures(saes, rows)


def resolved(
    spec: SteeringSpec, served: ModelInfo = MODEL
) -> tuple[StoredSteering, list[torch.Tensor]]:
    state = ModelState(features=named(spec, served=served))
    per_prompt, blobs = resolve_edits([], [spec], Bounds(served, [PromptFacts(5)]), state)
    ((entry,),) = per_prompt
    return entry, [
        torch.tensor(to_numpy(from_msgpack(blobs[name], Tensor))) for name in entry.tensors
    ]


def steered(spec: SteeringSpec, rows: torch.Tensor, dtype: str = "float32") -> torch.Tensor:
    """What the kernels make of rows `[n, d_in]`."""
    entry, tensors = resolved(spec, msgspec.structs.replace(MODEL, dtype=dtype))
    assert entry.hook == "post_block"
    assert entry.layers == [1]
    does = does_of(entry.family, entry.numbers, tensors, entry.scale)
    plan = SitePlan(D_IN, [{entry.family: does}], {token: [1] for token in range(len(rows))})
    stream = rows.clone()
    single_site(stream, torch.zeros(1, D_IN, dtype=rows.dtype), *plan.build(len(rows), rows.dtype))
    return stream


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    with np.load(ROOT / "rows.npz") as arrays:
        return torch.tensor(arrays["rows"])


@pytest.mark.parametrize("name", RULED)
@pytest.mark.parametrize(("op", "value"), [("clamp", 1.5), ("ablate", None), ("add", -0.75)])
def test_one_activation_changes_and_the_reconstruction_error_stays(
    name: str, op: str, value: float | None, rows: torch.Tensor
) -> None:
    sae = load(ROOT / name, registered(name).digest)
    before = sae.encode(rows)
    feature = int((before > 0).sum(0).argmax())
    wanted = before.clone()
    wanted[:, feature] = before[:, feature] + value if op == "add" and value else value or 0.0
    found = steered(SteeringSpec(sae=name, feature=feature, op=op, value=value), rows)  # type: ignore[arg-type]
    moved = (sae.decode(wanted) - sae.decode(before)) * NORMALISATIONS[
        sae.form.normalize_activations
    ](rows).scale
    torch.testing.assert_close(found, rows + moved, atol=3e-6, rtol=1e-5)
    assert (found != rows).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RULED)
def test_clamping_to_the_present_value_changes_no_bit(
    name: str, dtype: str, rows: torch.Tensor
) -> None:
    held = rows.to(getattr(torch, dtype))
    top = load(ROOT / name, registered(name).digest).top(held, 3)
    for row, indices, values in zip(held, top.indices, top.activations, strict=True):
        for feature, value in zip(indices.tolist(), values.tolist(), strict=True):
            spec = SteeringSpec(sae=name, feature=feature, op="clamp", value=value)
            assert torch.equal(steered(spec, row[None], dtype), row[None]), (feature, value)
            assert not torch.equal(
                steered(msgspec.structs.replace(spec, value=value + 0.5), row[None], dtype),
                row[None],
            )


def test_an_edit_of_a_feature_may_be_limited() -> None:
    spec = SteeringSpec(sae="jumprelu", feature=5, op="ablate", limit=EditLimit(relative=0.5))
    assert resolved(spec)[0].limit == 0.5


def test_an_inactive_feature_is_ablated_already(rows: torch.Tensor) -> None:
    inactive = load(ROOT / "jumprelu", registered("jumprelu").digest).encode(rows)[:, 5] == 0
    found = steered(SteeringSpec(sae="jumprelu", feature=5, op="ablate"), rows)
    assert torch.equal(found[inactive], rows[inactive])
    assert inactive.any()
    assert (found[~inactive] != rows[~inactive]).any(1).all()


@pytest.mark.parametrize("name", ["topk", "rescaled"])
def test_adding_to_a_feature_of_a_topk_autoencoder_adds_its_decoder_row(
    name: str, rows: torch.Tensor
) -> None:
    sae = load(ROOT / name, registered(name).digest)
    before = sae.encode(rows)
    wanted = before.clone()
    wanted[:, 4] += 1.25
    found = steered(SteeringSpec(sae=name, feature=4, op="add", value=1.25), rows)
    torch.testing.assert_close(
        found, rows + sae.decode(wanted) - sae.decode(before), atol=3e-6, rtol=1e-5
    )


def test_three_parts_in_bfloat16_add_up_to_the_encoder() -> None:
    spec = SteeringSpec(sae="gated", feature=3, op="ablate")
    whole = resolved(spec)[1]
    parts = resolved(spec, msgspec.structs.replace(MODEL, dtype="bfloat16"))[1]
    assert torch.equal(parts[0] + parts[1] + parts[2], whole[0])
    assert all(torch.equal(part, part.bfloat16().float()) for part in parts[:3])
    assert not whole[1].any()


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"feature": 3}, "feature", "is not valid without `sae`"),
        ({"value": 3.0}, "value", "is not valid without `sae`"),
        ({"sae": "standard", "value": 1.0}, "feature", "is required with sae"),
        ({"sae": "standard", "feature": D_SAE, "value": 1.0}, "feature", "has no feature 32"),
        ({"sae": "standard", "feature": 3}, "value", "is required for op 'add'"),
        (
            {"sae": "standard", "feature": 3, "op": "ablate", "value": 1.0},
            "value",
            "is not valid for op 'ablate'",
        ),
        (
            {"sae": "standard", "feature": 3, "op": "replace", "value": 1.0},
            "op",
            "'replace' is not valid with sae",
        ),
        (
            {"sae": "standard", "feature": 3, "op": "clamp", "value": 1e7},
            "value",
            "1e+07 is out of range",
        ),
        (
            {"sae": "standard", "feature": 3, "op": "add", "value": 1e7},
            "value",
            "1e+07 is out of range",
        ),
        (
            {"sae": "standard", "feature": 3, "value": 1.0, "layers": 1},
            "layers",
            "is not valid together with sae",
        ),
        (
            {"sae": "standard", "feature": 3, "value": 1.0, "module": "joy"},
            "module",
            "is not valid together with sae",
        ),
        (
            {"sae": "topk", "feature": 3, "op": "clamp", "value": 1.0},
            "sae",
            "depends on all other features of the token",
        ),
        (
            {"sae": "rescaled", "feature": 3, "op": "ablate"},
            "sae",
            "valid: op 'add', or a standard, jumprelu or gated SAE",
        ),
        (
            {"sae": "standard", "feature": 3, "value": 1.0, "positions": [9]},
            "positions",
            "position 9 is out of range",
        ),
        (
            {"sae": "standard", "feature": 3, "op": "ablate", "positions": [9]},
            "positions",
            "position 9 is out of range",
        ),
    ],
)
def test_what_an_autoencoder_cannot_do_is_refused_by_field(
    spec: dict[str, Any], field: str, says: str
) -> None:
    with refuses(kind="invalid_request") as refused:
        resolved(SteeringSpec(**spec))
    assert str(refused.value.field).startswith(f"steering[0].{field}")
    assert says in refused.value.detail


def test_what_features_need_together_is_bounded_and_current(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("midstream.api.resolve.edits.features.MAX_FEATURES", 2)
    specs = [SteeringSpec(sae="standard", feature=feature, op="ablate") for feature in (1, 2, 2, 3)]
    with refuses("names 3 features"):
        named(*specs)
    assert set(named(*specs[:3]).rows) == {("standard", 1), ("standard", 2)}
    sae = msgspec.structs.replace(registered("standard"), digest="0" * 64)
    with refuses("have changed since it was registered", field="sae"):
        FeatureFiles(str(ROOT)).read(sae, [1])


@pytest.mark.parametrize("large", ["decoder", "encoder", "bias"])
def test_numbers_beyond_the_models_dtype_are_refused(large: str) -> None:
    vectors = {
        name: np.full(D_IN, 7e4 if name == large else 1.0, np.float32)
        for name in ("decoder", "encoder")
    }
    rule = ThresholdFeature(
        vectors["encoder"], vectors["decoder"], 7e4 if large == "bias" else 1.0, 0.0
    )
    found = {3: FeatureVectors(vectors["decoder"], rule)}
    check_range(registered("gated"), MODEL, found)
    with refuses(
        match=r"feature 3 of 'gated' has a number of magnitude 7e\+04: float16 allows "
        r"6.55e\+04",
        kind="invalid_request",
        field="sae",
    ):
        check_range(registered("gated"), msgspec.structs.replace(MODEL, dtype="float16"), found)


def test_modules_and_global_steering_take_features() -> None:
    specs = [
        SteeringSpec(sae="standard", feature=2, op="clamp", value=3.0),
        SteeringSpec(sae="topk", feature=1, op="add", value=-2.0),
    ]
    features = named(*specs)
    for content in (
        resolve_module(specs, MODEL, features),
        resolve_global(specs, MODEL, ModelState(features=features)),
    ):
        assert [entry.family for entry in content.entries] == ["feature", "add"]
        assert content.entries[0].numbers[:2] == [1.0, 3.0]
        assert len(content.blobs) == 4  # the middle part of an encoder is its last: zeros
