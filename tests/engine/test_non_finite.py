"""Numbers that are not finite stay with the request that made them: it fails, and no bit of another
request's numbers changes.
"""

import numpy as np
import pytest
from attack import LARGE
from host import Host, capture_of, prompt_of, steer
from patching_kit import for_everyone
from tiny import LAYERS

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import PositionWindow
from midstream.schemas.requests.specs import StoredSteering

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
    prompt, other = prompt_of(12, seed=500), prompt_of(9, seed=501)
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
