"""What does a harvest cost beside the model?

    python benchmarks/harvest.py [--rounds 5] [--sequences 256]

The service and stock vLLM take turns. Prints JSON. A rate counts the tokens of sequences; for the
service, from the planned source to the last unit that counts.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fake_engine"))

from engines import DEMO_MODEL, Stock, bench_prompts, tokenised
from stack import Stack

from midstream.client import Client
from midstream.schemas.settings.settings import load_settings
from midstream_harvest.records.harvests import HarvestView

LENGTH = 256
#: Of the model's 30: one at a quarter, one at half, the last, and six up to the last but two. The
#: layers above the highest are not computed.
LAYERS = ([7], [14], [29], [2, 7, 12, 17, 22, 27])
ENGINE = {
    "engine.max_num_seqs": 64,
    "engine.max_num_batched_tokens": 2048,
    "engine.max_model_len": 2048,
    "kv_cache_gib": 1.0,
}
SLOW = {"lease_s": 15.0, "tuning.visibility_timeout_s": 30}


def sequences(count: int, seed: int) -> list[list[int]]:
    """Documentation cut into pieces of `LENGTH` tokens, each begun by random tokens so that no two
    share a prefix.
    """
    stream = [token for ids in tokenised(bench_prompts(), DEMO_MODEL) for token in ids]
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        start = int(rng.integers(0, len(stream) - LENGTH))
        found.append([*rng.integers(1000, 20000, 8).tolist(), *stream[start : start + LENGTH - 8]])
    return found


def harvest(client: Client, model: str, lines: list[Any], **fields: Any) -> HarvestView:
    view = client.harvests.submit(
        model=model, source={"lines": lines}, positions={"skip_bos": False}, **fields
    )
    while (view := client.harvests.get(view)).state not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.1)
    assert view.state == "succeeded", view
    return view


def computed_s(view: HarvestView) -> float:
    """From the first part that computes to the end, sealing included."""
    assert view.started is not None
    assert view.finished is not None
    return view.finished - view.started


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = (
        "1"  # all compute with as many threads: one fewer than cores
    )
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))
    found: dict[str, Any] = {
        "length": LENGTH,
        "sequences": arguments.sequences,
        "rounds": arguments.rounds,
        "engine": ENGINE,
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stock = Stock(
            load_settings({}, model=str(DEMO_MODEL), data_dir=str(root / "stock"), **ENGINE)
        )
        try:
            options = {
                "engine": "vllm",
                "model": str(DEMO_MODEL),
                "model_name": "demo",
                "certify": False,
                **ENGINE,
                **SLOW,
            }
            with (
                Stack(root / "ours", api=True, start_timeout_s=300, **options) as stack,
                Client(stack.url) as client,
            ):
                for layers in LAYERS:
                    rounds = [
                        turn(stock, client, layers, number, arguments.sequences)
                        for number in range(arguments.rounds + 1)
                    ][1:]
                    ratios = [rates["harvest"] / rates["stock"] for rates in rounds]
                    found[f"layers {layers}"] = {
                        f"{kind}_tokens_s": [round(rates[kind]) for rates in rounds]
                        for kind in ("stock", "harvest")
                    } | {"harvest_to_stock": round(statistics.median(ratios), 3)}
        finally:
            stock.close()
    return found


def turn(
    stock: Stock,
    client: Client,
    layers: list[int],
    number: int,
    count: int,
) -> dict[str, float]:
    """Tokens/s of each on the same sequences; who is first changes."""
    lines = sequences(count, 1000 * sum(layers) + number)
    tokens = sum(map(len, lines))

    def ours() -> float:
        view = harvest(client, "demo", lines, layers=layers, shards={"mib": 16})
        client.harvests.delete(view)
        return computed_s(view)

    order = ["stock", "harvest"][:: 1 if number % 2 else -1]
    kinds = {"stock": lambda: stock.run(lines, 1, 64), "harvest": ours}
    rates = {kind: tokens / kinds[kind]() for kind in order}
    print(f"layers {layers}, turn {number}: {rates}", file=sys.stderr)
    return rates


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=256)
    chosen = parser.parse_args()
    print(json.dumps(speed(chosen), indent=1))
