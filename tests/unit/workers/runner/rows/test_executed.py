"""A step whose sites did not do what was planned fails the requests that it concerns, before a
receipt says otherwise.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plane_kit import Rig, capturing, run, steered
from rank_kit import Rank, Request, steering

from midstream.kernels.plan import CAPTURED_AFTER, CAPTURED_BEFORE, EDITED
from midstream.schemas.prompts.selectors import HOOKS, Window
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.runner.base.row_index import Keeping, KeptBlock
from midstream.workers.runner.rows import finite_check


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def skip(
    monkeypatch: pytest.MonkeyPatch, rig: Rig, hook: str, layer: int, steps: Sequence[int] = (0,)
) -> None:
    """The op of one site is not called in these forwards: as where a model no longer calls the
    wrapped module.
    """
    forward, number = rig._rank.forward, iter(range(1000))

    def without(*windows: Any) -> None:
        if next(number) in steps:
            site = next(
                site for site in rig._rank.sites if (site.hook, site.layer) == (hook, layer)
            )
            site.busy = False
        forward(*windows)

    monkeypatch.setattr(rig._rank, "forward", without)


def test_a_skipped_edit_fails_its_request_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    skip(monkeypatch, rig, "pre_attn", 0)
    edited, other, plain = (
        steered(1),
        Request(2, 6, 8, (), [steering(rig.vector(3.0), [1], "pre_attn")]),
        capturing(3),
    )
    both = [edited, other, plain]
    rig.step(*((request, 0, 6) for request in both), new=both)
    rig.step(*((request, 6, 1) for request in both))
    rig.step(finished=both)
    receipts = {receipt.job: receipt for receipt in rig.receipts()}
    assert (receipts["j1"].status, receipts["j1"].kind) == ("error", "intervention_failed")
    assert (
        receipts["j1"].message
        == "step 1, edits at pre_attn of layer 0: 6 planned, 0 counted (rank 0)"
    )
    assert [receipts[job].status for job in ("j2", "j3")] == ["ok", "ok"]
    assert not rig._rank.buffers.counts.any(), "the next step counts from zero"


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_skipped_capture_leaves_no_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    skip(monkeypatch, rig, "post_block", 1, steps=[1])
    request, other = capturing(1, at=at), steered(2)
    rig.step((request, 0, 6), (other, 0, 6), new=[request, other])
    rig.step((request, 6, 1), (other, 6, 1))
    rig.step(finished=[request, other])
    receipts = {receipt.job: receipt for receipt in rig.receipts()}
    assert (receipts["j1"].kind, receipts["j1"].files) == ("capture_failed", [])
    assert (
        f"rows captured {at} edits at post_block of layer 1: 1 planned, 0 counted"
        in receipts["j1"].message
    )
    assert receipts["j2"].status == "ok"


def test_a_site_that_ran_twice_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = rig._rank.forward
    monkeypatch.setattr(
        rig._rank, "forward", lambda *windows: [forward(*windows), forward(*windows)]
    )
    run(rig, steered(1))
    (receipt,) = rig.receipts()
    assert "edits at pre_attn of layer 0: 6 planned, 12 counted" in receipt.message


def test_a_site_without_a_plan_that_did_something_fails_all_of_the_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = rig._rank.forward

    def astray(*windows: Any) -> None:
        forward(*windows)
        rig._rank.buffers.counts[5, CAPTURED_AFTER] += 1

    monkeypatch.setattr(rig._rank, "forward", astray)
    run(rig, capturing(1))
    (receipt,) = rig.receipts()
    assert (
        "rows captured after edits at post_block of layer 0: 0 planned, 1 counted"
        in receipt.message
    )


def test_rows_of_a_miscounted_step_are_kept_for_no_other_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip(monkeypatch, rig, "post_block", 0, steps=[1])
    first, second, third = capturing(1), capturing(2), capturing(3)
    rig.step((first, 0, 6), new=[first], keeping=Keeping(keep=[KeptBlock("1", 0, 0, 4, 7)]))
    rig.step(
        (second, 4, 2), new=[second], cached=4, keeping=Keeping(serve=[KeptBlock("2", 0, 0, 4, 7)])
    )
    assert rig.plane.status()["kept_row_bytes"] == 0
    assert rig.plane.status()["unkept"] == 2, (
        "the scheduler is told to forget what it takes for kept"
    )
    rig.step(
        (third, 4, 2), new=[third], cached=4, keeping=Keeping(serve=[KeptBlock("3", 0, 0, 4, 7)])
    )
    kinds = {receipt.job: receipt.kind for receipt in rig.receipts()}
    assert kinds == {"j2": "capture_failed", "j3": "capture_failed"}


class LateEvent:
    """Copies that have landed only once they are waited for."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "a thread that waits must not spin"
        self.landed = False

    def record(self) -> None:
        return

    def query(self) -> bool:
        return self.landed

    def synchronize(self) -> None:
        self.landed = True


