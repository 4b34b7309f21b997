"""Fits on a gradient worker: modules, registered once they are measured, and Jacobian lenses, whose
folder the service reads; cancelled, and taken over.

Everything is real but the model: a small random Llama, whose rows the fake vLLM worker lacks.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from midstream_fake_engine.model import NUM_LAYERS
from refusal_kit import refuses
from stack import Stack, stack_with

from midstream import Client
from midstream.schemas.jobs.fits import FitRequest, LensFitRequest
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.attributions import GRADIENTS

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
    assert (training.job, training.effect.better, training.examples, training.effect.examples) == (
        view.id,
        True,
        8,
        2,
    )
    module = client.modules.get("even")
    assert (module.digest, module.training) == (result.digest, training)
    steered = client.run(
        model="fake-model", prompt="number 3 is", steering=[{"module": "even", "scale": 0.5}]
    )
    assert steered.state is State.SUCCEEDED
    points = [event.data for event in client.jobs.events(view.id) if event.event == "fit"]
    assert [point["step"] for point in points] == [p.step for p in training.losses[1:]]
    again = client.fit_module(**FIT | {"register": "never"})
    assert (again.digest, again.reason, again.training.losses, again.training.examples_digest) == (
        "",
        "register is 'never'",
        training.losses,
        training.examples_digest,
    )
    assert client.modules.get("even") == module


@pytest.mark.slow("fits until it is cancelled")
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
    assert (lens.layers, lens.description) == (list(range(NUM_LAYERS - 1)), "of numbers")
    assert lens.vocabulary > 0
    fit = lens.fit
    assert (fit.method, fit.prompts, fit.short, len(fit.errors)) == ("sketched", 4, 1, 3)
    file = Path(stack.settings.artifacts_of("lenses"), lens.path, "lens.safetensors")
    assert lens.path.startswith(f"corpora/{job.id}-")
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert client.lens("hello", jacobian="said").layers == lens.layers
    points = [event.data for event in client.jobs.events(job.id) if event.event == "fit"]
    assert points == [{"prompts": done, "of": 5} for done in range(5)]


def test_fit_of_a_name_that_exists_keeps_the_former_file(stack: Stack, client: Client) -> None:
    first = client.fit_lens(**LENS)
    second = client.fit_lens(**LENS | {"rank": None})
    assert (second.fit.method, client.jacobians.get("said")) == ("exact", second)
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
    assert (view.kind, view.queue, view.worker, view.capture_status, view.receipts) == (
        "gradient",
        GRADIENTS,
        "w1-g",
        "ok",
        view.receipts_expected,
    )
    assert [file.rows for file in result.capture_results.files] == [1]
