"""When does the first token come, steered by a vector that nobody has seen, by one that is known,
or by a named module? Through HTTP.

    python benchmarks/steering_http.py [--rounds 40] [--entries 30] [--compiled]

One request at a time on a stack of its own, streamed, eight prompt tokens. The kinds take turns in
a changing order:

- `plain`: not steered.
- `inline first`: `--entries` vectors in the request's body, one per layer, that the server has
  never seen.
- `inline again`: the same vectors once more: the ranks have them, the body carries them.
- `module cold`: fresh vectors registered under a name, and the name's first use, from the beginning
  of the registration.
- `registration`: the part of it that is the registration.
- `module warm`: the name once more.

Times are until the first token has arrived, and until the answer is settled: a steered answer ends
only when the ranks have reported.
"""

import argparse
import base64
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from engines import DEMO_MODEL, bench_prompts, tokenised

from midstream.client.stack.supervisor import Supervisor, prepare
from midstream.schemas.base.settings import Settings

KINDS = ("plain", "inline first", "inline again", "module cold", "registration", "module warm")
PROMPT_TOKENS = 8
MAX_TOKENS = 4
NAME = "bench"


def entries_of(rng: np.random.Generator, number: int, hidden_size: int) -> list[dict[str, Any]]:
    """Random vectors, one for each of the first layers."""
    return [
        {
            "layers": layer,
            "scale": 0.1,
            "vector": {
                "dtype": "float32",
                "shape": [hidden_size],
                "data": base64.b64encode(
                    rng.standard_normal(hidden_size).astype("<f4").tobytes()
                ).decode(),
            },
        }
        for layer in range(number)
    ]


class Asking:
    """One request after the other, each timed."""

    def __init__(self, http: httpx2.Client, model: str, prompts: list[list[int]]):
        self._http, self._model, self._prompts = http, model, prompts
        self._number = 0

    def first_token(self, steering: list[dict[str, Any]]) -> tuple[float, float]:
        """Seconds until the first token, and until the end of the answer."""
        self._number += 1
        body = {
            "model": self._model,
            "prompt": self._prompts[self._number % len(self._prompts)],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "steering": steering,
        }
        content = json.dumps(body)
        start, first, last = time.perf_counter(), 0.0, {}
        with self._http.stream(
            "POST", "/v1/completions", content=content, headers={"content-type": "application/json"}
        ) as answer:
            answer.read() if answer.status_code != 200 else None
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter() - start
                last = json.loads(line.removeprefix("data: "))
        assert "error" not in last, last
        assert not steering or last["determinism"]["consistent"], last
        return first, time.perf_counter() - start

    def register(self, steering: list[dict[str, Any]]) -> float:
        """Seconds until the name means it."""
        content = json.dumps({"steering": steering})
        start = time.perf_counter()
        answer = self._http.put(
            f"/v1/steering/modules/{NAME}",
            content=content,
            headers={"content-type": "application/json"},
        )
        answer.raise_for_status()
        return time.perf_counter() - start


def one_round(
    asking: Asking, rng: np.random.Generator, entries: int, hidden_size: int, turn: int
) -> dict[str, tuple[float, float]]:
    """Kind → seconds until the first token, until the end."""
    found = {}

    def plain() -> None:
        found["plain"] = asking.first_token([])

    def inline() -> None:
        steering = entries_of(rng, entries, hidden_size)
        found["inline first"] = asking.first_token(steering)
        found["inline again"] = asking.first_token(steering)

    def module() -> None:
        registered = asking.register(entries_of(rng, entries, hidden_size))
        first, whole = asking.first_token([{"module": NAME}])
        found["registration"] = (registered, registered)
        found["module cold"] = (registered + first, registered + whole)
        found["module warm"] = asking.first_token([{"module": NAME}])

    kinds = [plain, inline, module]
    for kind in kinds[turn % 3 :] + kinds[: turn % 3]:
        kind()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--entries", type=int, default=30)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    prompts = [prompt[:PROMPT_TOKENS] for prompt in tokenised(bench_prompts(), DEMO_MODEL)]
    hidden_size = json.loads((DEMO_MODEL / "config.json").read_text())["hidden_size"]
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        wanted = Settings(
            model=str(DEMO_MODEL), data_dir=folder, api_port=0, flower_port=0, max_model_len=2048,
            enable_prefix_caching=False, enforce_eager=not options.compiled,
        )  # fmt: skip
        settings = prepare(wanted, Path(folder), print)
        with (
            Supervisor(settings, say=lambda line: None) as stack,
            httpx2.Client(base_url=stack.url, timeout=60) as http,
        ):
            asking = Asking(http, settings.served_model, prompts)
            for turn in range(3):  # warm-up
                one_round(asking, rng, options.entries, hidden_size, turn)
            rounds = [
                one_round(asking, rng, options.entries, hidden_size, turn)
                for turn in range(options.rounds)
            ]
    report = []
    for kind in KINDS:
        first, whole = ([found[kind][place] * 1e3 for found in rounds] for place in (0, 1))
        beside = [found[kind][0] / found["inline first"][0] for found in rounds]
        report.append(
            {
                "kind": kind,
                "first_ms": round(statistics.median(first), 1),
                "first_p90_ms": round(float(np.percentile(first, 90)), 1),
                "whole_ms": round(statistics.median(whole), 1),
                "first_to_inline_first": round(statistics.median(beside), 3),
            }
        )
    print(
        f"{options.entries} vectors, {options.entries * hidden_size * 4} bytes; "
        f"{options.rounds} rounds, one request at a time"
    )
    for line in report:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    print(
        json.dumps(
            {
                "benchmark": "steering_http",
                "entries": options.entries,
                "compiled": options.compiled,
                "results": report,
            }
        )
    )


if __name__ == "__main__":
    main()
