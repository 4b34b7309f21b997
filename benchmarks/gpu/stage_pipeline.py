"""Two pipeline stages on two GPUs: steps are scheduled ahead, as vLLM does with its v2 runner, and
idle hooks cost nothing.
"""

import time

import kit
import stage_serving
from engines import EngineProcess


def main() -> None:
    asked = kit.options(__doc__)
    gpus = kit.machine(asked.device).get("gpus", 0)
    if gpus < 2:
        kit.finish(asked, {"skipped": f"{gpus} GPUs; two are needed"})
        return
    until = time.monotonic() + asked.seconds
    config = kit.shape("8b")
    model = kit.write_model(asked.out / "model", config, "bfloat16")
    engines = {
        kind: EngineProcess(
            kind,
            kit.serving_settings(asked, asked.out / kind, model, pipeline_parallel_size=2),
            kit.without_weights(asked) | {"kv_cache_memory_bytes": 6 << 30},
        )
        for kind in ("stock", "ours")
    }
    work = stage_serving.WORKLOADS["decode"]
    prompts = kit.token_ids(work.requests, work.prompt, config["vocab_size"])
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for turn in range(-1, 10):  # the first is a warm-up
        if turn > 1 and time.monotonic() > until:
            break
        for kind in ("stock", "ours") if turn % 2 else ("ours", "stock"):
            took = engines[kind].run(prompts, work.generated, len(prompts))["seconds"]
            if turn >= 0:
                seconds[kind].append(took)
    facts = {kind: engine.facts for kind, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    figures = {
        "async": {"value": int(facts["ours"]["async_scheduling"])},
        "idle": kit.figure(kit.added(seconds["ours"], seconds["stock"]), 100),
    }
    kit.finish(
        asked, {"figures": figures, "notes": [f"{kind}: {told}" for kind, told in facts.items()]}
    )


if __name__ == "__main__":
    main()
