"""How many patched cells a second does a sweep give, beside TransformerLens?

And what does ordinary traffic notice of one?

    make lens                                  # TransformerLens' own environment
    python benchmarks/patching.py [--rounds 3] [--dtypes float32 bfloat16] [--only grid beside] \\
        [--lens PYTHON] [--compiled]

`grid`: `POST /v1/sweeps` over HTTP, worker, ranks and relay of a stack of its own; one hook
(`resid_pre`), all 30 layers, all positions of a pair of 23 tokens and one of 100. Seconds from the
request until the job is over, both clean runs and the control patches in them; and until the first
`cell` event. Twice: with cells that begin at the layer that they patch (`entry`), and without.
Beside them, taking turns in the same minutes: TransformerLens (`lens.py`, float32 and the same
dtype), the same pairs and hook, one cell in a forward (`naive`) and as many as there are positions
(`batched`), of some layers: a cell costs the same in each. Its model is loaded already, and the
rows of the clean prompt are part of its time. The values that both give are compared.

`beside`: latency of ordinary requests (64 prompt tokens, 16 generated), one at a time, alone and
while a sweep runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
from engines import DEMO_MODEL, bench_prompts, tokenised

from midstream.client.stack.supervisor import Supervisor, prepare
from midstream.schemas.base.settings import Settings
from midstream.schemas.base.tuning import Tuning

#: The environment that `make lens` makes; `--lens` or this variable names another.
LENS_VARIABLE = "MIDSTREAM_LENS"
LENS = os.environ.get(
    LENS_VARIABLE, str(Path(__file__).resolve().parents[1] / ".cache" / "lens" / "bin" / "python")
)
HOOK = "resid_pre"
LAYERS = 30
#: Prompt tokens of a pair → every which layer TransformerLens is asked for, batched and naive.
LENS_STEPS = {23: (5, 15), 100: (15, 30)}
CLEAN, CORRUPT = (
    "The Eiffel Tower is located in the city of",
    "The Colosseum is located in the city of",
)
ANSWER, FOIL = " Paris", " Rome"
#: Ordinary requests.
ORDINARY_TOKENS, ORDINARY_GENERATED = 64, 16


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
            [python, str(Path(__file__).with_name("lens.py")), "serve"],
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
def stack(
    dtype: str, entry: bool, compiled: bool, **changes: Any
) -> Iterator[tuple[httpx2.Client, str]]:
    """A client of a service of its own, and the model's name. `changes`: of its settings."""
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        wanted = Settings(
            model=str(DEMO_MODEL),
            data_dir=folder,
            api_port=0,
            flower_port=0,
            max_model_len=2048,
            dtype=dtype,  # type: ignore[arg-type]
            tuning=Tuning(sweep_entry=entry),
            enforce_eager=not compiled,
            **changes,
        )
        settings = prepare(wanted, Path(folder), print)
        with (
            Supervisor(settings, say=lambda line: None) as running,
            httpx2.Client(base_url=running.url, timeout=600) as http,
        ):
            yield http, settings.served_model


class Sweep(NamedTuple):
    cells: int
    seconds: float  # from the request until it is over
    first_s: float  # until the first cell is known to the client
    values: np.ndarray  # `[layers, positions]`
    noise_floor: float


def begin(http: httpx2.Client, model: str, pair: Pair) -> str:
    """The sweep's job."""
    asked = {
        "clean": pair.clean,
        "corrupt": pair.corrupt,
        "answer": [pair.answer],
        "foil": [pair.foil],
    }
    answer = http.post(
        "/v1/sweeps",
        json={"model": model, "pairs": [asked], "hooks": [HOOK], "metric": "logit_diff"},
    )
    answer.raise_for_status()
    return str(answer.json()["id"])


def sweep(http: httpx2.Client, model: str, pair: Pair) -> Sweep:
    start = time.perf_counter()
    job, first = begin(http, model, pair), 0.0
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
    return Sweep(found["summary"]["cells"], seconds, first, values, result["noise_floor"])


def say(dtype: str, length: int, name: str, rate: float) -> None:
    print(f"  {dtype}, {length} tokens, {name}: {rate:.1f} cells/s", flush=True)


