"""How fast do large captures become durable, and what does it cost the processor?

    python benchmarks/large_captures.py [--mib 40] [--captures 16] [--rounds 3] [--sites 180] \\
        [--folder DIR]

One writer thread's consumer `filesystem`, layout `packed`, rows of hidden size 576 in bf16, as of
SmolLM2-135M. In turns: through the page cache (as files were written before), directly
(`storage/direct_write.py`), and `dd conv=fsync` of as many bytes for the disk's own rate. Seconds
include CRC32 and fsync, not the making of the rows; CPU is that of this process, the kernel's
writeback not included.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from midstream.broker.artifacts.retention import Usage
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.storage import file_store
from midstream.storage.store import open_store
from midstream.workers.runner.files.finished_rows import FinishedCapture
from midstream.workers.runner.files.layouts import Filesystem, StoreConfig

HIDDEN, ITEM = 576, 2


def captures(rows: memoryview, sites: int, positions: int, count: int) -> list[FinishedCapture]:
    layers = list(range(sites))
    capture = StoredCapture(
        sites={"post_block": layers}, positions="all_prompt", tag="bench", layout="packed"
    )
    site = positions * HIDDEN * ITEM
    return [
        FinishedCapture(
            spec=RankSpec(
                version="1",
                job="job_bench",
                request=number,
                attempt=1,
                prompt_tokens=positions,
                captures=[capture],
            ),
            capture=capture,
            sites={"post_block": layers},
            hidden_size=HIDDEN,
            dtype="bfloat16",
            positions=list(range(positions)),
            token_ids=[7] * positions,
            worker="bench",
            rank=0,
            pp=0,
            stages=1,
            rows=lambda hook, layer: [rows[layer * site : (layer + 1) * site]],
        )
        for number in range(count)
    ]


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, CPU seconds)."""
    os.sync()  # what others left to be written
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def plain_write(folder: Path, size: int) -> None:
    """Write so many bytes durably with `dd`, for the disk's own rate, and remove them."""
    file = folder / "dd"
    subprocess.run(
        [
            "dd",
            "if=/dev/zero",
            f"of={file}",
            "bs=1M",
            f"count={size >> 20}",
            "conv=fsync",
            "status=none",
        ],
        check=True,
    )
    file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=40, help="approximate size of one capture")
    parser.add_argument("--captures", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sites", type=int, default=180)
    parser.add_argument(
        "--folder",
        type=Path,
        help="a folder on the disk to be measured; default: the temporary folder",
    )
    options = parser.parse_args()
    positions = (options.mib << 20) // (options.sites * HIDDEN * ITEM)
    size = positions * options.sites * HIDDEN * ITEM
    rows = memoryview(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)).toreadonly()
    all_bytes = size * options.captures
    found: dict[str, list[tuple[float, float]]] = {"page cache": [], "direct": [], "dd": []}
    least = file_store.LEAST
    for _ in range(options.rounds):
        for kind, results in found.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                if kind == "dd":
                    results.append(
                        timed(lambda scratch=scratch: plain_write(Path(scratch), all_bytes))
                    )  # type: ignore[misc]
                    continue
                file_store.LEAST = least if kind == "direct" else 1 << 62
                store = StoreConfig(open_store(scratch), "bench.boot.0")
                writer = Filesystem(store, Usage(store.store, 0))
                made = captures(rows, options.sites, positions, options.captures)
                results.append(
                    timed(lambda made=made, writer=writer: [writer.consume([one]) for one in made])
                )  # type: ignore[misc]
    report = {
        kind: {
            "gb_per_s": [round(all_bytes / wall / 1e9, 2) for wall, _ in results],
            "cpu_s_per_gb": round(
                statistics.median(cpu for _, cpu in results) / all_bytes * 1e9, 2
            ),
        }
        for kind, results in found.items()
    }
    for kind, line in report.items():
        print(f"{kind:<11} GB/s {line['gb_per_s']}  CPU s per GB {line['cpu_s_per_gb']}")
    print(
        json.dumps(
            {
                "benchmark": "large_captures",
                "mib": options.mib,
                "captures": options.captures,
                "results": report,
            }
        )
    )


if __name__ == "__main__":
    main()
