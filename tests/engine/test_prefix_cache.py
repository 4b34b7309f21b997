"""The prefix cache serves nobody what was computed under another's intervention, and no capture is
short. v1, fp32.

KV blocks hold 128 tokens, so the prompts here fill several.
"""

import msgspec
import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error, steer
from reference import Edit, Reference
from size_kit import both_sides, check_sizes
from tiny import HIDDEN, LAYERS
from tolerances import FP32_ROWS

ALL = list(range(LAYERS))
BLOCK = 128


def direction(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=HIDDEN).astype(np.float32)


def rows_match(host: Host, reference: Reference, job, output, edits=()) -> None:
    tokens = job.prompts[0].token_ids + output.token_ids
    wanted = reference.post_block(tokens[:-1], edits)
    positions = host.capture(job).positions(0)
    for layer in job.captures[0][0].sites["post_block"]:
        assert relative_error(host.capture(job).array(layer), wanted[layer][positions]) <= FP32_ROWS


def test_steered_blocks_never_serve_a_plain_request(cached: Host, reference: Reference) -> None:
    prompt, vector = prompt_of(300, seed=1), direction(1)  # field case 13
    steered = cached.job(prompt, max_tokens=2, steering=[steer(cached.vector(vector), [0], 3.0)])
    plain = cached.job(prompt, max_tokens=2, capture=capture_of(ALL, "last_prompt"))
    cached.run(steered)
    output = cached.run(plain)[plain.id][0]
    assert output.cached_tokens == 0
    rows_match(cached, reference, plain, output)


def test_plain_blocks_never_serve_a_steered_request(cached: Host, reference: Reference) -> None:
    prompt, vector = prompt_of(300, seed=2), direction(2)  # field case 13
    cached.run(cached.job(prompt, max_tokens=2))
    steered = cached.job(
        prompt,
        max_tokens=2,
        capture=capture_of(ALL, "last_prompt"),
        steering=[steer(cached.vector(vector), [0], 3.0)],
    )
    output = cached.run(steered)[steered.id][0]
    assert output.cached_tokens == 0
    rows_match(cached, reference, steered, output, [(0, 3.0 * vector, None)])


def test_equal_interventions_share_blocks_and_another_scale_does_not(
    cached: Host, reference: Reference
) -> None:
    prompt, vector = prompt_of(300, seed=3), direction(3)
    name = cached.vector(vector)
    cached.run(cached.job(prompt, max_tokens=1, steering=[steer(name, [0])]))
    same = cached.job(
        prompt, max_tokens=1, capture=capture_of(ALL, "last_prompt"), steering=[steer(name, [0])]
    )
    output = cached.run(same)[same.id][0]
    assert output.cached_tokens == 2 * BLOCK
    rows_match(cached, reference, same, output, [(0, vector, None)])
    other = cached.job(prompt, max_tokens=1, steering=[steer(name, [0], 1.5)])
    assert cached.run(other)[other.id][0].cached_tokens == 0


def test_prefix_blocks_are_not_shared_across_steering_digests(
    cached: Host, reference: Reference
) -> None:
    """Steered, plain, steered again, and steered by another vector that differs in one value; all
    of it fits the cache.
    """
    prompt, vector = prompt_of(300, seed=63), direction(9)  # field case 13, field case 15
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
        output = cached.run(job)[job.id][0]
        assert output.cached_tokens == (2 * BLOCK if name in met else 0), (name, met)
        rows_match(cached, reference, job, output, edits[name])
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
        (entry,) = cached.steering(*edits[name]) or [None]
        steering = [msgspec.structs.replace(entry, positions="all_generated")] if entry else None
        job = cached.job(
            prompt, max_tokens=12, capture=capture_of(ALL, "last_prompt"), steering=steering
        )
        output = answers[name] = cached.run(job)[job.id][0]
        # of 250 tokens, 128 are in a full block
        assert output.cached_tokens == (BLOCK if turn else 0), name
        generated = list(range(250, 261))
        rows_match(
            cached,
            reference,
            job,
            output,
            [edit._replace(positions=generated) for edit in edits[name]],
        )
    after = cached.job(
        prompt + answers["one"].token_ids[:11], max_tokens=1, capture=capture_of(ALL, "last_prompt")
    )
    output = cached.run(after)[after.id][0]
    assert output.cached_tokens == BLOCK, "the second block ends with six steered tokens"
    rows_match(cached, reference, after, output)