def grids(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line per dtype and length."""
    report = []
    lens = Lens(options.lens)
    for dtype in options.dtypes:
        with (
            stack(dtype, True, options.compiled) as entering,
            stack(dtype, False, options.compiled) as plain,
        ):
            for length in options.lengths:
                pair, rates = pair_of(length), defaultdict(list)
                for each in (entering, plain):
                    sweep(*each, pair)  # warm-up
                batched, naive = (list(range(0, LAYERS, step)) for step in LENS_STEPS[length])
                lens.run(pair, dtype, naive[:1], length)
                off = floor = 0.0
                for turn in range(options.rounds):
                    for name, target in (("entry", entering), ("plain", plain)):
                        made = sweep(*target, pair)
                        rates[name].append(made.cells / made.seconds)
                        say(dtype, length, name, rates[name][-1])
                        rates[f"{name} first_s"].append(made.first_s)
                        floor = max(floor, made.noise_floor)
                    rate, values = lens.run(pair, dtype, batched, length)
                    rates["lens batched"].append(rate)
                    say(dtype, length, "TransformerLens batched", rate)
                    off = max(off, float(np.abs(values - made.values[batched]).max()))
                    if turn == 0:  # slow, and steady
                        rates["lens naive"].append(lens.run(pair, dtype, naive, 0)[0])
                        say(dtype, length, "TransformerLens naive", rates["lens naive"][-1])
                line = {"dtype": dtype, "tokens": length, "cells": made.cells}
                line |= {
                    name: round(statistics.median(values), 3) for name, values in rates.items()
                }
                ratios = {
                    name: [
                        ours / theirs
                        for ours, theirs in zip(rates[name], rates["lens batched"], strict=True)
                    ]
                    for name in ("entry", "plain")
                }
                line |= {
                    f"{name} to batched": [round(ratio, 2) for ratio in values]
                    for name, values in ratios.items()
                }
                line |= {"largest difference": round(off, 6), "noise_floor": round(floor, 6)}
                report.append(line)
                print("  ".join(f"{name}: {value}" for name, value in line.items()), flush=True)
    lens.close()
    return report


def beside(options: argparse.Namespace) -> dict[str, Any]:
    """Latencies of ordinary requests in seconds, alone and beside a sweep; they take turns."""
    prompts = [
        ids[:ORDINARY_TOKENS]
        for ids in tokenised(bench_prompts(), DEMO_MODEL)
        if len(ids) >= ORDINARY_TOKENS
    ]
    latencies: dict[str, list[float]] = {"alone": [], "beside": []}
    pair, sweeps, number = pair_of(100), 0, 0
    with stack("bfloat16", True, options.compiled) as (http, model):

        def ordinary() -> float:
            nonlocal number
            number += 1
            body = {
                "model": model,
                "prompt": prompts[number % len(prompts)],
                "max_tokens": ORDINARY_GENERATED,
                "temperature": 0,
                "ignore_eos": True,
            }
            start = time.perf_counter()
            http.post("/v1/completions", json=body).raise_for_status()
            return time.perf_counter() - start

        sweep(http, model, pair_of(23))  # warm-up
        for _ in range(options.rounds):
            for _ in range(2):
                ordinary()
            latencies["alone"] += [ordinary() for _ in range(options.requests)]
            job = begin(http, model, pair)
            for _ in range(2):
                ordinary()
            measured = 0
            while measured < options.requests and http.get(f"/v1/jobs/{job}").json()["state"] in (
                "queued",
                "running",
            ):
                latencies["beside"].append(ordinary())
                measured += 1
            sweeps += 1
            while http.get(f"/v1/jobs/{job}", params={"wait": 30}).json()["state"] in (
                "queued",
                "running",
            ):
                pass
    line: dict[str, Any] = {"sweeps": sweeps}
    for name, values in latencies.items():
        line[name] = {
            "requests": len(values),
            "p50_ms": round(1e3 * statistics.median(values), 1),
            "p95_ms": round(1e3 * float(np.percentile(values, 95)), 1),
        }
    print("  ".join(f"{name}: {value}" for name, value in line.items()))
    return line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[23, 100], choices=list(LENS_STEPS)
    )
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=["grid", "beside"], choices=["grid", "beside"])
    parser.add_argument(
        "--lens",
        default=LENS,
        help=f"a Python with TransformerLens; default ${LENS_VARIABLE}, or what `make lens` made",
    )
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    report = {
        "grids": grids(options) if "grid" in options.only else [],
        "beside": beside(options) if "beside" in options.only else {},
    }
    print(json.dumps({"benchmark": "patching", "compiled": options.compiled, **report}))


if __name__ == "__main__":
    main()
