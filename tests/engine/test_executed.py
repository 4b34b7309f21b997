"""A site that does not run in a real forward fails the requests that it concerns, and no other."""

import re

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, steer
from reference import Edit
from size_kit import both_sides, check_sizes
from test_inside import captured
from test_modes import direction
from tiny import LAYERS

from midstream.schemas.jobs.jobs import Job

LAST = LAYERS - 1


@pytest.mark.parametrize("engine", ["v1", "compiled"])
def test_a_site_that_did_not_capture_fails_those_who_capture_there(
    engine: str, request: pytest.FixtureRequest
) -> None:
    host: Host = request.getfixturevalue(engine)
    here = host.job(prompt_of(80, seed=600), max_tokens=3, capture=capture_of([0, LAST], "all"))
    elsewhere = host.job(prompt_of(9, seed=601), max_tokens=3, capture=capture_of([0], "all"))
    edited = host.job(
        prompt_of(9, seed=602), max_tokens=3, steering=[steer(host.vector(direction(1)), [1])]
    )
    host.call("midstream_fault", "skip_site")
    host.run_together(here, elsewhere, edited)
    receipt = host.receipts(here)[0]
    assert (receipt.status, receipt.kind, receipt.files) == ("error", "capture_failed", [])
    assert re.search(
        (rf"rows captured before edits at post_block of layer {LAST}: \d+ planned, 0 " r"counted"),
        receipt.message,
    )
    assert [host.receipts(job)[0].status for job in (elsewhere, edited)] == ["ok", "ok"]


@pytest.mark.parametrize("engine", ["v1", "compiled"])
def test_a_site_that_did_not_edit_fails_its_request(
    engine: str, request: pytest.FixtureRequest
) -> None:
    host: Host = request.getfixturevalue(engine)
    job = host.job(
        prompt_of(12, seed=603),
        max_tokens=3,
        steering=[steer(host.vector(direction(2)), [0, 2], positions=[3, 4])],
    )
    host.call("midstream_fault", "skip_site")
    host.run(job)
    receipt = host.receipts(job)[0]
    assert (receipt.status, receipt.kind) == ("error", "intervention_failed")
    assert "edits at post_block of layer 2: 2 planned, 0 counted" in receipt.message
    again = host.job(
        prompt_of(12, seed=604),
        max_tokens=3,
        steering=[steer(host.vector(direction(3)), [0, 2], positions=[3, 4])],
    )
    host.run(again)
    assert (host.receipts(again)[0].status, host.receipts(again)[0].applied) == ("ok", 4), (
        "the steps that follow are sound"
    )


def test_ranks_agree_on_the_sizes_of_limited_edits(tp2: Host) -> None:
    """The norm is that of whole rows, and the sizes are in the checksum of each rank's receipt."""
    tp2.call("restart_ledgers")  # faults of earlier tests left them different
    job = tp2.job(
        prompt_of(20, seed=607),
        max_tokens=20,
        capture=both_sides([2]),
        steering=[steer(tp2.vector(direction(4)), [2], 3.0, limit=0.4)],
    )
    tp2.run(job)
    (largest,) = check_sizes(tp2, job, [2])
    assert 0.39 < largest <= 0.4
    first, second = tp2.receipts(job)
    assert (first.checksum, first.actions, second.sizes) == (second.checksum, second.actions, [])


@pytest.mark.parametrize("hook", ["z", "k", "mlp_act"])
def test_each_rank_answers_for_its_own_columns_of_sites_inside(tp2: Host, hook: str) -> None:
    """A site of one rank that does not capture or edit is in the receipts; requests beside it are
    sound.
    """
    shape = tp2.info["inside"][hook]
    vector = (
        np.random.default_rng(3).normal(size=shape["heads"] * shape["width"]).astype(np.float32)
    )
    edit = tp2.steering(Edit(1, vector, [3, 4], hook))

    def jobs(seed: int) -> tuple[Job, Job, Job]:
        reads = captured(
            tp2,
            tp2.job(prompt_of(12, seed=seed), max_tokens=3),
            hook=hook,
            layers=1,
            positions="all",
        )
        return (
            reads,
            tp2.job(prompt_of(12, seed=seed + 1), max_tokens=3, steering=edit),
            tp2.job(prompt_of(9, seed=2), max_tokens=3),
        )

    for number, kind in enumerate(("capture_failed", "intervention_failed")):
        mine = jobs(610 + 2 * number)[number]
        tp2.call("midstream_fault", "skip_site:rank=1")
        tp2.run_any(mine)
        first, second = tp2.receipts(mine)
        assert (first.status, second.status, second.kind) == ("ok", "error", kind)
        assert re.search(rf"{hook} of layer 1: \d+ planned, 0 counted", second.message)
    tp2.call("midstream_fault", "")
    tp2.call("restart_ledgers")
    sound = jobs(630)
    tp2.run(*sound)
    assert [receipt.status for job in sound[:2] for receipt in tp2.receipts(job)] == ["ok"] * 4
    assert len({receipt.checksum for receipt in tp2.receipts(sound[1])}) == 1
