"""What do benchmarks compare with?

A stock vLLM engine, or ours called directly, in a process of its own.

Run as a program it serves JSON lines: `{"prompts": [[ids]], "max_tokens": n, "concurrency": n,
"steering": null, "capture": null}` → seconds and latencies; ours also how often and with how many
bytes of vectors the ranks were called.
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
import numpy as np
import shares

from midstream.schemas.artifacts.conditions import Condition, StoredPolicy
from midstream.schemas.artifacts.probes import Action, ProbeContent, StoredProbe
from midstream.schemas.base.settings import Settings, load_settings, to_environment
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.schemas.requests.steering import GlobalSteering
from midstream.workers.engine.requests import prompt_request

#: Reads each probe that has a policy: stops at a mean that nothing reaches.
POLICY = StoredPolicy(
    name="p",
    version=1,
    digest="d",
    condition=Condition(at_least=1e30, aggregation="mean", window=16),
    actions=["stop"],
    mode="active",
    acts=True,
)
DATA = Path(__file__).with_name("data")
#: Variable with arguments for vLLM beyond the settings', as JSON.
EXTRA = "BENCH_ENGINE_EXTRA"
DEMO_MODEL = Path.home() / ".cache" / "midstream" / "models" / "SmolLM2-135M-Instruct"


def bench_prompts() -> list[str]:
    """103 paragraphs of documentation, 50 to 300 tokens each."""
    prompts: list[str] = json.loads((DATA / "bench_prompts.json").read_text())
    return prompts


class EngineProcess:
    """`kind`: `stock` (vLLM with nothing of ours) or `ours` (`VllmEngine`, the data plane
    installed).
    """

    def __init__(
        self,
        kind: str,
        settings: Settings,
        extra: dict[str, Any] | None = None,
        timed: Path | None = None,
    ):
        """`extra`: arguments for vLLM, such as `load_format`.

        `timed`: a file for the time that its ranks spend in our code.
        """
        Path(settings.data_dir).mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind],
            env={
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",  # both kinds compute on the same cores
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                EXTRA: json.dumps(extra or {}),
                **(shares.create(timed) if timed else {}),
                **to_environment(settings),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._timed = timed
        self.facts = self._read()  # once it is ready

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        concurrency: int,
        steering: dict[str, Any] | None = None,
        capture: dict[str, Any] | None = None,
        probes: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """`seconds` for all, `latencies` of each, `tokens` generated; of ours `sends`,
        `sent_bytes`: vectors to the ranks.

        `cpu`: CPU seconds of the ranks' main threads, which run the model; `ours`: those in parts
        of our code, if the engine is timed.

        `steering`: `{"layers": […], "distinct": n, "seed": n, "limit": x}`, of ours only: prompt i
        adds, at each of the layers, a random vector of its own for each i modulo `distinct`, with
        that limit, as `StoredSteering` has it; none without. `capture`: a
        `StoredCapture` of every prompt, of ours only.
        `probes`: `{"count": n, "layers": […], "action": …, "policies": false}`, of ours only: so
        many probes score every token, at these layers in turn; with `policies`, one reads each.
        """
        assert self._process.stdin is not None
        command = {
            "prompts": prompts,
            "max_tokens": max_tokens,
            "concurrency": concurrency,
            "steering": steering,
            "capture": capture,
        }
        command["probes"] = probes
        before = shares.read(self._timed) if self._timed else {}
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._read()
        after = shares.read(self._timed) if self._timed else {}
        return answer | {"ours": {part: after[part] - seconds for part, seconds in before.items()}}

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
    settings = load_settings()
    target = await (_Ours if kind == "ours" else _Stock).start(settings)
    number = 0

    async def one(
        prompt: list[int],
        max_tokens: int,
        gate: asyncio.Semaphore,
        steering: list[StoredSteering],
        captures: list[StoredCapture],
        probes: list[StoredProbe],
    ) -> tuple[float, int]:
        nonlocal number
        number += 1
        job = Job(
            id=str(number),
            kind="generate",
            model="",
            prompts=[StoredPrompt(token_ids=prompt)],
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            created=0.0,
            steering=[steering] if steering else [],
            captures=[captures] if captures else [],
            probes=probes,
        )
        async with gate:
            start = time.perf_counter()
            count = await target.generate(job)
            return time.perf_counter() - start, count

    reply(target.facts())
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        prompts, wish = command["prompts"], command["steering"]
        steering = target.steering(len(prompts), **wish) if wish else [[] for _ in prompts]
        captures = (
            [msgspec.convert(command["capture"], StoredCapture)] if command["capture"] else []
        )
        probes = target.probes(**command["probes"]) if command["probes"] else []
        sends, sent = target.sends, target.sent_bytes
        await target.llm.reset_prefix_cache()
        gate = asyncio.Semaphore(command["concurrency"])
        start, cpu = time.perf_counter(), model_cpu()
        asked = zip(prompts, steering, strict=True)
        done = await asyncio.gather(
            *(
                one(prompt, command["max_tokens"], gate, entries, captures, probes)
                for prompt, entries in asked
            )
        )
        answer = {
            "seconds": time.perf_counter() - start,
            "latencies": [d[0] for d in done],
            "tokens": sum(d[1] for d in done),
        }
        answer["cpu"] = model_cpu() - cpu
        reply(answer | {"sends": target.sends - sends, "sent_bytes": target.sent_bytes - sent})
    target.llm.shutdown()
    os._exit(0)  # vLLM's own clean-up at interpreter exit prints a traceback


class _Stock:
    """vLLM's AsyncLLM with our settings and nothing else of ours."""

    sends = sent_bytes = 0

    def __init__(self, llm: Any):
        self.llm = llm

    @classmethod
    async def start(cls, settings: Settings) -> "_Stock":
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from midstream.workers.engine.options import engine_arguments as vllm_options

        vllm_options.prepare_environment(settings)
        arguments = vllm_options.engine_options(settings) | extra_arguments()
        return cls(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)))

    async def generate(self, job: Job) -> int:
        """Tokens generated."""
        from vllm import TokensPrompt

        from midstream.workers.engine import vllm_output

        prompt, count = TokensPrompt(prompt_token_ids=job.prompts[0].token_ids), 0
        async for output in self.llm.generate(
            prompt, vllm_output.sampling_params(job.sampling, None), job.id
        ):
            count += len(output.outputs[0].token_ids)
        return count

    def facts(self) -> dict[str, Any]:
        return facts_of(self.llm)

    def steering(self, prompts: int, **wish: Any) -> list[list[StoredSteering]]:
        raise ValueError("a stock engine steers nothing")