def test_counts_that_arrive_late_are_read_before_the_receipt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where a step does not wait for them."""
    monkeypatch.setattr(rig.plane._banks.first.finite, "_on_cpu", False)
    monkeypatch.setattr(finite_check, "_copy_to_host", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    skip(monkeypatch, rig, "post_block", 1)
    request, other = capturing(1), steered(2)
    rig.step((request, 0, 6), (other, 0, 6), new=[request, other])
    assert not rig.plane._tracked["1"].reported, "nothing waited for the device"
    rig.step((request, 6, 1), (other, 6, 1))
    rig.step(finished=[request, other])
    receipts = {receipt.job: receipt for receipt in rig.receipts()}
    assert receipts["j1"].message == (
        "step 1, rows captured before edits at post_block of layer 1: 6 planned, 0 counted (rank 0)"
    )
    assert receipts["j2"].status == "ok"


def test_an_idle_step_is_not_observed(rig: Rig) -> None:
    request = Request(1, 6, 9, (), [steering(rig.vector(1.0), [0], "pre_attn", Window(20))])
    seen: list[Any] = []
    take = rig.plane._banks.first.finite.take
    rig.plane._banks.first.finite.take = lambda *given: [seen.append(given[2]), take(*given)][1]  # type: ignore[method-assign]
    rig.step((request, 0, 6), new=[request])
    assert seen == [None]
    assert not rig.plane._banks.first.finite._pending


def test_each_rank_of_a_stage_counts_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [Rig(tmp_path / str(number), rank=number, world=2) for number in range(2)]
    skip(monkeypatch, ranks[1], "pre_attn", 0)
    for each in ranks:
        run(each, steered(1, captures=capturing(1).captures))
    first, second = (each.receipts()[0] for each in ranks)
    assert first.status == "ok"
    assert "(rank 1)" in second.message


def capture(positions: Any, at: str = "before", **sites: list[int]) -> StoredCapture:
    return StoredCapture(sites=sites, positions=positions, tag="t", at=at)  # type: ignore[arg-type]


# -- what is planned is what is counted
# --------------------------------------------------------------------------------------


def test_any_mix_of_requests_counts_what_was_planned() -> None:
    """Chunks, decoding, drafts that are computed again, preemption; rows of several configurations
    at one token. `Rank.step` compares.
    """
    for seed in range(12):
        rng = np.random.default_rng(seed)
        rank = Rank(layers=3, capacity=96, traced=bool(seed % 2))
        requests = [rank.admit(random_request(rank, rng, number)) for number in range(5)]
        reached = [0] * len(requests)
        for _ in range(12):
            windows = []
            for request, at in zip(requests, list(reached), strict=True):
                if rng.random() < 0.3 or at >= request.total:
                    continue
                if rng.random() < 0.15:  # preempted, or drafts were rejected
                    at = int(rng.integers(0, at + 1))
                count = int(min(rng.integers(1, 9), request.total - at))
                windows.append((request, at, count))
                reached[request.number] = at + count
            if windows:
                rank.step(*windows)


def random_request(rank: Rank, rng: np.random.Generator, number: int) -> Request:
    choices: list[Callable[[], Any]] = [
        lambda: "all",
        lambda: "all_generated",
        lambda: [0, 3, 5],
        lambda: Window(int(rng.integers(0, 6)), int(rng.integers(7, 12))),
    ]

    def edits() -> list[Any]:
        return [
            steering(
                rank.vector(rng.normal(size=5)),
                sorted(rng.choice(3, int(rng.integers(1, 4)), replace=False).tolist()),
                HOOKS[int(rng.integers(0, 6))],
                choices[int(rng.integers(0, 4))](),
                ["add", "replace", "ablate"][int(rng.integers(0, 3))],
            )
            for _ in range(int(rng.integers(0, 3)))
        ]

    captures = [
        capture(
            "all",
            at=("before", "after")[int(rng.integers(0, 2))],
            **{HOOKS[int(rng.integers(0, 6))]: [0, 2]},
        )
        for _ in range(int(rng.integers(0, 2)))
    ]
    return Request(number, 12, 20, captures, edits())


def test_the_typed_finding_names_site_expected_and_found() -> None:
    rank = Rank()
    request = rank.admit(
        Request(
            0, 3, 4, [capture("all", post_block=[1])], [steering(rank.vector(np.ones(5)), [0, 1])]
        )
    )
    rank.plan((request, 0, 3))
    assert rank.planner.due is not None
    counts = rank.planner.due.counts.copy()
    assert list(rank.planner.due.miscounts(7, counts, rank.sites)) == []
    last = len(rank.sites) - 1
    counts[last, EDITED] -= 1
    counts[last, CAPTURED_BEFORE] += 2
    edits, captured = rank.planner.due.miscounts(7, counts, rank.sites)
    assert (edits.id, edits.step, edits.site, edits.expected, edits.counted) == (
        "0",
        7,
        rank.sites[last],
        3,
        2,
    )
    assert (edits.kind, captured.kind) == ("intervention_failed", "capture_failed")
    assert (captured.expected, captured.counted) == (3, 5)
