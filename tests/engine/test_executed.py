"""A site that does not run in a real forward, or numbers that are not finite, fail the requests
that they concern, and no other.
"""

import re

import numpy as np
import pytest
from attack import LARGE
from host import Host, capture_of, prompt_of, steer
from patching_kit import for_everyone
from reference import Edit
from size_kit import both_sides, check_sizes
from test_inside import captured
from test_modes import direction
from tiny import LAYERS

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import PositionWindow
from midstream.schemas.requests.specs import StoredSteering

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
    assert receipt.status == "error"
    assert receipt.kind == "capture_failed"
    assert receipt.files == []
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
    assert receipt.status == "error"
    assert receipt.kind == "intervention_failed"
    assert "edits at post_block of layer 2: 2 planned, 0 counted" in receipt.message
    again = host.job(
        prompt_of(12, seed=604),
        max_tokens=3,
        steering=[steer(host.vector(direction(3)), [0, 2], positions=[3, 4])],
    )
    host.run(again)
    assert host.receipts(again)[0].status == "ok", "the steps that follow are sound"
    assert host.receipts(again)[0].applied == 4, "the steps that follow are sound"


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
    assert first.checksum == second.checksum
    assert first.actions == second.actions
    assert second.sizes == []


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
        assert first.status == "ok"
        assert second.status == "error"
        assert second.kind == kind
        assert re.search(rf"{hook} of layer 1: \d+ planned, 0 counted", second.message)
    tp2.call("midstream_fault", "")
    tp2.call("restart_ledgers")
    sound = jobs(630)
    tp2.run(*sound)
    assert [receipt.status for job in sound[:2] for receipt in tp2.receipts(job)] == ["ok"] * 4
    assert len({receipt.checksum for receipt in tp2.receipts(sound[1])}) == 1


# --- Numbers that are not finite ------------------------------------------------------------------


ALL = list(range(LAYERS))
BLOCK = 128


def overflowing(host: Host, start: int = 0) -> list[StoredSteering]:
    """Added at two layers, the vector is finite at the first and not at the second."""
    name = host.vector(np.full(host.info["hidden_size"], LARGE[host.info["dtype"]]))
    return [steer(name, [0, 1], positions=PositionWindow(start))]


def capturing(host: Host, prompt: list[int], **others: object) -> Job:
    return host.job(prompt, capture=capture_of(ALL, "all"), **others)  # type: ignore[arg-type]


def rows_of(host: Host, job: Job) -> np.ndarray:
    return np.stack([host.capture(job).array(layer) for layer in ALL])


@pytest.mark.parametrize("engine", ["v1", "cached", "compiled", "v2", "tp2", "pp2", "overlapped"])
def test_an_edit_that_overflows_fails_its_request_and_names_the_row(
    engine: str, request: pytest.FixtureRequest
) -> None:
    host: Host = request.getfixturevalue(engine)
    prompt = prompt_of(12, seed=500)
    other = prompt_of(9, seed=501)
    first = capturing(host, other)
    alone = host.run_together(first)[first.id][0]
    attacks = [
        host.job(
            prompt,
            max_tokens=4,
            steering=overflowing(host, start=5),
            capture=capture_of(ALL, "all"),
        )
        for _ in range(3)
    ]
    cancelled = host.job(prompt_of(14, seed=502), max_tokens=20, steering=overflowing(host))
    beside = capturing(host, other)
    host.run(*attacks, beside, cancelled, cancel_after={cancelled.id: 2})
    for attack in attacks:
        failed = [receipt for receipt in host.receipts(attack) if receipt.status == "error"]
        assert failed
        assert {receipt.kind for receipt in failed} == {"intervention_failed"}
        assert any(
            "add produced a non-finite row at post_block of layer 1, position 5" in each.message
            for each in failed
        ), failed
    assert np.isfinite(rows_of(host, beside)).all()
    for _ in range(3):  # in blocks that the attacks had, and partly filled
        after = capturing(host, other)
        assert host.run_together(after)[after.id][0].token_ids == alone.token_ids
        if host.settings.vllm.enable_prefix_caching is False:
            assert np.array_equal(rows_of(host, after), rows_of(host, first))
        assert np.isfinite(rows_of(host, after)).all()


def test_blocks_of_an_attack_are_not_served_from_the_prefix_cache(cached: Host) -> None:
    prompt = prompt_of(2 * BLOCK + 9, seed=510)
    plain = cached.job(prompt, max_tokens=2)
    text = cached.run(plain)[plain.id][0].token_ids
    steering = overflowing(cached, start=BLOCK + 3)
    for _ in range(2):
        attack = cached.job(prompt, max_tokens=2, steering=steering)
        cached.run(attack)
        (receipt,) = cached.receipts(attack)
        assert receipt.kind == "intervention_failed"
    again = cached.job(prompt, max_tokens=2, capture=capture_of(ALL, "last_prompt"))
    assert cached.run(again)[again.id][0].token_ids == text
    assert np.isfinite(rows_of(cached, again)).all()


def test_non_finite_global_edits_fail_requests_under_them_and_none_after(v1: Host) -> None:
    first = capturing(v1, prompt_of(9, seed=530))
    v1.run_together(first)
    under = v1.job(prompt_of(14, seed=531), max_tokens=4)
    answer = v1.run_any(under, everyone=for_everyone(1, *overflowing(v1)))
    assert not answer.errors, answer.errors
    assert [receipt.kind for receipt in v1.receipts(under)] == ["intervention_failed"]
    after = capturing(v1, prompt_of(9, seed=530))
    v1.run_together(after)
    assert np.array_equal(rows_of(v1, after), rows_of(v1, first))