@pytest.mark.parametrize(
    ("positions", "shared"),
    [([290], 2 * BLOCK), ([140], BLOCK), ("all_generated", 2 * BLOCK), ("all", 0)],
)
def test_blocks_below_the_first_steered_position_stay_shared(
    cached: Host, reference: Reference, positions, shared
) -> None:
    """All of the prompt's, where only generated tokens are steered."""  # field case 16
    prompt, vector = prompt_of(300, seed=10 + shared), direction(4)
    cached.run(cached.job(prompt, max_tokens=1))
    job = cached.job(
        prompt,
        max_tokens=3,
        capture=capture_of(ALL, "last_prompt"),
        steering=[steer(cached.vector(vector), [0], 1.0, positions)],
    )
    output = cached.run(job)[job.id][0]
    assert output.cached_tokens == shared
    where = (
        {"all": None, "all_generated": [300, 301]}.get(positions)
        if isinstance(positions, str)
        else positions
    )
    rows_match(cached, reference, job, output, [(0, vector, where)])


@pytest.mark.parametrize(
    ("positions", "reused"),
    [("all_prompt", 0), ([130], BLOCK), ("last_prompt", 2 * BLOCK), ("all_generated", 2 * BLOCK)],
)
def test_captures_on_cached_prompts_are_complete(
    cached: Host, reference: Reference, positions, reused
) -> None:
    prompt = prompt_of(300, seed=20 + reused)  # field case 14
    cached.run(cached.job(prompt, max_tokens=1))
    job = cached.job(prompt, max_tokens=4, capture=capture_of(ALL, positions))
    output = cached.run(job)[job.id][0]
    assert output.cached_tokens == reused
    rows_match(cached, reference, job, output)


def test_rows_of_a_cached_prompt_come_from_the_store_and_equal_computed_ones(
    cached: Host, reference: Reference
) -> None:
    # field case 14
    """The second capture of a prompt computes only what no full block holds; one of other sites
    computes it all.
    """
    prompt, sites = prompt_of(300, seed=61), {"post_block": ALL, "mlp_in": [1, 2]}
    outputs = {}
    for turn in ("computed", "served"):
        job = cached.job(prompt, max_tokens=4, capture=capture_of([], "all", sites=sites))
        outputs[turn] = (job, cached.run(job)[job.id][0])
    reused = {
        turn: sum(file.reused for file in cached.receipts(job)[0].files)
        for turn, (job, _) in outputs.items()
    }
    assert reused == {"computed": 0, "served": 2 * BLOCK * 6}
    assert {turn: output.cached_tokens for turn, (_, output) in outputs.items()} == {
        "computed": 0,
        "served": 2 * BLOCK,
    }
    first, second = (cached.capture(job) for job, _ in outputs.values())
    for hook, layers in sites.items():
        for layer in layers:
            assert np.array_equal(
                first.array(layer, hook)[: 2 * BLOCK], second.array(layer, hook)[: 2 * BLOCK]
            )
    rows_match(cached, reference, *outputs["served"])
    other = cached.job(prompt, max_tokens=1, capture=capture_of([0], "all_prompt", hook="pre_attn"))
    assert cached.run(other)[other.id][0].cached_tokens == 0


def test_rows_kept_of_a_steered_prompt_serve_no_plain_capture_of_it(
    cached: Host, reference: Reference
) -> None:
    prompt, vector = prompt_of(300, seed=62), direction(8)  # field case 13
    steering = [steer(cached.vector(vector), [0], 2.0, [140])]
    for _ in range(2):
        steered = cached.job(
            prompt, max_tokens=1, capture=capture_of(ALL, "all_prompt"), steering=steering
        )
        output = cached.run(steered)[steered.id][0]
        rows_match(cached, reference, steered, output, [(0, 2.0 * vector, [140])])
    assert output.cached_tokens == 2 * BLOCK
    plain = cached.job(prompt, max_tokens=1, capture=capture_of(ALL, "all_prompt"))
    output = cached.run(plain)[plain.id][0]
    # the block below the steered position is shared, and so are its rows
    assert output.cached_tokens == BLOCK
    rows_match(cached, reference, plain, output)


def test_preempted_requests_have_every_row_once(cached: Host, reference: Reference) -> None:
    # field case 6
    """Seven blocks for six requests of up to three blocks each: they must take turns."""
    before = cached.call("midstream_status")[0]["preemptions"]
    vector = direction(5)
    jobs = [
        cached.job(
            prompt_of(110, seed=200 + n),
            max_tokens=180,
            capture=capture_of(ALL, "all"),
            steering=[steer(cached.vector(vector), [1], 0.3)] if n % 2 else None,
        )
        for n in range(6)
    ]
    answers = cached.run_together(*jobs)
    assert cached.call("midstream_status")[0]["preemptions"] > before
    for number, job in enumerate(jobs):
        output = answers[job.id][0]
        assert len(output.token_ids) == 180
        assert cached.capture(job).positions(0) == list(range(289))
        rows_match(cached, reference, job, output, [(1, 0.3 * vector, None)] if number % 2 else [])


