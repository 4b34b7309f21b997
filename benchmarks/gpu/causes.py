"""What a step's time goes to: switches that take a part of the product out or add one, and the
attribution of what a kind of load adds to stock vLLM's step.
"""

import contextlib
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

#: ms below which a difference is nothing, and how many median deviations of its rounds are noise.
LEAST_MS, DEVIATIONS = 0.05, 3.0
#: A part's extra is hidden behind the device if less than this share of it is in the step.
HIDDEN = 0.5
#: Waits of the model's thread for the device are no cost, but what it computes meanwhile is.
WAITS = ("wait",)
#: Span of the device → parts of the host between its events: what these take longer is theirs.
BETWEEN = {"forward": ("forward",), "sampling": ("drain", "sample", "execute")}

Run = Mapping[str, Any]


# --- Switches


@dataclass(frozen=True)
class Switch:
    """A method of the product and what replaces it; `replace(original)`. `adds`: the switch adds
    work, so that its effect is what the step takes longer with it.
    """

    module: str
    owner: str
    method: str
    replace: Callable[[Callable[..., Any]], Callable[..., Any]]
    adds: bool = False


def _unobserved(original: Callable[..., Any]) -> Callable[..., Any]:
    def take(check: Any, *_: Any) -> None:
        check.last = None

    return take


def _uploaded(original: Callable[..., Any]) -> Callable[..., Any]:
    """The plan is uploaded in every busy step, also where it repeats the last one's."""

    import torch

    from midstream.workers.runner.base.host_memory import locked_copy

    def commit(planner: Any) -> None:
        original(planner)
        if planner.due is not None:
            staging = planner._staging
            staging._buffers.plan.copy_(
                locked_copy(torch.from_numpy(planner._plan)), non_blocking=True
            )

    return commit


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every forward has all launches."""
    from midstream.kernels import WHOLE

    def choose(plane: Any, windows: Any) -> int:
        original(plane, windows)
        plane._family = WHOLE
        return WHOLE

    return choose


_RUNNER = "midstream.workers.runner"
#: Without the copies, captured rows are not those of the model: a time is all that counts.
SWITCHES: dict[str, Switch] = {
    "copies": Switch(f"{_RUNNER}.rows.buffers", "_Halves", "_copy", lambda _: lambda *_: None),
    "sizes": Switch(f"{_RUNNER}.rows.edit_sizes", "SizeTable", "add", lambda _: lambda *_: False),
    "finite": Switch(f"{_RUNNER}.rows.finite_check", "FiniteCheck", "take", _unobserved),
    "upload": Switch(f"{_RUNNER}.rows.planner", "Planner", "commit", _uploaded, adds=True),
    "family": Switch(f"{_RUNNER}.plane.data_plane", "DataPlane", "choose", _whole, adds=True),
}


@contextlib.contextmanager
def switched(name: str, plane: Any) -> Iterator[None]:
    """Have the switch in effect within the block; none for an empty name or without a plane."""
    if not name or plane is None:
        yield
        return
    switch = SWITCHES[name]
    owner = getattr(import_module(switch.module), switch.owner)
    original = getattr(owner, switch.method)
    setattr(owner, switch.method, switch.replace(original))
    logging.disable()  # of the requests that fail for it
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        setattr(owner, switch.method, original)
        for bank in plane._banks._banks:  # what sites added and nobody took
            bank.finite._counts.zero_()
            bank.finite._expected = bank.finite._off = 0 * bank.finite._off


# --- Attribution


@dataclass(frozen=True)
class Cause:
    """What a kind adds to stock's step, in ms."""

    slope: float
    ratio: float  # of the slopes
    longest: float  # step, of stock's median
    parts: dict[str, float]  # on the processor, `blocked in …`, `device: …`
    noise: dict[str, float]
    named: str  # the part with the largest extra beyond noise; "": none
    hidden: bool  # behind the device: the steps do not take that much longer
    switches: dict[str, float] = field(default_factory=dict)


def costs(run: Run) -> dict[str, float]:
    """Return ms of a step by part: each one's time on the processor, and what its thread waited for
    the interpreter or a lock; of the device by span.
    """
    found = {}
    for name, times in run["parts"].items():
        found[name] = times["cpu"]
        if name not in WAITS and name != "rest":
            found[f"blocked in {name}"] = max(0.0, times["wall"]["mean"] - times["cpu"])
    return found | {f"device: {name}": took for name, took in run.get("device", {}).items()}


def extra(run: Run, stock: Run) -> dict[str, float]:
    """Return what each part takes longer than stock's, or takes where stock has none."""
    mine, other = costs(run), costs(stock)
    found = {name: took - other.get(name, 0.0) for name, took in mine.items()}
    for span, parts in BETWEEN.items():
        if (name := f"device: {span}") in found:
            host = sum(
                found.get(each, 0.0) for part in parts for each in (part, f"blocked in {part}")
            )
            found[name] -= max(0.0, host)
    return found


def attribute(
    runs: Mapping[str, Sequence[Run]], switches: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, Cause]:
    """Return the cause of each kind but `stock`. `runs`: kind → its run of each round. `switches`:
    see `effects`.
    """
    found = {}
    for kind, of_kind in runs.items():
        if kind == "stock":
            continue
        pairs = list(zip(of_kind, runs["stock"], strict=False))
        rounds = [extra(run, stock) for run, stock in pairs]
        parts = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        noise = {
            name: max(LEAST_MS, DEVIATIONS * _deviation([each[name] for each in rounds]))
            for name in parts
        }
        beyond = {name: took for name, took in parts.items() if took > noise[name]}
        named = max(beyond, key=lambda name: beyond[name], default="")
        slope = statistics.median(run["slope"] - stock["slope"] for run, stock in pairs)
        found[kind] = Cause(
            slope=slope,
            ratio=statistics.median(run["slope"] / stock["slope"] for run, stock in pairs),
            longest=max(run["longest"] for run in of_kind)
            / statistics.median(stock["median"] for _, stock in pairs),
            parts=parts,
            noise=noise,
            named=named,
            hidden=bool(named) and slope < HIDDEN * parts[named],
            switches=dict((switches or {}).get(kind, {})),
        )
    return found


def effects(
    runs: Mapping[tuple[str, str], Sequence[Run]], of: str = "slope"
) -> dict[str, dict[str, float]]:
    """Return kind → switch → ms of a step that its part takes. `runs`: (kind, switch or "") → its
    run of each round. `of`: `slope`, or `busy`, of the model's thread.
    """
    found: dict[str, dict[str, float]] = {}
    for (kind, name), of_switch in runs.items():
        if name and (kind, "") in runs:
            pairs = zip(of_switch, runs[kind, ""], strict=False)
            took = statistics.median(run[of] - whole[of] for run, whole in pairs)
            found.setdefault(kind, {})[name] = took if SWITCHES[name].adds else -took
    return found


def _deviation(values: Sequence[float]) -> float:
    """The median distance from the median."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
