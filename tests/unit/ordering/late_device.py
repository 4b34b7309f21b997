"""A stand-in for an accelerator that obeys only CUDA's ordering rules: each stream is a queue, and
its work runs late, in an adversarial order.

A tensor of the device holds its content in ordinary memory, but every operation on it is queued on
the calling thread's current stream, and reads host memory only when it runs. Results that are read
before an event, and host memory that is changed while a copy is queued, therefore show.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from midstream.workers.runner.base.shared_memory import SharedMemory
from midstream.workers.runner.rows import arena, buffers

#: The torch device that stands for the accelerator: real tensors of it have no memory.
KIND = torch.device("meta")
#: Operations whose results share memory with their argument.
_VIEWS = frozenset(
    (
        *("alias", "as_strided", "detach", "expand", "permute", "reshape", "select", "slice"),
        *("split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view"),
    )
)
#: Contents of a result that is not computed yet.
_NOT_YET = -77


class Device:
    """All streams, and the order in which their work runs.

    `haste`: probability that the device runs one more piece of work whenever the host queues one.
    `behind`: which streams fall behind: `copies`, `forward` or `any`.
    """

    def __init__(self, seed: int, haste: float = 0.3, behind: str = "any") -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self._draw = random.Random(seed)
        self._haste = haste
        self._behind = behind
        self._current = threading.local()
        self.first = Stream(device=self)
        self.errors: list[Exception] = []  # of work that failed

    @property
    def current(self) -> "Stream":
        """The calling thread's current stream."""
        return getattr(self._current, "stream", self.first)

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before = self.current
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def advance(self) -> None:
        """Run some of the queued work, perhaps none."""
        with self.lock:
            while self._draw.random() < self._haste:
                ready = [stream for stream in self.streams if stream.queue]
                if not ready:
                    return
                forward = [stream for stream in ready if stream is self.first]
                copies = [stream for stream in ready if stream is not self.first]
                preferred = {"copies": forward, "forward": copies, "any": ready}[self._behind]
                if not preferred and self._draw.random() < 0.9:
                    return  # those that fall behind run only now and then
                self._draw.choice(preferred or ready).run_one()

    def launch(self, work: Callable[[], None]) -> None:
        """Queue `work` on the current stream."""
        self.current.put(work)
        self.advance()

    def full(self, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> "DeviceTensor":
        return DeviceTensor(torch.full(shape, value, dtype=dtype))

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Queue the calling thread's tensor operations within the block on the device."""
        with _Mode(self):
            yield

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have torch's names for streams, events and page-locked memory mean this device."""
        empty = torch.empty

        def unlocked(*arguments: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            return empty(*arguments, **more)

        def stream(device: object = None, priority: int = 0) -> Stream:
            return Stream(device=self)

        def event(**_: bool) -> Event:
            return Event(self)

        def wait(memory: SharedMemory, landing: int) -> None:
            while memory.landed[0] < landing:
                with self.lock:  # whatever is preferred: another process waits
                    if ready := [item for item in self.streams if item.queue]:
                        self._draw.choice(ready).run_one()
                if not ready:
                    time.sleep(0)  # the host has to finish it

        DeviceTensor.owner = self
        patch.setattr(SharedMemory, "wait", wait)
        patch.setattr(torch, "empty", unlocked)
        patch.setattr(arena, "lock", lambda memory: None)
        patch.setattr(buffers, "on_device", DeviceTensor)
        for name, stand_in in {
            "Stream": stream,
            "Event": event,
            "stream": self.on,
            "current_stream": lambda device=None: self.current,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)


class Stream:
    """Work that runs in order, some time after it was queued."""

    def __init__(self, device: Device) -> None:
        self._device = device
        #: Work, or (stream, number): wait until that stream has done this many pieces.
        self.queue: deque[Callable[[], None] | tuple[Stream, int]] = deque()
        self.issued = self.done = 0
        device.streams.append(self)

    def put(self, work: "Callable[[], None] | tuple[Stream, int]") -> None:
        with self._device.lock:
            self.queue.append(work)
            self.issued += 1

    def run_one(self) -> None:
        """Run the next piece, unless it waits for another stream."""
        work = self.queue[0]
        if isinstance(work, tuple):
            other, number = work
            if other.done < number:
                return
        else:
            try:
                work()
            except Exception as error:
                self._device.errors.append(error)
        self.queue.popleft()
        self.done += 1

    def run_until(self, number: int) -> None:
        """Run as little as possible until this many pieces are done. (What a piece waits for was
        queued before it, so no two streams wait for each other.)
        """
        while self.done < number:
            work = self.queue[0]
            if isinstance(work, tuple):
                work[0].run_until(work[1])
            self.run_one()

    def wait_event(self, event: "Event") -> None:
        if event.recorded is not None:
            self.put(event.recorded)

    def wait_stream(self, other: "Stream") -> None:
        self.put((other, other.issued))

    def synchronize(self) -> None:
        with self._device.lock:
            self.run_until(self.issued)


class Event:
    """A place in a stream; as in CUDA, an event that was never recorded has occurred."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.recorded: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.current
        self.recorded = stream, stream.issued

    def query(self) -> bool:
        self._device.advance()
        return self.recorded is None or self.recorded[0].done >= self.recorded[1]

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current).wait_event(self)

    def synchronize(self) -> None:
        with self._device.lock:
            if self.recorded is not None:
                self.recorded[0].run_until(self.recorded[1])


class DeviceTensor(torch.Tensor):
    """A tensor of the device. `content`: what its queued work has left so far."""

    content: torch.Tensor
    owner: Device

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, content.shape, strides=content.stride(), dtype=content.dtype, device=KIND
        )
        made.content = content
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)})"

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Do nothing: memory of the device is not given to another tensor."""

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        return _call(cls.owner, operation, arguments, named or {})


class _Mode(TorchDispatchMode):
    """Catches also operations that make tensors of the device from none."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        return _call(self._device, operation, arguments, named or {})


def _content(item: Any) -> Any:
    return item.content if isinstance(item, DeviceTensor) else item


def _on_device(item: Any) -> Any:
    return DeviceTensor(item) if isinstance(item, torch.Tensor) else item


def _call(device: Device, operation: Any, arguments: Any, named: dict[str, Any]) -> Any:
    """Queue an operation on the current stream, or run it if it concerns no tensor of the
    device. An operation whose result is on the host waits for the current stream, as CUDA does.
    """
    name = operation._schema.name.split("::")[1]
    involved = [item for item in tree_leaves((arguments, named)) if isinstance(item, DeviceTensor)]
    target = named.get("device")
    to_device = target is not None and torch.device(target).type == KIND.type
    if not involved and not to_device:
        return operation(*arguments, **named)
    waits = not named.get("non_blocking")
    given = {key: item for key, item in named.items() if key not in ("non_blocking", "pin_memory")}
    if to_device:
        given["device"] = torch.device("cpu")
    inputs = tree_map(_content, arguments)
    given = tree_map(_content, given)
    if name in _VIEWS:
        return tree_map(_on_device, operation(*inputs, **given))
    to_host = target is not None and not to_device
    if name == "_local_scalar_dense" or to_host:
        assert waits, "a copy into new pageable memory must wait for the device"
        device.current.synchronize()
        return operation(*inputs, **given)
    if operation._schema.is_mutable:
        device.launch(lambda: operation(*inputs, **given))
        blocks = name == "copy_" and not (len(arguments) > 2 and arguments[2]) and waits
        if blocks and not all(isinstance(item, DeviceTensor) for item in arguments[:2]):
            device.current.synchronize()
        return arguments[0]
    # Run once now, for the shape only.
    results = tree_map(_unknown, operation(*tree_map(_cloned, inputs), **given))

    def compute() -> None:
        for result, value in zip(
            tree_leaves(results), tree_leaves(operation(*inputs, **given)), strict=True
        ):
            if isinstance(result, torch.Tensor):
                result.copy_(value)

    device.launch(compute)
    if to_device and involved == [] and waits and name == "_to_copy":
        device.current.synchronize()
    return tree_map(_on_device, results)


def _cloned(item: Any) -> Any:
    # 0: an index that is not computed yet may be any number
    return torch.zeros_like(item) if isinstance(item, torch.Tensor) else item


def _unknown(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return torch.full_like(item, float("nan") if item.is_floating_point() else _NOT_YET)
