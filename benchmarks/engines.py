"""What benchmarks compare with: a stock vLLM engine in a process of its own; and the demo model's
prompts.

Run as a program it serves JSON lines: `{"prompts": [[ids]], "max_tokens": n, "concurrency": n}` →
seconds of all.
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

from midstream.schemas.settings.settings import Settings, load_settings, to_environment

DATA = Path(__file__).with_name("data")
DEMO_MODEL = Path.home() / ".cache" / "midstream" / "models" / "SmolLM2-135M-Instruct"


def bench_prompts() -> list[str]:
    """103 paragraphs of documentation, 50 to 300 tokens each."""
    return json.loads((DATA / "bench_prompts.json").read_text())


def tokenised(texts: Iterable[str], model: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


class Stock:
    """vLLM's AsyncLLM with our settings and nothing else of ours."""

    def __init__(self, settings: Settings):
        Path(settings.data_dir).mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",  # it computes on the same cores as ours
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                **to_environment(settings),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._read()  # once it is ready

    def run(self, prompts: list[list[int]], max_tokens: int, concurrency: int) -> float:
        """Seconds for all."""
        assert self._process.stdin is not None
        asked = {"prompts": prompts, "max_tokens": max_tokens, "concurrency": concurrency}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the engine process ended")
        return float(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


async def serve(settings: Settings, reply: Any) -> None:
    from vllm import SamplingParams, TokensPrompt
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from midstream.workers.engine.options import engine_arguments

    engine_arguments.prepare_environment(settings)
    arguments = AsyncEngineArgs(**engine_arguments.engine_options(settings))
    llm = AsyncLLM.from_engine_args(arguments)
    reply(0.0)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        gate = asyncio.Semaphore(asked["concurrency"])
        params = SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=True, temperature=0)

        async def one(number: int, ids: list[int], gate: Any = gate, params: Any = params) -> None:
            async with gate:
                async for _ in llm.generate(
                    TokensPrompt(prompt_token_ids=ids), params, str(number)
                ):
                    pass

        await llm.reset_prefix_cache()
        start = time.perf_counter()
        await asyncio.gather(*(one(number, ids) for number, ids in enumerate(asked["prompts"])))
        reply(time.perf_counter() - start)
    llm.shutdown()
    os._exit(0)  # vLLM's own clean-up at interpreter exit prints a traceback


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    asyncio.run(serve(load_settings(), lambda seconds: channel.write(f"{seconds}\n".encode())))
