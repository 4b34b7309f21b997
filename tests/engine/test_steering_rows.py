"""Steered streams are the reference's streams, steered requests do not touch their neighbours.

v1 runner, fp32.
"""

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error, steer
from reference import Edit, Reference
from size_kit import both_sides, check_sizes, sizes_of
from tiny import HIDDEN, LAYERS
from tolerances import FP32_BATCH, FP32_ROWS

from midstream.schemas.prompts.selectors import Window

ALL = list(range(LAYERS))


def direction(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=HIDDEN).astype(np.float32)


@pytest.mark.parametrize("layers", [[0], [2], ALL])
def test_a_steered_request_has_the_reference_stream_in_every_later_layer(
    v1: Host, reference: Reference, layers
) -> None:
    vector = direction(1)
    prompt = prompt_of(100)
    job = v1.job(
        prompt,
        max_tokens=5,
        capture=capture_of(ALL, "all"),
        steering=[steer(v1.vector(vector), layers, 1.5)],
    )
    tokens = prompt + v1.run(job)[job.id][0].token_ids
    wanted = reference.post_block(tokens[:-1], [(layer, 1.5 * vector, None) for layer in layers])
    plain = reference.post_block(tokens[:-1])
    for layer in ALL:
        got = v1.capture(job).array(layer)
        assert relative_error(got, wanted[layer]) <= FP32_ROWS
        if layer > min(layers):
            assert relative_error(got, plain[layer]) > 0.05


def test_entries_for_one_layer_add_up(v1: Host, reference: Reference) -> None:
    first, second = direction(1), direction(2)
    prompt = prompt_of(12)
    entries = [
        steer(v1.vector(first), [1], 2.0),
        steer(v1.vector(second), [1, 2], -1.0),
        steer(v1.vector(second), [1], 0.5, [3, 4]),
    ]
    job = v1.job(prompt, max_tokens=1, capture=capture_of(ALL, "all"), steering=entries)
    v1.run(job)
    edits = [
        (1, 2.0 * first, None),
        (1, -second, None),
        (2, -second, None),
        (1, 0.5 * second, [3, 4]),
    ]
    wanted = reference.post_block(prompt, edits)
    for layer in ALL:
        assert relative_error(v1.capture(job).array(layer), wanted[layer]) <= FP32_ROWS


@pytest.mark.parametrize("positions", [[3], [70, 2], [-1]])
def test_positional_steering_fires_once_at_its_position(
    v1: Host, reference: Reference, positions
) -> None:
    # field case 9
    """Not in every prefill chunk (steps hold 64 tokens) and not in every decode step."""
    vector, prompt = direction(3), prompt_of(100)
    where = sorted(position % 100 for position in positions)
    job = v1.job(
        prompt,
        max_tokens=6,
        capture=capture_of(ALL, "all"),
        steering=[steer(v1.vector(vector), [1], 1.0, where)],
    )
    tokens = prompt + v1.run(job)[job.id][0].token_ids
    wanted = reference.post_block(tokens[:-1], [(1, vector, where)])
    for layer in ALL:
        assert relative_error(v1.capture(job).array(layer), wanted[layer]) <= FP32_ROWS
    assert v1.receipts(job)[0].applied == len(where)


def test_generated_only_steering_leaves_the_prompt_alone(v1: Host, reference: Reference) -> None:
    vector, prompt = direction(4), prompt_of(30)
    job = v1.job(
        prompt,
        max_tokens=6,
        capture=capture_of(ALL, "all"),
        steering=[steer(v1.vector(vector), [0], 1.0, "all_generated")],
    )
    tokens = prompt + v1.run(job)[job.id][0].token_ids
    wanted = reference.post_block(tokens[:-1], [(0, vector, list(range(30, 35)))])
    for layer in ALL:
        assert relative_error(v1.capture(job).array(layer), wanted[layer]) <= FP32_ROWS


