"""Failures inside a rank's data plane fail the requests concerned, with the reason, and leave the
engine up.
"""

import operator
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plane_kit import Rig, capturing, run, steered
from rank_kit import stream_of

from midstream.workers.runner.base.host_memory import HostMemoryError
from midstream.workers.runner.base.row_index import Keeping, KeptBlock
from midstream.workers.runner.plane.requests import WrongAdapterError
from midstream.workers.runner.rows.capture import Piece
from midstream.workers.runner.rows.mover import Mover


class Adapters:
    """Adapters of a rank on which every row is computed as its request needs."""

    def account(self, *_: Any) -> None:
        return

    used = account


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, loras=Adapters())


def _raise(error: Exception) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing


#: What of the data plane fails, in which object, and the kind that the request's receipt then has.
FAILURES = [
    ("_banks.first.finite", "settle", ""),
    ("_banks.first.finite", "_observe", ""),
    ("_overload", "wait", "capture_failed"),
    ("_slabs", "collect", "capture_failed"),
    ("_mover", "take", "capture_failed"),
    ("_streams", "prepare", "capture_failed"),
    ("loras", "account", ""),
    ("_slabs", "new_slab", "capture_failed"),
    ("_banks.first.planner._staging", "commit", ""),
    ("_banks.first.planner._staging", "take", "capture_failed"),
]


@pytest.mark.parametrize(("owner", "name", "kind"), FAILURES, ids=lambda each: str(each))
def test_a_failure_of_the_data_plane_fails_its_requests_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, kind: str
) -> None:
    """The engine calls `begin`, `plan` and `drain` outside any guard of its own: what they raise
    would end it.
    """
    first = steered(1, captures=capturing(1).captures)
    if name != "prepare":  # called when a request begins
        rig.step((first, 0, 4), new=[first])
    with monkeypatch.context() as broken:
        broken.setattr(
            operator.attrgetter(owner)(rig.plane),
            name,
            _raise(HostMemoryError("no 16384 bytes of page-locked memory")),
        )
        rig.step((first, 4, 2), new=[first] if name == "prepare" else [])
    rig.step(finished=[first])
    later = capturing(2)
    run(rig, later)
    failed, fine = rig.receipts()
    assert (failed.job, failed.status, failed.kind) == ("j1", "error", kind)
    assert "no 16384 bytes of page-locked memory" in failed.message
    assert (fine.job, fine.status) == ("j2", "ok")
    assert (rig.reader(later).array(1) == stream_of(2, "post_block", 1, 0, 7)).all()


