"""Installed readers on the real engine: they get the rows that a capture of the same sites stores,
and a fault stays with its request.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
from host import Host, capture_of, prompt_of
from tiny import LAYERS

from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.api.resolve.readings.readers import resolve_reader
from midstream.broker.ledger.results.readings import readings
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.readings.installed import ReaderReading, ReaderSpec
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.runner.readings.installed_readers import PATIENCE_S

ALL = list(range(LAYERS))


def reader(host: Host, name: str, tokens: int, **fields: Any) -> StoredCapture:
    """As the API stores it."""
    info = msgspec.convert(host.info, ModelInfo)
    (stored,) = resolve_reader(
        ReaderSpec(name=name, **fields), Bounds(info, [PromptFacts(tokens)], 8), "readers[0]"
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
    job, failing = (
        host.job(prompt_of(70), max_tokens=4, capture=captures),
        host.job(prompt_of(12), capture=raising),
    )
    host.run(job, failing)
    stored, (reading,) = host.capture(job), read(host, job)
    assert (len(reading.parts), reading.package, reading.version, reading.options["k"]) == (
        stages,
        "row-geometry",
        "1.0",
        4,
    )
    seen = []
    for part in reading.parts:
        sites = [(hook, layer) for hook, layers in part.sites.items() for layer in layers]
        norms = np.linalg.norm(
            np.stack([stored.array(layer, hook=hook) for hook, layer in sites]), axis=-1
        )  # type: ignore[arg-type]
        np.testing.assert_allclose(part.arrays["norm"].numpy(), norms, rtol=1e-6)
        assert (part.positions, part.token_ids) == (stored.positions(), stored.token_ids())
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
            assert (receipt.status, receipt.kind) == ("error", "reading_failed")
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
