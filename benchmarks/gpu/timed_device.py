"""A stand-in for a GPU as the host sees it: work on a stream takes time and no processor, calls
into the driver take a processor and no interpreter lock, and tensors lie in ordinary memory.

`install` makes a rank's data plane take the paths that it takes for a GPU. Contents are right,
because every operation runs when it is called; `tests/unit/ordering/late_device.py` is the stand-in
that tests their order.
"""

import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

#: Seconds that a copy between host and device takes at least.
COPY_S = 4e-6
#: Seconds of a processor that a launch of a kernel and of a graph take.
LAUNCH_S = 20e-6
GRAPH_S = 150e-6
_BLOCK = bytes(4096)


def burn(seconds: float) -> None:
    """Use a processor without the interpreter lock, as a call into the driver does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        zlib.crc32(_BLOCK)


class Stream:
    """Work that takes time, in order."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._free = 0.0
        self._lock = threading.Lock()

    @property
    def free(self) -> float:
        """When everything that was launched is over."""
        return self._free

    def launch(self, seconds: float) -> None:
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + seconds

    def wait_event(self, event: "Event") -> None:
        self._free = max(self._free, event.at)

    def wait_stream(self, other: "Stream") -> None:
        self._free = max(self._free, other.free)

    def synchronize(self) -> None:
        _wait(self._free)


class Event:
    """A place in a stream. `waited(seconds)` is told of each wait."""

    waited: Callable[[float], None] = staticmethod(lambda seconds: None)

    def __init__(self, *_: object, **__: object) -> None:
        self.at = self._reached = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = (stream or current()).free
        self._reached = max(self.at, time.perf_counter())

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds from here to there, on the device."""
        return (other._reached - self._reached) * 1e3

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        began = time.perf_counter()
        _wait(self.at)
        Event.waited(time.perf_counter() - began)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)


def _wait(at: float) -> None:
    if (left := at - time.perf_counter()) > 0:
        time.sleep(left)


MAIN = Stream()
_of_thread = threading.local()


def current(device: object = None) -> Stream:
    return getattr(_of_thread, "stream", MAIN)


class _On:
    """Context in which a stream is the current one, for one copy."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = current()
        _of_thread.stream = self._stream
        self._stream.launch(COPY_S)

    def __exit__(self, *_: object) -> None:
        _of_thread.stream = self._before


class Kernel:
    """A Triton kernel that costs its launch and computes nothing."""

    def __init__(self, function: Any) -> None:
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.arg_names = list(function.__code__.co_varnames[: function.__code__.co_argcount])

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.run

    def run(self, *_: object, **__: object) -> None:
        burn(LAUNCH_S)

    def __call__(self, *_: object, **__: object) -> None:
        return


def patch_streams() -> None:
    """Have torch's names for streams and events mean this device; after the import of vLLM's worker
    for CPUs, which gives them meanings of its own.
    """
    cuda: Any = torch.cuda
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.stream = _On
    cuda.current_stream = current
    cuda.set_device = lambda device: None
    cuda.set_stream = lambda stream: setattr(_of_thread, "stream", stream)


def patch_memory() -> None:
    """Have no memory be page-locked."""
    empty: Any = torch.empty

    def unlocked(*arguments: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return empty(*arguments, **more)

    torch.empty = unlocked
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment]


def patch_triton() -> None:
    """Have Triton make stand-ins of its kernels; before vLLM's runner is imported."""
    import vllm.triton_utils

    triton: Any = vllm.triton_utils.triton
    triton.jit = lambda *given, **_: Kernel(given[0]) if given else Kernel
    triton.next_power_of_2 = lambda number: 1 << max(0, (number - 1).bit_length())


def install(plane: Any, ring_rows: int) -> None:
    """Have a data plane with buffers on the CPU take its paths for a GPU. `ring_rows`: of half its
    ring.
    """
    from midstream.workers.runner.base.shared_memory import PAGE
    from midstream.workers.runner.rows import buffers
    from midstream.workers.runner.rows.idle_pages import IdlePages

    patch_streams()
    buffers.on_device = lambda values: values
    arena = plane._arena
    copies = Stream()
    # as if it were, so that its pages are there
    arena.locked = arena._idle._first * PAGE + (plane._config.row_store_mib << 20)
    arena._idle = IdlePages(arena.memory, arena.locked, arena.end)
    arena.bytes[: arena.locked : PAGE] = 0
    for bank in plane.banks._banks:
        staging = bank.planner._staging
        finite = bank.finite
        held = staging._buffers
        held.ring = torch.zeros(2 * ring_rows, held.ring.shape[1], dtype=held.ring.dtype)
        held.capture_slots = held.capture_slots[:1].repeat(8, 1)
        staging._on_cpu = False
        staging._token_rows = staging._token_rows.copy()
        staging._halves = buffers._Halves(held.ring, staging._memory, copies)
        finite._side = Stream()


def forward(plane: Any, seconds: float) -> None:
    """Launch a forward that takes so many seconds of the device, and let its sites do what is
    planned.
    """
    burn(GRAPH_S)
    MAIN.launch(seconds)
    if plane is None:
        return
    for bank in plane.banks._banks:
        due = bank.planner.due
        held = bank.planner._staging._buffers
        if due is None:
            continue
        held.counts.numpy()[:] += due.counts
        sites = due.counts[:, 0].nonzero()[0]
        if len(sites):
            held.sizes.numpy()[sites, : plane._view.num_rows] = 0.1
