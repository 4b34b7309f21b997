"""lm-evaluation-harness, as it is published, reads log-likelihoods from `/v1/completions`, steered
by `?module=` and not.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stack import Stack
from tree import ROOT

from midstream.client import Client
from midstream.workers.demo_model import fetch_demo_model

#: Run by hand: a minute of downloads for an environment of its own.
pytestmark = [pytest.mark.timeout(1500), pytest.mark.packages]
SCALE = -0.5
#: Of a sum over a few tokens in float32, which depends on the batch by 1e-5.
ATOL = 1e-4


@pytest.fixture(scope="module")
def command(library) -> Path:
    return library("lm-eval").with_name("lm_eval")


@pytest.fixture(scope="module")
def service(serve) -> Stack:
    stack = serve()
    vector = np.random.default_rng(0).standard_normal(576).astype(np.float32)
    with Client(stack.url) as client:
        client.modules.put("shift", [{"layers": 15, "vector": vector}])
    return stack


def evaluated(command: Path, url: str, folder: Path) -> list[dict[str, Any]]:
    """The samples of an evaluation at the endpoint `url`: batches of eight prompts, each a list of
    token ids.
    """
    model = (
        f"model=demo,base_url={url},tokenizer={fetch_demo_model()},"
        "tokenizer_backend=huggingface,max_length=512"
    )
    task = "--tasks examples/lm_eval/outlook.yaml --batch_size 8 --log_samples"
    chosen = ["--model", "local-completions", "--model_args", model, *task.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        [str(command), *chosen, "--output_path", str(folder / "results")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (samples,) = (folder / "results").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def likelihood(client: Client, context: str, end: str, **steering: Any) -> tuple[float, bool]:
    """The log-likelihood of `end` behind `context`, and whether each of its tokens is the
    likeliest.
    """
    said = client.completion(
        "demo", context + end, max_tokens=0, temperature=0, echo=True, logprobs=1, **steering
    ).raw["choices"][0]["logprobs"]
    ends = [at for at, offset in enumerate(said["text_offset"]) if offset >= len(context)]
    assert "".join(said["tokens"][at] for at in ends) == end
    likeliest = all(
        said["token_logprobs"][at] == max(said["top_logprobs"][at].values()) for at in ends
    )
    return sum(said["token_logprobs"][at] for at in ends), likeliest


def test_log_likelihoods_are_those_of_the_client_steered_and_not(
    command: Path, service: Stack, tmp_path: Path
) -> None:
    endpoint = f"{service.url}/v1/completions"
    ways: dict[str, Any] = {
        "": {},
        f"?module=shift:{SCALE}": {"steering": {"module": "shift", "scale": SCALE}},
    }
    found = []
    with Client(service.url) as client:
        for number, (suffix, steering) in enumerate(ways.items()):
            samples = evaluated(command, endpoint + suffix, tmp_path / str(number))
            assert len(samples) == 40
            pairs = [
                (sample["doc"]["text"], end, response)
                for sample in samples
                for end, response in zip(
                    sample["doc"]["choices"], sample["filtered_resps"], strict=True
                )
            ]
            expected = [likelihood(client, context, end, **steering) for context, end, _ in pairs]
            theirs = np.array([float(response[0]) for _, _, response in pairs])
            np.testing.assert_allclose(theirs, [value for value, _ in expected], rtol=0, atol=ATOL)
            assert [str(response[1]) == "True" for _, _, response in pairs] == [
                likeliest for _, likeliest in expected
            ]
            found.append(dict(zip([pair[:2] for pair in pairs], theirs, strict=True)))
    plain, steered = found
    assert plain.keys() == steered.keys()
    assert min(abs(plain[pair] - steered[pair]) for pair in plain) > ATOL, "the module changes each"
