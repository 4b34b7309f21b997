"""Fits on a gradient worker: registered once they are measured, cancelled, and taken over.

Everything is real but the model: a small random Llama, whose rows the fake vLLM worker lacks.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from stack import Stack

from midstream import Client
from midstream.schemas.jobs.jobs import State

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
DEADLINE_S = 60.0


@pytest.fixture
def stack(tmp_path: Any) -> Iterator[Stack]:
    with Stack(tmp_path, api=True) as running:
        running.spawn("worker-g", engine="gradients-fake")
        running.wait_ready("worker-g")
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as running:
        yield running


def until_running(client: Client, job_id: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while client.jobs.get(job_id).state is not State.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_fitted_module_is_registered_with_its_record(client: Client) -> None:
    view = client.fits.submit(**FIT)
    result = client.fits.result(view.id)
    training = result.training
    assert (training.job, training.effect.better) == (view.id, True)
    assert (training.examples, training.effect.examples) == (8, 2)
    module = client.modules.get("even")
    assert (module.digest, module.training) == (result.digest, training)
    steered = client.run(
        model="fake-model", prompt="number 3 is", steering=[{"module": "even", "scale": 0.5}]
    )
    assert steered.state is State.SUCCEEDED
    points = [event.data for event in client.jobs.events(view.id) if event.event == "fit"]
    assert [point["step"] for point in points] == [p.step for p in training.losses[1:]]


def test_same_fit_gives_the_same_module(client: Client) -> None:
    first, second = client.fit_module(**FIT), client.fit_module(**FIT)
    assert first.training.losses == second.training.losses
    assert first.digest == second.digest != ""
    assert first.training.examples_digest == second.training.examples_digest


def test_module_is_not_registered_if_nobody_wants_it(client: Client) -> None:
    result = client.fit_module(**FIT, register="never")
    assert (result.digest, result.reason) == ("", "register is 'never'")
    assert list(client.modules.list("fake-model")) == []


def test_cancelled_fit_registers_nothing(stack: Stack, client: Client) -> None:
    stack.end("worker-g")
    stack.restart("worker-g", engine="gradients-fake", engine_options={"token_s": 0.5})
    job_id = client.fits.submit(**FIT).id
    until_running(client, job_id)
    client.jobs.cancel(job_id)
    assert client.jobs.wait(job_id).state is State.CANCELLED
    assert list(client.modules.list("fake-model")) == []


def test_killed_worker_loses_no_fit(stack: Stack, client: Client) -> None:
    stack.end("worker-g")
    stack.restart("worker-g", engine="gradients-fake", engine_options={"token_s": 0.5})
    job_id = client.fits.submit(**FIT).id
    until_running(client, job_id)
    stack.kill("worker-g")
    stack.restart("worker-g", engine="gradients-fake")
    result = client.fits.result(job_id)
    assert client.jobs.get(job_id).attempt > 1  # a slow machine may lose a lease as well
    assert client.modules.get("even").digest == result.digest
