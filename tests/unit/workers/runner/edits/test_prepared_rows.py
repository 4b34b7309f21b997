"""Rows that were laid out ahead or kept are what a request's own would be, and are refused where
those would be.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from capture_kit import source_run
from plane_kit import VECTOR, Rig, spec_of, steered
from rank_kit import HIDDEN, steering

from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.requests.source_runs import RunRow, row_name
from midstream.schemas.requests.specs import SteeringRow, steering_rows
from midstream.workers.runner.edits.prepared_rows import PreparedRows
from midstream.workers.runner.edits.vector_pool import JoinedRow, joined

NAME = content_hash(VECTOR)


def laid_out(value: float, entries: int = 1) -> JoinedRow:
    held = torch.full((entries, HIDDEN), value), torch.zeros(entries, 4)
    return joined({(0, 0): held}, HIDDEN, torch.float32, pinned=False)


def row(number: float) -> SteeringRow:
    (made,) = steering_rows([steering("v", [0], scale=number)])
    return made


def noting(rows: PreparedRows) -> Callable[[], None]:
    """Waits until the thread has done what was expected so far."""
    done = threading.Event()

    def wait() -> None:
        rows.expect(lambda: done.set() or [])  # type: ignore[func-returns-value]
        assert done.wait(60)

    return wait


def test_expected_rows_are_laid_out_in_the_thread_and_once() -> None:
    made: list[tuple[str, bool]] = []

    def make(spec: SteeringRow) -> JoinedRow:
        made.append((spec.key, threading.current_thread() is threading.main_thread()))
        return laid_out(1.0)

    rows = PreparedRows(make, lambda names: set())
    rows.start()
    rows.expect(lambda: [row(1.0), row(2.0), row(1.0)])
    noting(rows)()
    assert rows.get(row(1.0)) is rows.get(row(1.0))
    assert made == [(row(1.0).key, False), (row(2.0).key, False)]
    rows.get(row(3.0))
    assert made[2:] == [(row(3.0).key, True)], "nobody expected it"
    rows.close()


def test_a_row_that_is_being_laid_out_is_waited_for() -> None:
    begun = threading.Event()
    go_on = threading.Event()
    made = []

    def make(spec: SteeringRow) -> JoinedRow:
        made.append(spec.key)
        begun.set()
        assert go_on.wait(60)
        return laid_out(1.0)

    rows = PreparedRows(make, lambda names: set())
    rows.start()
    rows.expect(lambda: [row(1.0)])
    assert begun.wait(60)
    threading.Timer(0.05, go_on.set).start()
    rows.get(row(1.0))
    assert made == [row(1.0).key]
    rows.close()


def test_the_rows_used_last_are_kept_within_the_limit() -> None:
    made: list[str] = []

    def make(spec: SteeringRow) -> JoinedRow:
        made.append(spec.key)
        return laid_out(1.0)

    rows = PreparedRows(make, lambda names: set(), kept_bytes=2 * laid_out(1.0).size)
    for number in (1.0, 2.0, 1.0, 3.0, 1.0, 2.0):
        rows.get(row(number))
    assert made == [row(number).key for number in (1.0, 2.0, 3.0, 2.0)]


def test_what_cannot_be_laid_out_ahead_is_refused_when_it_is_needed() -> None:
    def make(spec: SteeringRow) -> JoinedRow:
        raise ValueError("it does not fit")

    rows = PreparedRows(make, lambda names: set())
    rows.start()
    rows.expect(lambda: [row(1.0)])
    rows.expect(lambda: msgspec.msgpack.decode(b"\xc1"))  # of another version
    noting(rows)()
    with pytest.raises(ValueError, match="it does not fit"):
        rows.get(row(1.0))
    rows.close()


def test_kept_rows_of_a_vector_that_was_dropped_are_refused(rig: Rig) -> None:
    request = steered(1)
    rig.step((request, 0, 6), new=[request])
    rig.step(finished=[request])
    rig.plane.rank_state.vectors.drop([NAME])
    again = steered(2)
    rig.step((again, 0, 6), new=[again])
    failed = rig.told()["j2"]
    assert failed.status == "error"
    assert failed.message == f"vector {NAME[:12]} is not on this rank"


def test_rows_of_source_runs_are_looked_up_each_time(rig: Rig) -> None:
    run = source_run(rig.directory / "captures", {"pre_attn": [0]}, [0, 1])
    rig.plane.runs.put(run)
    (spec,) = steering_rows(
        [steering(row_name(RunRow(run.key, "pre_attn", 0, 1)), [0], "pre_attn", [1], "replace")]
    )
    rig.plane._table.prepared.get(spec)
    rig.plane.runs.drop([run.key])
    with pytest.raises(LookupError):
        rig.plane._table.prepared.get(spec)


@pytest.mark.parametrize("how", ["with its vectors", "while it waits"])
def test_ranks_agree_whichever_of_them_laid_rows_out_ahead(tmp_path: Path, how: str) -> None:
    """Same checksum, same pool, same stream: the first rank expects the row, the second does
    not.
    """
    ahead = Rig(tmp_path / "0", world=2)
    other = Rig(tmp_path / "1", rank=1, world=2)
    tensor = from_numpy(np.linspace(-3, 5, HIDDEN, dtype=np.float32))
    request = steered(1, scale=1.7, vector=content_hash(tensor))
    for rig in (ahead, other):
        rig.plane.rank_state.vectors.put({content_hash(tensor): tensor})
    spec = spec_of(request)
    if how == "with its vectors":
        ahead.plane.expect([msgspec.to_builtins(spec.steering)])
    else:
        ahead.plane.begin([], {}, 0, waiting=[to_msgpack(spec)])
        other.plane.begin([], {}, 0)
    noting(ahead.plane._table.prepared)()
    ahead.plane._table.prepared._make = lambda spec: pytest.fail("laid out on the model thread")  # type: ignore[method-assign]
    for rig in (ahead, other):
        rig.step((request, 0, 6), new=[request])
    assert (ahead.left("pre_attn", 0) == other.left("pre_attn", 0)).all()
    assert ahead.plane.actions.checksum == other.plane.actions.checksum
    assert ahead.plane.fingerprint() == other.plane.fingerprint()


def test_a_restarted_rank_keeps_no_rows(rig: Rig) -> None:
    rig.plane.rank_state.vectors.put({content_hash(VECTOR): VECTOR})
    rig.plane._table.prepared.get(steering_rows(spec_of(steered(1)).steering)[0])
    assert rig.plane._table.prepared._kept
    rig.plane.restart()
    assert not rig.plane._table.prepared._kept
