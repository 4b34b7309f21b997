"""What does a step cost where scheduler, model runner, ranks and all of our threads share one
interpreter, as on one GPU?

    python benchmarks/host_bound.py [--requests 64 256] [--kinds stock idle one steer both]
        [--device-ms 7] [--rounds 3] [--generated 128]

vLLM's real engine core, scheduler and v2 runner, asynchronous scheduling and our whole data plane
run in one process (executor `uni`); the device is a timeline (`gpu/timed_device.py`) on which a
step takes `--device-ms`. All requests decode together. Prints for each kind, over the steps in
which all of them decode: mean, median, 95th percentile and longest step in ms, the ratio of its
mean to stock vLLM's of the same round, and how long the model's thread is busy in a step.

Kinds: `idle`: nothing is asked; `one`: each request captures one layer; `steer`: each has a
configuration of its own at all layers; `both`: that, and captures of all layers.
"""

import argparse
import gc
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KINDS = ("stock", "idle", "one", "steer", "both")
LAYERS, HIDDEN, PROMPT, VOCABULARY, RING = 32, 64, 32, 512, 262_144
EXTRA = {"load_format": "dummy", "skip_tokenizer_init": True, "distributed_executor_backend": "uni"}
#: Steps at the beginning and at the end that are not counted: requests come and go in them.
FIRST, LAST = 8, 4


def options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--device-ms", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--generated", type=int, default=128)
    parser.add_argument("--engine", choices=["stock", "ours"], help=argparse.SUPPRESS)
    return parser.parse_args(given)


# --- One engine, in a process of its own


def _step_seconds(rows: int, requests: int, asked: argparse.Namespace) -> float:
    """Seconds of the device for a step of so many token rows; prompts take longer."""
    return float(asked.device_ms + max(0, rows - requests) * 0.022) * 1e-3


