"""What does it cost to capture everything? 103 prompts × 30 layers × all prompt positions, through HTTP, held until durable.

    python benchmarks/capture_http.py [--rounds 5] [--max-tokens 1 16] [--concurrency 64] [--compiled]

Beside it, in the same run and in turns: a stock vLLM engine called directly (no HTTP, no queue) with the same prompts and no
capture. An untimed round first checks every file's CRC32 at the moment its response arrives.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import aiohttp
from engines import DEMO_MODEL, EngineProcess, bench_prompts, settings_for, tokenised

from midstream.client.supervisor import Supervisor, prepare
from midstream.schemas.settings import Settings


async def captured_round(
    url: str, model: str, prompts: list[list[int]], layers: Any, max_tokens: int, concurrency: int, root: Path, check: bool
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds for all, and each `capture_results`."""
    gate = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(url, raise_for_status=True, timeout=aiohttp.ClientTimeout(600)) as http:

        async def one(prompt: list[int]) -> dict[str, Any]:
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "capture": {"layers": layers, "positions": "all_prompt"},
                "capture_wait": True,
            }
            async with gate, http.post("/v1/completions", json=body) as response:
                results: dict[str, Any] = (await response.json())["capture_results"]
            if check:
                for file in results["files"]:
                    assert zlib.crc32((root / file["path"]).read_bytes()) == file["crc32"], file
            return results

        start = time.perf_counter()
        results = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return time.perf_counter() - start, results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--layers", default="all")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    prompts = tokenised(bench_prompts(), DEMO_MODEL)
    tokens = sum(map(len, prompts))
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        common = {"enforce_eager": not options.compiled, "enable_prefix_caching": False, "max_model_len": 2048}
        stock = EngineProcess("stock", settings_for(Path(folder) / "stock", DEMO_MODEL, **common))
        data = Path(folder) / "stack"
        wanted = Settings(model=str(DEMO_MODEL), data_dir=str(data), api_port=0, flower_port=0, **common)
        settings = prepare(wanted, data, print)
        report: list[dict[str, Any]] = []
        with Supervisor(settings, say=lambda line: None) as stack:
            run = (stack.url, settings.served_model, prompts, options.layers)
            for max_tokens in options.max_tokens:
                _, checked = asyncio.run(captured_round(*run, max_tokens, options.concurrency, settings.capture_root, check=True))
                ok = sum(result["status"] == "ok" for result in checked)
                stock.run(prompts, max_tokens, options.concurrency)
                plain, captured = [], []
                for _ in range(options.rounds):
                    plain.append(stock.run(prompts, max_tokens, options.concurrency)["seconds"])
                    seconds, results = asyncio.run(
                        captured_round(*run, max_tokens, options.concurrency, settings.capture_root, check=False)
                    )
                    assert all(result["status"] == "ok" for result in results)
                    captured.append(seconds)
                    print(
                        f"  max_tokens {max_tokens}: plain {plain[-1]:.2f} s, captured {seconds:.2f} s, {seconds / plain[-1]:.3f}",
                        flush=True,
                    )
                report.append(
                    {
                        "max_tokens": max_tokens,
                        "ok": f"{ok}/{len(prompts)}",
                        "plain_s": round(statistics.median(plain), 3),
                        "captured_s": round(statistics.median(captured), 3),
                        "ratio": round(statistics.median(c / p for c, p in zip(captured, plain, strict=True)), 3),
                        "mib": round(sum(result["bytes"] for result in checked) / (1 << 20)),
                        "rows": sum(result["rows"] for result in checked),
                    }
                )
        stock.close()
    print(f"{len(prompts)} prompts, {tokens} tokens, layers {options.layers}, concurrency {options.concurrency}")
    for line in report:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    print(json.dumps({"benchmark": "capture_http", "compiled": options.compiled, "layers": options.layers, "results": report}))


if __name__ == "__main__":
    main()