def test_limits_hold_for_preempted_requests_and_cached_prompts(cached: Host) -> None:
    vector = cached.vector(direction(6))
    before = cached.call("midstream_status")[0]["preemptions"]
    jobs = [
        cached.job(
            prompt_of(110, seed=300 + n),
            max_tokens=180,
            capture=both_sides([1]),
            steering=[steer(vector, [1], 3.0, limit=0.6)],
        )
        for n in range(5)
    ]
    cached.run_together(*jobs)
    assert cached.call("midstream_status")[0]["preemptions"] > before
    for job in jobs:
        (largest,) = check_sizes(cached, job, [1])
        assert 0.59 < largest <= 0.6
    again = cached.job(
        prompt_of(300, seed=300), max_tokens=2, steering=[steer(vector, [1], 3.0, limit=0.6)]
    )
    cached.run(again)
    # its failing twin may not be served the blocks of a request that failed
    for _ in range(2):
        failing = cached.job(
            prompt_of(300, seed=300), max_tokens=2, steering=[steer(vector, [1], 3.0, limit=-0.6)]
        )
        cached.run_any(failing)
        receipt = cached.receipts(failing)[0]
        assert receipt.kind == "edit_too_large"
        assert "layer 1, position 0 is" in receipt.message


@pytest.mark.parametrize(
    ("positions", "touched"),
    [("all_prompt", range(440)), ("all_generated", []), ("last_prompt", [439])],
)
def test_the_next_chat_turn_reuses_no_block_steered_relative_to_the_prompts_end(
    cached: Host, reference: Reference, positions, touched
) -> None:
    # field case 13
    """The second prompt is the first with its answer: other tokens are the prompt's now."""
    vector, first = direction(6), prompt_of(300, seed=31)
    steering = [steer(cached.vector(vector), [0], 2.0, positions)]
    job = cached.job(first, max_tokens=141, steering=steering)
    second = first + cached.run(job)[job.id][0].token_ids[:140]
    again = cached.job(
        second, max_tokens=1, capture=capture_of(ALL, "last_prompt"), steering=steering
    )
    output = cached.run(again)[again.id][0]
    rows_match(cached, reference, again, output, [(0, 2.0 * vector, list(touched))])


def test_a_failed_intervention_leaves_no_blocks_that_claim_it(
    cached: Host, reference: Reference
) -> None:
    """A failed request runs on without its edit; a repeat must not read the blocks that it left.

    The worker resets the cache for its digest, also while other requests hold their blocks.
    """  # field case 13
    prompt, vector = prompt_of(300, seed=41), direction(7)
    name = cached.vector(vector)
    cached.call("midstream_fault", "admit")
    failed = cached.job(prompt, max_tokens=1, steering=[steer(name, [0])])
    cached.run(failed)
    cached.call("midstream_fault", "")
    assert cached.receipts(failed)[0].status == "error"
    again = cached.job(prompt, max_tokens=1, steering=[steer(name, [0])])
    assert cached.run(again)[again.id][0].cached_tokens > 0
    assert (
        "cached prefix was computed by a request whose intervention failed"
        in cached.receipts(again)[0].message
    )
    answer = cached.run_any(cached.job(prompt_of(100, seed=42), max_tokens=150), look=True)
    assert not answer.errors
    assert cached.call("midstream_status")[0]["tainted"] == 0
    for reused in (0, 2 * BLOCK):
        anew = cached.job(
            prompt,
            max_tokens=2,
            capture=capture_of(ALL, "last_prompt"),
            steering=[steer(name, [0])],
        )
        output = cached.run(anew)[anew.id][0]
        assert output.cached_tokens == reused
        rows_match(cached, reference, anew, output, [(0, vector, None)])


@pytest.mark.parametrize(("way", "crossing"), [("cached", 2 * BLOCK), ("tp2", 0)])
@pytest.mark.parametrize("asks", ["nothing", "steering", "capture"])
def test_tenants_reuse_each_others_blocks_only_where_the_cache_is_shared(
    way: str, crossing: int, asks: str, request
) -> None:
    """`cached` has prefix_cache_scope=shared, `tp2` has `tenant`.

    Reuse is reported as `cached_tokens`.
    """
    host: Host = request.getfixturevalue(way)
    prompt = prompt_of(300, seed=70 + len(asks))
    steering = [steer(host.vector(direction(70)), [0], 2.0)] if asks == "steering" else None
    capture = capture_of(ALL, "all_prompt") if asks == "capture" else None
    found = {}
    for turn in ("a first", "a again", "b first", "b again"):
        job = msgspec.structs.replace(
            host.job(prompt, max_tokens=1, steering=steering, capture=capture), tenant=turn[0]
        )
        found[turn] = host.run(job)[job.id][0].cached_tokens
    assert found == {"a first": 0, "a again": 2 * BLOCK, "b first": crossing, "b again": 2 * BLOCK}