class _Ours:
    """`VllmEngine`, used as a worker uses it; every request holds its vectors, as a job does."""

    def __init__(self, engine: Any, hidden_size: int):
        self._engine, self._hidden_size = engine, hidden_size
        self.llm = engine._llm
        self.sends = self.sent_bytes = 0
        self._tensors: dict[str, Tensor] = {}
        self._call = engine._call
        engine._ranks._call = self._counted

    @classmethod
    async def start(cls, settings: Settings) -> "_Ours":
        engine = direct_engine(settings)
        await engine.start()
        return cls(engine, engine.info.hidden_size)

    def facts(self) -> dict[str, Any]:
        return facts_of(self.llm) | {
            "layers": self._engine.info.num_layers,
            "step_rows": self._engine.info.capture_row_limit,
        }

    async def generate(self, job: Job) -> int:
        names = (
            [name for entry in job.steering[0] for name in entry.tensors] if job.steering else []
        )
        names += [name for probe in job.probes for name in probe.content.tensors]
        await self._engine.hold_vectors(names, self._fetch)
        count = 0
        async for progress in self._engine.generate(prompt_request(job, 0, 1), GlobalSteering()):
            count += len(progress.token_ids)
        await self._engine.release_vectors(names)
        return count

    def steering(
        self, prompts: int, layers: list[int], distinct: int, seed: int, limit: float = 0.0
    ) -> list[list[StoredSteering]]:
        """Entries of each prompt."""
        rng = np.random.default_rng(seed)
        tensors = [
            from_numpy(rng.standard_normal(self._hidden_size).astype(np.float32))
            for _ in range(distinct)
        ]
        names = [content_hash(tensor) for tensor in tensors]
        self._tensors = dict(zip(names, tensors, strict=True))
        entries = [
            [
                StoredSteering(
                    layers=layers,
                    hook="post_block",
                    positions="all",
                    family="add",
                    tensors=[name],
                    scale=0.1,
                    limit=limit,
                )
            ]
            for name in names
        ]
        return [entries[number % distinct] for number in range(prompts)]

    def probes(
        self, count: int, layers: list[int], action: Action, policies: bool = False
    ) -> list[StoredProbe]:
        """Random ones, of one label each, with thresholds that nothing reaches."""
        made = []
        for number in range(count):
            tensors = [
                from_numpy(np.random.default_rng(number).standard_normal((1, self._hidden_size))),
                from_numpy(np.zeros(1)),
            ]
            names = [content_hash(tensor) for tensor in tensors]
            self._tensors |= dict(zip(names, tensors, strict=True))
            layer = layers[number % len(layers)]
            content = ProbeContent(
                hook="post_block",
                layer=layer,
                tensors=names,
                labels=["x"],
                thresholds=[1e30],
                aggregation="max",
            )
            made.append(
                StoredProbe(
                    name=f"p{number}",
                    digest=content.digest,
                    content=content,
                    action=action,
                    policy=POLICY if policies else None,
                )
            )
        return made

    async def _fetch(self, name: str) -> Tensor:
        return self._tensors[name]

    async def _counted(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "midstream_put_vectors":
            self.sends += 1
            self.sent_bytes += sum(len(vector["data"]) for vector in args[0].values())
        return await self._call(method, args)


def model_cpu() -> float:
    """CPU seconds of the threads that run the model: the main thread of each rank of this process's
    engine; 0 where there is none.
    """
    found = {}  # pid → (name, parent, seconds of the main thread)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, fields = (
                (folder / "task" / folder.name / "stat")
                .read_text()
                .partition("(")[2]
                .rpartition(") ")
            )
        except OSError:  # it ended
            continue
        values = fields.split()
        found[folder.name] = (
            name,
            values[1],
            (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK"),
        )
    cores = {pid for pid, (_, parent, _) in found.items() if parent == str(os.getpid())}
    return sum(
        seconds
        for name, parent, seconds in found.values()
        if parent in cores and name.startswith("VLLM::Worker")
    )


def extra_arguments() -> dict[str, Any]:
    """For vLLM, as the process that started this one says."""
    extra: dict[str, Any] = json.loads(os.environ.get(EXTRA, "{}"))
    return extra


def direct_engine(settings: Settings) -> Any:
    """A `VllmEngine` that gives vLLM the extra arguments, too.

    Without a tokenizer it serves token ids only.
    """
    from midstream.workers.engine import vllm as module

    extra, options = extra_arguments(), module.engine_options
    module.engine_options = lambda settings: options(settings) | extra
    if extra.get("skip_tokenizer_init"):
        module.bundle_of = lambda _: TokenizerBundle("", None, {}, [])
    return module.VllmEngine(settings)


def facts_of(llm: Any) -> dict[str, Any]:
    """What was measured: the runner, graphs, and how steps are scheduled."""
    config = llm.vllm_config
    compilation = config.compilation_config
    return {
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "eager": bool(config.model_config.enforce_eager),
        "cudagraphs": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
    }


def settings_for(directory: Path, model: Path, **options: Any) -> Settings:
    """As `midstream up` would run it, for a direct engine: no relay listens, receipts stay in the
    outbox.
    """
    chosen = {
        "relay_url": "tcp://127.0.0.1:9",
        "worker_id": "bench",
        "max_model_len": 2048,
    } | options
    return load_settings({}, model=str(model), data_dir=str(directory), **chosen)


if __name__ == "__mp_main__":
    shares.begin()

if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    asyncio.run(
        _serve(sys.argv[1], lambda answer: channel.write(json.dumps(answer).encode() + b"\n"))
    )
