"""What does it cost to capture everything? 103 prompts × 30 layers × all prompt positions, through
HTTP, held until durable.

    python benchmarks/capture_http.py [--rounds 5] [--max-tokens 1 16] [--concurrency 64] \\
        [--hooks post_block] [--layers all] [--compiled]

`--hooks`: names separated by commas, `all`, or `none` (the same requests without a capture, and not
held); several sets, such as `--hooks none post_block all`, are measured in turns. The ratio to
`none`, which the same engine served, says what the capture costs. After each round with captures,
`dd` writes as many bytes to the same disk durably: where the capture's own rate is near that, the
disk is the limit. An untimed round first checks every file's CRC32 at the moment its response
arrives.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import aiohttp
from engines import DEMO_MODEL, bench_prompts, tokenised
from services import report, service

from midstream.schemas.prompts.selectors import HOOKS

NOTHING: dict[str, Any] = {"status": "not_requested", "files": [], "bytes": 0, "rows": 0}


async def captured_round(
    url: str,
    model: str,
    prompts: list[list[int]],
    hooks: dict[str, str],
    max_tokens: int,
    concurrency: int,
    root: Path,
    check: bool,
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds for all, and each `capture_results`."""
    gate = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(
        url, raise_for_status=True, timeout=aiohttp.ClientTimeout(600)
    ) as http:

        async def one(prompt: list[int]) -> dict[str, Any]:
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            } | (
                {"capture": {"hooks": hooks, "positions": "all_prompt"}, "capture_wait": True}
                if hooks
                else {}
            )
            async with gate, http.post("/v1/completions", json=body) as response:
                results: dict[str, Any] = (await response.json()).get("capture_results", NOTHING)
            if check:
                for file in results["files"]:
                    blob = (root / file["path"]).read_bytes()[file["offset"] :][: file["bytes"]]
                    assert zlib.crc32(blob) == file["crc32"], file
            return results

        start = time.perf_counter()
        results = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return time.perf_counter() - start, results


def dd_s(folder: Path, size: int) -> float:
    """Seconds in which `dd` writes so many bytes durably, for the disk's own rate."""
    os.sync()  # what others left to be written
    file = folder / "dd"
    start = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={size >> 20}"]
    subprocess.run([*command, "conv=fsync", "status=none"], check=True)
    seconds = time.perf_counter() - start
    file.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--hooks", nargs="+", default=["none", "post_block", "all"])
    parser.add_argument("--layers", default="all")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    prompts = tokenised(bench_prompts(), DEMO_MODEL)
    tokens = sum(map(len, prompts))
    named: dict[str, Any] = {"all": HOOKS, "none": ()}
    sets = {
        names: dict.fromkeys(named.get(names, names.split(",")), options.layers)
        for names in options.hooks
    }
    common: dict[str, Any] = {"engine.enforce_eager": not options.compiled}
    if options.compiled:
        common["tuning.capture_buffer_mib"] = 1024  # all six hooks of a full step
    found: list[dict[str, Any]] = []
    with service(
        model=str(DEMO_MODEL),
        **{"engine.enable_prefix_caching": False, "engine.max_model_len": 2048},
        **common,
    ) as stack:
        settings = stack.settings

        def captured(
            hooks: dict[str, str], max_tokens: int, *, check: bool
        ) -> tuple[float, list[dict[str, Any]]]:
            os.sync()  # what the round before left to the disk
            run = captured_round(
                stack.url,
                settings.served_model,
                prompts,
                hooks=hooks,
                max_tokens=max_tokens,
                concurrency=options.concurrency,
                root=settings.capture_root,
                check=check,
            )
            seconds, results = asyncio.run(run)
            shutil.rmtree(
                settings.capture_root / "default", ignore_errors=not hooks
            )  # or the disk fills over the rounds
            return seconds, results

        for max_tokens in options.max_tokens:
            checked = {
                name: captured(hooks, max_tokens, check=True)[1] for name, hooks in sets.items()
            }
            seconds: dict[str, list[float]] = {name: [] for name in sets}
            disk: dict[str, list[float]] = {name: [] for name in sets}
            for _ in range(options.rounds):
                for name, hooks in sets.items():
                    took, results = captured(hooks, max_tokens, check=False)
                    assert all(
                        result["status"] == ("ok" if hooks else "not_requested")
                        for result in results
                    )
                    seconds[name].append(took)
                    print(f"  max_tokens {max_tokens}: {name} {took:.2f} s", flush=True)
                    if size := sum(result["bytes"] for result in results):
                        disk[name].append(dd_s(settings.capture_root, size))
            found += [
                {
                    "hooks": name,
                    "max_tokens": max_tokens,
                    "ok": "{}/{}".format(
                        sum(result["status"] == "ok" for result in checked[name]),
                        len(prompts),
                    ),
                    "seconds": round(statistics.median(took), 3),
                    "to_none": round(
                        statistics.median(
                            c / n for c, n in zip(took, seconds["none"], strict=True)
                        ),
                        3,
                    )
                    if "none" in seconds
                    else None,
                    "dd_s": round(statistics.median(disk[name] or [0.0]), 3),
                    "mib": round(sum(result["bytes"] for result in checked[name]) / (1 << 20)),
                    "rows": sum(result["rows"] for result in checked[name]),
                }
                for name, took in seconds.items()
            ]
    about = {"prompts": len(prompts), "tokens": tokens, "layers": options.layers}
    report("capture_http", found, compiled=options.compiled, **about)


if __name__ == "__main__":
    main()
