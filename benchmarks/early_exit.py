"""What does a request save that needs no token, and what do others notice?

    python benchmarks/early_exit.py [--rounds 5]

Jobs with `max_tokens: 0` and jobs with `max_tokens: 1` take turns on one service, with the same
captures: alone, and beside clients that generate. Prints JSON. For harvests see `harvest.py`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fake_engine"))

import httpx2
from engines import DEMO_MODEL, bench_prompts, tokenised
from stack import Stack

from midstream.client import Client

#: Of the model's 30.
LAYERS = (5, 14, 22)
#: Clients that generate, each one text after another.
CLIENTS = 8
TOKENS = 48
ENGINE = {
    "engine.max_num_seqs": 64,
    "engine.max_num_batched_tokens": 2048,
    "engine.max_model_len": 2048,
    "engine.enable_prefix_caching": False,
    "kv_cache_gib": 1.0,
}
#: Limit of tokens → how it is called here.
KINDS = {0: "shallow", 1: "whole"}


def captured(client: Client, prompts: list[list[int]], layer: int, max_tokens: int) -> float:
    """Seconds of a job with one layer's rows at all positions."""
    begin = time.perf_counter()
    result = client.run(
        model="demo",
        prompts=prompts,
        capture={"layers": [layer], "positions": "all_prompt"},
        sampling={"max_tokens": max_tokens, "ignore_eos": True},
        progress=False,
    )
    assert len(result.outputs) == len(prompts)
    return time.perf_counter() - begin


def alone(client: Client, prompts: list[list[int]], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layer in LAYERS:
        seconds: dict[int, list[float]] = {0: [], 1: []}
        for number in range(rounds + 1):
            for max_tokens in (0, 1) if number % 2 else (1, 0):
                seconds[max_tokens].append(captured(client, prompts, layer, max_tokens))
        ratios = [short / whole for short, whole in zip(*seconds.values(), strict=True)][1:]
        found[f"layer {layer}"] = {
            "shallow_to_whole": round(statistics.median(ratios), 3),
            "whole_s": round(statistics.median(seconds[1]), 2),
        }
        print(f"layer {layer}: {seconds}", file=sys.stderr)
    return found


@contextmanager
def generating(url: str) -> Iterator[list[float]]:
    """Have clients generate within the block; the times at which they received a token."""
    times: list[float] = []
    over = threading.Event()

    def write() -> None:
        body = {"model": "demo", "prompt": "The sea", "max_tokens": TOKENS, "ignore_eos": True}
        with httpx2.Client(base_url=url, timeout=120.0) as client:
            while not over.is_set():
                with client.stream(
                    "POST", "/v1/completions", json=body | {"stream": True}
                ) as lines:
                    for line in lines.iter_lines():
                        if line.startswith("data: {"):
                            times.append(time.perf_counter())

    threads = [threading.Thread(target=write) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield times
    finally:
        over.set()
        for thread in threads:
            thread.join()


def beside(stack: Stack, client: Client, prompts: list[list[int]], rounds: int) -> dict[str, Any]:
    """Tokens per second of the clients, and seconds of the jobs, beside jobs of either kind."""
    rates: dict[int, list[float]] = {0: [], 1: []}
    seconds: dict[int, list[float]] = {0: [], 1: []}
    with generating(stack.url) as times:
        time.sleep(3.0)
        for number in range(rounds + 1):
            for max_tokens in (0, 1) if number % 2 else (1, 0):
                begin = time.perf_counter()
                took = captured(client, prompts, LAYERS[1], max_tokens)
                got = sum(begin <= at <= begin + took for at in times)
                rates[max_tokens].append(got / took)
                seconds[max_tokens].append(took)
    ratios = [short / whole for short, whole in zip(*rates.values(), strict=True)][1:]
    return {
        "clients": CLIENTS,
        "tokens_s_beside_shallow_to_whole": round(statistics.median(ratios), 3),
        "tokens_s": {
            KINDS[kind]: [round(rate, 1) for rate in of_kind] for kind, of_kind in rates.items()
        },
        "seconds": {
            KINDS[kind]: [round(took, 2) for took in of_kind] for kind, of_kind in seconds.items()
        },
    }


def main(rounds: int) -> dict[str, Any]:
    prompts = [ids[:256] for ids in tokenised(bench_prompts(), DEMO_MODEL)]
    options = {"engine": "vllm", "model": str(DEMO_MODEL), "model_name": "demo", "certify": False}
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), api=True, start_timeout_s=300, **options, **ENGINE) as stack,
        Client(stack.url) as client,
    ):
        return {
            "prompts": len(prompts),
            "tokens": sum(map(len, prompts)),
            "alone": alone(client, prompts, rounds),
            "beside": beside(stack, client, prompts, rounds),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    print(json.dumps(main(parser.parse_args().rounds), indent=1))
