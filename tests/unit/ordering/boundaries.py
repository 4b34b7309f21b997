"""Boundaries of a rank's data plane at which a simulation injects one failure."""

from collections.abc import Callable
from typing import Any

import pytest
from simulated_rank import Simulation

from midstream.storage import file_store
from midstream.workers.runner.edits.steering_tables import RowTable
from midstream.workers.runner.edits.vector_pool import EntryPool
from midstream.workers.runner.files.desk import EndedRequest
from midstream.workers.runner.files.layouts import Filesystem
from midstream.workers.runner.files.streams import RecordingFile
from midstream.workers.runner.plane.probe_scores import Scorer
from midstream.workers.runner.probes.watches import Watch
from midstream.workers.runner.rows import buffers, finite_check
from midstream.workers.runner.rows.arena import Arena, BankRows
from midstream.workers.runner.rows.buffers import Staging
from midstream.workers.runner.rows.capture import Recording, RowStream
from midstream.workers.runner.rows.delivery import RowDelivery
from midstream.workers.runner.rows.finite_check import FiniteCheck
from midstream.workers.runner.rows.overload import Overload
from midstream.workers.runner.rows.planner import Planner
from midstream.workers.runner.rows.row_store import RowStore
from midstream.workers.runner.rows.step_places import Places

#: (owner, name of the function, whether the failure follows its work instead of preceding it).
BOUNDARIES: list[tuple[Any, str, bool]] = [
    (RowTable, "acquire", False),
    (EntryPool, "write", False),
    (Planner, "plan_steering", False),
    (Planner, "plan_capture", False),
    (Planner, "plan_capture", True),
    (BankRows, "take", False),
    (BankRows, "take", True),
    (Arena, "_reserve", False),
    (Places, "move_to", False),
    (Staging, "place", True),  # between `next()` and `take()` of the ring's halves
    (buffers, "locked_copy", False),  # each upload of the plan
    (Staging, "commit", True),
    (Staging, "take", False),
    (Staging, "take", True),
    (finite_check, "locked_like", False),
    (FiniteCheck, "take", True),
    (FiniteCheck, "settle", False),
    (Places, "drain", False),
    (Recording, "keep", False),
    (Recording, "leave", False),
    (Overload, "check", False),
    (RowStore, "keep", False),
    (RowStore, "serve", False),
    (Scorer, "take", False),
    (Scorer, "settle", False),
    (Watch, "results", False),
    (RowDelivery, "submit", False),
    (RowStream, "push", False),
    (RecordingFile, "_put", False),  # in a writer: rows of a running request
    (EndedRequest, "finish", False),
    (Filesystem, "consume", False),
    (file_store.FileWriter, "commit", False),
]


def inject(number: int) -> Callable[[pytest.MonkeyPatch, Simulation], None]:
    """Return what lets the boundary of this number fail once, at a step that the seed draws."""
    # every other time round, each boundary fails under another overload policy
    owner, name, follows = BOUNDARIES[(number + number // len(BOUNDARIES)) % len(BOUNDARIES)]

    def prepare(patch: pytest.MonkeyPatch, simulation: Simulation) -> None:
        function = getattr(owner, name)
        first = 3 + simulation.seed % 17

        def failing(*arguments: Any, **named: Any) -> Any:
            due = simulation.step >= first and not simulation.failed_at
            if due:
                simulation.failed_at = simulation.step
            if follows or not due:
                result = function(*arguments, **named)
            if due:
                raise OSError(f"injected failure of {name}")
            return result

        patch.setattr(owner, name, failing)

    return prepare
