"""Switches that take a part of the product out of a step or add one, and what a step takes without
or with it.
"""

import contextlib
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Run = Mapping[str, Any]


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
    "copies": Switch(f"{_RUNNER}.rows.buffers", "_Halves", "_scatter", lambda _: lambda *_: None),
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
        for bank in plane.banks._banks:  # what sites added and nobody took
            bank.finite._counts.zero_()
            nothing = 0 * bank.finite._off
            bank.finite._expected = nothing
            bank.finite._off = nothing


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
