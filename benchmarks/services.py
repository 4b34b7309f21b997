"""What benchmarks start, and how they print what they found."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream.schemas.settings.settings import Settings, load_settings, to_environment
from midstream_ops import redis_server
from midstream_ops.supervisor import Supervisor, prepare


@contextmanager
def service(**settings: Any) -> Iterator[Supervisor]:
    """A whole service of its own on free ports, as `midstream up` starts it. The engine `fake` is
    that of the tests.
    """
    if settings.get("engine") == "fake":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fake_engine"))
        import midstream_fake_engine

        midstream_fake_engine.install()
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        wanted = load_settings({}, data_dir=folder, api_port=0, flower_port=0, **settings)
        with Supervisor(prepare(wanted, Path(folder), print), say=lambda line: None) as stack:
            yield stack


@contextmanager
def relay(folder: Path) -> Iterator[Settings]:
    """The settings of a relay over a Redis of its own, which takes receipts: senders try again what
    nobody takes, more and more.
    """
    server = redis_server.start(folder)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "midstream.broker.relay"],
        env=environment | to_environment(Settings(redis_url=server.url)),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().split()[-1]
        yield Settings(redis_url=server.url, relay_url=url, lease_s=600)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        server.stop()


def report(benchmark: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Print a line for each row, then all as JSON."""
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps({"benchmark": benchmark, **more, "results": rows}))
