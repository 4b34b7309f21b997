"""Does "from token n on" mean each position from there on once: in chunks, in decode steps, after
preemption, in the prefix cache?

v1 runner, eager, fp32.
"""

from typing import Any

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error
from reference import Edit, Reference
from tiny import HIDDEN, LAYERS
from tolerances import FP32_ROWS

from midstream.schemas.jobs.jobs import Job, Output
from midstream.schemas.prompts.selectors import Window
from midstream.schemas.requests.specs import StoredSteering

ALL = list(range(LAYERS))
BLOCK = 128
VECTOR = np.random.default_rng(71).normal(size=HIDDEN).astype(np.float32)
#: Each would do something else when applied to the same row again.
EDITS = [
    Edit(1, VECTOR, op="add", scale=0.3, norm_match=True),
    Edit(1, VECTOR, op="clamp", low=0.5, high=1.0, strength=0.5),
    Edit(1, VECTOR),
]


def over(host: Host, edit: Edit, window: Window) -> list[StoredSteering]:
    """The edit at a range of positions."""
    (entry,) = host.steering(edit)
    return [
        StoredSteering(
            **{name: getattr(entry, name) for name in entry.__struct_fields__}
            | {"positions": window}
        )
    ]


def named(window: Window, total: int) -> list[int]:
    return list(
        range(min(window.start, total), total if window.stop is None else min(window.stop, total))
    )


def check(
    host: Host, reference: Reference, job: Job, output: Output, edit: Edit, window: Window
) -> list[int]:
    """Captured rows of a steered request are the reference's; returns the positions that were fed
    and named.
    """
    tokens = job.prompts[0].token_ids + output.token_ids[:-1]
    where = named(window, len(tokens))
    wanted = reference.post_block(tokens, [edit._replace(positions=where)])
    positions = host.capture(job).positions(0)
    for layer in ALL:
        assert relative_error(host.capture(job).array(layer), wanted[layer][positions]) <= FP32_ROWS
    return where


@pytest.mark.parametrize("edit", EDITS, ids=["add_matched", "clamp", "add"])
def test_a_range_is_edited_once_per_position_over_chunks_and_decode_steps(
    v1: Host, reference: Reference, edit: Edit
) -> None:
    # field case 9
    """Steps hold 64 tokens, the prompt 150: it begins in the first chunk, in the last, or in the
    generated part.
    """
    windows = [
        Window(start=3),
        Window(start=130),
        Window(start=152),
        Window(start=60, stop=70),
        Window(start=148, stop=153),
    ]
    jobs = [
        v1.job(
            prompt_of(150, seed=n),
            max_tokens=6,
            capture=capture_of(ALL, "all"),
            steering=over(v1, edit, w),
        )
        for n, w in enumerate(windows)
    ]
    answers = v1.run(*jobs)
    for job, window in zip(jobs, windows, strict=True):
        where = check(v1, reference, job, answers[job.id][0], edit, window)
        assert v1.receipts(job)[0].applied == len(where) > 0


def test_a_range_is_captured_once_per_position_over_chunks_and_decode_steps(
    v1: Host, reference: Reference
) -> None:
    prompt = prompt_of(150, seed=9)
    windows = [
        Window(start=130),
        Window(start=152),
        Window(start=60, stop=70),
        Window(start=148, stop=153),
    ]
    jobs = [v1.job(prompt, max_tokens=6, capture=capture_of(ALL, window)) for window in windows]
    answers = v1.run(*jobs)
    for job, window in zip(jobs, windows, strict=True):
        assert v1.capture(job).positions(0) == named(window, 155)
        check(v1, reference, job, answers[job.id][0], EDITS[2]._replace(scale=0.0), window)


def test_a_range_is_edited_alike_after_preemption(cached: Host, reference: Reference) -> None:
    """Seven blocks for six requests of up to three blocks each; the range begins before, at and
    behind the end of the prompt.
    """
    before = cached.call("midstream_status")[0]["preemptions"]  # field case 6, field case 9
    windows = [Window(start=start) for start in (5, 100, 109, 110, 200, 270)]
    jobs = [
        cached.job(
            prompt_of(110, seed=700 + n),
            max_tokens=180,
            capture=capture_of(ALL, "all"),
            steering=over(cached, EDITS[n % 3], window),
        )
        for n, window in enumerate(windows)
    ]
    answers = cached.run_together(*jobs)
    assert cached.call("midstream_status")[0]["preemptions"] > before
    for number, (job, window) in enumerate(zip(jobs, windows, strict=True)):
        assert cached.capture(job).positions(0) == list(range(289))
        where = check(cached, reference, job, answers[job.id][0], EDITS[number % 3], window)
        assert cached.receipts(job)[0].applied == len(where)


@pytest.mark.parametrize(
    ("window", "shared"),
    [
        (Window(start=140), 1),
        (Window(start=128), 1),
        (Window(start=127), 0),
        (Window(start=300), 2),
    ],
)
def test_the_prompt_below_a_range_is_shared_with_plain_requests_both_ways(
    cached: Host, reference: Reference, window: Window, shared: int
) -> None:
    for turn in ("plain first", "steered first"):  # field cases 13, 16
        prompt = prompt_of(300, seed=1000 + window.start + 500 * (turn == "plain first"))
        steered = cached.job(
            prompt,
            max_tokens=3,
            capture=capture_of(ALL, "last_prompt"),
            steering=over(cached, EDITS[2], window),
        )
        plain = cached.job(prompt, max_tokens=3, capture=capture_of(ALL, "last_prompt"))
        first, second = (plain, steered) if turn == "plain first" else (steered, plain)
        outputs: dict[str, Any] = {job.id: cached.run(job)[job.id][0] for job in (first, second)}
        assert (outputs[first.id].cached_tokens, outputs[second.id].cached_tokens) == (
            0,
            shared * BLOCK,
        ), turn
        check(cached, reference, steered, outputs[steered.id], EDITS[2], window)
        check(cached, reference, plain, outputs[plain.id], EDITS[2]._replace(scale=0.0), window)


def test_the_next_chat_turn_reuses_blocks_of_a_range(cached: Host, reference: Reference) -> None:
    """From token n on is the same in a longer prompt: unlike `all_generated`, it does not go by
    where the prompt ended.
    """
    steering, first = over(cached, EDITS[2], Window(start=200)), prompt_of(300, seed=75)
    second = (
        first
        + cached.run(job := cached.job(first, max_tokens=141, steering=steering))[job.id][
            0
        ].token_ids[:140]
    )
    again = cached.job(
        second, max_tokens=2, capture=capture_of(ALL, "last_prompt"), steering=steering
    )
    output = cached.run(again)[again.id][0]
    assert output.cached_tokens == 3 * BLOCK
    check(cached, reference, again, output, EDITS[2], Window(start=200))
