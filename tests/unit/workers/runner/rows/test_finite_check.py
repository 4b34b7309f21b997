"""A request whose edits leave rows that are not finite fails and says which; rows of the unedited
model are only counted.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plane_kit import Rig, capturing, steered
from rank_kit import Request, steering, stream_of

from midstream.schemas.prompts.selectors import Window
from midstream.workers.runner.base.engine_step import Finish, RequestRows, StepView
from midstream.workers.runner.rows.finite_check import _Finding


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def spoil(monkeypatch: pytest.MonkeyPatch, *positions: int) -> None:
    """Make the stream NaN at these positions of every request."""

    def spoiled(number: int, hook: str, layer: int, first: int, count: int) -> np.ndarray:
        rows = stream_of(number, hook, layer, first, count)
        rows[[position - first for position in positions if first <= position < first + count]] = (
            np.nan
        )
        return rows

    monkeypatch.setattr("rank_kit.stream_of", spoiled)


def clamping(rig: Rig, number: int, strength: float, positions: Any = "all") -> Request:
    """Set to a large component at layer 1; with a large strength that overflows."""
    entry = steering(
        rig.vector(2.0), [1], positions=positions, family="clamp", numbers=[strength, 1e6, 1e6]
    )
    return Request(number, 6, 8, capturing(number).captures, [entry])


def test_an_edit_that_overflows_fails_its_request_alone(rig: Rig) -> None:
    bad, good, plain = (
        clamping(rig, 1, 3e38, Window(2)),
        clamping(rig, 2, 1.0, Window(2)),
        capturing(3),
    )
    both = [bad, good, plain]
    rig.step(*((request, 0, 6) for request in both), new=both)
    rig.step(*((request, 6, 1) for request in both))
    rig.step(finished=both)
    receipts = {receipt.job: receipt for receipt in rig.receipts()}
    assert receipts["j1"].kind == "intervention_failed"
    assert (
        "clamp produced a non-finite row at post_block of layer 1, position 2"
        in receipts["j1"].message
    )
    assert [receipts[job].status for job in ("j2", "j3")] == ["ok", "ok"]
    assert not rig._rank.buffers.broken.any(), "the marks are gone"


def test_rows_of_the_unedited_model_are_counted_and_fail_no_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 1, 4)
    # of the second, position 1 precedes every edit
    plain, later = capturing(1), clamping(rig, 2, 1.0, Window(3))
    rig.step(
        (plain, 0, 6), (later, 0, 6), new=[plain, later], hidden=[0, np.nan, 0, 0, np.nan, 0] * 2
    )
    assert rig.plane.found()() == [("1", 1), ("2", 1), ("2", 4)], (
        "the scheduler hears of all of them"
    )
    rig.step((plain, 6, 1), (later, 6, 1))
    rig.step(finished=[plain, later])
    for receipt in rig.receipts():
        assert receipt.status == "ok"
        assert sum(file.non_finite for file in receipt.files) == 2 * 2, "two layers, two positions"


def test_non_finite_rows_after_an_edit_fail_the_request(rig: Rig) -> None:
    """Neither row was broken by an edit itself: what the model made of it is not the unedited
    model's.
    """
    request = clamping(rig, 1, 1.0, Window(3))
    rig.step((request, 0, 6), new=[request], hidden=[0, 0, 0, 0, np.inf, 0])
    (receipt,) = rig.receipts()
    assert receipt.kind == "intervention_failed"
    assert "after the last layer is not finite at position 4" in receipt.message


def test_a_captured_row_that_is_not_finite_behind_an_edit_fails_its_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen by the writer alone: no edit is at that row, and another stage has the last layer."""
    spoil(monkeypatch, 5)
    request = clamping(rig, 1, 1.0, [3])
    rig.step((request, 0, 6), new=[request])
    rig.step((request, 6, 1))
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert receipt.kind == "intervention_failed"
    assert "layer 0, position 5 is not finite, after edits" in receipt.message


def test_requests_that_reused_broken_blocks_fail(rig: Rig) -> None:
    """The one that came in the same step, on blocks that were to be filled, and one that comes
    later; not those that compute their own.
    """
    first, beside, later, own = (steered(number) for number in range(1, 5))
    rig.step(
        (first, 0, 6),
        (beside, 4, 2),
        new=[first, beside],
        cached=4,
        hidden=[0, 0, 0, np.nan, 0, 0, 0, 0],
    )
    rig.step((own, 0, 6), (later, 4, 2), new=[own, later], cached=4)
    rig.step(finished=[own])
    assert {receipt.job: receipt.kind for receipt in rig.receipts()} == {
        "j1": "intervention_failed",
        "j2": "intervention_failed",
        "j3": "intervention_failed",
        "j4": "",
    }


class InFlight:
    """The event of a step that is over when somebody has waited for it."""

    def __init__(self) -> None:
        self.waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True


@pytest.mark.parametrize(("last", "waits"), [(6, True), (7, False)])
def test_an_ended_request_waits_for_the_steps_of_its_rows_alone(
    rig: Rig, last: int, waits: bool
) -> None:
    """A step that was under way when the request ended has computed a row of its last token, which
    was never to be fed back.
    """
    request, event = capturing(1), InFlight()
    rig.step((request, 0, 6), new=[request])
    for position in range(6, last + 1):
        rig.step((request, position, 1))
    view = StepView([RequestRows("1", 0, 1, last)], 1)
    finding = _Finding(9, view, None, None, None, None, None, event)  # type: ignore[arg-type]
    rig.plane._banks.first.finite._pending.append(finding)
    rig.plane.begin([], {"1": Finish(list(range(1000, 1008)), False)}, 0)
    assert event.waited == waits
