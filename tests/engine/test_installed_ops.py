"""Installed ops and readers on the real engine. Ops, eager and compiled, edit their rows; readers
get the rows that a capture of the same sites stores; a fault of either stays with its request.
"""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from extension_kit import BANK
from host import Host, capture_of, prompt_of
from tiny import HIDDEN, LAYERS

from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.api.resolve.readings.readings import resolve_readings
from midstream.broker.ledger.named.registry import NOTHING_FOUND, Lookup
from midstream.broker.ledger.results.readings import readings
from midstream.schemas import packages
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.readings.installed import ReaderReading, ReaderSpec
from midstream.schemas.requests.artifact_kinds import ARTIFACTS
from midstream.schemas.requests.specs import SteeringSpec, StoredCapture
from midstream.workers.runner.readings.installed_readers import PATIENCE_S

ALL = list(range(LAYERS))
VECTOR = np.random.default_rng(5).normal(size=HIDDEN).astype(np.float32)
SIDES = [capture_of(ALL, "all", "before"), capture_of(ALL, "all", "after", at="after")]


def steered(host: Host, seed: int, *specs: dict[str, Any]) -> Job:
    return host.job(
        prompt_of(20, seed=seed),
        capture=SIDES,
        steering=host.steering(*(SteeringSpec(**spec) for spec in specs)),
    )


