"""The prefix cache serves nobody what was computed under another's intervention, and no capture is
short. v1, fp32.

KV blocks hold 128 tokens, so the prompts here fill several.
"""

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, steer
from msgspec.structs import replace
from reference import Edit, Reference
from rows_kit import check_rows, direction
from size_kit import both_sides, check_sizes
from tiny import LAYERS

from midstream.schemas.jobs.jobs import Job, Output

ALL = list(range(LAYERS))
BLOCK = 128


def run_alone(host: Host, job: Job) -> tuple[list[Output], int]:
    """Its outputs, and how many tokens the prefix cache served."""
    outputs = host.run(job)[job.id]
    return outputs, outputs[0].cached_tokens


def test_prefix_blocks_are_shared_by_equal_steering_digests_alone(
    cached: Host, reference: Reference
) -> None:
    """Steered, plain, steered again, and steered by another vector that differs in one value, or by
    another scale; all of it fits the cache.
    """
    prompt = prompt_of(300, seed=63)  # field case 13, field case 15
    vector = direction(9)
    other = vector.copy()
    other[-1] += 2.0
    edits = {
        "plain": [],
        "one": [Edit(0, vector, op="ablate"), Edit(1, vector)],
        "other": [Edit(0, other, op="ablate"), Edit(1, other)],
    }
    met: set[str] = set()
    for name in ("one", "plain", "one", "other", "plain", "one", "other"):
        job = cached.job(
            prompt,
            max_tokens=2,
            capture=capture_of(ALL, "last_prompt"),
            steering=cached.steering(*edits[name]),
        )
        outputs, found = run_alone(cached, job)
        assert found == (2 * BLOCK if name in met else 0), (name, met)
        check_rows(cached, reference, job, outputs, edits[name])
        met.add(name)


def test_decode_only_steering_shares_prompt_blocks_and_no_generated_ones(
    cached: Host, reference: Reference
) -> None:
    prompt = prompt_of(250, seed=64)  # field case 13, field case 16
    edits = {
        "plain": [],
        "one": [Edit(0, direction(10))],
        "other": [Edit(0, direction(11), op="ablate")],
    }
    answers = {}
    for turn, name in enumerate(("one", "plain", "other", "one")):
        entries = [
            replace(entry, positions="all_generated") for entry in cached.steering(*edits[name])
        ]
        job = cached.job(
            prompt, max_tokens=12, capture=capture_of(ALL, "last_prompt"), steering=entries
        )
        outputs, found = run_alone(cached, job)
        answers[name] = outputs[0].token_ids
        # of 250 tokens, 128 are in a full block
        assert found == (BLOCK if turn else 0), name
        check_rows(cached, reference, job, outputs)
    after = cached.job(
        prompt + answers["one"][:11], max_tokens=1, capture=capture_of(ALL, "last_prompt")
    )
    outputs, found = run_alone(cached, after)
    assert found == BLOCK, "the second block ends with six steered tokens"
    check_rows(cached, reference, after, outputs)


@pytest.mark.parametrize(
    ("positions", "shared"),
    [([290], 2 * BLOCK), ([140], BLOCK), ("all", 0)],
)
def test_blocks_below_the_first_steered_position_stay_shared(
    cached: Host, reference: Reference, positions, shared
) -> None:
    prompt = prompt_of(300, seed=10 + shared)  # field case 16
    vector = direction(4)
    cached.run(cached.job(prompt, max_tokens=1))
    job = cached.job(
        prompt,
        max_tokens=3,
        capture=capture_of(ALL, "last_prompt"),
        steering=[steer(cached.vector(vector), [0], 1.0, positions)],
    )
    outputs, found = run_alone(cached, job)
    assert found == shared
    where = None if positions == "all" else positions
    check_rows(cached, reference, job, outputs, [(0, vector, where)])


@pytest.mark.parametrize(
    ("positions", "reused"),
    [("all_prompt", 0), ([130], BLOCK), ("last_prompt", 2 * BLOCK), ("all_generated", 2 * BLOCK)],
)
def test_captures_on_cached_prompts_are_complete(
    cached: Host, reference: Reference, positions, reused
) -> None:
    prompt = prompt_of(300, seed=920 + len(positions))  # field case 14
    cached.run(cached.job(prompt, max_tokens=1))
    job = cached.job(prompt, max_tokens=4, capture=capture_of(ALL, positions))
    outputs, found = run_alone(cached, job)
    assert found == reused
    check_rows(cached, reference, job, outputs)


def test_rows_of_a_cached_prompt_come_from_the_store_and_equal_computed_ones(
    cached: Host, reference: Reference
) -> None:
    # field case 14
    """The second capture of a prompt computes only what no full block holds; one of other sites
    computes it all.
    """
    prompt = prompt_of(300, seed=61)
    sites = {"post_block": ALL, "mlp_in": [1, 2]}
    readers = []
    for reused in (0, 2 * BLOCK):
        job = cached.job(prompt, max_tokens=4, capture=capture_of([], "all", sites=sites))
        outputs, found = run_alone(cached, job)
        assert found == reused
        assert sum(file.reused for file in cached.receipts(job)[0].files) == reused * 6
        check_rows(cached, reference, job, outputs)
        readers.append(cached.capture(job))
    for hook, layers in sites.items():
        for layer in layers:
            first, second = (reader.array(layer, hook)[: 2 * BLOCK] for reader in readers)
            assert np.array_equal(first, second)
    other = cached.job(prompt, max_tokens=1, capture=capture_of([0], "all_prompt", hook="pre_attn"))
    assert run_alone(cached, other)[1] == 0


