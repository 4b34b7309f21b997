"""Gradient jobs on a real stack: a vLLM worker and a gradient worker of one tiny model in float32,
which agree on every row, and what the gradient worker computes equals autograd written by hand.
Modules that it fits have the promised effect in stock vLLM.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from stack import Stack
from test_features import LAYER as SAE_LAYER, Dictionary
from transformers import AutoModelForCausalLM
from wait_kit import wait_until

from midstream import Client
from midstream.client.captures.reader import CaptureReader
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json
from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.jobs.jobs import TERMINAL, JobView, State
from midstream.schemas.jobs.results import JobResult
from midstream.storage.formats.module_files import specs_of
from midstream_lab.records.attributions import AttributionResult
from midstream_lab.records.fits import FitResult

pytestmark = pytest.mark.long

TOKENS = list(range(40, 64))
OTHER = list(range(60, 84))
WORKER = "worker-gradients"


class Service:
    def __init__(self, stack: Stack, model: Path) -> None:
        self.stack = stack
        self.http = httpx2.Client(base_url=stack.url, timeout=90)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def post(self, path: str, **body: Any) -> Any:
        return self.http.post(path, json={"model": "tiny", **body})

    def job(self, **capture: Any) -> str:
        answer = self.post(
            "/v1/jobs", prompts=[TOKENS], capture={"of": "gradient", "tag": "g", **capture}
        )
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def ended(self, job: str, path: str = "/v1/jobs") -> JobView:
        while True:
            view = from_json(self.http.get(f"{path}/{job}", params={"wait": 30}).content, JobView)
            if view.state in TERMINAL:
                return view

    def attributed(self, worker: str, **asked: Any) -> AttributionResult:
        """The result of an attribution between the two prompts, checked by the vLLM worker."""
        pair = {"clean": TOKENS, "corrupt": OTHER, "answer": [7], "foil": [8]}
        answer = self.post("/v1/attributions", pairs=[pair], metric="logit_diff", **asked)
        assert answer.status_code == 202, answer.text
        job = str(answer.json()["id"])
        assert self.ended(job).state is State.SUCCEEDED, self.stack.log(worker)[-3000:]
        found = from_json(self.http.get(f"/v1/jobs/{job}/result").content, JobResult).attribution
        assert isinstance(found, AttributionResult)
        return found

    def rows(self, job: str) -> CaptureReader:
        view = self.ended(job)
        assert view.state is State.SUCCEEDED, (view.error, self.stack.log(WORKER)[-3000:])
        assert view.receipts == view.receipts_expected == 1
        return CaptureReader(self.stack.settings.capture_root / "g", job)

    def rows_of(self, tokens: list[int]) -> list[np.ndarray]:
        """The output of each layer, `[tokens, hidden]`."""
        with torch.no_grad():
            states = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
            last: list[torch.Tensor] = []
            handle = self.model.model.norm.register_forward_pre_hook(
                lambda _, args: last.append(args[0])
            )
            self.model.model(torch.tensor([tokens]))
            handle.remove()
        return [state[0].numpy() for state in (*states.hidden_states[1:-1], last[0])]

    def patched(self, layer: int, position: int, row: np.ndarray) -> float:
        """The logit difference of `OTHER` with this output of `layer` at `position`."""

        def patch(_module: object, _args: object, output: Any) -> Any:
            whole = output[0] if isinstance(output, tuple) else output
            whole[0, position] = torch.tensor(row)

        handle = self.model.model.layers[layer].register_forward_hook(patch)
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([OTHER])).logits[0, -1].double()
        handle.remove()
        return float(logits[7] - logits[8])

    def by_hand(self, layer: int, scalar: str, tokens: list[int] = TOKENS) -> np.ndarray:
        """d scalar / d (output of `layer`), `[tokens, hidden]`."""
        kept: list[torch.Tensor] = []

        def keep(_module: object, _args: object, output: Any) -> Any:
            kept.append(output[0] if isinstance(output, tuple) else output)
            kept[0].requires_grad_()

        self.model.requires_grad_(False)
        handle = self.model.model.layers[layer].register_forward_hook(keep)
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0].double()
        handle.remove()
        losses = [logits[at - 1].log_softmax(-1)[tokens[at]] for at in range(1, len(tokens))]
        values = {"logit": logits[-1, 7] - logits[-1, 8], "loss": -torch.stack(losses).sum()}
        (gradient,) = torch.autograd.grad(values[scalar], kept)
        return gradient[0].numpy()


@pytest.fixture(scope="module")
def service(tiny_stack: Stack) -> Service:
    return Service(tiny_stack, Path(tiny_stack.settings.model))


@pytest.mark.parametrize(
    ("name", "scalar"),
    [
        ("logit", {"kind": "logit", "token": 7, "foil": 8}),
        ("loss", {"kind": "loss"}),
    ],
)
def test_gradient_rows_are_those_of_autograd_by_hand(
    service: Service, name: str, scalar: dict[str, Any]
) -> None:
    job = service.job(hooks={"post_block": "all"}, positions="all_prompt", scalar=scalar)
    reader = service.rows(job)
    for layer in range(service.model.config.num_hidden_layers):
        expected = service.by_hand(layer, name)
        scale = max(1.0, float(np.abs(expected).max()))
        got = reader.array(layer, "post_block")
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * scale)
    result = from_json(service.http.get(f"/v1/jobs/{job}/result").content, JobResult)
    assert [output.token_ids for output in result.outputs] == [[]]
    assert "sites compared with the vLLM worker's" in service.stack.log(WORKER)


def test_an_attribution_is_estimated_here_and_verified_by_the_vllm_worker(
    service: Service,
) -> None:
    verify = {"top": 4, "random": 4, "doubtful": 2}
    result = service.attributed(WORKER, hooks=["post_block"], verify=verify)
    (estimated,) = result.estimated
    (grids,) = result.pairs
    # the corrupt prompt is patched with rows of the clean one, to first order
    layers = range(service.model.config.num_hidden_layers)
    clean = service.rows_of(TOKENS)
    corrupt = service.rows_of(OTHER)
    for layer in layers:
        gradient = service.by_hand(layer, "logit", OTHER)
        expected = ((clean[layer] - corrupt[layer]) * gradient).sum(1) + estimated.base
        np.testing.assert_allclose(estimated.estimates["post_block"][layer], expected, atol=1e-4)
    exact = [
        (layer, column)
        for layer in layers
        for column in range(len(TOKENS))
        if grids.grids["post_block"][layer][column] is not None
    ]
    assert len(exact) == len(estimated.checked)
    assert {why for cell in estimated.checked for why in cell.why} == {"top", "random", "doubtful"}
    for cell in estimated.checked:
        assert cell.exact == grids.grids["post_block"][cell.layer][cell.column]
        expected = service.patched(cell.layer, cell.column, clean[cell.layer][cell.column])
        assert cell.exact == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("kind", ["jumprelu", "layer_norm"])
def test_features_are_verified_by_patches_of_row_plus_delta_times_decoder(
    service: Service, kind: str
) -> None:
    """Exact values on vLLM are those of a hook in transformers that writes the row by hand."""
    found = Dictionary(Path(service.stack.settings.artifacts_of("saes")), kind, seed=2)
    made = service.http.put(
        f"/v1/artifacts/saes/{kind}", json={"path": found.name, "model": "tiny"}
    )
    assert made.status_code == 201, made.text
    (estimated,) = service.attributed("worker", sae=kind, verify={"top": 6, "random": 6}).estimated
    clean, corrupt = (service.rows_of(tokens)[SAE_LAYER] for tokens in (TOKENS, OTHER))
    change = (found.encode(clean) - found.encode(corrupt)) * found.spread(corrupt)
    decoder = found.tensors["W_dec"].astype(np.float64)
    gradient = service.by_hand(SAE_LAYER, "logit", OTHER)
    checked = {(cell.column, cell.feature): cell for cell in estimated.checked}
    assert len(checked) >= 7
    assert {why for cell in checked.values() for why in cell.why} == {"top", "random"}
    for (at, feature), cell in checked.items():
        assert feature is not None
        delta = clean[at] - corrupt[at] - change[at] @ decoder
        if feature >= 0:
            delta = change[at, feature] * decoder[feature]
        wanted = service.patched(SAE_LAYER, at, (corrupt[at] + delta).astype(np.float32))
        assert cell.exact == pytest.approx(wanted, abs=1e-3)
        assert cell.estimate == pytest.approx(estimated.base + delta @ gradient[at], abs=1e-3)
    effects = [abs((cell.exact or 0.0) - (estimated.base or 0.0)) for cell in checked.values()]
    assert max(effects) > 0.02, "far more than the tolerance"


def test_the_model_leaves_memory_when_idle_and_loads_again(service: Service) -> None:
    scalar = {"kind": "logit", "token": 7}
    first = service.rows(service.job(layers=[0], positions=[3], scalar=scalar))
    loads = service.stack.log(WORKER).count("model loaded and compared")
    wait_until(
        lambda: service.stack.log(WORKER).count("model dropped from memory") >= loads,
        why="the model is not dropped",
    )
    again = service.rows(service.job(layers=[0], positions=[3], scalar=scalar))
    assert service.stack.log(WORKER).count("model loaded and compared") == loads + 1
    np.testing.assert_array_equal(first.array(0), again.array(0))


def test_a_job_survives_the_death_of_its_worker(service: Service) -> None:
    stack = service.stack
    stack.kill(WORKER)
    job = service.job(layers=[1], positions=[3], scalar={"kind": "loss"})
    stack.restart(WORKER, engine="gradients")
    wait_until(lambda: stack.view(job).state is not State.QUEUED)
    stack.kill(WORKER, signal.SIGKILL)  # while it loads the model
    stack.restart(WORKER, engine="gradients")
    reader = service.rows(job)
    assert stack.view(job).attempt == 2
    np.testing.assert_allclose(reader.array(1)[0], service.by_hand(1, "loss")[3], atol=1e-4)


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
        first = len(example["prompt"])
        graded = choice["prompt_logprobs"]
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
    assert result.digest == ""
    assert "does not exceed" in result.reason
    with pytest.raises(MidstreamError, match="logistic"):
        client.modules.get("logistic")


def test_rows_that_do_not_differ_fail_the_job(client: Client) -> None:
    prompts = [[21, 22, 23 + index] for index in range(8)]
    with pytest.raises(MidstreamError, match="do not differ"):
        fitted(client, "difference_of_means", positive=prompts, negative=prompts)