def test_a_plan_that_cannot_be_committed_does_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it may be on the device: the forward that follows edits and records nothing."""
    request = steered(1, captures=capturing(1).captures)
    staging = rig.plane._banks.first.planner._staging
    commit = staging.commit

    def half(plan: np.ndarray, lists: Sequence[np.ndarray]) -> None:
        commit(plan, lists)
        raise HostMemoryError("no 64 bytes of page-locked memory")

    with monkeypatch.context() as broken:
        broken.setattr(staging, "commit", half)
        rig.step((request, 0, 6), new=[request])
    assert (rig.left("pre_attn", 0) == stream_of(1, "pre_attn", 0, 0, 6)).all()
    assert not rig.plane._banks.first.planner.busy
    assert not bool(rig._rank.buffers.plan.any())
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert (receipt.status, receipt.files) == ("error", [])


def test_a_capture_that_cannot_be_copied_fails_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, beside = capturing(1), capturing(2)
    rig.step((first, 0, 6), (beside, 0, 6), new=[first, beside])
    rig.plane._mover.submit(lambda: None).result()
    recording = rig.plane._tracked["1"].recordings[0]
    with monkeypatch.context() as broken:
        broken.setattr(recording, "_piece", _raise(HostMemoryError("no memory")))
        rig.step((first, 6, 1), (beside, 6, 1))
        rig.plane._mover.submit(lambda: None).result()
    rig.step(finished=[first, beside])
    failed, fine = rig.receipts()
    assert (failed.job, failed.status, failed.kind) == ("j1", "error", "capture_failed")
    assert "no memory" in failed.message
    assert (fine.job, fine.status) == ("j2", "ok")
    assert (rig.reader(beside).array(1) == stream_of(2, "post_block", 1, 0, 7)).all()


def test_rows_that_were_not_copied_are_not_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = capturing(1), capturing(2)
    block = KeptBlock("1", 0, 0, 4, 7)
    with monkeypatch.context() as broken:
        broken.setattr(Piece, "place", _raise(HostMemoryError("no memory")))
        rig.step((first, 0, 6), new=[first], keeping=Keeping(keep=[block]))
        rig.plane._mover.submit(lambda: None).result()
    serve = Keeping(serve=[block._replace(request_id="2")])
    rig.step((second, 4, 2), new=[second], keeping=serve, cached=4)
    rig.step((second, 6, 1), (first, 6, 1))
    rig.step(finished=[first, second])
    receipts = {receipt.job: receipt for receipt in rig.receipts()}
    assert [receipts[job].status for job in ("j1", "j2")] == ["error", "error"]
    assert "not available: no memory" in receipts["j2"].message


def test_a_copy_that_fails_fails_the_requests_of_its_step_and_no_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, later = capturing(1), capturing(2), capturing(3)
    with monkeypatch.context() as broken:
        broken.setattr(torch, "_foreach_copy_", _raise(RuntimeError("no copy")))
        rig.step((first, 0, 6), (second, 0, 6), new=[first, second])
        rig.plane._mover.submit(lambda: None).result()
    rig.step((later, 0, 6), (first, 6, 1), (second, 6, 1), new=[later])
    rig.step((later, 6, 1))
    rig.step(finished=[first, second, later])
    receipts = {receipt.job: receipt for receipt in rig.receipts()}
    assert [receipts[job].status for job in ("j1", "j2", "j3")] == ["error", "error", "ok"]
    assert "no copy" in receipts["j1"].message
    assert (rig.reader(later).array(1) == stream_of(3, "post_block", 1, 0, 7)).all()


def test_rows_are_copied_once_and_not_on_the_thread_of_the_model(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    place = Piece.place

    def placing(piece: Piece, first: int, count: int) -> torch.Tensor:
        copied.append(threading.current_thread().name)
        return place(piece, first, count)

    monkeypatch.setattr(Piece, "place", placing)
    rig.plane.block_size = 4
    first, second = capturing(1), capturing(2)
    block = KeptBlock("1", 0, 0, 4, 7)
    rig.step((first, 0, 6), new=[first], keeping=Keeping(keep=[block]))
    for at in range(6, 10):
        rig.step((first, at, 1))
    rig.step(
        (second, 4, 2),
        new=[second],
        keeping=Keeping(serve=[block._replace(request_id="2")]),
        cached=4,
    )
    rig.step((second, 6, 1))
    first.total = 11
    rig.step(finished=[first, second])
    assert [receipt.status for receipt in rig.receipts()] == ["ok", "ok"]
    # two blocks of the first prompt, one of the second, and each generated token
    assert copied == ["midstream-mover"] * (2 + 4 + 1 + 1)
    assert (rig.reader(second).array(1)[:4] == stream_of(1, "post_block", 1, 0, 4)).all()


def test_requests_that_end_wait_for_the_copies_and_not_the_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover is stuck for longer than the steps take; the writer waits for it."""
    go = threading.Event()
    take = Mover.take

    def late(mover: Mover, *given: Any, **options: Any) -> None:
        mover.submit(lambda: go.wait(30))
        take(mover, *given, **options)

    monkeypatch.setattr(Mover, "take", late)
    request = capturing(1)
    run(rig, request)
    assert rig.plane._mover.waiting
    go.set()
    (receipt,) = rig.receipts()
    assert receipt.status == "ok"
    assert not rig.plane._mover.waiting
    assert (rig.reader(request).array(1) == stream_of(1, "post_block", 1, 0, 7)).all()


def test_rows_of_another_adapter_end_the_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    request = capturing(1)
    monkeypatch.setattr(rig.plane.loras, "account", _raise(WrongAdapterError("another")))
    with pytest.raises(WrongAdapterError):
        rig.step((request, 0, 4), new=[request])
