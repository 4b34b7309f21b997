"""Starts engines in a short time: one process imports everything once and is forked for each.

    with Nursery(folder) as nursery:
        host = nursery.host(folder / "llama", checkpoint, dtype="bfloat16")

A fork of a nursery runs `engine_process.serve`, with the engine core in the same process; nothing
is left over from one engine to the next. With `processes`, vLLM starts processes of its own for the
core and the ranks, as in a worker, but forks them too: spawned, each would import everything again.
"""

import asyncio
import contextlib
import copy
import functools
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from midstream.broker.processes.leftovers import own_temporary_folder
from midstream.broker.processes.orphans import die_with_parent
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.settings.settings import load_settings

if TYPE_CHECKING:
    from host import Host

#: Of the environment of a fork: folders of packages that it finds beside those of the nursery.
PACKAGES = "TEST_PACKAGES"


class Birth(msgspec.Struct):
    """What a fork is told: its environment, the pipes on which it is driven, its log."""

    environment: dict[str, str]
    processes: bool
    commands: str
    answers: str
    log: str


class Nursery:
    """The process that is forked."""

    def __init__(self, directory: Path, env: dict[str, str] | None = None):
        self._directory = directory
        self._numbers = itertools.count()
        self._log = open(directory / "nursery.log", "wb")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._hosts: list[Host] = []

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """It and its forks, at once."""
        for host in self._hosts:
            host.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def host(
        self, directory: Path, model: Path, env: dict[str, str] | None = None, **settings: Any
    ) -> "Host":
        """An engine whose core is in the fork; `directory` is made.

        Raises AssertionError with its log when it does not start.
        """
        from host import Host

        directory.mkdir(parents=True)
        self._hosts.append(Host(directory, model, env, nursery=self, **settings))
        return self._hosts[-1]

    def fork(self, environment: dict[str, str], log: Path, processes: bool) -> "_Fork":
        names = [
            str(self._directory / f"{name}-{next(self._numbers)}")
            for name in ("commands", "answers")
        ]
        for name in names:
            os.mkfifo(name)
        birth = Birth(environment, processes, names[0], names[1], str(log))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(to_json(birth) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, (
            f"the nursery ended:\n{Path(self._log.name).read_text(errors='replace')[-3000:]}"
        )
        # A fork opens them in this order too.
        return _Fork(int(line), open(names[0], "wb", buffering=0), open(names[1], "rb"))


class _Fork:
    """As much of `subprocess.Popen` as `Host` uses."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]):
        self.stdin = stdin
        self.stdout = stdout
        self._pid = pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        """Until it and its ranks are gone, who have its pipe: a moment later than the pipe."""
        if not self.stdout.closed:
            self.stdout.read()
            self.stdin.close()
            self.stdout.close()
            while Path("/proc", str(self._pid)).exists():
                time.sleep(0.001)


# -- in the nursery and its forks
# ----------------------------------------------------------------------------------------


class InprocLLM:
    """What `VllmEngine` uses of vLLM's AsyncLLM, with the engine core in this process.

    One thread does all of its work.
    """

    def __init__(self, llm: Any, thread: ThreadPoolExecutor):
        self._llm = llm
        self._thread = thread
        self._core = llm.engine_core.engine_core
        self._outputs: dict[str, asyncio.Queue[Any]] = {}
        self._internal: dict[str, str] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._paused = False
        self.renderer = llm.renderer
        self.model_config = llm.model_config
        self.vllm_config = llm.vllm_config
        self.engine_core = self  # of which `call_utility_async` is used
        self.errored = False
        self.dead_error = None
        self.output_handler = None

    @classmethod
    def from_vllm_config(cls, config: Any, disable_log_stats: bool) -> "InprocLLM":
        from vllm.v1.engine.llm_engine import LLMEngine

        compare_as_a_worker_does(config)
        thread = ThreadPoolExecutor(1)
        return cls(
            thread.submit(
                LLMEngine.from_vllm_config, config, disable_log_stats=disable_log_stats
            ).result(),
            thread,
        )

    async def _in_thread(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        queue = self._outputs[request_id] = asyncio.Queue()
        try:
            self._internal[request_id] = await self._in_thread(
                self._llm.add_request, request_id, prompt, params, None, lora_request
            )
            self._go_on()
            while True:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            del self._outputs[request_id]

    @property
    def output_processor(self) -> Any:
        return self._llm.output_processor

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._paused = True

    async def resume_generation(self) -> None:
        self._paused = False
        self._go_on()

    def _go_on(self) -> None:
        if not self._paused and (self._stepping is None or self._stepping.done()):
            self._stepping = asyncio.ensure_future(self._step())

    async def _step(self) -> None:
        try:
            # The ranks hear in the next step who has finished.
            while not self._paused and (self._outputs or self._core.scheduler.has_requests()):
                for output in await self._in_thread(self._llm.step):
                    if output.request_id in self._outputs:
                        self._outputs[output.request_id].put_nowait(output)
                await asyncio.sleep(0)
        except Exception as error:
            self.errored = True
            self.dead_error = error
            for queue in self._outputs.values():
                queue.put_nowait(error)

    async def abort(self, request_id: str) -> None:
        await self._in_thread(self._llm.abort_request, [request_id])

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        return list(await self._in_thread(lambda: self._llm.collective_rpc(method, timeout, args)))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        result = await self._in_thread(getattr(self._core, method), *args)
        self._go_on()
        return result

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._in_thread(self._llm.reset_prefix_cache))

    def shutdown(self) -> None:
        self._thread.submit(self._llm.engine_core.shutdown).result()


def know_models(names: Iterable[str]) -> None:
    """Let vLLM inspect the classes of these architectures here; by itself it starts a Python
    process for each.
    """
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

    for name in names:
        model = ModelRegistry.models.get(name)
        if isinstance(model, _LazyRegisteredModel):
            ModelRegistry.register_model(name, model.load_model_cls())


def compare_as_a_worker_does(config: Any) -> None:
    """Run the comparison's calls to transformers where vLLM's wrapper of its classes does nothing.

    A worker builds the reference in a process in which vLLM loads no model. Here both share one, in
    which vLLM's Transformers backend has wrapped transformers' classes for compilation.

    `config`: vLLM's, of the engine in this process.
    """
    from vllm.config import CompilationConfig, set_current_vllm_config

    from midstream.workers.engine.proof import reference

    attempt = reference._attempt
    eager = copy.copy(config)
    eager.compilation_config = CompilationConfig(mode=0)

    def within(what: str, call: Callable[[], Any]) -> Any:
        def run() -> Any:
            with set_current_vllm_config(eager):
                return call()

        return attempt(what, run)

    reference._attempt = within


def fork_processes() -> None:
    """Have vLLM fork its processes, which its CPU platform spawns."""
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork")  # type: ignore[assignment]


def architectures_of(checkpoint: Path) -> list[str]:
    config = checkpoint / "config.json"  # absent where the model is a name of a hub
    return json.loads(config.read_text()).get("architectures") or [] if config.exists() else []


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    import engine_process

    import midstream.workers.engine.vllm as hosting
    from midstream.workers.engine.no_torchvision import stand_in
    from midstream.workers.runner.hooks.architectures import ARCHITECTURES, BACKEND_CLASS
    from midstream.workers.runner.support import seams

    for name in ("vllm.v1.worker.cpu_worker", "midstream.workers.runner.vllm.worker_class"):
        importlib.import_module(name)
    seams.verify()
    stand_in()
    know_models((*ARCHITECTURES, BACKEND_CLASS))
    gc.collect()
    gc.freeze()  # a collection in a fork neither looks at what was imported nor copies its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    for line in iter(sys.stdin.readline, ""):
        birth = from_json(line, Birth)
        pid = os.fork()
        if pid:
            answers.write(b"%d\n" % pid)
            continue
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(birth.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(birth.environment)
        sys.path[:0] = filter(None, os.environ.get(PACKAGES, "").split(os.pathsep))
        own_temporary_folder(Path(load_settings().data_dir))  # as a worker has one
        if birth.processes:
            fork_processes()
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            hosting.AsyncLLM = InprocLLM  # type: ignore[attr-defined, assignment, misc]
        sys.stdin = open(birth.commands)  # noqa: SIM115 - as long as the process
        channel = open(birth.answers, "wb", buffering=0)  # noqa: SIM115
        know_models(architectures_of(Path(load_settings().model)))
        try:
            asyncio.run(engine_process.serve(functools.partial(_answer, channel)))
        except BaseException:
            traceback.print_exc()
        os._exit(0)  # the rest of this function is the nursery's


def _answer(channel: IO[bytes], answer: Any) -> None:
    channel.write(to_json(answer) + b"\n")


if __name__ == "__main__":
    main()
