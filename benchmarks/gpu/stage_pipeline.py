"""Two pipeline stages on two GPUs: steps are scheduled ahead, as vLLM does with its v2 runner, and
idle hooks cost nothing.

With `--tiny`, two ranks on a CPU, and ours in place of stock: vLLM's eager runner for CPUs makes no
buffers for what a later stage receives.
"""

from concurrent.futures import ThreadPoolExecutor

import kit
import stage_serving
from engines import EngineProcess


def main() -> None:
    asked = kit.options(__doc__)
    gpus = kit.machine(asked.device).get("gpus", 0)
    if asked.gpu and gpus < 2:
        kit.finish(asked, {"skipped": f"{gpus} GPUs; two are needed"})
        return
    config = kit.shape("tiny" if asked.tiny else "8b")
    model = kit.write_model(asked.out / "model", config, "bfloat16" if asked.gpu else "float32")
    extra = kit.without_weights(asked) | ({"kv_cache_memory_bytes": 6 << 30} if asked.gpu else {})
    with ThreadPoolExecutor(2) as starting:
        started = {
            kind: starting.submit(
                EngineProcess,
                kind if asked.gpu else "ours",
                kit.serving_settings(asked, asked.out / kind, model, pipeline_parallel_size=2),
                extra,
            )
            for kind in ("stock", "ours")
        }
    engines = {kind: engine.result() for kind, engine in started.items()}
    notes = [f"{kind}: {engine.facts}" for kind, engine in engines.items()]
    found: dict[str, dict[str, float]] = {
        "async": {"value": int(engines["ours"].facts["async_scheduling"])}
    }
    kit.so_far(asked, {"figures": found, "notes": notes})
    work = (stage_serving.TINY if asked.tiny else stage_serving.WORKLOADS)["decode"]
    prompts = kit.token_ids(work.requests, work.prompt, config["vocab_size"])
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for turn in range(-1, 2 if asked.tiny else 10):  # the first is a warm-up
        if turn > 1 and asked.left < 0:
            break
        for kind in ("stock", "ours") if turn % 2 else ("ours", "stock"):
            took = engines[kind].run(prompts, work.generated, len(prompts))["seconds"]
            if turn >= 0:
                seconds[kind].append(took)
        if seconds["ours"]:
            found["idle"] = kit.figure(kit.added(seconds["ours"], seconds["stock"]), 100)
            kit.so_far(asked, {"figures": found, "notes": notes})
    kit.finish(asked, {"figures": found, "notes": notes})
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
