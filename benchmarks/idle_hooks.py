"""What do the installed hooks cost when no request uses them?

Ours against stock, same prompts, in turns in one run.

    python benchmarks/idle_hooks.py [--rounds 8] [--prompts 256] [--max-tokens 16] [--compiled] \\
        [--hooks all,inside]

Both engines are called directly in processes of their own; the order within a round alternates.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from engines import DEMO_MODEL, EngineProcess, bench_prompts, settings_for, tokenised


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument(
        "--hooks",
        default="all",
        help="the setting of that name: all,inside has those inside attention and MLP too",
    )
    options = parser.parse_args()
    texts = tokenised(bench_prompts(), DEMO_MODEL)
    prompts = [texts[n % len(texts)][: 8 + n % 17] for n in range(options.prompts)]
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        engines = {
            kind: EngineProcess(
                kind,
                settings_for(
                    Path(folder) / kind,
                    DEMO_MODEL,
                    enable_prefix_caching=False,
                    enforce_eager=not options.compiled,
                    hooks=options.hooks,
                ),
            )
            for kind in ("stock", "ours")
        }
        for engine in engines.values():
            engine.run(prompts, options.max_tokens, len(prompts))
        seconds: dict[str, list[float]] = {"stock": [], "ours": []}
        for number in range(options.rounds):
            for kind in ("stock", "ours") if number % 2 else ("ours", "stock"):
                seconds[kind].append(
                    engines[kind].run(prompts, options.max_tokens, len(prompts))["seconds"]
                )
            print(
                f"  stock {seconds['stock'][-1]:.3f} s, ours {seconds['ours'][-1]:.3f} s",
                flush=True,
            )
        for engine in engines.values():
            engine.close()
    ratios = [ours / stock for ours, stock in zip(seconds["ours"], seconds["stock"], strict=True)]
    result = {
        "compiled": options.compiled,
        "stock_s": round(statistics.median(seconds["stock"]), 3),
        "ours_s": round(statistics.median(seconds["ours"]), 3),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_of_best": round(min(seconds["ours"]) / min(seconds["stock"]), 4),
    }
    print("  ".join(f"{name} {value}" for name, value in result.items()))
    print(
        json.dumps(
            {
                "benchmark": "idle_hooks",
                "prompts": options.prompts,
                "max_tokens": options.max_tokens,
                "result": result,
            }
        )
    )


if __name__ == "__main__":
    main()
