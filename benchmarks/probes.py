"""What do probes on every token cost? Conditions that take turns in short rounds: the same prompts, the same engine.

    python benchmarks/probes.py [--rounds 10] [--prompts 64] [--max-tokens 24] [--compiled]

Conditions: `none`; `one` probe; `16` probes at one layer; `16-layers`: 16 probes at 16 layers. All have the action `stop`, so that
every step waits for its scores. Compared: wall time, and CPU time of the thread that runs the model.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import DEMO_MODEL, EngineProcess, bench_prompts, settings_for, tokenised
from steering import interval

from midstream.schemas.probes import ProbeContent, StoredProbe
from midstream.schemas.specs import RankSpec, probe_captures
from midstream.schemas.tensors import content_hash, from_numpy
from midstream.workers.runner.capture import Extent, Recording, StepRows
from midstream.workers.runner.landing import LANDED
from midstream.workers.runner.probes import Scorer
from midstream.workers.runner.steering_tables import VectorStore

CONDITIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "one": {"count": 1, "layers": [14]},
    "16": {"count": 16, "layers": [14]},
    "16-layers": {"count": 16, "layers": list(range(8, 24))},
}


def scoring(requests: int, probes: int, layers: int, hidden: int = 576) -> float:
    """Microseconds of CPU time for the scores and news of a step in which so many requests generate; median of 200 steps."""
    torch.set_num_threads(1)
    vectors, made = VectorStore(), []
    for number in range(probes):
        tensors = [from_numpy(np.random.default_rng(number).standard_normal((1, hidden))), from_numpy(np.zeros(1))]
        for tensor in tensors:
            vectors.put(content_hash(tensor), tensor)
        content = ProbeContent(
            hook="post_block", layer=number % layers, tensors=[content_hash(tensor) for tensor in tensors], labels=["x"], thresholds=[1e30]
        )
        made.append(StoredProbe(name=f"p{number}", digest=content.digest, content=content, action="stop"))
    ports = {("post_block", layer): 2 * layer for layer in range(layers)}
    mask = np.zeros(2 * layers, dtype=bool)
    mask[::2] = True
    scorer = Scorer(vectors, hidden, waits=True)
    recordings = []
    for number in range(requests):
        recording = Recording(probe_captures(made)[0], dict(ports), mask)
        spec = RankSpec(version="", job=str(number), request=0, attempt=1, prompt_tokens=1, probes=made)
        scorer.watch(str(number), spec, [recording])
        recordings.append(recording)
    slab, base = torch.randn(layers * requests, hidden, dtype=torch.bfloat16), np.repeat(np.arange(layers) * requests, 2)
    step = StepRows(slab, base, np.zeros(2 * layers, dtype=np.int64), LANDED)
    times = []
    for position in range(200):
        extents = [(recording, Extent(step, np.array([slot]), position, 1)) for slot, recording in enumerate(recordings)]
        began = time.thread_time()
        scorer.take(extents, recordings)
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    texts = tokenised(bench_prompts(), DEMO_MODEL)
    prompts = [texts[n % len(texts)][: 8 + n % 57] for n in range(options.prompts)]
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in CONDITIONS}
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        settings = settings_for(Path(folder), DEMO_MODEL, enable_prefix_caching=False, enforce_eager=not options.compiled)
        engine = EngineProcess("ours", settings)
        for number in range(options.rounds + 1):
            for name in CONDITIONS if number % 2 else reversed(CONDITIONS):
                done = engine.run(prompts, options.max_tokens, len(prompts), probes=CONDITIONS[name])
                if number:  # the first brings the weights to the ranks
                    taken[name].append((done["seconds"], done["cpu"]))
            told = {name: each[-1] for name, each in taken.items() if each}
            print("  " + "  ".join(f"{name} {seconds:.3f} s, {cpu:.2f} s CPU" for name, (seconds, cpu) in told.items()), flush=True)
        engine.close()
    results = []
    for name in CONDITIONS:
        wall, cpu = ([mine[part] / base[part] for mine, base in zip(taken[name], taken["none"], strict=True)] for part in (0, 1))
        results.append(
            {
                "condition": name,
                "seconds": round(statistics.median(each[0] for each in taken[name]), 3),
                "cpu_s": round(statistics.median(each[1] for each in taken[name]), 2),
                "wall_ratio": round(statistics.median(wall), 4),
                "wall_interval": interval(wall),
                "cpu_ratio": round(statistics.median(cpu), 4),
                "cpu_interval": interval(cpu),
            }
        )
    for line in results:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    alone = [
        {"requests": requests, "probes": probes, "layers": layers, "us_per_step": round(scoring(requests, probes, layers))}
        for requests in (1, 8, 64)
        for probes, layers in ((1, 1), (16, 1), (16, 16))
    ]
    for line in alone:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    print(json.dumps({"benchmark": "probes", **vars(options), "results": results, "scoring": alone}))


if __name__ == "__main__":
    main()
