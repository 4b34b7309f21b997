"""What do benchmarks compare with? A stock vLLM engine, or ours called directly, in a process of its own.

Run as a program it serves JSON lines: `{"prompts": [[ids]], "max_tokens": n, "concurrency": n}` → seconds and latencies.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from midstream.schemas.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.settings import Settings, load_settings, to_environment

DATA = Path(__file__).with_name("data")
DEMO_MODEL = Path.home() / ".cache" / "midstream" / "models" / "SmolLM2-135M-Instruct"


def bench_prompts() -> list[str]:
    """103 paragraphs of documentation, 50 to 300 tokens each."""
    prompts: list[str] = json.loads((DATA / "bench_prompts.json").read_text())
    return prompts


class EngineProcess:
    """`kind`: `stock` (vLLM with nothing of ours) or `ours` (`VllmEngine`, the data plane installed)."""

    def __init__(self, kind: str, settings: Settings):
        Path(settings.data_dir).mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **to_environment(settings)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._read()  # ready

    def run(self, prompts: list[list[int]], max_tokens: int, concurrency: int) -> dict[str, Any]:
        """`seconds` for all, `latencies` of each, `tokens` generated."""
        assert self._process.stdin is not None
        command = {"prompts": prompts, "max_tokens": max_tokens, "concurrency": concurrency}
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the engine process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def tokenised(texts: Iterable[str], model: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


async def _serve(kind: str, reply: Any) -> None:
    from vllm import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    from midstream.workers import vllm_engine

    settings = load_settings()
    if kind == "ours":
        engine = vllm_engine.VllmEngine(settings)
        await engine.start()
        llm = engine._llm
    else:
        vllm_engine._environment(settings)
        args = vllm_engine.engine_options(settings)
        llm = AsyncLLM.from_engine_args(vllm_engine.AsyncEngineArgs(**args))
    number = 0

    async def one(prompt: list[int], max_tokens: int, gate: asyncio.Semaphore) -> tuple[float, int]:
        nonlocal number
        number += 1
        job = Job(
            id=str(number),
            kind="generate",
            model="",
            prompts=[StoredPrompt(token_ids=prompt)],
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            created=0.0,
        )
        async with gate:
            start, count = time.perf_counter(), 0
            async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), vllm_engine.sampling_params(job, None), job.id):
                count += len(output.outputs[0].token_ids)
            return time.perf_counter() - start, count

    reply({"ready": True})
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        await llm.reset_prefix_cache()
        gate = asyncio.Semaphore(command["concurrency"])
        start = time.perf_counter()
        done = await asyncio.gather(*(one(prompt, command["max_tokens"], gate) for prompt in command["prompts"]))
        reply({"seconds": time.perf_counter() - start, "latencies": [d[0] for d in done], "tokens": sum(d[1] for d in done)})
    llm.shutdown()
    os._exit(0)  # vLLM's own clean-up at interpreter exit prints a traceback


def settings_for(directory: Path, model: Path, **options: Any) -> Settings:
    """As `midstream up` would run it, for a direct engine: no relay listens, receipts stay in the outbox."""
    chosen = {"relay_url": "tcp://127.0.0.1:9", "worker_id": "bench", "max_model_len": 2048} | options
    return msgspec.structs.replace(Settings(), model=str(model), data_dir=str(directory), **chosen)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    asyncio.run(_serve(sys.argv[1], lambda answer: channel.write(json.dumps(answer).encode() + b"\n")))
