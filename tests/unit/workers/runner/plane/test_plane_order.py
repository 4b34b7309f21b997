"""Order of what a rank's data plane does within one step, on the real plane."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plane_kit import Adapters, Rig, capturing, probed, steered
from rank_kit import Rank, Request

from midstream.broker.receipts.outbox import Outbox
from midstream.schemas.requests.specs import Grade
from midstream.workers.runner.base.backlog import WORKS
from midstream.workers.runner.base.row_index import Keeping, KeptBlock
from midstream.workers.runner.edits.prepared_rows import PreparedRows
from midstream.workers.runner.edits.steering_tables import Tables
from midstream.workers.runner.files.writer import CaptureWriter
from midstream.workers.runner.plane.grading import Grading
from midstream.workers.runner.plane.layer_gate import LayerGate
from midstream.workers.runner.plane.probe_scores import Scorer
from midstream.workers.runner.plane.reentry import Reentry
from midstream.workers.runner.plane.reports import Reports
from midstream.workers.runner.rows.banks import Banks
from midstream.workers.runner.rows.overload import Overload
from midstream.workers.runner.rows.row_store import RowStore

#: What acts in a step, by class.
ACTORS: dict[type, tuple[str, ...]] = {
    Banks: (
        "settle",
        "recording",
        "plan_steering",
        "plan_capture",
        "commit",
        "take",
        "drain",
        "leave",
    ),
    Tables: ("acquire", "release"),
    PreparedRows: ("close",),
    Scorer: ("settle", "watch", "take"),
    RowStore: ("serve", "keep", "drop"),
    Overload: ("check",),
    Reentry: ("plan",),
    LayerGate: ("begin_at_first",),
    Grading: ("plan", "take"),
    Reports: ("over",),
    Rank: ("forward",),
    Adapters: ("account",),
    CaptureWriter: ("close",),
    Outbox: ("flush", "close"),
}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for actor, names in ACTORS.items():
        for name in names:
            monkeypatch.setattr(
                actor, name, noting(f"{actor.__name__}.{name}", getattr(actor, name))
            )
    return calls


class Whole(Rig):
    """A rank with all parts, whose forward begins above the first layer and returns logits."""

    def __init__(self, folder: Path) -> None:
        self.gate = LayerGate([0, 1])
        super().__init__(folder, gate=self.gate, loras=Adapters())
        forward = self._rank.forward

        def with_logits(*windows: tuple[Request, int, int]) -> None:
            forward(*windows)
            self.gate.begin = 1
            self.plane.grade(torch.zeros(len(windows), 8))

        self._rank.forward = with_logits  # type: ignore[method-assign]


def everything(rig: Rig, number: int = 1) -> Request:
    """A request that is steered, captured, scored and graded."""
    request = probed(rig, "stop", number)
    spec = request.tracked.spec
    request.tracked.spec = msgspec.structs.replace(
        spec,
        captures=[*spec.captures, *capturing(1).captures],
        rows=steered(1).tracked.spec.rows,
        grade=Grade(token_ids=[1]),
    )
    return request


def step(rig: Rig, log: list[str], *windows: tuple[Request, int, int], **given: Any) -> list[str]:
    log.clear()
    rig.step(*windows, **given)
    return list(log)


def without_gate(calls: list[str]) -> list[str]:
    """The gate closes after the forward; no other part depends on when."""
    assert calls.index("LayerGate.begin_at_first") > calls.index("Rank.forward")
    return [call for call in calls if call != "LayerGate.begin_at_first"]


CHECKS = ["Overload.check"] * len(WORKS)
ADMIT = ["Banks.recording", "Banks.recording", "Scorer.watch", "Tables.acquire"]
PLAN = [
    "Banks.plan_capture",
    "Banks.plan_steering",
    "Banks.commit",
    "Reentry.plan",
    "Grading.plan",
]
DRAIN = [
    "Adapters.account",
    "Banks.take",
    "Banks.drain",
    "Scorer.take",
    "Scorer.settle",
]


def test_the_parts_of_a_step_act_in_this_order(tmp_path: Path, log: list[str]) -> None:
    rig = Whole(tmp_path)
    request = everything(rig)
    kept = Keeping(serve=[], keep=[KeptBlock("1", 1, 0, 4, 1)], drop=[])
    assert without_gate(step(rig, log, (request, 0, 6), new=[request], keeping=kept)) == [
        *ADMIT, *CHECKS,
        *PLAN, "Rank.forward", "Grading.take",
        *DRAIN, "Banks.settle", "RowStore.keep", "RowStore.drop", "Banks.leave",
    ]  # fmt: skip
    served = Keeping(serve=[KeptBlock("1", 1, 0, 4, 1)], keep=[], drop=[])
    assert without_gate(step(rig, log, (request, 6, 1), keeping=served)) == [
        "RowStore.serve", *CHECKS,
        *PLAN, "Rank.forward",
        *DRAIN, "Banks.settle", "RowStore.drop", "Banks.leave",
    ]  # fmt: skip


def test_rows_are_released_before_they_are_acquired(tmp_path: Path, log: list[str]) -> None:
    rig = Whole(tmp_path)
    first = everything(rig)
    rig.step((first, 0, 6), new=[first])
    second = everything(rig, 2)
    assert without_gate(step(rig, log, (second, 0, 6), new=[second], finished=[first])) == [
        "Banks.settle", "Scorer.settle", "Tables.release", "Reports.over", *ADMIT,
        *CHECKS,
        *PLAN, "Rank.forward", "Grading.take",
        *DRAIN, "Banks.settle", "Banks.leave",
    ]  # fmt: skip


def test_a_step_without_requests_plans_nothing(tmp_path: Path, log: list[str]) -> None:
    rig = Whole(tmp_path)
    assert step(rig, log) == [
        "Adapters.account", "Banks.settle"
    ]  # fmt: skip


def test_what_is_pending_is_written_before_the_outbox_closes(
    tmp_path: Path, log: list[str]
) -> None:
    rig = Whole(tmp_path)
    log.clear()
    rig.plane.close()
    assert log == [
        "CaptureWriter.close", "Outbox.flush", "Outbox.close", "PreparedRows.close"
    ]  # fmt: skip