@pytest.mark.parametrize("engine", ["v1", "compiled"])
def test_an_op_edits_beside_others_and_not_at_strength_zero(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """A cap half as long as most rows, behind an addition and with a strength of 0."""
    host: Host = request.getfixturevalue(engine)
    plain = host.job(prompt_of(20, seed=1), capture=SIDES)
    host.run_together(plain)
    limit = float(np.median(np.linalg.norm(host.capture(plain).array(1), axis=-1)))
    cap = {"extension": "norm-cap", "layers": 1, "options": {"limit": limit}}
    both = steered(host, 3, cap, {"op": "add", "layers": 1, "vector": from_numpy(VECTOR)})
    nothing = steered(host, 1, cap | {"strength": 0.0})
    host.run_together(both)
    host.run_together(nothing)
    before, after = (host.capture(both, side).array(1) for side in (0, 1))
    added = before + VECTOR
    norms = np.linalg.norm(added, axis=-1, keepdims=True)
    capped = np.where(norms > limit, added * limit / norms, added)
    np.testing.assert_allclose(after, capped, rtol=1e-5, atol=1e-5)
    for layer in ALL:
        zero, bare = (host.capture(job, 1).array(layer) for job in (nothing, plain))
        np.testing.assert_array_equal(zero, bare)


@pytest.mark.parametrize("engine", ["cached", "v2", "tp2", "pp2", "overlapped"])
def test_ops_edit_their_rows_alike_on_every_runner_rank_and_stage(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """Of each request at a layer of its own, beside failing ones; where there are few blocks,
    requests are preempted meanwhile.
    """
    host: Host = request.getfixturevalue(engine)
    before = host.call("midstream_status")[0]["preemptions"]
    unit = VECTOR / np.linalg.norm(VECTOR)
    length, tokens = (110, 60) if engine == "cached" else (58, 14)
    jobs = {}
    for layer in ALL:
        steering = host.steering(
            SteeringSpec(extension="along", layers=[layer], vector=from_numpy(VECTOR), strength=0.5)
        )
        jobs[layer] = host.job(
            prompt_of(length, seed=30 + layer), max_tokens=tokens, capture=SIDES, steering=steering
        )
    raises = SteeringSpec(extension="unruly", layers=[LAYERS - 1], options={"mood": 1.0})
    failing = host.job(prompt_of(12), steering=host.steering(raises))
    host.run_together(*jobs.values(), failing)
    for edited, job in jobs.items():
        sides = [host.capture(job, side) for side in (0, 1)]
        for layer in ALL:
            old, new = (reader.array(layer) for reader in sides)
            wanted = old + 0.5 * (old @ unit)[:, None] * unit
            np.testing.assert_allclose(
                new, wanted if layer == edited else old, rtol=1e-4, atol=1e-5
            )
        applied = sum(receipt.applied for receipt in host.receipts(job))
        assert applied == (length + tokens - 1) * host.settings.vllm.tensor_parallel_size
    assert "intervention_failed" in {receipt.kind for receipt in host.receipts(failing)}
    assert (host.call("midstream_status")[0]["preemptions"] > before) == (
        engine in ("cached", "overlapped")
    )


def test_an_op_that_fails_for_one_request_edits_rows_of_others_with_the_same_edit(v1: Host) -> None:
    same = SteeringSpec(extension="unruly", layers=1, options={"mood": 5.0})
    far = SteeringSpec(op="add", layers=1, vector=from_numpy(np.full(HIDDEN, 1e4, np.float32)))
    good = v1.job(prompt_of(20), capture=SIDES, steering=v1.steering(same))
    bad = v1.job(prompt_of(20), steering=v1.steering(far, same))
    v1.run_together(good, bad)
    assert v1.receipts(bad)[0].kind == "intervention_failed"
    before, after = (v1.capture(good, side).array(1) for side in (0, 1))
    np.testing.assert_array_equal(after, before + np.float32(1))


def test_what_an_op_does_wrong_fails_its_request_alone(v1: Host) -> None:
    def wrong(seed: int, mood: float) -> Job:
        return v1.job(
            prompt_of(20, seed=seed),
            steering=v1.steering(
                SteeringSpec(extension="unruly", layers=1, options={"mood": mood})
            ),
        )

    jobs = [wrong(seed, mood) for seed, mood in enumerate((1.0, 2.0, 3.0, 4.0), 10)]
    good = wrong(20, 0.0)
    beside = v1.job(prompt_of(20, seed=1), capture=SIDES)
    stale = wrong(21, 0.0)
    entry = stale.steering[0][0]
    entry.numbers[-1] += 1.0
    v1.run(*jobs, good, beside, stale)
    for job in jobs:
        (receipt,) = v1.receipts(job)
        assert receipt.status == "error", receipt
        assert receipt.kind == "intervention_failed", receipt
        assert "replace with extension" in receipt.message
    (receipt,) = v1.receipts(stale)
    assert receipt.status == "error"
    assert receipt.kind == "intervention_failed"
    assert "another version of it" in receipt.message
    assert v1.receipts(good)[0].status == "ok"
    for layer in ALL:
        assert np.isfinite(v1.capture(beside).array(layer)).all()


def reader(
    host: Host, name: str, tokens: int, found: Lookup = NOTHING_FOUND, **fields: Any
) -> StoredCapture:
    """As the API stores it."""
    info = msgspec.convert(host.info, ModelInfo)
    parsed: Any = SimpleNamespace(readings={"readers": [ReaderSpec(name=name, **fields)]})
    ((_, (stored,)),) = resolve_readings(
        parsed, Bounds(info, [PromptFacts(tokens)], 8, found=found)
    )
    return stored


def read(host: Host, job: Job) -> list[ReaderReading]:
    receipts = host.receipts(job)
    assert [receipt.status for receipt in receipts] == ["ok"] * len(receipts), receipts
    return readings(receipts)["readers"]


@pytest.mark.parametrize("engine", ["v1", "v2", "tp2", "pp2", "overlapped"])
def test_reader_gets_the_rows_of_a_capture_on_every_runner_rank_and_stage(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """In chunks. Each stage reads its own layers, one rank of it; a fault fails the request, also
    where one stage reads nothing, and no other.
    """
    host: Host = request.getfixturevalue(engine)
    stages = host.settings.vllm.pipeline_parallel_size
    wish: Any = {
        "hooks": {"post_block": "all", "mlp_out": [1]},
        "positions": "all",
        "options": {"k": 4},
    }
    captures = [
        capture_of([], "all", sites={"mlp_out": [1], "post_block": ALL}),
        reader(host, "row-geometry", 70, **wish),
    ]
    raising = reader(host, "unruly", 12, layers=[LAYERS - 1], options={"mood": "raise"})
    job = host.job(prompt_of(70), max_tokens=4, capture=captures)
    failing = host.job(prompt_of(12), capture=raising)
    host.run(job, failing)
    stored = host.capture(job)
    (reading,) = read(host, job)
    assert len(reading.parts) == stages
    assert reading.package == "row-geometry"
    assert reading.version == "1.0"
    assert reading.options["k"] == 4
    seen = []
    for part in reading.parts:
        sites = [(hook, layer) for hook, layers in part.sites.items() for layer in layers]
        norms = np.linalg.norm(
            np.stack([stored.array(layer, hook=hook) for hook, layer in sites]), axis=-1
        )  # type: ignore[arg-type]
        np.testing.assert_allclose(part.arrays["norm"].numpy(), norms, rtol=1e-6)
        assert part.positions == stored.positions()
        assert part.token_ids == stored.token_ids()
        seen += sites
    assert sorted(seen) == sorted([("mlp_out", 1), *(("post_block", layer) for layer in ALL)])
    assert ("reading_failed", True) in [
        (receipt.kind, "unruly: ValueError: no such luck" in receipt.message)
        for receipt in host.receipts(failing)
    ]


def test_a_fault_in_a_reader_fails_its_request_alone(v1: Host) -> None:
    jobs = {
        mood: v1.job(prompt_of(12), capture=reader(v1, "unruly", 12, options={"mood": mood}))
        for mood in ["good", "raise", "exit", "large", "other", "write"]
    }
    beside = v1.job(prompt_of(12), capture=[capture_of(ALL, "all"), reader(v1, "row-geometry", 12)])
    v1.run(*jobs.values(), beside)
    words = {
        "raise": "unruly: ValueError: no such luck",
        "exit": "it raised SystemExit(3)",
        "large": "returned 72 bytes",
        "other": "declares the arrays ['rows']",
        "write": "read-only",
    }
    for mood, job in jobs.items():
        (receipt,) = v1.receipts(job)
        if mood == "good":
            assert receipt.status == "ok"
            assert read(v1, job)[0].parts[0].arrays["rows"].numpy().tolist() == [1]
        else:
            assert receipt.status == "error"
            assert receipt.kind == "reading_failed"
            assert words[mood] in receipt.message
    assert read(v1, beside)[0].parts[0].arrays["norm"].numpy().shape == (LAYERS, 1)


@pytest.mark.long
def test_a_reader_that_hangs_fails_its_request_after_its_time(v1: Host) -> None:
    hanging = v1.job(prompt_of(12), capture=reader(v1, "unruly", 12, options={"mood": "hang"}))
    v1.run(hanging)
    (receipt,) = v1.receipts(hanging)
    assert f"it took longer than {PATIENCE_S:g} s" in receipt.message
    after = v1.job(prompt_of(12), capture=reader(v1, "row-geometry", 12))
    v1.run(after)
    assert read(v1, after)[0].parts[0].arrays["norm"].numpy().shape == (LAYERS, 1)


@pytest.mark.parametrize("engine", ["v1", "tp2", "pp2"])
def test_a_reader_reads_with_a_registered_artifact_as_it_was_accepted(
    engine: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cosine of each row with the directions of a bank, of which ranks hold no name."""
    host: Host = request.getfixturevalue(engine)
    monkeypatch.syspath_prepend(str(BANK))
    banks = packages.part("midstream_bank:BANKS")
    monkeypatch.setitem(ARTIFACTS, "banks", banks)
    units = np.stack([VECTOR / np.linalg.norm(VECTOR), np.eye(HIDDEN, dtype=np.float32)[3]])
    bank = banks.record(
        name="mine",
        model="m",
        digest="d",
        created=1.0,
        labels=["far", "third"],
        units=units.astype("<f4").tobytes(),
    )
    options = {"bank": "mine"}
    found = Lookup("m", {("banks", "mine"): bank})
    wish = reader(host, "bank", 20, found, layers=ALL, positions="all", options=options)
    job = host.job(prompt_of(20), max_tokens=4, capture=[capture_of(ALL, "all"), wish])
    host.run(job)
    stored = host.capture(job)
    for part in read(host, job)[0].parts:
        for layer, cosines in zip(
            part.sites["post_block"], part.arrays["cosine"].numpy(), strict=True
        ):
            rows = stored.array(layer)
            wanted = rows @ units.T / np.linalg.norm(rows, axis=-1, keepdims=True)
            np.testing.assert_allclose(cosines, wanted, rtol=1e-4, atol=1e-5)
