"""Prepares every process that vLLM starts for an engine: vLLM calls `begin` first, as a plug-in."""

import logging
import multiprocessing
import os
from pathlib import Path

from vllm import envs
from vllm.platforms import current_platform

from ....broker.processes.leftovers import name_after
from ....broker.processes.orphans import die_with_parent
from ..base.config import VARIABLE, plane_config
from .build_errors import KeptForWorker


def begin() -> None:
    """End with the process that started this one, name shared memory after the data directory, and
    keep the error of a start that fails. Does nothing in the worker itself, and in processes of
    others.
    """
    if multiprocessing.parent_process() is None or VARIABLE not in os.environ:
        return
    die_with_parent()
    _fork_ranks()
    config = plane_config()
    name_after(Path(config.outbox_dir).parent)
    logging.getLogger("vllm").addHandler(KeptForWorker(config.spill_dir, config.boot))


def _fork_ranks() -> None:
    """Have the engine's core fork its rank where vLLM's CPU platform would spawn it, and have it
    import everything once more. Not where OpenMP has to bind threads: it reads its variables when
    it is loaded.
    """
    if current_platform.is_cpu() and envs.VLLM_CPU_OMP_THREADS_BIND == "nobind":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.register_at_fork(after_in_child=die_with_parent)  # vLLM calls no plug-in there
