"""An engine core that its caller steps: scheduler, model runner, rank and all of our threads share
one process and one interpreter, as on one GPU.

Run as a program with a `Setup` as JSON, it serves `Work` line by line; `Child` is such a process.
On the device `timed`, vLLM's real engine core, scheduler and v2 runner and our whole data plane run
with a device that only takes time (`timed_device.py`); on `cuda` all is real. `stock` is
vLLM with nothing of ours.
"""

import argparse
import contextlib
import gc
import json
import os
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("stock", "idle", "one", "steer", "both")
#: Of the timed device: its model, and the rows of half a ring.
LAYERS = 32
HIDDEN = 64
VOCABULARY = 512
RING = 262_144
#: Seconds of the timed device for each token of a prompt.
TOKEN_S = 22e-6
#: Batches with graphs on a GPU: smaller ones are padded.
GRAPH_SIZES = [1, 64, 256]
#: Steps before those that count, while requests begin and end.
BEFORE = 60
#: Token ids that prompts have in common, for triggers.
COMMON = [7, 8, 9]
#: Files larger than this are deleted after a run.
KEPT_BYTES = 64 << 10


@dataclass(frozen=True)
class Setup:
    """An engine."""

    engine: str  # stock, ours
    device: str = "timed"  # timed, cuda
    most: int = 64  # requests at a time
    device_ms: float = 7.0  # of the timed device, for a step
    model: str = "8b"  # of a GPU, see `kit.shape`
    parts: bool = True  # whether parts of steps are timed
    folder: str = ""  # for what is written; "": one in memory, deleted at the end
    tags: dict[str, str] = field(default_factory=dict)  # of captures → folder of their files

    @property
    def timed(self) -> bool:
        return self.device == "timed"


@dataclass(frozen=True)
class Work:
    """Requests that all begin together, or with `churn` one whenever another ends.

    Kinds: `stock` and `idle`: nothing is asked; `one`: each captures one layer; `steer`: each has a
    configuration of its own at all layers; `both`: that, and captures of all layers; `prompts`:
    each captures all layers at its prompt; `mixed`: in turn one of `mixed_wish`.
    """

    kind: str
    requests: int
    prompt: int = 32
    generated: int = 128
    tag: str = "memory"
    switch: str = ""  # see `causes.SWITCHES`
    churn: int = 0  # steps that count while requests begin and end; 0: all begin together
    device_ms: float = 0.0  # of the timed device, for a step; 0: that of the `Setup`