def test_the_second_prompt_of_a_job_is_steered_like_the_first(
    v1: Host, reference: Reference
) -> None:
    vector = direction(5)  # field case 11
    job = v1.job(
        prompt_of(9),
        prompt_of(14, seed=1),
        max_tokens=1,
        capture=capture_of([3], "all"),
        steering=[steer(v1.vector(vector), [0])],
    )
    v1.run(job)
    for request, prompt in enumerate(job.prompts):
        wanted = reference.post_block(prompt.token_ids, [(0, vector, None)])
        assert relative_error(v1.capture(job).array(3, request=request), wanted[3]) <= FP32_ROWS


def test_neighbours_of_a_steered_request_keep_their_rows(v1: Host, reference: Reference) -> None:
    vector = 50 * direction(6)
    steered = [
        v1.job(prompt_of(20, seed=n), max_tokens=8, steering=[steer(v1.vector(vector), ALL)])
        for n in range(4)
    ]
    plain = [
        v1.job(prompt_of(20, seed=50 + n), max_tokens=8, capture=capture_of(ALL, "all"))
        for n in range(4)
    ]
    answers = v1.run(*(job for pair in zip(steered, plain, strict=True) for job in pair))
    for job in plain:
        tokens = job.prompts[0].token_ids + answers[job.id][0].token_ids
        wanted = reference.post_block(tokens[:-1])
        for layer in ALL:
            assert relative_error(v1.capture(job).array(layer), wanted[layer]) <= FP32_ROWS


def test_scale_zero_and_a_vector_with_its_negative_change_nothing(v1: Host) -> None:
    name, prompt = v1.vector(direction(7)), prompt_of(25)
    plain = v1.job(prompt, max_tokens=1, capture=capture_of(ALL, "all"))
    zero = v1.job(
        prompt, max_tokens=1, capture=capture_of(ALL, "all"), steering=[steer(name, ALL, 0.0)]
    )
    both = v1.job(
        prompt,
        max_tokens=1,
        capture=capture_of(ALL, "all"),
        steering=[steer(name, ALL), steer(name, ALL, -1.0)],
    )
    for job in (plain, zero, both):
        v1.run(job)
    for layer in ALL:
        wanted = v1.capture(plain).array(layer)
        assert relative_error(v1.capture(zero).array(layer), wanted) <= FP32_BATCH
        assert relative_error(v1.capture(both).array(layer), wanted) <= FP32_BATCH


def test_configurations_beyond_the_table_wait_and_are_right(v1: Host, reference: Reference) -> None:
    # field case 24
    """The engine of this fixture has 4 rows; 20 distinct configurations are sent at once."""
    vectors = [direction(100 + n) for n in range(20)]
    jobs = [
        v1.job(
            prompt_of(15, seed=n),
            max_tokens=3,
            capture=capture_of([3], "all"),
            steering=[steer(v1.vector(vector), [1])],
        )
        for n, vector in enumerate(vectors)
    ]
    answers = v1.run(*jobs)
    for job, vector in zip(jobs, vectors, strict=True):
        tokens = job.prompts[0].token_ids + answers[job.id][0].token_ids
        wanted = reference.post_block(tokens[:-1], [(1, vector, None)])
        assert relative_error(v1.capture(job).array(3), wanted[3]) <= FP32_ROWS
    assert v1.call("midstream_status")[0]["rows_used"] == 0


def test_an_intervention_that_a_rank_cannot_apply_fails_its_request_only(v1: Host) -> None:
    v1.call("midstream_fault", "admit")
    try:
        bad = v1.job(prompt_of(5), max_tokens=2, steering=[steer(v1.vector(direction(8)), [0])])
        good = v1.job(prompt_of(5), max_tokens=2, capture=capture_of([0], "all"))
        v1.run(bad, good)
        assert (v1.receipts(bad)[0].status, v1.receipts(good)[0].status) == ("error", "ok")
        assert "fault injected: admit" in v1.receipts(bad)[0].message
    finally:
        v1.call("midstream_fault", "")


def test_vectors_that_a_rank_refuses_fail_the_job_before_it_runs(v1: Host) -> None:
    v1.call("midstream_fault", "put_vectors")  # field case 29
    try:
        job = v1.job(prompt_of(5), max_tokens=2, steering=[steer(v1.vector(direction(9)), [0])])
        assert "sending vectors failed on rank 0: fault injected" in v1.run_any(job).errors[job.id]
    finally:
        v1.call("midstream_fault", "")
    v1.run(job)
    assert v1.receipts(job)[0].status == "ok"


