"""Fits over HTTP: accepted as jobs of the gradient queue, refused by name, and their results read.

The worker is by hand: see `test_fits.py` for computed ones.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from edge import MODEL, Api, Hand
from ledger_kit import IDENTITY

from midstream import Client
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.fits import FitResult
from midstream.schemas.jobs.models import GradientInfo
from midstream.schemas.requests.attributions import GRADIENTS
from midstream.schemas.requests.trainings import FitEffect, FitPoint, FitSite, Training

BODY = {
    "model": MODEL,
    "name": "polite",
    "method": "vector",
    "layers": "1-2",
    "examples": [{"prompt": "hello world a", "target": " b"}] * 8,
}


@pytest.fixture
def hand(api: Api) -> Iterator[Hand]:
    with Hand(api.settings) as worker:
        yield worker


def gradients(hand: Hand, **changes: Any) -> None:
    facts = {"model": MODEL, "identity": IDENTITY, "dtype": "float32", "device": "cpu"}
    worker = hand.sign(worker="by hand, gradients", queue=GRADIENTS)
    hand.do(hand.ledger.publish_gradients(GradientInfo(**(facts | changes)), worker))


def training(job: str) -> Training:
    return Training(
        job=job,
        method="vector",
        hook="post_block",
        examples=4,
        examples_digest="0" * 64,
        seed=0,
        identity=IDENTITY,
        sites=[FitSite(layer=1, dose=0.2), FitSite(layer=2, dose=0.3)],
        effect=FitEffect(
            measure="logprob", before=-3.0, after=-1.0, error=0.1, examples=2, better=True
        ),
        steps=20,
        losses=[FitPoint(step=0, loss=None, validation_loss=3.0)],
    )


def test_fit_is_a_job_of_the_gradient_queue(api: Api, hand: Hand) -> None:
    assert api.http.get(f"/v1/models/{MODEL}").json()["gradients"] is None
    gradients(hand)
    assert api.http.get(f"/v1/models/{MODEL}").json()["gradients"]["device"] == "cpu"
    answer = api.http.post("/v1/modules/fit", json=BODY)
    assert answer.status_code == 202, answer.text
    view = answer.json()
    assert (view["kind"], view["queue"]) == ("fit", GRADIENTS)
    job = hand.job(view["id"])
    assert job.fit is not None
    assert (job.fit.layers, len(job.fit.examples)) == ([1, 2], 8)
    assert job.fit.template.family == "add"


def test_result_of_a_fit_is_read_by_the_client(api: Api, hand: Hand) -> None:
    gradients(hand)
    job_id = api.http.post("/v1/modules/fit", json=BODY).json()["id"]
    settings = msgspec.structs.replace(api.settings, engine="gradients")
    with Hand(settings) as worker:  # its queue is that of its settings
        claim = worker.claim(job_id)
    result = FitResult(name="polite", training=training(job_id), digest="d" * 64)
    assert hand.do(hand.ledger.store_outputs(job_id, claim.attempt, result)) == "succeeded"
    with Client(str(api.http.base_url)) as client:
        assert client.fits.result(job_id) == result
        assert client.result(job_id).outputs == []


def test_other_jobs_are_no_fits(api: Api, hand: Hand) -> None:
    job_id = api.http.post("/v1/jobs", json={"model": MODEL, "prompts": ["a"]}).json()["id"]
    hand.finish(job_id)
    with (
        Client(str(api.http.base_url)) as client,
        pytest.raises(MidstreamError, match="is not a fit"),
    ):
        client.fits.result(job_id)
    assert "fit" not in api.http.get(f"/v1/jobs/{job_id}/result").json()


@pytest.mark.parametrize(
    ("served", "changes", "field", "detail"),
    [
        (None, {}, "model", "no gradient worker"),
        ({"refused": "rows differ by 0.5"}, {}, "model", "rows differ by 0.5"),
        ({"absent": {"mlp_out": "fused"}}, {"hook": "mlp_out"}, "hook", "fused"),
        ({}, {"method": "pca"}, "positive", "0 entries"),
        ({}, {"method": "lora"}, "method", "lora"),
        ({}, {"layers": 7}, "layers", "layers 0 to 3"),
        ({}, {"name": "a/b"}, "name", ""),
    ],
)
def test_refusals(
    api: Api, hand: Hand, served: Any, changes: dict[str, Any], field: str, detail: str
) -> None:
    if served is not None:
        gradients(hand, **served)
    answer = api.http.post("/v1/modules/fit", json=BODY | changes)
    problem = answer.json()
    assert (answer.status_code, problem["field"]) == (400, field), problem
    assert detail in problem["detail"]
