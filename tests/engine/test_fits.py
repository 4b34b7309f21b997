"""Modules fitted by the gradient worker have the promised effect in stock vLLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from stack import Stack

from midstream import Client
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.jobs.fits import FitResult
from midstream.storage.formats.module_files import specs_of

pytestmark = pytest.mark.long

#: Nats by which vLLM's log-probabilities may differ from transformers': float32 in another order.
NEAR = 1e-4
LAYERS = [1, 2]


@pytest.fixture(scope="module")
def client(tiny_stack: Stack) -> Iterator[Client]:
    with Client(tiny_stack.url) as running:
        yield running


def examples(count: int = 16) -> list[dict[str, list[int]]]:
    draw = np.random.default_rng(3)
    return [
        {"prompt": draw.integers(20, 500, 5 + i % 3).tolist(), "target": [33, 34]}
        for i in range(count)
    ]


def held_out(count: int, share: float = 0.25) -> list[int]:
    """The examples on which the effect of a training is measured, by the split of seed 0."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return order[: round(share * count)][1::2]


def in_vllm(client: Client, chosen: list[dict[str, list[int]]], **fields: Any) -> float:
    """The mean log-probability of the targets, as vLLM grades their prompts."""
    prompts = [example["prompt"] + example["target"] for example in chosen]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "prompt_logprobs": 0, **fields}
    answer = httpx2.post(f"{client.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    sums = []
    for choice, example, prompt in zip(answer.json()["choices"], chosen, prompts, strict=True):
        first, graded = len(example["prompt"]), choice["prompt_logprobs"]
        sums.append(sum(graded[p][str(prompt[p])]["logprob"] for p in range(first, len(prompt))))
    return float(np.mean(sums))


def fitted(client: Client, method: str, **fields: Any) -> FitResult:
    return client.fit_module(
        model="tiny", name=method.replace("_", "-"), method=method, layers=LAYERS, **fields
    )


@pytest.mark.parametrize("method", ["vector", "reft"])
def test_trained_module_has_the_promised_effect(client: Client, method: str) -> None:
    every = examples()
    result = fitted(client, method, examples=every, steps=40, learning_rate=0.05)
    effect = result.training.effect
    assert effect.better
    assert result.digest == client.modules.get(method).digest
    chosen = [every[index] for index in held_out(len(every))]
    assert effect.examples == len(chosen)
    steering = [{"module": method}]
    assert in_vllm(client, chosen) == pytest.approx(effect.before, abs=NEAR)
    assert in_vllm(client, chosen, steering=steering) == pytest.approx(effect.after, abs=NEAR)
    assert effect.after - effect.before > 1.0


def test_difference_of_means_is_that_of_captured_rows(client: Client, tmp_path: Path) -> None:
    draw = np.random.default_rng(9)
    sides = {
        side: [[*draw.integers(20, 500, 6).tolist(), last] for _ in range(24)]
        for side, last in (("positive", 7), ("negative", 9))
    }
    result = fitted(client, "difference_of_means", **sides, register="always")
    trained = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()[6:]
    means = []
    for prompts in sides.values():
        job = client.run(
            model="tiny",
            prompts=[prompts[index] for index in trained],
            sampling={"max_tokens": 1},
            capture={"layers": LAYERS, "positions": "last_prompt"},
        )
        with client.capture(job.id) as rows:
            means.append(
                [
                    np.mean([rows.array(n, request=r)[0] for r in rows.requests()], axis=0)
                    for n in LAYERS
                ]
            )
    client.modules.export("difference-of-means", tmp_path / "module.safetensors")
    specs = specs_of((tmp_path / "module.safetensors").read_bytes())
    for spec, positive, negative in zip(specs, *means, strict=True):
        assert spec.vector is not None
        np.testing.assert_allclose(to_numpy(spec.vector), positive - negative, rtol=1e-3, atol=1e-3)
    assert client.modules.get("difference-of-means").training == result.training


def test_module_without_effect_is_not_registered(client: Client) -> None:
    """Both sides are the same prompts in another order, so what separates the rows of the training
    separates those that are held out the other way round.
    """
    draw = np.random.default_rng(4)
    one, two = ([draw.integers(20, 500, 6).tolist() for _ in range(16)] for _ in range(2))
    result = fitted(client, "logistic", positive=one + two, negative=two + one)
    assert not result.training.effect.better
    assert (result.digest, "does not exceed" in result.reason) == ("", True)
    with pytest.raises(MidstreamError, match="logistic"):
        client.modules.get("logistic")


def test_rows_that_do_not_differ_fail_the_job(client: Client) -> None:
    prompts = [[21, 22, 23 + index] for index in range(8)]
    with pytest.raises(MidstreamError, match="do not differ"):
        fitted(client, "difference_of_means", positive=prompts, negative=prompts)
