"""Steered streams are the reference's streams: over chunks and decode steps, for every prompt, in
ranges of positions, and within limits.

v1 runner, fp32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error, steer
from msgspec import UNSET
from msgspec.structs import replace
from nursery import Nursery
from reference import Edit, Reference
from rows_kit import check_rows, direction
from size_kit import both_sides, check_sizes, sizes_of
from tiny import LAYERS
from tolerances import FP32_ROWS
from trigger_kit import open_of

from midstream.schemas.jobs.jobs import Job, Output
from midstream.schemas.prompts.selectors import PositionWindow, select
from midstream.schemas.prompts.windows import Trigger
from midstream.schemas.requests.specs import StoredSteering

ALL = list(range(LAYERS))
BLOCK = 128


def test_entries_for_one_layer_add_up_for_every_prompt_of_a_job(
    v1: Host, reference: Reference
) -> None:
    # field case 11
    """Entries for several layers, and for some positions; the second prompt of a job is steered
    like the first, in two steps.
    """
    first = direction(1)
    second = direction(2)
    entries = [
        steer(v1.vector(first), [1], 2.0),
        steer(v1.vector(second), [1, 2], -1.0),
        steer(v1.vector(second), [1], 0.5, [3, 4]),
    ]
    job = v1.job(
        prompt_of(12),
        prompt_of(100, seed=1),
        max_tokens=4,
        capture=capture_of(ALL, "all"),
        steering=entries,
    )
    edits = [
        (1, 2.0 * first, None),
        (1, -second, None),
        (2, -second, None),
        (1, 0.5 * second, [3, 4]),
    ]
    check_rows(v1, reference, job, v1.run(job)[job.id], edits)


def test_configurations_beyond_the_table_wait_and_are_right(v1: Host, reference: Reference) -> None:
    # field case 24
    """The engine of this fixture has 4 rows, and 10 of the operator's; 18 distinct configurations
    are under way at once.
    """
    vectors = [direction(100 + n) for n in range(18)]
    jobs = [
        v1.job(
            prompt_of(15, seed=n),
            max_tokens=60,
            capture=capture_of([3], "all"),
            steering=[steer(v1.vector(vector), [1])],
        )
        for n, vector in enumerate(vectors)
    ]
    answer = v1.run_any(*jobs)
    assert not answer.errors
    assert answer.waiting > 0
    for job, vector in zip(jobs, vectors, strict=True):
        check_rows(v1, reference, job, answer.outputs[job.id], [(1, vector, None)])
    assert v1.call("midstream_status")[0]["rows_used"] == 0


@pytest.mark.parametrize("way", ["v1", "cached", "v2", "tp2", "pp2", "overlapped"])
def test_requests_with_many_entries_begin_beside_others(
    request: pytest.FixtureRequest, way: str
) -> None:
    """With more than 64 entries they wait for one step of those that run. With few KV blocks
    (`cached`, `overlapped`) they are preempted as well.
    """
    host: Host = request.getfixturevalue(way)
    split = way in ("tp2", "pp2", "overlapped")
    reference = Reference(request.getfixturevalue("qwen3" if split else "llama"))
    vector = direction(200)
    name = host.vector(vector)
    plain = [
        host.job(prompt_of(90, seed=n), max_tokens=60, capture=capture_of(ALL, "all"))
        for n in range(3)
    ]
    many = [
        host.job(
            prompt_of(90, seed=10 + n),
            max_tokens=40,
            capture=capture_of(ALL, "all"),
            steering=[steer(name, [1], 1.0 + n, [place]) for place in range(80)],
        )
        for n in range(4)
    ]
    outputs = host.run(*plain, *many)
    for job in plain:
        check_rows(host, reference, job, outputs[job.id])
    for n, job in enumerate(many):
        edit = Edit(1, (1.0 + n) * vector, positions=list(range(80)))
        check_rows(host, reference, job, outputs[job.id], [edit])


def test_a_vector_is_sent_to_the_ranks_once(v1: Host) -> None:
    name = v1.vector(direction(10))  # field case 45, field case 47
    before = v1.call("midstream_status")[0]["vectors"]
    v1.run(
        *[v1.job(prompt_of(5, seed=n), max_tokens=2, steering=[steer(name, [0])]) for n in range(5)]
    )
    v1.run(v1.job(prompt_of(6), max_tokens=2, steering=[steer(name, [1], 3.0)]))
    assert v1.call("midstream_status")[0]["vectors"] == before + 1


# --- Ranges of positions --------------------------------------------------------------------------


def over(host: Host, edit: Edit, window: PositionWindow) -> list[StoredSteering]:
    """The edit at a range of positions."""
    (entry,) = host.steering(edit)
    return [replace(entry, positions=window)]


def named(window: PositionWindow, total: int) -> list[int]:
    return list(range(min(window.start, total), min(window.stop or total, total)))


def test_a_range_is_edited_once_per_position_over_chunks_and_decode_steps(
    v1: Host, reference: Reference
) -> None:
    # field case 9
    """Steps hold 64 tokens, the prompt 150: it begins in the first chunk, in the last, or in the
    generated part. Each edit would do something else when applied to the same row again.
    """
    edits = [
        Edit(1, direction(71), op="add", scale=0.3, norm_match=True),
        Edit(1, direction(71), op="clamp", low=0.5, high=1.0, strength=0.5),
    ]
    windows = [
        PositionWindow(3),
        PositionWindow(130),
        PositionWindow(152),
        PositionWindow(60, 70),
        PositionWindow(148, 153),
    ]
    jobs = [
        v1.job(
            prompt_of(150, seed=n),
            max_tokens=6,
            capture=capture_of(ALL, "all"),
            steering=over(v1, edits[n % 2], window),
        )
        for n, window in enumerate(windows)
    ]
    answers = v1.run(*jobs)
    for n, (job, window) in enumerate(zip(jobs, windows, strict=True)):
        where = named(window, 155)
        check_rows(v1, reference, job, answers[job.id], [edits[n % 2]._replace(positions=where)])
        assert v1.receipts(job)[0].applied == len(where) > 0


@pytest.mark.parametrize(
    ("start", "shared", "turn"),
    [(128, 1, "plain first"), (127, 0, "plain first"), (140, 1, "steered first")],
)
def test_the_prompt_below_a_range_is_shared_with_plain_requests_both_ways(
    cached: Host, reference: Reference, start: int, shared: int, turn: str
) -> None:
    # field cases 13, 16
    prompt = prompt_of(300, seed=1000 + start)
    edit = Edit(1, direction(71))
    capture = capture_of(ALL, "last_prompt")
    steered = cached.job(
        prompt, max_tokens=3, capture=capture, steering=over(cached, edit, PositionWindow(start))
    )
    plain = cached.job(prompt, max_tokens=3, capture=capture)
    both = (plain, steered) if turn == "plain first" else (steered, plain)
    outputs = {job.id: cached.run(job)[job.id] for job in both}
    assert [outputs[job.id][0].cached_tokens for job in both] == [0, shared * BLOCK]
    where = named(PositionWindow(start), 302)
    check_rows(cached, reference, steered, outputs[steered.id], [edit._replace(positions=where)])
    check_rows(cached, reference, plain, outputs[plain.id])


def test_the_next_chat_turn_reuses_blocks_of_a_range(cached: Host, reference: Reference) -> None:
    """From token n on is the same in a longer prompt: unlike `all_generated`, it does not go by
    where the prompt ended.
    """
    edit = Edit(1, direction(71))
    first = prompt_of(300, seed=75)
    steering = over(cached, edit, PositionWindow(200))
    job = cached.job(first, max_tokens=141, steering=steering)
    second = first + cached.run(job)[job.id][0].token_ids[:140]
    again = cached.job(
        second, max_tokens=2, capture=capture_of(ALL, "last_prompt"), steering=steering
    )
    outputs = cached.run(again)[again.id]
    assert outputs[0].cached_tokens == 3 * BLOCK
    check_rows(cached, reference, again, outputs, [edit._replace(positions=list(range(200, 441)))])


# --- Sizes and limits -----------------------------------------------------------------------------


def test_reported_sizes_are_those_of_rows_before_and_after_the_edits(v1: Host) -> None:
    """Several edits at a site, at some positions, in chunks of 64 tokens, next to one another."""
    first = v1.vector(direction(21))
    second = v1.vector(direction(22))
    edits = {
        "all": [steer(first, [1, 3], 0.3)],
        "list": [steer(first, [1], 0.3, [2, 70, 99]), steer(second, [1], 2.0, [70])],
        "generated": [steer(second, [1], 1.0, "all_generated")],
        "ablate": v1.steering(Edit(1, direction(23), op="ablate")),
    }
    jobs = {
        name: v1.job(
            prompt_of(100, seed=n), max_tokens=20, capture=both_sides([1, 3]), steering=entries
        )
        for n, (name, entries) in enumerate(edits.items())
    }
    plain = v1.job(prompt_of(30), max_tokens=2, capture=capture_of([1], "all"))
    v1.run(*jobs.values(), plain)
    assert v1.receipts(plain)[0].sizes == []
    for name, *wanted in (
        ("all", [1, 3]),
        ("list", [1], [2, 70, 99]),
        ("generated", [1], range(100, 119)),
        ("ablate", [1]),
    ):
        check_sizes(v1, jobs[name], *wanted)


def test_a_limit_scales_what_is_larger_and_leaves_the_rest(v1: Host) -> None:
    vector = v1.vector(direction(24))
    prompt = prompt_of(80)
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
    before = v1.capture(jobs[1]).array(1)[:80]
    large = sizes_of(v1, jobs[1], 1)[:80]
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
        steering=[steer(vector, [2], 50.0, PositionWindow(25), limit=-0.7)],
    )
    v1.run_any(bad, good, late)
    assert v1.receipts(good)[0].status == "ok"
    for job, position in ((bad, 0), (late, 25)):
        receipt = v1.receipts(job)[0]
        assert receipt.kind == "edit_too_large"
        assert f"post_block of layer 2, position {position} is" in receipt.message
        assert "more than its limit, 0.7, the strictest of its entry" in receipt.message
        assert receipt.sizes == []


# --- Triggers -------------------------------------------------------------------------------------


def triggered(
    host: Host, seed: int, positions: Any = "all", scale: float = 1.0, **trigger: Any
) -> StoredSteering:
    entry = steer(host.vector(direction(seed)), [1], scale, positions)
    return replace(entry, trigger=Trigger(**trigger))


def job_of(
    host: Host, prompt: list[int], *entries: StoredSteering, tokens: int = 20, at: str = "all"
) -> Job:
    capture: Any = capture_of(ALL, at)  # type: ignore[arg-type]
    return host.job(prompt, max_tokens=tokens, capture=capture, steering=list(entries))


def made(host: Host, prompt: list[int], *entries: StoredSteering) -> list[int]:
    job = job_of(host, prompt, *entries)
    return host.run(job)[job.id][0].token_ids


def check(
    host: Host, reference: Reference, outputs: dict[str, list[Output]], *jobs: Job
) -> list[list[StoredSteering]]:
    """Rows are the reference's under the jobs' steering at positions that their final tokens say;
    returns that.
    """
    every = []
    for job in jobs:
        prompt = list(job.prompts[0].token_ids)
        tokens = [*prompt, *outputs[job.id][0].token_ids[:-1]]
        open_at = [open_of(entry.trigger, tokens) for entry in job.steering[0] if entry.trigger]
        entries = [
            replace(
                entry,
                trigger=UNSET,
                positions=[
                    place
                    for place in select(entry.positions, 0, len(tokens), len(prompt))
                    if here[place]
                ],
            )
            for entry, here in zip(job.steering[0], open_at, strict=True)
        ]
        assert all(entry.positions for entry in entries), "an edit that never begins shows nothing"
        edits = [(1, host.array(e.tensors[0]) * e.scale, e.positions) for e in entries]
        check_rows(host, reference, job, outputs[job.id], edits)
        every.append(entries)
    return every


def test_edits_by_token_equal_those_at_explicit_positions(v1: Host, reference: Reference) -> None:
    """Three requests in each step; a sequence lies across the first boundary of chunks of 64
    tokens, others are generated.
    """
    prompt = prompt_of(150, seed=71)
    other = prompt_of(20, seed=72)
    across = triggered(v1, 1, token_ids=[prompt[62:66]], after=9)
    late = made(v1, prompt, across)
    early = made(v1, other)
    pair = triggered(v1, 2, "all_generated", token_ids=[late[6:8]], after="end")
    others = triggered(
        v1, 3, token_ids=[[prompt[0]], [prompt[90]], late[3:4]], skip=True, scale=0.01
    )
    often = triggered(v1, 4, token_ids=[[early[2]], [early[4]]], after=1)
    jobs = [job_of(v1, prompt, across, pair), job_of(v1, prompt, others), job_of(v1, other, often)]
    outputs = v1.run_together(*jobs)
    every = check(v1, reference, outputs, *jobs)
    prompts = (prompt, prompt, other)
    twins = [job_of(v1, *each, *edits) for *each, edits in zip(prompts, every, strict=True)]
    outputs |= v1.run_together(*twins)
    found = [
        (
            outputs[job.id][0].token_ids,
            [v1.capture(job).array(layer).tobytes() for layer in ALL],
            [receipt.applied for receipt in v1.receipts(job)],
        )
        for job in (*jobs, *twins)
    ]
    assert found[:3] == found[3:]


def test_cached_tokens_advance_a_trigger(cached: Host, reference: Reference) -> None:
    """An occurrence across the end of the cached blocks, and one inside, before the first edit."""
    prompt = prompt_of(300, seed=73)
    for entry in (
        triggered(cached, 1, token_ids=[prompt[253:258]], after="end"),
        triggered(cached, 2, [270, 290], token_ids=[prompt[40:42]], after="end"),
    ):
        for turn in range(2):
            job = job_of(cached, prompt, entry, tokens=4, at="last_prompt")
            outputs = cached.run(job)
            assert outputs[job.id][0].cached_tokens == 2 * BLOCK * turn
            check(cached, reference, outputs, job)


def test_preempted_requests_keep_their_triggers(cached: Host, reference: Reference) -> None:
    jobs = []
    for seed in range(80, 85):
        prompt = prompt_of(100, seed=seed)
        entry = triggered(cached, seed, token_ids=[made(cached, prompt)[17:19]], after="end")
        jobs.append(job_of(cached, prompt, entry, tokens=60))
    before = cached.call("midstream_status")[0]["preemptions"]
    check(cached, reference, cached.run_together(*jobs), *jobs)
    assert cached.call("midstream_status")[0]["preemptions"] > before


@pytest.mark.parametrize("way", ["v2", "tp2", "pp2", "overlapped"])
def test_every_rank_and_runner_decides_alike(request: pytest.FixtureRequest, way: str) -> None:
    host: Host = request.getfixturevalue(way)
    reference = Reference(request.getfixturevalue("llama" if way == "v2" else "qwen3"))
    prompt = prompt_of(90, seed=75)
    first = triggered(host, 1, token_ids=[prompt[62:66]], after=5)
    pair = triggered(host, 2, token_ids=[made(host, prompt, first)[4:6]], after="end")
    job = job_of(host, prompt, first, pair)
    check(host, reference, host.run(job), job)
    receipts = host.receipts(job)
    agreed = {(receipt.pp, receipt.checksum, receipt.applied) for receipt in receipts}
    assert len(agreed) == len({receipt.pp for receipt in receipts}), "ranks of a stage differ"


@pytest.mark.long
def test_rejected_drafts_leave_nothing_to_a_trigger(
    llama: Path, reference: Reference, nursery: Nursery, tmp_path: Path
) -> None:
    """Prompts that repeat themselves, so that drafts are made; a random model rejects most of
    them, among which are tokens of the sequences.
    """
    host = nursery.host(tmp_path / "engine", llama, speculative_tokens=3)
    jobs = []
    for seed in range(8):
        prompt = prompt_of(12, seed=seed) * 3
        often = triggered(host, seed, "all", 0.1, token_ids=[[n] for n in prompt[:8]], after=1)
        pair = made(host, prompt, often)[4:6]
        later = triggered(host, 9, "all_generated", token_ids=[pair], after="end")
        jobs.append(job_of(host, prompt, often, later, tokens=40))
    before = host.call("midstream_status")[0]["token_rows"]
    outputs = host.run(*jobs)
    computed = host.call("midstream_status")[0]["token_rows"] - before
    assert computed > len(jobs) * (36 + 39) + 20, "no draft was rejected"
    for job, entries in zip(jobs, check(host, reference, outputs, *jobs), strict=True):
        applied = sum(len(entry.positions) for entry in entries)
        assert [receipt.applied for receipt in host.receipts(job)] == [applied]
    host.close()
