"""Harvests on the real engine: their rows are those of captures, and a killed worker costs none and
doubles none.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host import relative_error
from services import demo_service
from stack import Stack
from tolerances import BF16_BATCH
from transformers import AutoModelForCausalLM
from tree import ROOT

from midstream.broker.artifacts.headers import find_entries
from midstream.client import Client
from midstream.client.captures.reader import CaptureReader
from midstream.storage.store import open_store
from midstream.workers.runner.readings.sae import load as load_sae
from midstream_harvest.ledger.harvests import job_id_of
from midstream_harvest.reader import Harvest, open, verify
from midstream_ops.demo_model import fetch_demo_model

DOCUMENTS = [
    f"Fact number {number}: "
    + "the sum of the angles of a triangle is two right angles, " * (1 + number % 9)
    for number in range(60)
]
LAYERS = [3, 15, 28]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with demo_service(tmp_path_factory.mktemp("stack")) as started:
        yield started


@pytest.fixture
def client(service: Stack) -> Iterator[Client]:
    with Client(service.url) as made:
        yield made


def harvested(service: Stack, client: Client, **fields: object) -> Harvest:
    view = client.harvests.submit(
        model="demo", source={"lines": DOCUMENTS}, layers=LAYERS, shards={"mib": 1}, **fields
    )
    try:
        view = client.harvests.wait(view, timeout=300)
    except TimeoutError as error:
        for name in service.processes:
            error.add_note(f"{name}:\n{service.log(name)[-4000:]}")
        raise
    assert verify(view.uri).faults == []
    return open(view.uri)


@pytest.fixture(scope="module")
def whole(service: Stack) -> Harvest:
    with Client(service.url) as made:
        return harvested(service, made)


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
    service: Stack, client: Client
) -> None:
    service.replace(
        "worker", **{"global_capture.sites": "post_block:15", "global_capture.tag": "ops"}
    )
    try:
        made = harvested(service, client)
    finally:
        service.replace("worker")
    jobs = [job_id_of(made.manifest.id, part, 0) for part in range(len(made.manifest.parts))]
    store = open_store(service.settings.artifacts)
    assert sum(len(list(find_entries(store, job, "ops"))) for job in jobs) == len(DOCUMENTS)
    captured = CaptureReader(Path(service.settings.artifacts) / "ops", job=jobs[0])
    keys = made.keys(slice(None))
    rows = made.rows(slice(None), 15)
    for request in captured.requests()[:5]:
        (token,) = captured.token_ids(request=request)
        (position,) = captured.positions(request=request)
        alike = rows[(keys.positions == position) & (keys.token_ids == token)]
        row = captured.array(15, request=request)
        assert min(relative_error(each[None], row) for each in alike) <= BF16_BATCH


def test_a_policy_that_stops_all_traffic_ends_what_a_harvest_generates(
    service: Stack, client: Client
) -> None:
    """At the first token in which it crosses; the rows of the documents stay."""

    def generated() -> int:
        made = harvested(service, client, generate={"max_tokens": 4, "ignore_eos": True})
        return made.manifest.generated

    assert generated() == 4 * len(DOCUMENTS)
    client.probes.put("guard", weight=np.zeros(576), bias=[1.0], layer=3, thresholds=[0.5])
    condition = {"at_least": 0.5, "schedule": {"tokens": "all"}}
    fields = {"probe": "guard", "condition": condition, "mode": "active", "all_traffic": True}
    client.policies.put("guard", **fields, actions=["stop"])
    try:
        assert generated() == 0
    finally:
        client.policies.delete("guard")


def predictions(model: Any, tokens: list[int], vector: np.ndarray | None) -> torch.Tensor:
    """transformers' log-probabilities of the next token, `[tokens, vocabulary]` float64, with
    `vector` added to the output of layer 10.
    """

    def steer(_module: Any, _inputs: Any, output: Any) -> Any:
        steered = (output[0] if isinstance(output, tuple) else output) + torch.from_numpy(vector)
        return (steered, *output[1:]) if isinstance(output, tuple) else steered

    hooked = [model.model.layers[10].register_forward_hook(steer)] if vector is not None else []
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
    finally:
        for handle in hooked:
            handle.remove()
    return logits.double().log_softmax(-1)


def test_a_module_is_compared_with_the_plain_model(client: Client) -> None:
    """KL of every token equals that of transformers' own predictions, and so do the tokens that
    move most; the features' figures are those of both harvests' rows.
    """
    vector = np.random.default_rng(5).standard_normal(576).astype(np.float32) * 4
    client.modules.put("shift", [{"layers": [10], "vector": vector}])
    client.saes.put("words", "smollm2-15")
    fields: dict[str, Any] = {"positions": {"skip_bos": False}, "at": "after"}
    fields |= {"source": {"lines": DOCUMENTS[:12]}, "shards": {"mib": 1}, "layers": [15, 29]}
    views = [
        client.harvests.wait(client.harvests.submit(model="demo", **fields, **more), timeout=180)
        for more in ({}, {"steering": [{"module": "shift"}]})
    ]
    survey = client.harvests.survey(views[0], against=views[1].id, sae="words", top=5, context=2)
    plain, steered = (open(view.uri) for view in views)
    model = AutoModelForCausalLM.from_pretrained(fetch_demo_model(), dtype=torch.float32)
    expected = []
    keys = []
    for document in range(12):
        found, _ = plain.document(document, 29)
        tokens = found.token_ids.tolist()
        assert found.positions.tolist() == list(range(len(tokens)))
        p, q = (predictions(model, tokens, edit) for edit in (None, vector))
        expected += (p.exp() * (p - q)).sum(1).tolist()
        keys += [(document, position) for position in range(len(tokens))]
    kl = survey.array("kl")
    np.testing.assert_allclose(kl, expected, atol=2e-4, rtol=1e-3)
    assert survey.survey.mean_kl == pytest.approx(np.mean(expected), rel=1e-3)
    strongest = {}
    for row in np.argsort(-kl, kind="stable").tolist():
        strongest.setdefault(keys[row][0], (*keys[row], float(kl[row])))
    assert [
        (example.document, example.position, example.value) for example in survey.examples()
    ] == list(strongest.values())[:5]
    registered = client.saes.get("words")
    encoder = load_sae(ROOT / "examples" / "data" / "saes" / "smollm2-15", registered.digest)
    for side, harvest in enumerate((plain, steered)):
        active = encoder.encode(torch.from_numpy(harvest.rows(slice(None), 15))).numpy()
        density = (active > 0).mean(0)
        # a row of another batch shape may differ in its last bits, at an activation's threshold
        np.testing.assert_allclose(survey.density[:, side], density, atol=2.1 / len(kl))
    moved = survey.features(limit=3)
    change = np.abs(survey.density[:, 1] - survey.density[:, 0])
    assert [each.feature for each in moved] == np.argsort(-change, kind="stable")[:3].tolist()


def test_a_head_of_whole_blocks_is_that_of_the_whole_document(
    service: Stack, client: Client
) -> None:
    """The prompt is computed in steps of 64 tokens, and its first token, the text's beginning,
    gives no row: so the head ends behind the first row of a step.
    """
    draw = np.random.default_rng(4)
    lines = [[1, *draw.integers(100, 9000, 200).tolist()] for _ in range(4)]  # 1: its beginning
    head = {"positions": {"window": {"head_and_tail": {"head": 64, "tail": 0}}}}
    service.replace(
        "worker",
        **{"engine.max_num_batched_tokens": 64, "engine.enable_prefix_caching": False},
    )
    asked = ({}, head, head | {"generate": {"max_tokens": 2}})
    source: dict[str, Any] = {"model": "demo", "source": {"lines": lines}, "layers": [15]}
    try:
        views = [client.harvests.submit(**source, **more) for more in asked]  # type: ignore[arg-type]
        whole, *headed = [open(client.harvests.wait(view, timeout=180).uri) for view in views]
    finally:
        service.replace("worker")
    for made, document in itertools.product(headed, range(4)):
        keys, rows = made.document(document, 15)
        assert keys.positions.tolist() == list(range(1, 65))
        assert relative_error(rows, whole.document(document, 15)[1][:64]) <= BF16_BATCH
