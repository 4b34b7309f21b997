"""Faults of ordering that a simulation must find: each takes one wait, one copy of the data plane
out of its place.

Left out: memory of a slab that is reused before its copy landed, and filling the same half of the
ring each step. The first is harmless within a bank, whose copies run in order on one stream, and
otherwise needs a slab of a cancelled request in another bank, which no seed had; the second waits
for the half's last copy, so it is slower, not wrong.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from simulated_rank import Simulation

from midstream.workers.runner.edits.vector_pool import EntryPool
from midstream.workers.runner.files import layouts
from midstream.workers.runner.rows import buffers, finite_check
from midstream.workers.runner.rows.buffers import Staging, _Areas
from midstream.workers.runner.rows.pending_rows import OnStream

Fault = Callable[[pytest.MonkeyPatch, Simulation], None]
FAULTS: dict[str, Fault] = {}


def fault(prepare: Fault) -> Fault:
    FAULTS[prepare.__name__] = prepare
    return prepare


def _replaced(patch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


# --- The ring and the copy stream

#: A part of `_Areas.take`. Gets the areas, the event of the current half, the slab, and the rows.
Part = Callable[[_Areas, Any, torch.Tensor, int], None]


def _wait(areas: _Areas, *_: Any) -> None:
    areas._stream.wait_stream(torch.cuda.current_stream())


def _copy(areas: _Areas, event: Any, slab: torch.Tensor, rows: int) -> None:
    with torch.cuda.stream(areas._stream):
        _copy_here(areas, event, slab, rows)


def _copy_here(areas: _Areas, _: Any, slab: torch.Tensor, rows: int) -> None:
    first = areas._current * areas.rows
    slab.copy_(areas._ring[first : first + rows], non_blocking=True)


def _record(areas: _Areas, event: Any, *_: Any) -> None:
    event.record(areas._stream)


def _record_here(areas: _Areas, event: Any, *_: Any) -> None:
    event.record(torch.cuda.current_stream())


#: Fault → the parts of `_Areas.take` in its order; without a fault they are `_wait`, `_copy` and
#: `_record`. `_here`: on the forward's stream.
TAKES: dict[str, tuple[Part, ...]] = {
    "copy_does_not_wait_for_the_forward": (_copy, _record),
    "event_is_recorded_before_the_copy": (_wait, _record, _copy),
    "event_is_recorded_on_the_forwards_stream": (_wait, _copy, _record_here),
    "copy_is_queued_on_a_stream_without_the_event": (_wait, _copy_here, _record),
}


def _taking(patch: pytest.MonkeyPatch, _: Simulation, *, parts: tuple[Part, ...]) -> None:
    def take(self: _Areas, slab: torch.Tensor, rows: int) -> None:
        for part in parts:
            part(self, self._copied[self._current], slab, rows)

    patch.setattr(_Areas, "take", take)


FAULTS |= {name: partial(_taking, parts=parts) for name, parts in TAKES.items()}


# --- Landings and slabs


@fault
def rows_are_read_before_they_land(patch: pytest.MonkeyPatch, _: Simulation) -> None:
    patch.setattr(OnStream, "wait", lambda self: None)


# --- The plan's way to the device


@fault
def staging_memory_is_used_again_while_it_is_copied(
    patch: pytest.MonkeyPatch, _: Simulation
) -> None:
    memory: dict[Any, torch.Tensor] = {}

    def locked_copy(values: torch.Tensor) -> torch.Tensor:
        staged = memory.setdefault((values.shape, values.dtype), torch.empty_like(values))
        return staged.copy_(values)

    patch.setattr(buffers, "locked_copy", locked_copy)


#: Fault → the function that runs on a stream of its own.
MOVED: dict[str, tuple[Any, str]] = {
    "plan_is_uploaded_on_another_stream": (Staging, "_upload"),
    "steering_is_written_on_another_stream": (EntryPool, "write"),
    "steering_is_erased_on_another_stream": (EntryPool, "erase"),
    "observations_are_copied_on_another_stream": (finite_check, "_copy_to_host"),
}


def _moved(patch: pytest.MonkeyPatch, _: Simulation, *, owner: Any, name: str) -> None:
    function, streams = getattr(owner, name), list[Any]()

    def call(*arguments: Any) -> Any:
        if not streams:
            streams.append(torch.cuda.Stream())
        with torch.cuda.stream(streams[0]):
            return function(*arguments)

    patch.setattr(owner, name, call)


FAULTS |= {fault: partial(_moved, owner=owner, name=name) for fault, (owner, name) in MOVED.items()}


# --- The step's observations


@fault
def observations_do_not_wait_for_the_forward(patch: pytest.MonkeyPatch, made: Simulation) -> None:
    for bank in made.plane._banks._banks:
        patch.setattr(bank.finite._side, "wait_stream", lambda other: None)


@fault
def the_next_forward_does_not_wait_for_observations(
    patch: pytest.MonkeyPatch, _: Simulation
) -> None:
    patch.setattr(finite_check.FiniteCheck, "precede", lambda self: None)


@fault
def observations_are_read_before_their_event(patch: pytest.MonkeyPatch, _: Simulation) -> None:
    def made(function: Any) -> Any:
        def init(self: Any, *arguments: Any) -> None:
            function(self, *arguments[:-1], None)

        return init

    _replaced(patch, finite_check._Finding, "__init__", made)


# --- Files and receipts


@fault
def receipt_precedes_its_file(patch: pytest.MonkeyPatch, _: Simulation) -> None:
    """Publish a group's files together with those of the next group."""
    late: list[tuple[Any, ...]] = []
    publish = layouts.publish

    def publish_later(*arguments: Any) -> None:
        while late:
            publish(*late.pop())
        late.append(arguments)

    patch.setattr(layouts, "publish", publish_later)
