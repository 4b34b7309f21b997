"""How many short captures per second become durable, by layout?

    python benchmarks/layouts.py [--requests 2000] [--rounds 3] [--bursts 8] [--folder DIR]

Each request: the last position of 3 layers, hidden size 576, bf16, as of SmolLM2-135M. Through the
writer of a rank and its real outbox (SQLite, synchronous=FULL): a receipt counts once files and
receipt are on disk. `all at once`: every request waits in the queue from the start. `in bursts`: so
many at a time, the next when those are durable, as an engine finishes them. The layouts take turns;
ratios are of the medians. `per_file` writes each tensor into a file with its manifest beside it.
Prints a table and a JSON line.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from midstream.broker.receipts.outbox import Outbox
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.storage.store import open_store
from midstream.workers.runner.files.finished_rows import FinishedCapture
from midstream.workers.runner.files.layouts import StoreConfig
from midstream.workers.runner.files.writer import WriteJob, Writer

LAYOUTS = ("segment", "packed", "per_file")
LAYERS, HIDDEN, PROMPT = [5, 15, 25], 576, 24
JOB_PROMPTS = 100  # requests per job


def job(number: int, layout: str, rows: memoryview) -> WriteJob:
    capture = StoredCapture(
        sites={"post_block": LAYERS}, positions="last_prompt", tag="bench", layout=layout
    )  # type: ignore[arg-type]
    name, request = f"job_{number // JOB_PROMPTS:032d}", number % JOB_PROMPTS
    spec = RankSpec(
        version="1", job=name, request=request, attempt=1, prompt_tokens=PROMPT, captures=[capture]
    )

    def build() -> FinishedCapture:
        return FinishedCapture(
            spec=spec,
            capture=capture,
            sites={"post_block": LAYERS},
            hidden_size=HIDDEN,
            dtype="bfloat16",
            positions=[PROMPT - 1],
            token_ids=[7],
            worker="bench",
            rank=0,
            pp=0,
            stages=1,
            rows=lambda hook, layer: [rows],
        )

    receipt = Receipt(
        "1",
        "bench",
        "boot",
        name,
        request,
        1,
        0,
        1,
        tp=0,
        pp=0,
        step=number,
        actions=0,
        checksum="0" * 16,
        status="ok",
    )
    return WriteJob(receipt, [build], len(LAYERS) * HIDDEN * 2)


def measure(folder: Path, layout: str, requests: int, burst: int, threads: int) -> float:
    """Receipts per second; `burst` 0: all at once."""
    # nobody answers: it only keeps them
    outbox = Outbox(folder / "outbox", "bench", 0, "tcp://127.0.0.1:9")
    store = StoreConfig(open_store(folder / "captures"), "bench.boot.0")
    writer = Writer(store, outbox, threads, memory_limit=0)
    rows = memoryview(
        np.random.default_rng(0).integers(0, 1 << 16, HIDDEN, dtype=np.uint16).tobytes()
    )
    jobs = [job(number, layout, rows) for number in range(requests)]
    start = time.perf_counter()
    for first in range(0, requests, burst or requests):
        for one in jobs[first : first + (burst or requests)]:
            writer.submit(one)
        while burst and writer.busy():
            time.sleep(0.0002)
    writer.close()
    outbox.close()  # returns when everything appended is durable
    return requests / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bursts", type=int, default=8, help="requests that finish together")
    parser.add_argument(
        "--threads", type=int, default=2, help="writer threads, as `writer_threads`"
    )
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: the temporary folder's"
    )
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    print(f"{'arrival':<14} {'layout':<9} {'receipts/s':>10}   single rounds")
    for name, burst in (("all at once", 0), (f"in bursts of {options.bursts}", options.bursts)):
        rates: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
        for _ in range(options.rounds):
            for layout in LAYOUTS:
                with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                    os.sync()  # what the last round left to be written is not this one's
                    rates[layout].append(
                        measure(Path(scratch), layout, options.requests, burst, options.threads)
                    )
        medians = {layout: statistics.median(rounds) for layout, rounds in rates.items()}
        for layout, rounds in rates.items():
            print(
                (
                    f"{name:<14} {layout:<9} {medians[layout]:>10.0f}   "
                    f"{' '.join(f'{rate:.0f}' for rate in rounds)}"
                ),
                flush=True,
            )
        ratios = {
            f"segment/{layout}": round(medians["segment"] / medians[layout], 2)
            for layout in LAYOUTS[1:]
        }
        print(
            f"{name:<14} " + ", ".join(f"{pair} {ratio}" for pair, ratio in ratios.items()),
            flush=True,
        )
        results.append(
            {
                "arrival": name,
                "receipts_per_s": {layout: round(rate) for layout, rate in medians.items()},
                "ratios": ratios,
            }
        )
    print(
        json.dumps(
            {
                "benchmark": "layouts",
                "requests": options.requests,
                "cpus": os.cpu_count(),
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