class Engine:
    """vLLM's engine core in this process, whose model only takes time. The caller steps it."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        import direct
        import kit

        self._asked, self._sink, self._runs = asked, kit.Sink(), 0
        self._plane: Any = None
        self._requests, self._waited = 0, 0.0
        self._model_thread = threading.current_thread()
        self._patch()
        shape = kit.shape("tiny") | {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "head_dim": 32,
            "vocab_size": VOCABULARY,
        }
        model = kit.write_model(folder / "model", shape, "bfloat16")
        settings = kit.serving_settings(
            argparse.Namespace(gpu=False),
            folder / "data",
            model,
            relay_url=self._sink.url,
            max_num_seqs=max(asked.requests),
            max_num_batched_tokens=8192,
            max_model_len=2048,
            kv_cache_gib=1.5,
            dtype="bfloat16",
            runner="v2",
            capture_queue_mib=1506,
        )
        self.thread = direct.Stepped.thread
        llm = self._stock(settings) if asked.engine == "stock" else self._ours(settings)
        self._llm, self._core = llm, llm.engine_core.engine_core
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="outputs", daemon=True).start()

    def _patch(self) -> None:
        """Have vLLM's runner for GPUs run on the stand-in for one."""
        import timed_device

        timed_device.patch_triton()
        timed_device.patch_memory()
        import torch
        import vllm.config.vllm
        import vllm.v1.worker.cpu.shm
        import vllm.v1.worker.cpu_model_runner as on_cpu
        import vllm.v1.worker.gpu.model_runner as runner
        from vllm.model_executor.models.llama import LlamaForCausalLM

        timed_device.patch_streams()
        vllm.config.vllm.VllmConfig._validate_v2_model_runner = lambda self: None
        on_cpu._torch_cuda_wrapper = contextmanager(_nothing)
        hidden = torch.zeros(16384, HIDDEN, dtype=torch.bfloat16)
        logits = torch.zeros(1024, VOCABULARY)
        combine = runner.combine_sampled_and_draft_tokens

        def forward(model: Any, ids: Any = None, positions: Any = None, *_: Any, **__: Any) -> Any:
            rows = len(positions)
            timed_device.forward(self._plane, _step_seconds(rows, self._requests, self._asked))
            return hidden[:rows]

        LlamaForCausalLM.forward = forward
        LlamaForCausalLM.compute_logits = lambda model, rows, *_: logits[: len(rows)]
        runner.combine_sampled_and_draft_tokens = lambda *given: combine(*given).zero_()

        def waited(seconds: float) -> None:
            if threading.current_thread() is self._model_thread:
                self._waited += seconds

        timed_device.Event.waited = staticmethod(waited)

    def _stock(self, settings: Any) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from midstream.workers.engine.options import engine_arguments

        engine_arguments.prepare_environment(settings)
        arguments = engine_arguments.engine_options(settings) | EXTRA
        config = AsyncEngineArgs(**arguments).create_engine_config()
        config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
        start = LLMEngine.from_vllm_config
        return self.thread.submit(start, _overlapped(config), disable_log_stats=True).result()

    def _ours(self, settings: Any) -> Any:
        import direct
        import timed_device

        from midstream.schemas.base.ring import Ring
        from midstream.workers.engine import vllm as module
        from midstream.workers.runner.plane.data_plane import DataPlane
        from midstream.workers.runner.vllm import zeroed_blocks

        make = DataPlane.__init__

        def made(plane: Any, *given: Any, **named: Any) -> None:
            make(plane, *given, **named | {"traced": True})
            timed_device.install(plane, RING)
            self._plane = plane

        def scheduler(config: Any) -> str:
            _overlapped(config)
            return "midstream.workers.runner.vllm.scheduler.MidstreamAsyncScheduler"

        DataPlane.__init__ = made  # type: ignore[method-assign]
        zeroed_blocks.CpuBlocks = type("NotOnCpu", (), {})  # type: ignore[misc]
        changed: Any = module
        changed.scheduler_class, changed._ring = scheduler, lambda *_: Ring(RING, 2, 0)
        self._direct = direct.Direct(settings, EXTRA)
        return self._direct._llm.llm

    def _send(self) -> None:
        """Encode outputs in a thread, as the engine core's process does."""
        from vllm.v1.serial_utils import MsgpackEncoder

        encoder, buffer = MsgpackEncoder(), bytearray()
        while True:
            encoder.encode_into(self._sent.get(), buffer)

    def _wishes(self, kind: str, requests: int) -> list[dict[str, Any]]:
        """What each request asks for; its vectors are on the rank."""
        import numpy as np

        from midstream.schemas.base.tensors import from_numpy
        from midstream.schemas.requests.specs import StoredCapture, StoredSteering

        layers, wishes = list(range(LAYERS)), [dict[str, Any]() for _ in range(requests)]
        draws = np.random.default_rng(1)
        for wish in wishes:
            if kind in ("one", "both"):
                at = [LAYERS // 2] if kind == "one" else layers
                wish["captures"] = [
                    StoredCapture(sites={"post_block": at}, positions="all", tag="t")
                ]
            if kind in ("steer", "both"):
                vector = from_numpy(draws.standard_normal(HIDDEN).astype(np.float32))
                wish["steering"] = [
                    StoredSteering(
                        layers=layers,
                        hook="post_block",
                        positions="all",
                        family="add",
                        tensors=self._direct.hold([vector]),
                        scale=0.1,
                    )
                ]
        return wishes

    def _add(self, number: int, tokens: list[int], wish: dict[str, Any] | None) -> None:
        """`wish`: None: of a request that is not ours."""
        import direct
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        if wish is None:
            params = SamplingParams(
                max_tokens=self._asked.generated,
                ignore_eos=True,
                temperature=0,
                output_kind=RequestOutputKind.DELTA,
            )
            name = f"{self._runs}.{number}"
        else:
            from midstream.schemas.requests.steering import GlobalSteering
            from midstream.workers.engine.ranks.rank_spec import rank_spec
            from midstream.workers.engine.vllm_output import sampling_params

            job = f"j{self._runs}-{number}"
            ask = direct.request(number, tokens, self._asked.generated, job=job, **wish)
            params = sampling_params(ask.sampling, rank_spec(ask, GlobalSteering()))
            name = f"{job}.{number}.1"
        self._llm.add_request(name, TokensPrompt(prompt_token_ids=tokens), params)

    def run(self, kind: str, requests: int) -> dict[str, Any]:
        """Run so many requests from their prompts to their end; return ms of steps."""
        # what a client holds is elsewhere in a service
        self._llm.output_processor.request_states.clear()
        gc.collect()
        asks = kind not in ("stock", "idle")
        wishes = self._wishes(kind, requests) if asks else [None] * requests
        return self.thread.submit(self._steps, wishes).result()

    def _steps(self, wishes: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        import kit

        self._runs, self._requests, core = self._runs + 1, len(wishes), self._core
        received, prompts = self._sink.count, kit.token_ids(len(wishes), PROMPT, VOCABULARY)
        self._model_thread = threading.current_thread()
        for number, (tokens, wish) in enumerate(zip(prompts, wishes, strict=True)):
            self._add(number, tokens, wish)
        at, waits = list[float](), list[float]()
        while core.scheduler.has_requests() or core.batch_queue:
            outputs, executed = core.step_fn()
            core.post_step(model_executed=executed)
            if outputs and (found := outputs.get(0)) is not None and found.outputs:
                self._sent.put(found)
                if len(found.outputs) == len(wishes):
                    at.append(time.perf_counter())
                    waits.append(self._waited)
        if wishes[0] is not None:
            end = time.monotonic() + 60
            while self._sink.count - received < len(wishes) and time.monotonic() < end:
                core.step_fn() if core.scheduler.has_requests() else time.sleep(0.002)
            assert self._sink.count - received == len(wishes), "not all receipts came"
            assert not self._sink.failed, self._sink.failed[:1]
        inside = at[FIRST:-LAST]
        steps = sorted((b - a) * 1e3 for a, b in itertools.pairwise(inside))
        mean = (inside[-1] - inside[0]) * 1e3 / len(steps)
        waited = (waits[-LAST - 1] - waits[FIRST]) * 1e3 / len(steps)
        return {
            "mean": mean,
            "median": statistics.median(steps),
            "p95": steps[int(0.95 * len(steps))],
            "longest": steps[-1],
            "busy": mean - waited,
        }


def _nothing() -> Iterator[None]:
    yield


def _overlapped(config: Any) -> Any:
    """vLLM's config as on one GPU, which the platform for CPUs changes."""
    config.scheduler_config.async_scheduling = True
    config.parallel_config.distributed_executor_backend = "uni"
    return config


def serve(asked: argparse.Namespace) -> None:
    """Run what is asked on standard input, line by line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints
    sys.path.insert(0, str(HERE / "gpu"))
    import kit  # first: it settles where our modules are

    assert kit
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="host-bound-") as folder:
        engine = Engine(asked, Path(folder))
        answers.write("ready\n")
        for line in sys.stdin:
            answers.write(json.dumps(engine.run(**json.loads(line))) + "\n")
    os._exit(0)


# --- Both engines, in turns


class Child:
    """A process with one engine."""

    def __init__(self, engine: str, given: Sequence[str]) -> None:
        command = [sys.executable, __file__, *given, "--engine", engine]
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        assert self._answer() == "ready\n"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"an engine ended with {self._process.wait()}")
        return line

    def run(self, kind: str, requests: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, "requests": requests}) + "\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._answer())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    asked = options()
    if asked.engine:
        serve(asked)
    engines = {engine: Child(engine, sys.argv[1:]) for engine in ("stock", "ours")}
    kinds = ["stock", *(kind for kind in asked.kinds if kind != "stock")]
    results = []
    for requests in asked.requests:
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for number in range(asked.rounds + 1):
            for kind in kinds:
                found = engines["stock" if kind == "stock" else "ours"].run(kind, requests)
                if number:  # the first round warms up
                    runs[kind].append(found)
        for kind, of_kind in runs.items():
            median = {name: statistics.median(run[name] for run in of_kind) for name in of_kind[0]}
            ratio = statistics.median(
                run["mean"] / stock["mean"]
                for run, stock in zip(of_kind, runs["stock"], strict=True)
            )
            longest = max(run["longest"] for run in of_kind)
            results.append({"requests": requests, "kind": kind, "ratio": round(ratio, 3)})
            results[-1] |= {name: round(value, 2) for name, value in median.items()}
            results[-1]["longest"] = round(longest, 1)
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    for engine in engines.values():
        engine.close()
    print(json.dumps({"benchmark": "host_bound", "device_ms": asked.device_ms, "results": results}))


if __name__ == "__main__":
    main()