def test_rows_kept_of_a_steered_prompt_serve_no_plain_capture_of_it(
    cached: Host, reference: Reference
) -> None:
    """The block below the steered position is shared, and so are its rows."""
    prompt = prompt_of(300, seed=62)  # field case 13
    vector = direction(8)
    steering = [steer(cached.vector(vector), [0], 2.0, [140])]
    for entries, shared in ((steering, 0), (steering, 2 * BLOCK), (None, BLOCK)):
        job = cached.job(
            prompt, max_tokens=1, capture=capture_of(ALL, "all_prompt"), steering=entries
        )
        outputs, found = run_alone(cached, job)
        assert found == shared
        check_rows(cached, reference, job, outputs, [(0, 2.0 * vector, [140])] if entries else [])


@pytest.mark.slow("requests preempt one another")
def test_preempted_requests_have_every_row_once_and_keep_their_limits(
    cached: Host, reference: Reference
) -> None:
    # field case 6
    """Seven blocks for six requests of up to three blocks each: they must take turns. Of every
    other one, edits are limited.
    """
    before = cached.call("midstream_status")[0]["preemptions"]
    name = cached.vector(direction(6))
    jobs = [
        cached.job(
            prompt_of(110, seed=200 + n),
            max_tokens=180,
            capture=both_sides([1]) if n % 2 else capture_of(ALL, "all"),
            steering=[steer(name, [1], 3.0, limit=0.6)] if n % 2 else None,
        )
        for n in range(6)
    ]
    answers = cached.run_together(*jobs)
    assert cached.call("midstream_status")[0]["preemptions"] > before
    for number, job in enumerate(jobs):
        assert cached.capture(job).positions(0) == list(range(289))
        if number % 2:
            (largest,) = check_sizes(cached, job, [1])
            assert 0.59 < largest <= 0.6
        else:
            check_rows(cached, reference, job, answers[job.id])


def test_blocks_of_an_edit_within_its_limit_do_not_serve_its_failing_twin(cached: Host) -> None:
    vector = cached.vector(direction(6))
    prompt = prompt_of(300, seed=300)
    for limit, kind in ((0.6, ""), (-0.6, "edit_too_large"), (-0.6, "edit_too_large")):
        job = cached.job(prompt, max_tokens=2, steering=[steer(vector, [1], 3.0, limit=limit)])
        cached.run_any(job)
        (receipt,) = cached.receipts(job)
        assert receipt.kind == kind
        assert ("layer 1, position 0 is" in receipt.message) == bool(kind)


@pytest.mark.parametrize(
    ("positions", "touched"), [("all_prompt", range(440)), ("all_generated", [])]
)
def test_the_next_chat_turn_reuses_no_block_steered_relative_to_the_prompts_end(
    cached: Host, reference: Reference, positions, touched
) -> None:
    # field case 13
    """The second prompt is the first with its answer: other tokens are the prompt's now."""
    vector = direction(6)
    first = prompt_of(300, seed=31)
    steering = [steer(cached.vector(vector), [0], 2.0, positions)]
    job = cached.job(first, max_tokens=141, steering=steering)
    second = first + cached.run(job)[job.id][0].token_ids[:140]
    again = cached.job(
        second, max_tokens=1, capture=capture_of(ALL, "last_prompt"), steering=steering
    )
    outputs, _ = run_alone(cached, again)
    check_rows(cached, reference, again, outputs, [(0, 2.0 * vector, list(touched))])


def test_a_failed_intervention_leaves_no_blocks_that_claim_it(
    cached: Host, reference: Reference
) -> None:
    """A failed request runs on without its edit; a repeat must not read the blocks that it left.

    The worker resets the cache for its digest, also while other requests hold their blocks.
    """  # field case 13
    prompt = prompt_of(300, seed=41)
    vector = direction(7)
    steering = [steer(cached.vector(vector), [0])]
    cached.call("midstream_fault", "admit")
    failed = cached.job(prompt, max_tokens=1, steering=steering)
    cached.run(failed)
    cached.call("midstream_fault", "")
    assert cached.receipts(failed)[0].status == "error"
    again = cached.job(prompt, max_tokens=1, steering=steering)
    assert run_alone(cached, again)[1] > 0
    assert (
        "cached prefix was computed by a request whose intervention failed"
        in cached.receipts(again)[0].message
    )
    assert not cached.run_any(cached.job(prompt_of(100, seed=42), max_tokens=150), look=True).errors
    assert cached.call("midstream_status")[0]["tainted"] == 0
    for reused in (0, 2 * BLOCK):
        anew = cached.job(
            prompt, max_tokens=2, capture=capture_of(ALL, "last_prompt"), steering=steering
        )
        outputs, found = run_alone(cached, anew)
        assert found == reused
        check_rows(cached, reference, anew, outputs, [(0, vector, None)])


@pytest.mark.parametrize(("way", "crossing"), [("cached", 2 * BLOCK), ("tp2", 0)])
def test_tenants_reuse_each_others_blocks_only_where_the_cache_is_shared(
    way: str, crossing: int, request
) -> None:
    """`cached` has prefix_cache_scope=shared, `tp2` has `tenant`; whatever is asked for.

    Reuse is reported as `cached_tokens`.
    """
    host: Host = request.getfixturevalue(way)
    asked = {
        970: {},
        971: {"steering": [steer(host.vector(direction(70)), [0], 2.0)]},
        972: {"capture": capture_of(ALL, "all_prompt")},
    }
    for seed, fields in asked.items():
        found = []
        for tenant in "aabb":
            job = replace(
                host.job(prompt_of(300, seed=seed), max_tokens=1, **fields), tenant=tenant
            )
            found.append(run_alone(host, job)[1])
        assert found == [0, 2 * BLOCK, crossing, 2 * BLOCK], fields