def test_a_vector_is_sent_to_the_ranks_once(v1: Host) -> None:
    name = v1.vector(direction(10))  # field case 45, field case 47
    before = v1.call("midstream_status")[0]["vectors"]
    jobs = [
        v1.job(prompt_of(5, seed=n), max_tokens=2, steering=[steer(name, [0])]) for n in range(5)
    ]
    v1.run(*jobs)
    v1.run(v1.job(prompt_of(6), max_tokens=2, steering=[steer(name, [1], 3.0)]))
    assert v1.call("midstream_status")[0]["vectors"] == before + 1


def test_reported_sizes_are_those_of_rows_before_and_after_the_edits(v1: Host) -> None:
    """Several edits at a site, at some positions, in chunks of 64 tokens, next to one another."""
    first, second = v1.vector(direction(21)), v1.vector(direction(22))
    edits = {
        "all": [steer(first, [1, 3], 0.3)],
        "list": [steer(first, [1], 0.3, [2, 70, 99]), steer(second, [1], 2.0, [70])],
        "generated": [steer(second, [1], 1.0, "all_generated")],
        "ablate": v1.steering(Edit(1, direction(23), op="ablate")),
    }
    jobs = {
        name: v1.job(
            prompt_of(100, seed=n), max_tokens=40, capture=both_sides([1, 3]), steering=entries
        )
        for n, (name, entries) in enumerate(edits.items())
    }
    plain = v1.job(prompt_of(30), max_tokens=2, capture=capture_of([1], "all"))
    v1.run(*jobs.values(), plain)
    assert v1.receipts(plain)[0].sizes == []
    check_sizes(v1, jobs["all"], [1, 3])
    check_sizes(v1, jobs["list"], [1], [2, 70, 99])
    check_sizes(v1, jobs["generated"], [1], range(100, 139))
    check_sizes(v1, jobs["ablate"], [1])


def test_a_limit_scales_what_is_larger_and_leaves_the_rest(v1: Host, reference: Reference) -> None:
    vector, prompt = v1.vector(direction(24)), prompt_of(80)
    jobs = [
        v1.job(
            prompt,
            max_tokens=6,
            capture=both_sides([1]),
            steering=[steer(vector, [1], scale, limit=limit)],
        )
        for scale, limit in ((5.0, 0.7), (5.0, 0.0), (0.05, 0.7), (0.05, 0.0))
    ]
    v1.run(*jobs)
    limited, free, small, same = (check_sizes(v1, job, [1])[0] for job in jobs)
    assert free > 0.8
    assert 0.699 < limited <= 0.7
    assert small == same < 0.7
    scaled, unscaled = (v1.capture(job, 1).array(1)[:80] for job in jobs[:2])
    before, large = v1.capture(jobs[1]).array(1)[:80], sizes_of(v1, jobs[1], 1)[:80]
    wanted = before + np.minimum(1, 0.7 / large)[:, None] * (unscaled - before)
    assert relative_error(scaled, wanted) <= FP32_ROWS


def test_an_edit_beyond_a_failing_limit_fails_its_request_alone(v1: Host) -> None:
    vector = v1.vector(direction(25))
    bad, good = (
        v1.job(
            prompt_of(90, seed=n), max_tokens=4, steering=[steer(vector, [2], scale, limit=-0.7)]
        )
        for n, scale in enumerate((50.0, 0.01))
    )
    late = v1.job(
        prompt_of(20),
        max_tokens=12,
        steering=[steer(vector, [2], 50.0, Window(25), limit=-0.7)],
    )
    v1.run_any(bad, good, late)
    assert v1.receipts(good)[0].status == "ok"
    for job, position in ((bad, 0), (late, 25)):
        receipt = v1.receipts(job)[0]
        assert receipt.kind == "edit_too_large"
        assert f"post_block of layer 2, position {position} is" in receipt.message
        assert receipt.sizes == []
