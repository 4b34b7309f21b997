"""Patterns of all heads per second, beside transformers' `output_attentions`: prompts of the demo
model, fp32, through HTTP.

    python benchmarks/attention.py [--rounds 3] [--tokens 32 128 512] [--prompts 16]

`one`: a prompt by `Client.attention` until all its patterns are arrays. `many`: so many prompts in
one job, whose patterns are then made one after the other. transformers: a forward per prompt with
`attn_implementation="eager"`, and one batched forward. Both take turns on the same cores; the
largest difference between their patterns is reported. `sdpa`: transformers without patterns, for
comparison.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import DEMO_MODEL
from transformers import AutoModelForCausalLM

from midstream.client import Client
from midstream.client.captures.patterns import attention_of
from midstream.client.sdk.attention import capture_fields
from midstream.client.stack.supervisor import Supervisor, prepare
from midstream.schemas.base.settings import Settings


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    made = work()
    return time.perf_counter() - start, made


def attentions(model: Any, prompts: list[list[int]]) -> list[np.ndarray]:
    """Of each layer `[prompts, heads, query, key]`."""
    with torch.inference_mode():
        return [
            each.numpy() for each in model(torch.tensor(prompts), output_attentions=True).attentions
        ]


def of_job(client: Client, prompts: list[list[int]]) -> list[dict[int, np.ndarray]]:
    """Patterns of each prompt, of one job."""
    fields = capture_fields(prompts[0], "all", {}) | {"prompts": prompts}
    with client.capture(client.run(progress=False, **fields)) as reader:
        return [attention_of(reader, request=number).patterns for number in range(len(prompts))]


def measured(
    client: Client, eager: Any, sdpa: Any, tokens: int, prompts: int, rounds: int
) -> dict[str, Any]:
    rng = random.Random(tokens)
    vocabulary = eager.config.vocab_size
    seconds: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], Any]) -> Any:
        took, made = timed(work)
        seconds.setdefault(name, []).append(took)
        return made

    apart = 0.0
    for _ in range(rounds):
        # Other prompts each time: nothing is cached.
        asked = [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in range(prompts)]
        found = note("one", lambda asked=asked: client.attention(asked[0]).patterns)
        expected = note("transformers one", lambda asked=asked: attentions(eager, asked[:1]))
        apart = max(
            [
                apart,
                *(
                    float(np.abs(found[layer] - each[0]).max())
                    for layer, each in enumerate(expected)
                ),
            ]
        )
        fresh = [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in range(prompts)]
        note("many", lambda fresh=fresh: of_job(client, fresh))
        note(
            "transformers many",
            lambda fresh=fresh: [attentions(eager, [prompt]) for prompt in fresh],
        )
        note("transformers batched", lambda fresh=fresh: attentions(eager, fresh))
        with torch.inference_mode():
            note(
                "sdpa many",
                lambda fresh=fresh: [sdpa(torch.tensor([prompt])).logits for prompt in fresh],
            )
    medians = {name: round(statistics.median(took), 3) for name, took in seconds.items()}
    return {"tokens": tokens, "prompts": prompts, "largest_difference": apart, **medians}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    eager, sdpa = (
        AutoModelForCausalLM.from_pretrained(
            DEMO_MODEL, dtype=torch.float32, attn_implementation=name
        ).eval()
        for name in ("eager", "sdpa")
    )
    report = []
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        data = Path(folder) / "stack"
        wanted = Settings(
            model=str(DEMO_MODEL),
            data_dir=str(data),
            api_port=0,
            flower_port=0,
            dtype="float32",
            max_model_len=2048,
            hooks="all,inside",
        )
        with (
            Supervisor(prepare(wanted, data, print), say=lambda line: None) as stack,
            Client(stack.url) as client,
        ):
            client.attention([1, 2, 3])
            for tokens in options.tokens:
                report.append(
                    measured(client, eager, sdpa, tokens, options.prompts, options.rounds)
                )
                print(report[-1], flush=True)
    print(
        json.dumps({"benchmark": "attention", "cores": torch.get_num_threads(), "results": report})
    )


if __name__ == "__main__":
    main()
