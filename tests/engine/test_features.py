"""Features are those of the rows that a capture gets, whatever the engine does meanwhile; steering
by one sets it in the forward.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from host import Host, capture_of, prompt_of
from safetensors.numpy import save_file
from tiny import HIDDEN, LAYERS

from midstream.api.resolve.edits.features import FeatureFiles, NamedFeatures, check_specs
from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.steering import resolve_edits
from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.api.resolve.readings.saes import resolve_sae
from midstream.broker.ledger.results.readings import readings
from midstream.schemas.artifacts.saes import Sae, SaeRequest
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.readings.features import FeaturesReading, StoredFeatures
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.specs import SteeringSpec, StoredCapture, StoredSteering

D_SAE = 256
LAYER = 2
K = 12
#: Of activations of size 1 to 10, sums of 64 float32 products in another order.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}


class Dictionary:
    """A random autoencoder in SAELens' files, and its arithmetic in float64.

    `kind`: an architecture, or `layer_norm` of a standard one.
    """

    def __init__(self, root: Path, kind: str, seed: int, layer: int = LAYER) -> None:
        rng = np.random.default_rng(seed)
        self.normalises = kind == "layer_norm"
        architecture = "standard" if self.normalises else kind
        self.root = root
        self.name = f"{kind}-{layer}"
        self.architecture = architecture
        shapes = {
            "W_enc": (HIDDEN, D_SAE),
            "W_dec": (D_SAE, HIDDEN),
            "b_dec": (HIDDEN,),
            "b_enc": (D_SAE,),
        }
        self.tensors = {
            name: (rng.standard_normal(shape) / 8).astype(np.float32)
            for name, shape in shapes.items()
        }
        if architecture == "jumprelu":
            self.tensors["threshold"] = np.full(D_SAE, 0.2, np.float32)
        folder = root / self.name
        folder.mkdir(parents=True)
        save_file(self.tensors, folder / "sae_weights.safetensors")
        config = (
            {"architecture": architecture, "d_in": HIDDEN, "d_sae": D_SAE, "k": 9}
            if architecture == "topk"
            else {}
        )
        config |= {"normalize_activations": "layer_norm"} if self.normalises else {}
        config = {"architecture": architecture, "d_in": HIDDEN, "d_sae": D_SAE, **config}
        (folder / "cfg.json").write_text(
            json.dumps(config | {"metadata": {"hook_name": f"blocks.{layer}.hook_resid_post"}})
        )

    def spread(self, rows: np.ndarray) -> np.ndarray:
        """What an activation of 1 is in units of each row, `[n, 1]`."""
        wide = rows.astype(np.float64)
        return wide.std(1, ddof=1, keepdims=True) if self.normalises else np.ones((len(rows), 1))

    def encode(self, rows: np.ndarray) -> np.ndarray:
        wide = {name: tensor.astype(np.float64) for name, tensor in self.tensors.items()}
        read = rows.astype(np.float64)
        if self.normalises:
            read = (read - read.mean(1, keepdims=True)) / (self.spread(rows) + 1e-5)
        found = (read - wide["b_dec"]) @ wide["W_enc"] + wide["b_enc"]
        if self.architecture == "topk":
            return np.where(found >= np.sort(found)[:, [-9]], found, 0).clip(0)
        return (
            np.where(found > wide["threshold"], found, 0)
            if self.architecture == "jumprelu"
            else found.clip(0)
        )

    def on(self, host: Host) -> Sae:
        """Registered, and loaded on the ranks of the engine."""
        sae = resolve_sae(SaeRequest(path=self.name), self.name, _model(host), str(self.root))
        assert all(
            ok
            for ok, _ in host.call(
                "midstream_put_sae", sae.digest, sae.hook, sae.layer, str(self.root / self.name)
            )
        )
        return sae


def _model(host: Host) -> ModelInfo:
    return msgspec.convert(host.info, ModelInfo)


@pytest.fixture(scope="module")
def dictionaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dictionary]:
    root = tmp_path_factory.mktemp("saes")
    return {
        name: Dictionary(root, name, seed)
        for seed, name in enumerate(("standard", "jumprelu", "topk", "layer_norm"))
    }


def features(sae: Sae, positions: Any = "all", **options: Any) -> StoredCapture:
    reading = StoredFeatures(sae=sae.stored(), top_k=K)
    return StoredCapture(
        sites={sae.hook: [sae.layer]},
        positions=positions,
        tag="",
        consumers=[READER],
        reading=reading,
        **({"at": "after"} | options),
    )


def read(host: Host, job: Job) -> list[FeaturesReading]:
    receipts = host.receipts(job)
    for receipt in receipts:
        assert receipt.status == "ok", receipt
    return readings(receipts)["features"]


def check(reading: FeaturesReading, activations: np.ndarray) -> None:
    """`activations`: float64 `[positions, d_sae]`."""
    assert reading.active == pytest.approx((activations > 0).sum(1), abs=1), (
        "one may be at its threshold"
    )
    for wanted, mine, values in zip(
        activations, reading.features, reading.activations, strict=True
    ):
        np.testing.assert_allclose(values, np.sort(wanted)[::-1][: len(values)], **TOLERANCE)
        np.testing.assert_allclose(wanted[mine], values, **TOLERANCE)


def steering(host: Host, root: Path, sae: Sae, **fields: Any) -> list[StoredSteering]:
    """As the API stores it; its vectors are registered at the host. `root`: where its files are."""
    spec = SteeringSpec(sae=sae.name, **fields)
    (numbers,) = check_specs([spec], {sae.name: sae}).values()
    rows = FeatureFiles(str(root)).read(sae, numbers)
    named = NamedFeatures(
        {sae.name: sae}, {(sae.name, number): row for number, row in rows.items()}
    )
    per_prompt, blobs = resolve_edits(
        [], [spec], Bounds(_model(host), [PromptFacts(64)]), ModelState(features=named)
    )
    host._vectors |= {name: from_msgpack(blob, Tensor) for name, blob in blobs.items()}
    return per_prompt[0]


def test_features_are_those_of_the_captured_rows_in_chunks(
    v1: Host, dictionaries: dict[str, Dictionary]
) -> None:
    """200 tokens in steps of 64, four autoencoders at a time, beside another request."""
    saes = {name: each.on(v1) for name, each in dictionaries.items()}
    captures = [capture_of([LAYER], "all", at="after"), *(features(sae) for sae in saes.values())]
    job = v1.job(prompt_of(200), max_tokens=4, capture=captures)
    other = v1.job(prompt_of(30, seed=5), max_tokens=3)
    outputs = v1.run(job, other)[job.id]
    rows = v1.capture(job).array(LAYER)
    tokens = [*prompt_of(200), *outputs[0].token_ids][:-1]
    for reading, each in zip(read(v1, job), dictionaries.values(), strict=True):
        assert reading.sae == each.name
        assert reading.layer == LAYER
        assert reading.positions == list(range(203))
        assert reading.token_ids == tokens
        check(reading, each.encode(rows))
    assert {file.tag for file in v1.receipts(job)[0].files} == {"default"}, (
        "a reading stores no rows"
    )


def test_a_feature_is_set_in_the_forward_and_the_error_kept(
    v1: Host, dictionaries: dict[str, Dictionary]
) -> None:
    each = dictionaries["jumprelu"]
    sae = dictionaries["jumprelu"].on(v1)
    captures = [capture_of([LAYER], "all_prompt", at=at, tag=at) for at in ("before", "after")]
    for op, value in (("clamp", 7.5), ("ablate", None), ("add", 2.0)):
        plain = v1.job(prompt_of(20), max_tokens=1, capture=captures[0])
        v1.run(plain)
        feature = int(each.encode(v1.capture(plain).array(LAYER)).sum(0).argmax())
        edits = steering(v1, each.root, sae, feature=feature, op=op, value=value)
        job = v1.job(
            prompt_of(20), max_tokens=1, capture=[*captures, features(sae)], steering=edits
        )
        v1.run(job)
        before = v1.capture(job, 0).array(LAYER)
        after = v1.capture(job, 1).array(LAYER)
        activation = each.encode(before)[:, feature]
        moved = value if op == "add" and value else (value or 0.0) - activation
        wanted = (
            before
            + np.broadcast_to(moved, activation.shape)[:, None] * each.tensors["W_dec"][feature]
        )
        np.testing.assert_allclose(after, wanted, atol=1e-4)
        assert np.abs(after - before).max() > 0.1
        check(read(v1, job)[0], each.encode(after))


def test_an_autoencoder_that_is_not_loaded_fails_its_request_and_no_other(
    v1: Host, dictionaries: dict[str, Dictionary]
) -> None:
    sae = dictionaries["standard"].on(v1)
    assert all(ok for ok, _ in v1.call("midstream_drop_saes", [sae.digest]))
    wanting = v1.job(prompt_of(9), max_tokens=2, capture=features(sae))
    other = v1.job(prompt_of(9), max_tokens=2, capture=capture_of([1], "all"))
    v1.run(wanting, other)
    (receipt,) = v1.receipts(wanting)
    (fine,) = v1.receipts(other)
    assert receipt.status == "error"
    assert receipt.kind == "reading_failed"
    assert fine.status == "ok"
    assert "features: the sparse autoencoder 'standard-2'" in receipt.message
    wrong = v1.call(
        "midstream_put_sae",
        "0" * 64,
        sae.hook,
        sae.layer,
        str(dictionaries["standard"].root / sae.name),
    )
    assert "have changed since it was registered" in wrong[0][1]


def test_features_of_a_cached_prompt_are_the_same(
    cached: Host, dictionaries: dict[str, Dictionary]
) -> None:
    sae = dictionaries["standard"].on(cached)
    prompt = prompt_of(300, seed=61)
    jobs = [cached.job(prompt, max_tokens=2, capture=features(sae, "all_prompt")) for _ in range(2)]
    outputs = [cached.run(job)[job.id][0] for job in jobs]
    assert outputs[0].cached_tokens == 0
    assert outputs[1].cached_tokens == 256
    first, second = (read(cached, job)[0] for job in jobs)
    assert second.positions == list(range(300))
    assert second.features[:256] == first.features[:256]
    np.testing.assert_allclose(second.activations[0], first.activations[0], **TOLERANCE)


@pytest.mark.parametrize("engine", ["compiled", "v2"])
def test_features_under_other_runners(
    request: pytest.FixtureRequest, engine: str, dictionaries: dict[str, Dictionary]
) -> None:
    host: Host = request.getfixturevalue(engine)
    each = dictionaries["layer_norm"]
    sae = dictionaries["layer_norm"].on(host)
    captures = [
        *(capture_of([LAYER], "all", at=at, tag=at) for at in ("before", "after")),
        features(sae),
    ]
    edits = steering(
        host, each.root, sae, feature=3, op="clamp", value=4.0, positions="all_generated"
    )
    job = host.job(prompt_of(70, seed=5), max_tokens=3, capture=captures, steering=edits)
    host.run(job)
    before = host.capture(job, 0).array(LAYER)
    after = host.capture(job, 1).array(LAYER)
    check(read(host, job)[0], each.encode(after))
    moved = np.where(np.arange(len(before)) < 70, 0.0, 4.0 - each.encode(before)[:, 3])
    np.testing.assert_allclose(
        after, before + moved[:, None] * each.spread(before) * each.tensors["W_dec"][3], atol=1e-4
    )
    assert np.abs(after - before)[70:].max() > 0.1


@pytest.mark.parametrize("engine", ["tp2", "pp2"])
def test_one_rank_of_several_reads_the_features(
    request: pytest.FixtureRequest, engine: str, tmp_path: Path
) -> None:
    host: Host = request.getfixturevalue(engine)
    for layer in (0, LAYERS - 1):
        each = Dictionary(tmp_path, "standard", layer, layer)
        sae = each.on(host)
        job = host.job(
            prompt_of(40, seed=layer),
            max_tokens=2,
            capture=[capture_of([layer], "all", at="after"), features(sae)],
        )
        host.run(job)
        assert (
            sum(made.name == READER for receipt in host.receipts(job) for made in receipt.consumed)
            == 1
        )
        (reading,) = read(host, job)
        check(reading, each.encode(host.capture(job).array(layer)))
