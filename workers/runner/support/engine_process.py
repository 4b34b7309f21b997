"""Prepares every process that vLLM starts for an engine: vLLM calls `begin` first, as a plug-in."""

import logging
import multiprocessing
import os
from pathlib import Path

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
    config = plane_config()
    name_after(Path(config.outbox_dir).parent)
    logging.getLogger("vllm").addHandler(KeptForWorker(config.spill_dir, config.boot))
