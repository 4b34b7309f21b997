"""A request that needs no token computes the layers that its rows need, and its rows are those of
the whole forward: on both runners, two ranks, two stages, in chunks, beside others, steered, from
the prefix cache. fp32.
"""

import numpy as np
import pytest
from host import Host, capture_of, prompt_of
from reference import Edit, Reference
from rows_kit import check_rows, direction
from tiny import LAYERS

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.requests.specs import EntryPoint

BLOCK = 128


def skipped(host: Host) -> int:
    """(token row, layer) pairs that the ranks of the first tensor-parallel rank left out."""
    return sum(rank["skipped_rows"] for rank in host.call("midstream_status") if rank["tp"] == 0)


def shallow(host: Host, *prompts: list[int], layers: list[int], **options: object) -> Job:
    """A job that needs no token, with the rows of these layers at all positions."""
    capture = capture_of(layers, "all_prompt")
    return host.job(*prompts, max_tokens=0, capture=capture, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["v1", "v2", "tp2", "pp2", "overlapped"])
def test_rows_of_a_request_without_tokens_cost_their_layers_alone(
    request: pytest.FixtureRequest, way: str
) -> None:
    """One prompt takes two steps; the others share one."""
    host: Host = request.getfixturevalue(way)
    assert host.info["exits"]
    reference = Reference(request.getfixturevalue("llama" if way in ("v1", "v2") else "qwen3"))
    prompts = [prompt_of(length, seed=500 + length) for length in (9, 90, 21)]
    job = shallow(host, *prompts, layers=[0, 1])
    before = skipped(host)
    outputs = host.run(job)[job.id]
    assert [output.token_ids for output in outputs] == [[]] * 3
    assert [(output.text, output.finish_reason) for output in outputs] == [("", "length")] * 3
    assert check_rows(host, reference, job, outputs) == 2 * sum(map(len, prompts))
    assert skipped(host) - before == (LAYERS - 2) * sum(map(len, prompts))


def test_a_compiled_engine_computes_prompts_in_whole(compiled: Host, reference: Reference) -> None:
    assert not compiled.info["exits"]
    job = shallow(compiled, prompt_of(20, seed=510), layers=[0])
    outputs = compiled.run(job)[job.id]
    assert outputs[0].token_ids == []
    check_rows(compiled, reference, job, outputs)
    assert skipped(compiled) == 0


def test_whole_requests_beside_shallow_ones_have_their_own_numbers(
    v1: Host, reference: Reference
) -> None:
    """Enough tokens for shallow steps of their own, of different depths, while others generate."""
    others = [
        v1.job(prompt_of(30, seed=520 + number), max_tokens=24, capture=capture_of([3], "all"))
        for number in range(3)
    ]
    jobs = [
        shallow(
            v1,
            *(prompt_of(70, seed=530 + 10 * depth + number) for number in range(4)),
            layers=[depth],
        )
        for depth in range(3)
    ]
    before = skipped(v1)
    outputs = v1.run(*others, *jobs)
    for job in (*others, *jobs):
        check_rows(v1, reference, job, outputs[job.id])
    assert skipped(v1) > before


def test_edits_that_no_row_sees_are_left_out_and_others_are_applied(
    v1: Host, reference: Reference
) -> None:
    edits = [Edit(0, direction(1)), Edit(1, direction(2)), Edit(3, direction(3))]
    job = shallow(v1, prompt_of(25, seed=540), layers=[1], steering=v1.steering(*edits))
    outputs = v1.run(job)[job.id]
    check_rows(v1, reference, job, outputs, edits)
    (receipt,) = v1.receipts(job)
    assert receipt.applied == 2 * 25
    assert receipt.depth == 2


def test_blocks_serve_requests_that_need_no_more_layers_than_they_have(
    cached: Host, reference: Reference
) -> None:
    """Blocks of a whole forward serve a shallow request; its own serve none that goes deeper."""
    prompt = prompt_of(300, seed=550)
    last = "last_prompt"

    def hit(depth: int) -> int:
        job = cached.job(
            prompt, max_tokens=0 if depth < LAYERS else 1, capture=capture_of([depth - 1], last)
        )
        outputs = cached.run(job)[job.id]
        check_rows(cached, reference, job, outputs)
        return outputs[0].cached_tokens

    assert hit(2) == 0
    assert hit(2) == 2 * BLOCK
    assert hit(3) == 0
    assert hit(LAYERS) == 0
    assert hit(LAYERS) == 2 * BLOCK
    assert hit(1) == 2 * BLOCK


def test_a_cell_that_enters_above_and_is_read_below_computes_what_is_between(
    v1: Host, reference: Reference
) -> None:
    """It enters at layer 1, whose edit moves the row of layer 2; layers 0 and 3 are left out."""
    prompt = prompt_of(20, seed=560)
    base = v1.job(prompt, max_tokens=1, capture=capture_of([1], "all_prompt", "base", "pre_attn"))
    v1.run(base)
    key = v1.keep(base)
    edit = Edit(1, direction(4), [7], "post_block", "replace")
    capture = capture_of([2], "all_prompt")
    job = v1.job(prompt, max_tokens=0, capture=capture, steering=v1.steering(edit))
    before = skipped(v1)
    answer = v1.run_any(job, entries={job.id: EntryPoint(key, 1)})
    assert not answer.errors, answer.errors
    check_rows(v1, reference, job, answer.outputs[job.id], [edit])
    assert skipped(v1) - before == 2 * len(prompt)


def test_rows_are_those_of_the_whole_forward_bit_for_bit(v1: Host) -> None:
    prompts = [prompt_of(length, seed=570 + length) for length in (9, 30, 20)]
    capture = capture_of([0, 2], "all_prompt")
    whole, short = (v1.job(*prompts, max_tokens=tokens, capture=capture) for tokens in (1, 0))
    for job in (whole, short):
        v1.run_together(job)
    for layer in (0, 2):
        for number in range(len(prompts)):
            np.testing.assert_array_equal(
                v1.capture(short).array(layer, request=number),
                v1.capture(whole).array(layer, request=number),
            )
