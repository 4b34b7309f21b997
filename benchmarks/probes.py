"""What do probes on every token, policies that read them, and windows of captures cost?

Conditions that take turns in short rounds: the same prompts, the same engine.

    python benchmarks/probes.py [--rounds 10] [--prompts 64] [--max-tokens 24] [--compiled] \\
        [--larger] [--dtype float32] [--only none one]

Conditions: `none`; `one` probe; `16` probes at one layer; `16-layers`: 16 probes at 16 layers.
These have the action `flag`;
`16-stop`: those at one layer with the action `stop`, where every step waits for its scores;
`one-policy`, `16-policies`: such probes, each read by a policy that stops. `capture`: of every row
of one layer; `last`, `head-and-tail`, `around`: of those in a window; `capture-one`: of every row
beside a probe; `when`: of those where its score is high. Compared with `none`: wall time, and CPU
time of the thread that runs the model. `added`: what that thread spends more in our code than
without probes, as a share of its time: this varies much less, and leaves out only what our work
does to caches.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from engines import DEMO_MODEL, EngineProcess, bench_prompts, settings_for, tokenised
from steering import interval

#: A capture of one layer.
CAPTURE = {"sites": {"post_block": [14]}, "positions": "all", "tag": "t"}
ONE = {"count": 1, "layers": [14], "action": "flag"}
#: The arguments of `EngineProcess.run`.
CONDITIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "one": {"probes": ONE},
    "one-policy": {"probes": ONE | {"action": "stop", "policies": True}},
    "16": {"probes": ONE | {"count": 16}},
    "16-stop": {"probes": ONE | {"count": 16, "action": "stop"}},
    "16-policies": {"probes": ONE | {"count": 16, "action": "stop", "policies": True}},
    "16-layers": {"probes": ONE | {"count": 16, "layers": list(range(8, 24))}},
    "capture": {"capture": CAPTURE},
    "last": {"capture": CAPTURE | {"window": {"last": 8}}},
    "head-and-tail": {"capture": CAPTURE | {"window": {"head_and_tail": {"head": 4, "tail": 4}}}},
    "around": {
        "capture": CAPTURE
        | {"window": {"around": {"token_ids": [[260], [28]], "before": 2, "after": 2}}}
    },
    "capture-one": {"capture": CAPTURE, "probes": ONE},
    "when": {
        "capture": CAPTURE
        | {"window": {"when": {"probe": "p0", "at_least": 0, "before": 2, "after": 2}}},
        "probes": ONE,
    },
}

#: The shape of SmolLM2-1.7B.
LARGER = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


def larger(folder: Path) -> Path:
    """A model folder without weights, of that shape."""
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | LARGER))
    return folder


def ms(parts: dict[str, float]) -> str:
    return " ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in parts.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument(
        "--larger",
        action="store_true",
        help="random weights of the shape of SmolLM2-1.7B instead of the demo model",
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS))
    options = parser.parse_args()
    names = [name for name in CONDITIONS if name in {"none", *options.only}]
    texts = tokenised(bench_prompts(), DEMO_MODEL)
    prompts = [texts[n % len(texts)][: 8 + n % 57] for n in range(options.prompts)]
    taken: dict[str, list[tuple[float, float, dict[str, float]]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        model = larger(Path(folder) / "model") if options.larger else DEMO_MODEL
        settings = settings_for(
            Path(folder),
            model,
            enable_prefix_caching=False,
            enforce_eager=not options.compiled,
            dtype=options.dtype,
        )
        engine = EngineProcess(
            "ours",
            settings,
            {"load_format": "dummy"} if options.larger else None,
            timed=Path(folder) / "ours",
        )
        for number in range(options.rounds + 1):
            for name in names if number % 2 else names[::-1]:
                done = engine.run(prompts, options.max_tokens, len(prompts), **CONDITIONS[name])
                if number:  # the first brings the weights to the ranks
                    taken[name].append((done["seconds"], done["cpu"], done["ours"]))
            for name, (seconds, cpu, ours) in (
                (name, each[-1]) for name, each in taken.items() if each
            ):
                print(
                    f"  {name} {seconds:.3f} s, {cpu:.2f} s CPU, ours in ms: {ms(ours)}", flush=True
                )
        engine.close()
    results = []
    for name in names:
        wall, cpu = (
            [mine[part] / base[part] for mine, base in zip(taken[name], taken["none"], strict=True)]
            for part in (0, 1)
        )
        added = [
            (sum(mine[2].values()) - sum(base[2].values())) / mine[1]
            for mine, base in zip(taken[name], taken["none"], strict=True)
        ]
        results.append(
            {
                "condition": name,
                "seconds": round(statistics.median(each[0] for each in taken[name]), 3),
                "cpu_s": round(statistics.median(each[1] for each in taken[name]), 2),
                "wall_ratio": round(statistics.median(wall), 4),
                "wall_interval": interval(wall),
                "cpu_ratio": round(statistics.median(cpu), 4),
                "cpu_interval": interval(cpu),
                "added": round(statistics.median(added), 4),
                "added_interval": interval(added),
            }
        )
    for line in results:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    print(json.dumps({"benchmark": "probes", **vars(options), "results": results}))


if __name__ == "__main__":
    main()
