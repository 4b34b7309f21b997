"""Times of each part of an engine's steps: on the processor, in all and on the device.

The parts are methods of vLLM's scheduler and model runner and of our data plane. `StepClock`
replaces them on the instances of one engine, in the process that calls them, so the product knows
nothing of it. A part's time excludes that of the parts that it calls. What is measured is collected
per step in arrays; `statistics_of` keeps their statistics.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

#: Part → owner (an attribute of `owners`) and method; a part may have several.
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "schedule": (("scheduler", "schedule"),),
    "execute": (("runner", "execute_model"),),
    "begin": (("plane", "begin"),),
    "choose": (("plane", "choose"),),
    "prepare": (("runner", "prepare_inputs"), ("runner", "_prepare_inputs")),
    "plan": (("plane", "plan"),),
    "forward": (
        ("graphs", "run_fullgraph"),
        ("graphs", "run_pw_graph"),
        ("model", "forward"),
    ),
    "drain": (("plane", "drain"),),
    "sample": (("runner", "sample_tokens"),),
    "wait": (("future", "result"),),
    "update": (("scheduler", "update_from_output"),),
}
#: Waits of the model's thread for the device, which are no cost.
WAITS = ("wait",)
#: Spans of the device, each between two events: of the forward, and from there to the end of
#: sampling.
SPANS = ("forward", "sampling")
#: With fewer steps there is no slope.
LEAST_STEPS = 5
#: Steps whose events are kept; a run has fewer.
MOST_STEPS = 4096


class StepClock:
    """Clock of one engine, for the thread that steps it."""

    def __init__(self, owners: Mapping[str, Any], *, device: bool) -> None:
        """`owners`: see `PARTS`; those that the process does not have are absent. `device`: events
        of the device give its times.
        """
        self.names = list(PARTS)
        self._place = {name: place for place, name in enumerate(self.names)}
        self._now = np.zeros((2, len(self.names)))  # seconds: on the processor, in all
        self._inner: list[list[float]] = []  # of each open part: seconds of those inside
        self._open = [0] * len(self.names)
        self._thread = 0
        self._device = device
        self._events: list[list[Any]] = []
        self._before = 0  # steps with events before those that count
        self._steps: list[tuple[float, np.ndarray]] = []
        for name, methods in PARTS.items():
            for owner, method in methods:
                target = owners.get(owner)
                if target is not None and hasattr(target, method):
                    setattr(target, method, self._timed(name, _late(target, method)))

    def start(self) -> None:
        """Begin a run in this thread."""
        self._thread = threading.get_ident()
        self._now[:] = 0
        self._steps = []
        self._events = []

    def step(self) -> None:
        """End a step in which all requests decoded."""
        if not self._steps:
            self._before = max(0, len(self._events) - 1)
        self._steps.append((time.perf_counter(), self._now.copy()))

    @property
    def steps(self) -> int:
        return len(self._steps)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        place = self._place[name]
        before, after = self._marks(name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._open[place] += 1
            outermost = self._open[place] == 1
            if outermost:
                before()
            inner = [0.0, 0.0]
            self._inner.append(inner)
            used = time.thread_time()
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - used, time.perf_counter() - began
                self._inner.pop()
                for kind in range(2):
                    self._now[kind, place] += taken[kind] - inner[kind]
                    if self._inner:
                        self._inner[-1][kind] += taken[kind]
                self._open[place] -= 1
                if outermost:
                    after()

        return run

    def _marks(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what records the device's events around a part."""
        if not self._device or name not in ("forward", "sample"):
            return _nothing, _nothing

        def mark() -> None:
            if self._events:
                self._events[-1].append(_recorded())

        def begin() -> None:
            if len(self._events) < MOST_STEPS:
                self._events.append([_recorded()])

        return (begin, mark) if name == "forward" else (_nothing, mark)

    def spans(self, first: int, last: int) -> dict[str, float]:
        """Return the mean ms of each of `SPANS` in these steps."""
        if self._device and torch.cuda.is_available():
            torch.cuda.synchronize()
        found = np.array(
            [
                [one.elapsed_time(other) for one, other in itertools.pairwise(events)]
                for events in self._events[self._before :]
                if len(events) == 1 + len(SPANS)
            ]
        )[first:last]
        means = found.mean(axis=0).tolist() if len(found) else []
        return dict(zip(SPANS, means, strict=False))

    def measured(self) -> tuple[np.ndarray, np.ndarray]:
        """Return when each step ended, `[steps]`, and ms of each part in the steps after the first,
        `[steps - 1, on the processor or in all, parts]`.
        """
        at = np.array([at for at, _ in self._steps])
        parts = np.stack([parts for _, parts in self._steps])
        return at, np.diff(parts, axis=0) * 1e3


def _late(target: Any, method: str) -> Callable[..., Any]:
    """Return what calls the method as its class has it by then: a switch may replace it."""
    if isinstance(target, type) or method in vars(target):
        return getattr(target, method)
    return lambda *args, **kwargs: getattr(type(target), method)(target, *args, **kwargs)


def _nothing() -> None:
    return


def _recorded() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def threads() -> dict[str, float]:
    """Seconds on a processor of each of the process's Python threads so far, by name without its
    number.
    """
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            try:
                used = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # it ended
                continue
            name = thread.name.rstrip("0123456789").rstrip("-_ ")
            if thread is threading.current_thread():
                name = "the model's"
            found[name] = found.get(name, 0.0) + used
    return found


def bounds(steps: int, generated: int) -> tuple[int, int]:
    """The first and the last step of the slope: 16 and 112 of 128."""
    return min(generated // 8, steps - 3), min(generated * 7 // 8, steps - 1)


def statistics_of(clock: StepClock, generated: int) -> dict[str, Any]:
    """Statistics of a run's steps, in ms, of those of the slope alone: neither the first token nor
    the end is in them.
    """
    at, parts = clock.measured()
    first, last = bounds(len(at), generated)
    numbers = np.arange(first, last + 1)
    inside = parts[first:last]
    steps = np.diff(at[first : last + 1]) * 1e3
    used = inside[:, 0]
    taken = inside[:, 1]
    rest = steps - taken.sum(axis=1)
    found = {
        "slope": float(np.polyfit(numbers, at[first : last + 1], 1)[0] * 1e3),
        **_summary(steps),
        "busy": float(steps.mean() - sum(_waited(clock, used, taken, name) for name in WAITS)),
        "parts": {
            name: {"cpu": float(used[:, place].mean()), "wall": _summary(taken[:, place])}
            for place, name in enumerate(clock.names)
        },
        "device": clock.spans(first, last),
    }
    found["parts"]["rest"] = {"cpu": float(rest.mean()), "wall": _summary(rest)}
    return found


def _waited(clock: StepClock, used: np.ndarray, taken: np.ndarray, name: str) -> float:
    place = clock.names.index(name)
    return float((taken[:, place] - used[:, place]).mean())


def _summary(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    low = np.sort(values)
    return {
        "mean": float(low.mean()),
        "median": float(np.median(low)),
        "p95": float(low[int(0.95 * len(low))]),
        "longest": float(low[-1]),
    }
