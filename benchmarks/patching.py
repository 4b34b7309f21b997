"""How many patched cells a second does a sweep give, beside TransformerLens?

    make lens                                  # TransformerLens' own environment
    python benchmarks/patching.py [--rounds 3] [--dtypes float32 bfloat16] [--only grid beside] \\
        [--lens PYTHON] [--compiled]

`POST /v1/sweeps` over HTTP, worker, ranks and relay of a stack of its own; one hook
(`resid_pre`), all 30 layers, all positions of a pair of 23 tokens and one of 100. Seconds from the
request until the job is over, both clean runs and the control patches in them; and until the first
`cell` event. Beside it, taking turns in the same minutes: TransformerLens (`tools/peers/lens.py`,
the same dtype), the same pairs and hook, as many cells in a forward as there are positions, of some
layers: a cell costs the same in each. Its model is loaded already, and the rows of the clean prompt
are part of its time. The values that both give are compared.
"""

import argparse
import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
from engines import DEMO_MODEL, bench_prompts, tokenised
from services import report, service

#: The environment that `make lens` makes; `--lens` or this variable names another.
LENS_VARIABLE = "MIDSTREAM_LENS"
ROOT = Path(__file__).resolve().parents[1]
LENS = os.environ.get(LENS_VARIABLE, str(ROOT / ".cache" / "lens" / "bin" / "python"))
HOOK = "resid_pre"
LAYERS = 30
#: Prompt tokens of a pair → every which layer TransformerLens is asked for.
LENS_STEPS = {23: 5, 100: 15}
CLEAN = "The Eiffel Tower is located in the city of"
CORRUPT = "The Colosseum is located in the city of"
ANSWER = " Paris"
FOIL = " Rome"


class Pair(NamedTuple):
    """Token ids; both prompts have as many."""

    clean: list[int]
    corrupt: list[int]
    answer: int
    foil: int


def pair_of(length: int) -> Pair:
    """The two facts behind the same beginning of a paragraph."""
    clean, corrupt, (answer,), (foil,) = tokenised([CLEAN, CORRUPT, ANSWER, FOIL], DEMO_MODEL)
    before = next(ids for ids in tokenised(bench_prompts(), DEMO_MODEL) if len(ids) >= length)[
        : length - len(clean)
    ]
    return Pair(before + clean, before + corrupt, answer, foil)


class Lens:
    """TransformerLens in its own environment."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(ROOT / "tools" / "peers" / "lens.py"), "serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def run(
        self, pair: Pair, dtype: str, layers: list[int], batch: int
    ) -> tuple[float, np.ndarray]:
        """Cells a second, and their values `[layers, positions]`."""
        length = len(pair.corrupt)
        asked = {
            "dtype": dtype,
            "hook": HOOK,
            "layers": layers,
            "batch": batch,
            "places": [(place, place) for place in range(length)],
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked | pair._asdict()).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("TransformerLens ended: does `make lens` succeed?")
        answer = json.loads(line)
        return len(answer["values"]) / answer["seconds"], np.array(answer["values"]).reshape(
            len(layers), length
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def stack(dtype: str, compiled: bool) -> Iterator[tuple[httpx2.Client, str]]:
    """A client of a service of its own, and the model's name."""
    with (
        service(
            model=str(DEMO_MODEL),
            **{
                "engine.max_model_len": 2048,
                "engine.dtype": dtype,
                "engine.enforce_eager": not compiled,
            },
        ) as running,
        httpx2.Client(base_url=running.url, timeout=600) as http,
    ):
        yield http, running.settings.served_model


class Sweep(NamedTuple):
    cells: int
    seconds: float  # from the request until it is over
    first_s: float  # until the first cell is known to the client
    values: np.ndarray  # `[layers, positions]`


def sweep(http: httpx2.Client, model: str, pair: Pair) -> Sweep:
    asked = {"clean": pair.clean, "corrupt": pair.corrupt}
    asked |= {"answer": [pair.answer], "foil": [pair.foil]}
    body = {"model": model, "pairs": [asked], "hooks": [HOOK], "metric": "logit_diff"}
    start = time.perf_counter()
    job = http.post("/v1/sweeps", json=body).raise_for_status().json()["id"]
    first = 0.0
    with http.stream("GET", f"/v1/jobs/{job}/events") as events:
        events.raise_for_status()
        for line in events.iter_lines():
            if not first and line.startswith("event: cell"):
                first = time.perf_counter() - start
    seconds = time.perf_counter() - start
    found = http.get(f"/v1/jobs/{job}/result").raise_for_status().json()["sweep"]
    (result,) = found["pairs"]
    values = np.array(result["grids"]["pre_attn"], dtype=float)
    assert found["summary"]["skipped"] == 0, found["skipped"]
    return Sweep(found["summary"]["cells"], seconds, first, values)


def grids(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line per dtype and length."""
    found = []
    lens = Lens(options.lens)
    for dtype in options.dtypes:
        with stack(dtype, options.compiled) as service:
            for length in options.lengths:
                pair = pair_of(length)
                layers = list(range(0, LAYERS, LENS_STEPS[length]))
                rates = defaultdict(list)
                off = 0.0
                sweep(*service, pair)  # warm-up
                lens.run(pair, dtype, layers[:1], length)
                for _ in range(options.rounds):
                    made = sweep(*service, pair)
                    rates["ours"].append(made.cells / made.seconds)
                    rates["first_s"].append(made.first_s)
                    rate, values = lens.run(pair, dtype, layers, length)
                    rates["lens"].append(rate)
                    rates["ratio"].append(rates["ours"][-1] / rate)
                    off = max(off, float(np.abs(values - made.values[layers]).max()))
                line = {"dtype": dtype, "tokens": length, "cells": made.cells}
                line |= {name: [round(value, 2) for value in each] for name, each in rates.items()}
                line |= {"largest difference": round(off, 6)}
                found.append(line)
    lens.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[23, 100], choices=list(LENS_STEPS)
    )
    parser.add_argument(
        "--lens",
        default=LENS,
        help=f"a Python with TransformerLens; default ${LENS_VARIABLE}, or what `make lens` made",
    )
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    report("patching", grids(options), compiled=options.compiled)


if __name__ == "__main__":
    main()
