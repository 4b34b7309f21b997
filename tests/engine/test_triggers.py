"""Edits by token: their rows are those of the same edits at explicit positions, bit for bit, and
the reference's. fp32.
"""

from pathlib import Path
from typing import Any

import pytest
from host import Host, capture_of, prompt_of, steer
from msgspec import UNSET
from msgspec.structs import replace
from nursery import Nursery
from reference import Reference
from rows_kit import check_rows, direction
from tiny import LAYERS
from trigger_kit import open_of

from midstream.schemas.jobs.jobs import Job, Output
from midstream.schemas.prompts.selectors import select
from midstream.schemas.prompts.windows import Trigger
from midstream.schemas.requests.specs import StoredSteering

ALL = list(range(LAYERS))
BLOCK = 128


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
    prompt, other = prompt_of(150, seed=71), prompt_of(20, seed=72)
    across = triggered(v1, 1, token_ids=[prompt[62:66]], after=9)
    late, early = made(v1, prompt, across), made(v1, other)
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
    host, jobs = nursery.host(tmp_path / "engine", llama, speculative_tokens=3), []
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
