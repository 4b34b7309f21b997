"""How close are captured rows to transformers' `hidden_states[L + 1]`, and v1's to v2's?

    python benchmarks/fidelity.py

SmolLM2-135M-Instruct, the demo prompts, every layer and position, in fp32 and in bf16; transformers
runs on the same checkpoint in the same dtype and, for bf16, also in fp32; transformers in bf16
against itself in fp32 says what rounding alone does. Errors are distances relative to the
reference's length: of a layer's rows of one prompt together, and of each row by itself. The last
layer is compared before the final norm, which HF's list of hidden states has already applied.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fake_engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])  # of the engines' processes

from engines import DEMO_MODEL, bench_prompts, tokenised
from host import Host, capture_of
from reference import Reference

PROMPTS = 8


def compare(
    name: str, reference: str, pairs: Iterable[tuple[np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    """`pairs`: got and wanted, each `[layers, positions, hidden]`."""
    by_row, by_layer = [], []
    for got, wanted in pairs:
        by_row.append(
            (np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).ravel()
        )
        by_layer.append(
            np.linalg.norm(got - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))
        )
    row, layer = np.concatenate(by_row), np.concatenate(by_layer)
    return {
        "rows_of": name,
        "against": reference,
        "rows": len(row),
        "layer_max": float(layer.max()),
        "row_median": float(np.median(row)),
        "row_p999": float(np.quantile(row, 0.999)),
        "row_max": float(row.max()),
    }


def rows(directory: Path, dtype: str, prompts: list[list[int]]) -> list[np.ndarray]:
    """`[layers, positions, hidden]` of each prompt."""
    directory.mkdir()
    host = Host(directory, DEMO_MODEL, dtype=dtype, max_model_len=1024)
    try:
        job = host.job(*prompts, max_tokens=1, capture=capture_of(list(range(30)), "all_prompt"))
        host.run(job)
        return [host.capture(job).stack(request=number) for number in range(len(prompts))]
    finally:
        host.close()


def main() -> None:
    prompts = tokenised(bench_prompts()[:PROMPTS], DEMO_MODEL)
    report: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        captured = {
            dtype: rows(Path(folder) / dtype, dtype, prompts) for dtype in ("float32", "bfloat16")
        }
    wanted = {}
    for dtype in (torch.float32, torch.bfloat16):
        reference = Reference(DEMO_MODEL, dtype)
        name = str(dtype).removeprefix("torch.")
        wanted[name] = [
            np.stack([stream for _, stream in sorted(reference.post_block(prompt).items())])
            for prompt in prompts
        ]
    for dtype, against in (
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
    ):
        report.append(
            compare(
                f"captured {dtype}",
                f"transformers {against}",
                zip(captured[dtype], wanted[against], strict=True),
            )
        )
    pairs = zip(wanted["bfloat16"], wanted["float32"], strict=True)
    report.append(compare("transformers bfloat16", "transformers float32", pairs))
    for line in report:
        print(
            "{rows_of} against {against}: {rows} rows; layers up to {layer_max:.1e}; rows "
            "median {row_median:.1e}, "
            "p99.9 {row_p999:.1e}, max {row_max:.1e}".format(**line)
        )
    print(json.dumps({"benchmark": "fidelity", "results": report}))


if __name__ == "__main__":
    main()
