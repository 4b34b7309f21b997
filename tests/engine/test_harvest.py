"""Harvests on the real engine: their rows are those of captures, and a killed worker costs none and
doubles none.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from host import relative_error
from stack import Stack
from tolerances import BF16_BATCH

from midstream.broker.artifacts.headers import find_entries
from midstream.broker.ledger.recovery.harvests import job_id_of
from midstream.client import Client
from midstream.client.captures.reader import CaptureReader
from midstream.client.harvest import Harvest, open, verify
from midstream.storage.store import open_store
from midstream.workers.demo_model import fetch_demo_model

SLOW = {"lease_s": 15.0, "visibility_timeout_s": 30}
DOCUMENTS = [
    f"Fact number {number}: "
    + "the sum of the angles of a triangle is two right angles, " * (1 + number % 9)
    for number in range(60)
]
LAYERS = [3, 15, 28]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = fetch_demo_model()
    options = {
        "engine": "vllm",
        "model": str(model),
        "model_name": "demo",
        "max_model_len": 512,
        "kv_cache_gib": 0.5,
        "certify": False,
    }
    options |= {"dtype": "float32", "global_capture": "post_block:15", "global_capture_tag": "ops"}
    with Stack(
        tmp_path_factory.mktemp("harvest"), api=True, start_timeout_s=400, **options, **SLOW
    ) as stack:
        yield stack


@pytest.fixture
def client(service: Stack) -> Iterator[Client]:
    with Client(service.url) as made:
        yield made


def harvested(client: Client, **fields: object) -> Harvest:
    view = client.harvests.submit(
        model="demo", source={"lines": DOCUMENTS}, layers=LAYERS, shards={"mib": 1}, **fields
    )
    view = client.harvests.wait(view, timeout=180)
    assert verify(view.uri).faults == []
    return open(view.uri)


def check_close(made: Harvest, other: Harvest) -> None:
    """The same keys in the same places, and rows that differ by the batch alone."""
    for mine, theirs in zip(made.shards, other.shards, strict=True):
        for left, right in zip(mine.keys(), theirs.keys(), strict=True):
            assert np.array_equal(left, right)
        for layer in LAYERS:
            assert (
                relative_error(mine.rows("post_block", layer), theirs.rows("post_block", layer))
                <= BF16_BATCH
            )


@pytest.fixture(scope="module")
def whole(service: Stack) -> Harvest:
    with Client(service.url) as made:
        return harvested(made)


def test_rows_of_a_harvest_are_those_of_captures(client: Client, whole: Harvest) -> None:
    numbers = [0, 17, 59]
    job = client.run(
        model="demo",
        prompts=[DOCUMENTS[number] for number in numbers],
        max_tokens=1,
        progress=False,
        capture={"layers": LAYERS, "positions": "all_prompt"},
    )
    captured = client.capture(job)
    for request, number in enumerate(numbers):
        for layer in LAYERS:
            keys, rows = whole.document(number, layer)
            assert keys.positions.tolist() == captured.positions(request=request)
            assert keys.token_ids.tolist() == captured.token_ids(request=request)
            assert relative_error(rows, captured.array(layer, request=request)) <= BF16_BATCH
    assert set(whole.keys(slice(None)).documents.tolist()) == set(range(len(DOCUMENTS)))


def test_what_the_operator_captures_of_all_traffic_it_captures_of_a_harvest(
    service: Stack, whole: Harvest
) -> None:
    jobs = [job_id_of(whole.manifest.id, part, 0) for part in range(len(whole.manifest.parts))]
    found = [
        entry
        for job in jobs
        for _, entry in find_entries(open_store(service.settings.artifacts), job, "ops")
    ]
    assert len(found) == len(DOCUMENTS)
    captured = CaptureReader(Path(service.settings.artifacts) / "ops", job=jobs[0])
    for request in captured.requests()[:5]:
        tokens = captured.token_ids(request=request)
        (position,) = captured.positions(request=request)
        keys = whole.keys(slice(None))
        rows = whole.rows(slice(None), 15)[
            (keys.positions == position) & (keys.token_ids == tokens[0])
        ]
        assert (
            min(relative_error(row[None], captured.array(15, request=request)) for row in rows)
            <= BF16_BATCH
        )


def test_a_policy_that_stops_all_traffic_ends_what_a_harvest_generates(client: Client) -> None:
    """At the first token in which it crosses; the rows of the documents stay."""

    def generated() -> int:
        made = harvested(client, generate={"max_tokens": 4, "ignore_eos": True})
        return made.manifest.generated

    assert generated() == 4 * len(DOCUMENTS)
    client.probes.register("guard", weight=np.zeros(576), bias=[1.0], layer=3, thresholds=[0.5])
    condition = {"at_least": 0.5, "schedule": {"tokens": "all"}}
    fields = {"probe": "guard", "condition": condition, "mode": "active", "all_traffic": True}
    client.policies.register("guard", **fields, actions=["stop"])
    try:
        assert generated() == 0
    finally:
        client.policies.delete("guard")


@pytest.mark.matrix
def test_a_killed_worker_costs_no_row_and_doubles_none(
    service: Stack, client: Client, whole: Harvest
) -> None:
    view = client.harvests.submit(
        model="demo", source={"lines": DOCUMENTS}, layers=LAYERS, shards={"mib": 1}
    )
    while client.harvests.get(view).units_done < 1:
        time.sleep(0.05)
    service.kill("worker")
    before = client.harvests.get(view).units_done
    assert before < client.harvests.get(view).units
    service.restart("worker")
    done = client.harvests.wait(view, timeout=240)
    assert verify(done.uri).faults == []
    check_close(open(done.uri), whole)
    assert {path.name for path in Path(done.uri).iterdir()} == {
        "manifest.json",
        "plans",
        "parts",
        "shards",
    }


def test_scaled_rows_of_the_real_model_are_close(client: Client, whole: Harvest) -> None:
    """To half a step of the dtype, measured by the row's largest value, and what the batch may
    change.
    """
    for dtype, step in (("int8", 1 / 254), ("float8_e4m3fn", 2**-4)):
        made = harvested(client, dtype=dtype)
        for layer in LAYERS:
            exact = whole.document(11, layer)[1]
            error = np.abs(made.document(11, layer)[1] - exact).max(axis=1)
            assert (error <= (step + BF16_BATCH) * np.abs(exact).max(axis=1)).all(), (dtype, layer)
