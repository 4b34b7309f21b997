"""Fits on a gradient worker: modules, registered once they are measured, and Jacobian lenses, whose
folder the service reads; cancelled, and taken over. Everything is real but the model: a small
random Llama, whose rows the fake vLLM worker lacks.

And fits and doses over HTTP, with a worker by hand: accepted as jobs, refused by name, and their
results read.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from edge import HIDDEN, MODEL, Api, Hand, refused
from ledger_kit import IDENTITY
from midstream_fake_engine.model import NUM_LAYERS
from refusal_kit import refuses
from stack import Stack, stack_with

from midstream import Client
from midstream.schemas.base.edit_sizes import EditSizes
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.models import GradientInfo
from midstream.schemas.jobs.queues import GRADIENTS
from midstream.schemas.requests.trainings import FitEffect, FitPoint, FitSite, Training
from midstream.workers.engine.requests import prompt_request
from midstream_harvest.ledger.harvests import LedgerHarvests
from midstream_lab.records.doses import DoseCell, DoseResult, DoseWork
from midstream_lab.records.fits import (
    FitRequest,
    FitResult,
    FitWork,
    LensFitRequest,
    StoredModuleFit,
)

EXAMPLES = [{"prompt": f"number {n} is", "target": " even"} for n in range(12)]
FIT: dict[str, Any] = {
    "model": "fake-model",
    "name": "even",
    "method": "vector",
    "layers": [1],
    "examples": EXAMPLES,
    "steps": 20,
    "learning_rate": 0.1,
}
LENS: dict[str, Any] = {
    "model": "fake-model",
    "name": "said",
    "prompts": [list(range(n, n + 6)) for n in range(4)] + [[7]],
    "rank": 2,
    "skip_first": 2,
}
GRADIENT: dict[str, Any] = {"engine": "gradients-fake", "engine_options": {"token_s": 0.05}}


def lens_fit(**changes: Any) -> LensFitRequest:
    return msgspec.convert(LENS | changes, LensFitRequest)


# Its gradient worker takes 50 ms for a step of a fit.
stack = stack_with({"worker-g": GRADIENT}, api=True, callbacks=False)


def until_fitted(client: Client, job_id: str) -> None:
    """Until the worker has said something of its first steps."""
    next(event for event in client.jobs.events(job_id) if event.event == "fit")


@pytest.mark.slow("the gradient worker imports transformers, and fits a module twice")
def test_fitted_module_is_registered_with_its_record(client: Client) -> None:
    view = client.fits.submit(msgspec.convert(FIT, FitRequest))
    result = client.fits.result(view.id)
    training = result.training
    assert training.job == view.id
    assert training.effect.better
    assert training.examples == 8
    assert training.effect.examples == 2
    module = client.modules.get("even")
    assert module.digest == result.digest
    assert module.training == training
    steered = client.run(
        model="fake-model", prompt="number 3 is", steering=[{"module": "even", "scale": 0.5}]
    )
    assert steered.state is State.SUCCEEDED
    points = [event.data for event in client.jobs.events(view.id) if event.event == "fit"]
    assert [point["step"] for point in points] == [p.step for p in training.losses[1:]]
    again = client.fit_module(**FIT | {"register": "never"})
    assert again.digest == ""
    assert again.reason == "register is 'never'"
    assert again.training.losses == training.losses
    assert again.training.examples_digest == training.examples_digest
    assert client.modules.get("even") == module


@pytest.mark.long
def test_cancelled_fits_register_nothing(stack: Stack, client: Client) -> None:
    endless = {"name": "stopped", "prompts": [list(range(n, n + 6)) for n in range(200)]}
    for asked in (
        msgspec.convert(FIT | {"name": "stopped", "steps": 1000}, FitRequest),
        lens_fit(**endless),
    ):
        job_id = client.fits.submit(asked).id
        until_fitted(client, job_id)
        client.jobs.cancel(job_id)
        assert client.jobs.wait(job_id).state is State.CANCELLED
    assert "stopped" not in {module.name for module in client.modules.list("fake-model")}
    assert list(client.jacobians.list("fake-model")) == []
    assert not Path(stack.settings.artifacts_of("lenses"), "stopped").exists()


@pytest.mark.long
def test_killed_worker_loses_no_fit(stack: Stack, client: Client) -> None:
    asked = msgspec.convert(FIT | {"name": "kept", "steps": 100}, FitRequest)
    job_id = client.fits.submit(asked).id
    until_fitted(client, job_id)
    stack.crash("worker-g", **GRADIENT)
    result = client.fits.result(job_id)
    assert client.jobs.get(job_id).attempt > 1  # a slow machine may lose a lease as well
    assert client.modules.get("kept").digest == result.digest


def test_fitted_lens_is_registered_with_its_error_and_read(stack: Stack, client: Client) -> None:
    job = client.fits.submit(lens_fit(folder="corpora", description="of numbers"))
    lens = client.fits.result(job).lens
    assert client.jacobians.get("said") == lens
    assert lens.layers == list(range(NUM_LAYERS - 1))
    assert lens.description == "of numbers"
    assert lens.vocabulary > 0
    fit = lens.fit
    assert fit.method == "sketched"
    assert fit.prompts == 4
    assert fit.short == 1
    assert len(fit.errors) == 3
    file = Path(stack.settings.artifacts_of("lenses"), lens.path, "lens.safetensors")
    assert lens.path.startswith(f"corpora/{job.id}-")
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert client.lens("hello", jacobian="said").layers == lens.layers
    points = [event.data for event in client.jobs.events(job.id) if event.event == "fit"]
    assert points == [{"prompts": done, "of": 5} for done in range(5)]


def test_fit_of_a_name_that_exists_keeps_the_former_file(stack: Stack, client: Client) -> None:
    first = client.fit_lens(**LENS)
    second = client.fit_lens(**LENS | {"rank": None})
    assert second.fit.method == "exact"
    assert client.jacobians.get("said") == second
    files = [
        Path(stack.settings.artifacts_of("lenses"), lens.path, "lens.safetensors").read_bytes()
        for lens in (first, second)
    ]
    assert files[0] != files[1]


def test_folder_that_cannot_be_written_fails_the_fit(stack: Stack, client: Client) -> None:
    root = Path(stack.settings.artifacts_of("lenses"))
    root.mkdir(parents=True, exist_ok=True)
    (root / "blocked").write_text("a file in the way")
    with refuses(match="cannot be written", kind="internal"):
        client.fit_lens(**LENS | {"name": "blocked"})
    assert "blocked" not in {lens.name for lens in client.jacobians.list("fake-model")}


def test_gradient_rows_are_jobs_of_their_own_kind(client: Client) -> None:
    result = client.run(
        model="fake-model",
        prompt="number 3 is",
        capture={"layers": [1], "of": "gradient", "scalar": {"kind": "logit", "token": 5}},
    )
    view = client.jobs.get(result.id)
    assert view.kind == "gradient"
    assert view.queue == GRADIENTS
    assert view.worker == "w1-g"
    assert view.capture_status == "ok"
    assert view.receipts == view.receipts_expected
    assert [file.rows for file in result.capture_results.files] == [1]


BODY = {
    "model": MODEL,
    "name": "polite",
    "method": "vector",
    "layers": "1-2",
    "examples": [{"prompt": "hello world a", "target": " b"}] * 8,
}


def gradients(hand: Hand, **changes: Any) -> None:
    facts = {"model": MODEL, "identity": IDENTITY, "dtype": "float32", "device": "cpu"}
    worker = hand.sign(worker="by hand, gradients", queue=GRADIENTS)
    hand.do(hand.ledger.publish_model(GradientInfo(**(facts | changes)), worker))


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
    assert view["kind"] == "fit"
    assert view["queue"] == GRADIENTS
    fit = hand.job(view["id"]).work_as(FitWork).fit
    assert isinstance(fit, StoredModuleFit)
    assert fit.layers == [1, 2]
    assert len(fit.examples) == 8
    assert fit.template.family == "add"


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
    refused(api.http.post("/v1/modules/fit", json=BODY | changes), 400, field, detail)


def test_while_the_model_is_being_replaced_a_repeat_may_succeed(api: Api, hand: Hand) -> None:
    """A gradient worker of the next model has started, and no worker with its engine yet."""
    hand.do(hand.ledger.redis.delete(f"ms:alive:{hand.worker}"))
    gradients(hand, identity="f" * 64)
    refused(api.http.post("/v1/modules/fit", json=BODY), 503, "model", "different models")
    assert api.http.get(f"/v1/models/{MODEL}").json()["gradients"] is None


DOSE = {
    "model": MODEL,
    "prompts": ["hello world a", "hello there"],
    "steering": [{"vector": [1.0] * HIDDEN, "positions": {"start": 1}}],
    "layers": "1-2",
    "scales": [2.0, -1.0],
    "effect": {"target": " b"},
    "held_out": ["a b c"],
    "max_tokens": 4,
}


def test_a_dose_is_one_job_whose_prompts_are_those_of_all_cells(api: Api, hand: Hand) -> None:
    answer = api.http.post("/v1/doses", json=DOSE)
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    job = hand.job(job_id)
    assert answer.json()["kind"] == "dose"
    assert len(job.prompts) == 25
    assert job.sampling.max_tokens == 4
    dose = job.work_as(DoseWork).dose
    assert dose.cells == [(None, 0.0), (1, -1.0), (1, 2.0), (2, -1.0), (2, 2.0)]
    assert dose.target_tokens == [1, 1]
    assert [[(e.layers, e.scale) for e in entries] for entries in job.steering] == [
        [([layer], scale)] if scale else [] for layer, scale in dose.cells for _ in range(5)
    ]
    asked = [prompt_request(job, number, 1) for number in range(5)]
    assert [ask.sampling.prompt_logprobs for ask in asked] == [None, None, 0, 0, 0]
    assert [ask.sampling.max_tokens for ask in asked] == [4, 4, 1, 1, 1]
    cells = [
        DoseCell(
            layer=layer, scale=scale, effect=0.5, loss=1.0, repetition=0.0, safe=True, text="x"
        )
        for layer, scale in dose.cells
    ]
    outcome = DoseResult(dose=dose, unsteered=cells[0], cells=cells[1:])
    claim = hand.claim(job_id)
    assert hand.do(hand.ledger.store_outputs(job_id, claim.attempt, outcome)) == "running"
    for number in range(5, 25):
        hand.receipt(
            claim,
            number,
            sizes=[
                EditSizes(
                    request=number,
                    hook="post_block",
                    layer=1,
                    rows=3,
                    median=0.1,
                    largest=number / 10,
                )
            ],
        )
    with Client(str(api.http.base_url)) as client:
        result = client.result(job_id)
    assert isinstance(result.dose, DoseResult)
    assert [cell.largest for cell in result.dose.cells] == [0.9, 1.4, 1.9, 2.4]
    assert [(cell.layer, cell.scale) for cell in result.dose.safe] == [
        *((1, -1.0), (1, 2.0), (2, -1.0), (2, 2.0))
    ]
    assert len(result.edits) == 20


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("layers", ["1-2", None])
def test_a_policys_edits_are_the_same_in_every_cell_of_a_dose(
    api: Api, hand: Hand, layers: str | None, named: bool
) -> None:
    """Those of a policy of all traffic are the operator's: no layer and no scale of a dose changes
    them, and the unsteered cell has them.
    """
    ones = [1.0] * HIDDEN
    own = [{"layers": 1, "vector": ones}, {"layers": 2, "vector": ones}]
    acts = {"actions": [{"action": "steer", "module": "guard", "scale": 0.5}], "mode": "active"}
    for path, fields in {
        "artifacts/probes/unkind": {"weight": ones, "layer": 0},
        "artifacts/modules/guard": {"steering": [{"layers": "0,2", "vector": ones, "scale": -4.0}]},
        "artifacts/modules/own": {"steering": own},
        "artifacts/policies/guard": acts
        | {"probe": "unkind", "condition": {"at_least": 1.0}, "all_traffic": True},
    }.items():
        assert api.http.put(f"/v1/{path}", json={"model": MODEL, **fields}).status_code == 201
    steering = [{"module": "own"}] if named else own
    theirs = [each for each in hand.job(api.submit(steering=steering)).steering[0] if each.gate]
    assert [(entry.layers, entry.scale) for entry in theirs] == [([0, 2], -2.0)]
    body = {"steering": steering, "layers": layers, "effect": {"probe": "unkind"}}
    job = hand.job(api.http.post("/v1/doses", json=DOSE | body).json()["id"])
    dose = job.work_as(DoseWork).dose
    for number, (layer, scale) in enumerate(dose.cells):
        wanted = [([n], scale) for n in (1, 2) if scale and layer in (None, n)]
        for entries in job.steering[number * dose.requests :][: dose.requests]:
            assert [entry for entry in entries if entry.gate] == theirs
            assert [(e.layers, e.scale) for e in entries if not e.gate] == wanted
    made = [(each.digest == each.content.digest, each.content.aggregation) for each in job.probes]
    assert made == [(True, "mean"), (True, "last")]


def entry(**fields: Any) -> dict[str, Any]:
    return {"steering": [DOSE["steering"][0] | fields]}


@pytest.mark.parametrize(
    ("changes", "field", "detail"),
    [
        ({"layers": 7}, "layers", "layers 0 to 3"),
        ({"layers": None}, "steering[0].layers", "is required"),
        ({"effect": {"probe": "none"}}, "probes[0]", "none"),
        ({"effect": {"target": "zzz"}}, "effect.target", "changes the tokens of prompts[0]"),
        ({"steering": [{"module": "none"}]}, "steering[0].module", "none"),
        ({"steering": [{"vector": [1.0] * HIDDEN, "layers": 0}]}, "layers", "no entry at layer 1"),
        ({"scales": [n + 1.0 for n in range(32)], "prompts": ["a"] * 64}, "scales", "prompts"),
        (entry(norm_match=True) | {"scales": [1.0, 1000.0]}, "scales[1]", "-100 to 100"),
        (entry(op="ablate", strength=-2.0) | {"scales": [-51.0]}, "scales[0]", "-100 to 100"),
        (entry(scale=1e5) | {"scales": [2.0, -11.0]}, "scales[1]", "-1e+06 to 1e+06"),
    ],
)
def test_refusals_of_doses(
    api: Api, hand: Hand, changes: dict[str, Any], field: str, detail: str
) -> None:
    problem = refused(api.http.post("/v1/doses", json=DOSE | changes), 400, field)
    assert detail in problem["detail"] + (problem.get("allowed") or ""), problem


def test_a_tenants_limit_bounds_its_jobs_and_refuses_sweeps(api: Api, hand: Hand) -> None:
    hand.serve(grades=True)
    limit = {"edit_limit": {"relative": 0.7, "then": "fail"}}
    assert api.http.put("/v1/tenants/default", json=limit).json()["limits"]["edit_limit"] == {
        "relative": 0.7,
        "then": "fail",
    }
    steering = [{"layers": 1, "vector": [1.0] * HIDDEN}]
    body = {"model": MODEL, "prompts": ["a"]}
    plain = api.http.post("/v1/jobs", json=body).json()["id"]
    steered = api.http.post("/v1/jobs", json=body | {"steering": steering}).json()["id"]
    pair = {"clean": "hello a", "corrupt": "hello b", "answer": " c", "foil": " d"}
    sweep = api.http.post("/v1/sweeps", json={"model": MODEL, "pairs": [pair]})
    made = api.http.put("/v1/artifacts/modules/shift", json={"model": MODEL, "steering": steering})
    assert made.status_code == 201, made.text
    harvest = {"model": MODEL, "source": {"lines": ["a"]}, "layers": 1}
    harvested = api.http.post("/v1/harvests", json=harvest | {"steering": [{"module": "shift"}]})
    assert harvested.status_code == 202, harvested.text
    api.http.put("/v1/tenants/default", json={})
    api.http.delete("/v1/artifacts/modules/shift")
    assert hand.job(plain).steering in ([], [[]])
    assert [[entry.limit for entry in each] for each in hand.job(steered).steering] == [[-0.7]]
    assert sweep.status_code == 403, sweep.text
    assert "edit_limit" in sweep.json()["detail"], sweep.text
    (edit,) = hand.do(LedgerHarvests(hand.ledger).stored(harvested.json()["id"])).edits
    assert edit.limit == -0.7
