"""`midstream doctor --deep`: runs the real stack next to stock vLLM's own server, both on this
machine, with the same model and the same engine options, and takes all measurements.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import msgspec

from midstream.client.sdk.client import Client
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.settings.settings import Settings

from .checks.facts import host_facts
from .checks.finding import CheckFinding, findings_of
from .checks.rig import Rig
from .checks.table import of
from .processes import Announce, Child, free_port, members, wait_for
from .supervisor import READY_TIMEOUT_S, Supervisor, answers, child_environment, prepare

#: Share of a GPU's memory for each of the two engines on it.
GPU_SHARE = 0.45


def measured(
    settings: Settings, seconds: float, killed: Sequence[str], say: Announce
) -> Iterator[CheckFinding]:
    """Start both servers, take all measurements, and stop everything.

    Raises MidstreamError if a server does not start.
    """
    began = time.monotonic()
    data = Path(settings.data_dir)
    settings = for_both(prepare(settings, data, say), "gpu" in host_facts())
    say("starting stock vLLM's server")
    with _stock_server(settings) as (stock, process):
        say("starting Midstream's stack")
        stack = Supervisor(settings, say=lambda line: None)
        with stack, Client(stack.url, stack.settings.admin_key) as client:
            rig = Rig(
                settings=settings,
                stack=stack,
                client=client,
                stock=stock,
                seconds=seconds,
                killed=killed,
            )
            yield from findings_of(of("deep"), rig, say)
        say("stopping both")
    yield from findings_of(of("end"), lambda: [*stack.survivors(), *members(process)])
    created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now()))
    yield CheckFinding("info", "verified", f"{created}, {time.monotonic() - began:.0f} s")


def for_both(settings: Settings, gpu: bool) -> Settings:
    """Return the settings of both engines: without the prefix cache, because prompts repeat, and
    on a GPU with half of its memory each.
    """
    options = settings.engine_options
    if gpu:
        options = {"gpu_memory_utilization": GPU_SHARE} | options
    return msgspec.structs.replace(
        settings,
        vllm=msgspec.structs.replace(settings.vllm, enable_prefix_caching=False),
        engine_options=options,
    )


@contextmanager
def _stock_server(settings: Settings) -> Iterator[tuple[str, int]]:
    """Run stock vLLM's server; yield its address, and its process id, which is its session's.

    Raises MidstreamError with its last error line if it does not start.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    child = Child(
        "stock",
        [sys.executable, "-P", "-m", "midstream.workers.engine.proof.stock", str(port)],
        child_environment(settings),
        Path(settings.data_dir) / "logs" / "stock.log",
        30.0,
    )
    child.start()
    try:
        with httpx2.Client(timeout=5.0) as http:
            up = wait_for(
                lambda: answers(http, f"{url}/health"),
                READY_TIMEOUT_S,
                hurry=lambda: child.exit_code is not None,
                step=0.2,
            )
        if not up:
            raise MidstreamError(
                "engine_failed",
                f"stock vLLM's server did not start: {child.last_words()} (log: {child.log})",
            )
        yield url, child.pid or 0
    finally:
        child.stop()