class Engine:
    """vLLM's engine core in this process."""

    _plane: Any = None  # of our rank, if it is here

    def __init__(self, setup: Setup, folder: Path) -> None:
        import direct
        import kit

        self._setup = setup
        self._sink = kit.Sink()
        self._runs = 0
        self._requests = 0
        self._device_ms = setup.device_ms
        if setup.timed:
            self._patch()
        shape, self._settings, extra = self._configured(folder)
        self._layers = int(shape["num_hidden_layers"])
        self._hidden = int(shape["hidden_size"])
        self._vocabulary = int(shape["vocab_size"])
        for tag, target in setup.tags.items():
            Path(target).mkdir(parents=True, exist_ok=True)
            self._settings.capture_root.mkdir(parents=True, exist_ok=True)
            (self._settings.capture_root / tag).unlink(missing_ok=True)
            (self._settings.capture_root / tag).symlink_to(Path(target).resolve())
        self.thread = direct.Stepped.thread
        llm = self._stock(extra) if setup.engine == "stock" else self._ours(extra)
        self._llm = llm
        self._core = llm.engine_core.engine_core
        owners = self._owners()
        self._plane = owners.get("plane")
        self.clock = self.thread.submit(self._clock, owners).result()
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="outputs", daemon=True).start()

    # --- The start

    def _configured(self, folder: Path) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """Return the model's shape, the settings, and arguments for vLLM beside them."""
        import kit

        setup = self._setup
        as_asked: Any = argparse.Namespace(gpu=setup.device == "cuda")
        extra = kit.without_weights(as_asked)
        extra["distributed_executor_backend"] = "uni"
        if setup.timed:
            shape = kit.shape("tiny") | {
                "hidden_size": HIDDEN,
                "num_hidden_layers": LAYERS,
                "head_dim": 32,
                "vocab_size": VOCABULARY,
            }
            more: dict[str, Any] = {
                "engine.max_num_seqs": setup.most,
                "engine.max_num_batched_tokens": 8192,
                "engine.max_model_len": 2048,
                "kv_cache_gib": 1.5,
                "engine.dtype": "bfloat16",
                "runner": "v2",
                "tuning.capture_queue_mib": 1506,
            }
        else:
            shape = kit.two_of(setup.model)
            more = {"engine.max_num_seqs": setup.most}
            extra |= {"async_scheduling": True, "cudagraph_capture_sizes": GRAPH_SIZES}
            extra["kv_cache_memory_bytes"] = 9 << 30
        model = kit.write_model(folder / "model", shape, "bfloat16")
        settings = kit.serving_settings(
            as_asked, folder / "data", model, **{"relay_url": self._sink.url} | more
        )
        return shape, settings, extra

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
        on_cpu._torch_cuda_wrapper = contextlib.contextmanager(_nothing)
        hidden = torch.zeros(16384, HIDDEN, dtype=torch.bfloat16)
        logits = torch.zeros(1024, VOCABULARY)
        combine = runner.combine_sampled_and_draft_tokens

        def forward(model: Any, ids: Any = None, positions: Any = None, *_: Any, **__: Any) -> Any:
            rows = len(positions)
            prompts = max(0, rows - self._requests) * TOKEN_S
            timed_device.forward(self._plane, self._device_ms * 1e-3 + prompts)
            return hidden[:rows]

        LlamaForCausalLM.forward = forward
        LlamaForCausalLM.compute_logits = lambda model, rows, *_: logits[: len(rows)]
        runner.combine_sampled_and_draft_tokens = lambda *given: combine(*given).zero_()

    def _stock(self, extra: dict[str, Any]) -> Any:
        import direct
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from midstream.workers.engine.options import engine_arguments

        engine_arguments.prepare_environment(self._settings)
        arguments = engine_arguments.engine_options(self._settings) | extra
        config = AsyncEngineArgs(**arguments).create_engine_config()
        if self._setup.timed:
            config = _overlapped(config)
            config.scheduler_config.scheduler_cls = (
                "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
            )
        start = LLMEngine.from_vllm_config
        llm = self.thread.submit(start, config, disable_log_stats=True).result()
        self.facts = direct.facts_of(llm)
        return llm

    def _ours(self, extra: dict[str, Any]) -> Any:
        import direct

        if self._setup.timed:
            self._on_timed_device()
        self._direct = direct.Direct(self._settings, extra)
        self.facts = self._direct.facts
        return self._direct._llm.llm

    def _on_timed_device(self) -> None:
        """Have our worker and plane take their paths for a GPU."""
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
        changed.scheduler_class = scheduler
        changed._ring = lambda *_: Ring(RING, 0)

    def _owners(self) -> dict[str, Any]:
        """Return whose methods are parts of a step, see `step_clock.PARTS`."""
        import vllm.v1.executor.uniproc_executor as here

        worker = self._core.model_executor.driver_worker
        runner = worker.worker.model_runner
        plane = getattr(runner, "midstream", None)
        return {
            "scheduler": self._core.scheduler,
            "future": here.AsyncOutputFuture,
            "runner": runner,
            "plane": plane,
            "graphs": getattr(runner, "cudagraph_manager", None),
            "model": runner.model,
        }

    def _clock(self, owners: Mapping[str, Any]) -> Any:
        from step_clock import StepClock

        chosen = owners if self._setup.parts else {"future": owners["future"]}
        return StepClock(chosen, device="runner" in chosen)

    def _send(self) -> None:
        """Encode outputs in a thread, as the engine core's process does."""
        from vllm.v1.serial_utils import MsgpackEncoder

        encoder = MsgpackEncoder()
        buffer = bytearray()
        while True:
            encoder.encode_into(self._sent.get(), buffer)

    # --- Requests

    def _wishes(self, work: Work) -> list[dict[str, Any] | None]:
        """What each request asks for; its vectors are on the rank."""
        import numpy as np

        from midstream.schemas.requests.specs import StoredCapture

        if work.kind in ("stock", "idle"):
            return [None] * work.requests
        layers = list(range(self._layers))
        draws = np.random.default_rng(1)
        wishes = []
        for number in range(work.requests):
            if work.kind == "mixed":
                wishes.append(self._mixed(number, work, draws))
                continue
            wish: dict[str, Any] = {}
            if work.kind != "steer":
                at = layers[self._layers // 2 :][:1] if work.kind == "one" else layers
                positions = "all_prompt" if work.kind == "prompts" else "all"
                wish["captures"] = [
                    StoredCapture(sites={"post_block": at}, positions=positions, tag=work.tag)
                ]
            if work.kind in ("steer", "both"):
                wish["steering"] = [self._steering(layers, draws)]
            wishes.append(wish)
        return wishes

    def _steering(self, layers: list[int], draws: Any, **fields: Any) -> Any:
        """Return an edit with a vector of its own, which is on the rank."""
        import numpy as np

        from midstream.schemas.base.tensors import from_numpy
        from midstream.schemas.requests.specs import StoredSteering

        vector = from_numpy(draws.standard_normal(self._hidden).astype(np.float32))
        return StoredSteering(
            layers=layers,
            hook="post_block",
            positions="all",
            family="add",
            tensors=self._direct.hold([vector]),
            scale=0.1,
            **fields,
        )

    def _mixed(self, number: int, work: Work, draws: Any) -> dict[str, Any] | None:
        """Return what one of mixed requests asks for: a trigger, a gate, a limit, a window, a
        probe, every fourth token, sites of its own, its prompt alone, or nothing (two of ten).
        """
        import numpy as np

        from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
        from midstream.schemas.base.tensors import from_numpy
        from midstream.schemas.prompts.selectors import Span
        from midstream.schemas.prompts.windows import Trigger
        from midstream.schemas.requests.specs import StoredCapture, probe_captures

        layers = list(range(self._layers))
        # two such sets: nothing here admits requests, so they keep to what the engine was made for
        own = layers[number // 10 % 2 :: 4]
        probes = list[StoredProbe]()
        if number % 10 in (1, 4):
            tensors = self._direct.hold(
                [
                    from_numpy(draws.standard_normal((1, self._hidden)).astype(np.float32)),
                    from_numpy(np.zeros(1, dtype=np.float32)),
                ]
            )
            content = ProbeContent(
                hook="post_block",
                layer=self._layers // 2,
                tensors=tensors,
                labels=["x"],
                thresholds=[0.0],
            )
            actions = ["steer"] if number % 10 == 1 else []
            probes.append(StoredProbe("probe", content.digest, content, actions=actions))

        def captured(**fields: Any) -> list[StoredCapture]:
            asked: dict[str, Any] = {"sites": {"post_block": [self._layers // 2]}}
            return [StoredCapture(**asked | {"positions": "all", "tag": work.tag} | fields)]

        made: list[dict[str, Any] | None] = [
            {
                "steering": [
                    self._steering(layers, draws, trigger=Trigger(token_ids=[COMMON], after=3))
                ]
            },
            {"steering": [self._steering(layers, draws, gate="probe")]},
            {"steering": [self._steering(layers, draws, limit=0.5)]},
            {"captures": captured(window=Span(last=4))},
            {"captures": captured()},
            {"captures": captured(every_n=4)},
            {"captures": captured(sites={"post_block": own})},
            {"captures": captured(positions="all_prompt")},
            None,
            None,
        ]
        wish = made[number % 10]
        if wish is not None and probes:
            wish["probes"] = probes
            wish["captures"] = [*wish.get("captures", []), *probe_captures(probes)]
        return wish

    def _add(
        self,
        number: int,
        tokens: list[int],
        generated: int,
        wish: dict[str, Any] | None,
        place: int = 0,
    ) -> None:
        """`wish`: None: of a request that is not ours. `place`: of its vectors."""
        import direct
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        if wish is None:
            params = SamplingParams(
                max_tokens=generated,
                ignore_eos=True,
                temperature=0,
                output_kind=RequestOutputKind.DELTA,
            )
            name = f"{self._runs}.{number}"
        else:
            from midstream.workers.engine.ranks.rank_spec import rank_spec
            from midstream.workers.engine.vllm_output import sampling_params

            job = f"j{self._runs}-{number}"
            ask = direct.request(number, tokens, generated, job=job, **wish)
            params = sampling_params(ask.sampling, rank_spec(ask))
            name = f"{job}.{number}.1"
        self._llm.add_request(name, TokensPrompt(prompt_token_ids=tokens), params)

    # --- A run

    def run(self, work: Work) -> dict[str, Any]:
        """Run requests from their prompts to their end, and to the last file."""
        import causes

        # what a client holds is elsewhere in a service
        self._llm.output_processor.request_states.clear()
        gc.collect()
        self._device_ms = work.device_ms or self._setup.device_ms
        wishes = self._wishes(work)
        with causes.switched(work.switch, self._plane):
            steps = self._churned if work.churn else self._steps
            found: dict[str, Any] = self.thread.submit(steps, work, wishes).result()
        self._clear()
        return found

    def _steps(self, work: Work, wishes: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        import kit
        import step_clock

        self._runs += 1
        self._requests = len(wishes)
        core = self._core
        received = self._sink.count
        landed = self._sink.bytes
        prompts = kit.token_ids(len(wishes), work.prompt, self._vocabulary, seed=self._runs)
        bounds = step_clock.bounds(work.generated, work.generated)
        used = list[dict[str, float]]()
        self.clock.start()
        threads = step_clock.threads()
        began = time.perf_counter()
        for number, (tokens, wish) in enumerate(zip(prompts, wishes, strict=True)):
            self._add(number, tokens, work.generated, wish)
        first = full = last = 0.0
        while core.scheduler.has_requests() or core.batch_queue:
            outputs, executed = core.step_fn()
            core.post_step(model_executed=executed)
            if outputs and (found := outputs.get(0)) is not None and found.outputs:
                self._sent.put(found)
                last = time.perf_counter()
                first = first or last
                if len(found.outputs) == len(wishes):
                    full = full or last
                    self.clock.step()
                    if self.clock.steps - 1 in bounds:
                        used.append(step_clock.threads())
        durable = self._durable(work, received, wishes) if wishes[0] is not None else last
        result: dict[str, Any] = {
            "first_ms": (first - began) * 1e3,
            "full_ms": (full - began) * 1e3,
            "end_ms": (durable - last) * 1e3,
            "seconds": last - began,
            "durable": durable - began,
            "bytes": self._sink.bytes - landed,
            "threads_s": _since(threads),
        }
        if self.clock.steps > step_clock.LEAST_STEPS:
            result |= step_clock.statistics_of(self.clock, work.generated)
        if len(used) == 2:
            names = _since(used[0], used[1])
            steps = bounds[1] - bounds[0]
            result["threads"] = {name: took * 1e3 / steps for name, took in names.items()}
        return result

    def _churned(self, work: Work, wishes: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        """Make steps in which requests end and others begin, each with half to one and a half times
        as many tokens as asked. The time in which requests are added, which in a service is another
        process's, does not count.
        """
        import kit
        import numpy as np

        self._runs += 1
        self._requests = work.requests
        core = self._core
        prompts = kit.token_ids(work.requests, work.prompt, self._vocabulary, seed=self._runs)
        draws = np.random.default_rng(5)
        begun = 0

        def add(least: int, most: int) -> None:
            nonlocal begun
            place = begun % work.requests
            tokens = [begun % self._vocabulary, *prompts[place][1:-3], *COMMON]
            self._add(begun, tokens, int(draws.integers(least, most)), wishes[place])
            begun += 1

        for _ in range(work.requests):
            add(1, 2 * work.generated)
        walls = list[float]()
        busy = list[float]()
        ended = 0
        now = used = adding = adding_used = 0.0
        while len(walls) < BEFORE + work.churn:
            outputs, executed = core.step_fn()
            core.post_step(model_executed=executed)
            if not (outputs and (found := outputs.get(0)) is not None and found.outputs):
                continue
            self._sent.put(found)
            before = now
            used_before = used
            now = time.perf_counter()
            used = time.thread_time()
            if before:
                walls.append(now - before - adding)
                busy.append(used - used_before - adding_used)
            over = [each for each in found.outputs if each.finish_reason is not None]
            ended += len(over)
            for _ in over:
                add(work.generated // 2, work.generated * 3 // 2)
            adding = time.perf_counter() - now
            adding_used = time.thread_time() - used
        while core.scheduler.has_requests() or core.batch_queue:
            core.step_fn()
        received = -1
        while received != self._sink.count:  # until no more receipts come
            received = self._sink.count
            time.sleep(0.5)
        assert not self._sink.failed, self._sink.failed[:1]
        steps = np.sort(walls[BEFORE:]) * 1e3
        return {
            "mean": float(steps.mean()),
            "median": float(np.median(steps)),
            "p95": float(np.quantile(steps, 0.95)),
            "longest": float(steps[-1]),
            "busy": float(np.mean(busy[BEFORE:])) * 1e3,
            "ended": ended,
        }

    def _durable(self, work: Work, received: int, wishes: Sequence[Any]) -> float:
        """Return when the last receipt came."""
        core = self._core
        end = time.monotonic() + 60
        wanted = len([wish for wish in wishes if wish is not None])
        while self._sink.count - received < wanted and time.monotonic() < end:
            core.step_fn() if core.scheduler.has_requests() else time.sleep(0.002)
        assert self._sink.count - received == wanted, "not all receipts came"
        if work.switch:  # without one of its parts, the product is right to fail requests
            self._sink.failed.clear()
        assert not self._sink.failed, self._sink.failed[:1]
        return self._sink.at

    def _clear(self) -> None:
        for folder, _, names in os.walk(self._settings.capture_root, followlinks=True):
            for path in (Path(folder) / name for name in names):
                if path.stat().st_size > KEPT_BYTES:
                    path.unlink()


def _since(before: Mapping[str, float], now: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return seconds on a processor of each thread since then."""
    import step_clock

    now = now or step_clock.threads()
    return {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}


def _nothing() -> Iterator[None]:
    yield


def _overlapped(config: Any) -> Any:
    """vLLM's config as on one GPU, which the platform for CPUs changes."""
    config.scheduler_config.async_scheduling = True
    config.parallel_config.distributed_executor_backend = "uni"
    return config


# --- A process with one


def serve(setup: Setup) -> None:
    """Run what is asked on standard input, line by line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints
    import kit  # first: it settles where our modules are

    assert kit
    import torch

    if setup.device != "cuda":
        torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        folder = setup.folder or stack.enter_context(
            tempfile.TemporaryDirectory(dir="/dev/shm", prefix="stepped-engine-")
        )
        began = time.monotonic()
        engine = Engine(setup, Path(folder))
        answers.write(json.dumps(engine.facts | {"ready_s": time.monotonic() - began}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(engine.run(Work(**json.loads(line)))) + "\n")
    os._exit(0)


class Child:
    """A process with one engine, which is being started."""

    def __init__(self, setup: Setup) -> None:
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._setup = setup
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asdict(setup))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
        )
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, seconds: float = 600) -> "Child":
        """Wait until it serves. Raises RuntimeError, as all calls do, if it does not in time."""
        self.facts = self.facts or self._answer(seconds)
        return self

    def run(self, work: Work, seconds: float = 600) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(work)).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        # it answers each line with one, so nothing is left in the buffer
        if not select.select([self._process.stdout], [], [], max(0.0, seconds))[0]:
            self.kill()
            raise RuntimeError(f"the engine {self._setup.engine} did not answer in {seconds:.0f} s")
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the engine ended with {self._process.wait()}")
        return json.loads(line)

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._setup.folder:
            shutil.rmtree(self._setup.folder, ignore_errors=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    serve(Setup(**json.loads(sys.argv[1])))
