"""How long does a sweep over all heads take, beside TransformerLens?

And paths: to the logits, to a head's queries, from a head?

    make lens                                # TransformerLens' own environment
    python benchmarks/heads.py [--rounds 3] [--lens PYTHON]

The pair of `lens_heads.py` (14 tokens), float32. Ours: `POST /v1/sweeps` over HTTP, worker, ranks
and relay of a stack of its own, from the request until the job is over, both clean runs and the
control patches in it; cells begin at the layer that they patch. Theirs, taking turns:
`get_act_patch_attn_head_out_all_pos` (one cell in a forward pass), the same with all heads of a
layer in a batch, and `get_act_patch_direct_path` from one head. Both have the machine alone while
they run. The values are compared.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from lens_heads import ANSWER, CLEAN, CORRUPT, FOIL, SENDER
from patching import LENS, LENS_VARIABLE, stack

PAIR = {"clean": CLEAN, "corrupt": CORRUPT, "answer": ANSWER, "foil": FOIL}
SENDER_END = {"layer": SENDER[0], "hook": "z", "head": SENDER[1]}
SWEEPS: dict[str, dict[str, Any]] = {
    "heads": {"hooks": ["z"]},
    "path to the logits": {"hooks": ["z"], "path": {"receivers": "logits"}},
    "path to queries": {
        "hooks": ["z"],
        "path": {"receivers": [{"layer": 23, "hook": "q", "head": 3}], "frozen": ["attn"]},
    },
    "path from a head": {"hooks": ["q"], "path": {"sender": SENDER_END}},
}
#: Ours and theirs that are the same grid.
SAME = {"naive": "heads", "batched": "heads", "direct": "path from a head"}


def sweep(http: httpx2.Client, model: str, fields: dict[str, Any]) -> tuple[float, np.ndarray]:
    """Seconds, and the values `[layers, heads]`."""
    start = time.perf_counter()
    body = {"model": model, "pairs": [PAIR], "metric": "logit_diff", "axis": "head", **fields}
    job = http.post("/v1/sweeps", json=body).raise_for_status().json()["id"]
    while http.get(f"/v1/jobs/{job}", params={"wait": 60}).json()["state"] in ("queued", "running"):
        pass
    seconds = time.perf_counter() - start
    found = http.get(f"/v1/jobs/{job}/result").raise_for_status().json()["sweep"]
    assert not found["skipped"], found["skipped"]
    return seconds, np.array(next(iter(found["pairs"][0]["grids"].values())), dtype=float)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--lens",
        default=LENS,
        help=(f"a Python with TransformerLens; default ${LENS_VARIABLE}, or what `make lens` made"),
    )
    parser.add_argument("--theirs", nargs="+", default=list(SAME), choices=list(SAME))
    options = parser.parse_args()
    rates, values = defaultdict(list), {}
    off = 0.0
    with stack("float32", True, False, hooks="all,inside") as (http, model):
        for fields in SWEEPS.values():
            sweep(http, model, fields)  # warm-up
        for _ in range(options.rounds):
            for name, fields in SWEEPS.items():
                seconds, values[name] = sweep(http, model, fields)
                rates[name].append(values[name].size / seconds)
                print(f"  {name}: {rates[name][-1]:.1f} cells/s", flush=True)
            script = Path(__file__).with_name("lens_heads.py")
            command = [options.lens, str(script), "time", "--only", *options.theirs]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for line in filter(lambda line: line.startswith("{"), told.splitlines()):
                theirs = json.loads(line)
                rates[f"TransformerLens {theirs['name']}"].append(
                    theirs["cells"] / theirs["seconds"]
                )
                off = max(
                    off,
                    float(np.abs(np.array(theirs["values"]) - values[SAME[theirs["name"]]]).max()),
                )
            print(
                "  ".join(f"{name}: {each[-1]:.1f} cells/s" for name, each in rates.items()),
                flush=True,
            )
    report: dict[str, Any] = {
        name: round(statistics.median(each), 1) for name, each in rates.items()
    }
    print(
        json.dumps(
            {"benchmark": "heads", "cells_per_s": report, "largest difference": round(off, 6)}
        )
    )


if __name__ == "__main__":
    main()
