"""What benchmarks start, and how they print what they found."""

import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import httpx2

from midstream.schemas.settings.settings import Settings, load_settings, to_environment
from midstream_ops import redis_server
from midstream_ops.supervisor import Supervisor, prepare

ADMIN = "ms_admin0000000_" + "a" * 43


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


def headers_of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def client_of(url: str, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, headers=headers_of(key), timeout=300)


def keys_of(url: str, *tenants: str) -> dict[str, str]:
    """Make a key for each tenant, with `ADMIN`."""
    keys = {}
    for tenant in tenants:
        asked = {"name": tenant, "tenant": tenant}
        made = httpx2.post(f"{url}/v1/keys", json=asked, headers=headers_of(ADMIN))
        keys[tenant] = made.raise_for_status().json()["key"]
    return keys


@contextmanager
def small_jobs(
    url: str, key: str, samples: int, body: Callable[[], dict[str, Any]]
) -> Iterator[Callable[[], tuple[float, float]]]:
    """A process that asks for completions one after the other, `body()` each. Yields what has it
    ask for so many, and returns the median and the 99th percentile in ms.
    """
    pipe, there = multiprocessing.Pipe()
    asking = multiprocessing.get_context("spawn").Process(
        target=_ask, args=(url, key, samples, body, there)
    )
    asking.start()
    pipe.recv()

    def measured() -> tuple[float, float]:
        pipe.send("begin")
        cuts = statistics.quantiles(pipe.recv(), n=100)
        return cuts[49] * 1000, cuts[98] * 1000

    measured()
    try:
        yield measured
    finally:
        pipe.send("end")
        asking.join()


def _ask(
    url: str, key: str, samples: int, body: Callable[[], dict[str, Any]], pipe: Connection
) -> None:
    """From each `begin`, ask so many times, and send how long each took, in seconds."""
    with client_of(url, key) as http:
        pipe.send("ready")
        while pipe.recv() == "begin":
            taken = []
            for _ in range(samples):
                asked = body()
                began = perf_counter()
                http.post("/v1/completions", json=asked).raise_for_status()
                taken.append(perf_counter() - began)
            pipe.send(taken)


class Busy(ABC):
    """Keeps so many requests under way while it is open."""

    def __init__(self, url: str, key: str, at_once: int) -> None:
        self._url = url
        self._key = key
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(at_once)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        with client_of(self._url, self._key) as http:
            while not self._over.is_set():
                self._ask(http)

    @abstractmethod
    def _ask(self, http: httpx2.Client) -> None:
        """Make a request, and wait for what it asks for."""


def report(benchmark: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Print a line for each row, then all as JSON."""
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps({"benchmark": benchmark, **more, "results": rows}))
