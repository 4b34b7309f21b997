"""What is a rank told at boot?

What compiled graphs depend on (version and buffer layout) goes through vLLM's `additional_config`, which is part of
the compile cache's key. The rest changes with every boot and goes through one environment variable, which is not.
"""

import os
from typing import Any

from ... import __version__
from ...schemas.base import Record, from_json, to_json

KEY = "midstream"
VARIABLE = "_MIDSTREAM_PLANE"


class PlaneConfig(Record):
    """Everything but the requests."""

    version: str
    worker: str
    boot: str
    relay_url: str
    outbox_dir: str
    capture_root: str
    steering_rows: int  # distinct steering rows in one step, the sentinel row not counted
    capture_tokens: int  # captured token rows in one step: the step's token budget
    capture_queue_mib: int
    writer_threads: int
    cores: list[int]  # those that the worker may run on; vLLM binds each rank to some of them
    fault: str = ""  # tests only: see `faults`

    def layout(self) -> dict[str, Any]:
        """For `additional_config`: what a compiled graph depends on."""
        return {KEY: {"version": self.version, "steering_rows": self.steering_rows, "capture_tokens": self.capture_tokens}}

    def export(self) -> None:
        """Hand the config to the engine processes started after this."""
        os.environ[VARIABLE] = to_json(self).decode()


def plane_config() -> PlaneConfig:
    """The config that the worker exported; raises RuntimeError when versions differ."""
    config = from_json(os.environ[VARIABLE], PlaneConfig)
    if config.version != __version__:
        raise RuntimeError(f"this rank runs Midstream {__version__}, its worker {config.version}: install the same version on both")
    return config
