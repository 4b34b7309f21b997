"""Captured rows are the reference's rows, whatever the batch looks like.

Real vLLM, v1 runner, tiny Llama in fp32.
"""

import random

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error, steer
from reference import Reference
from tiny import LAYERS, VOCABULARY
from tolerances import FP32_ROWS

ALL = list(range(LAYERS))


def check_against_reference(host: Host, reference: Reference, job, outputs) -> int:
    """Every row of the job equals the reference's; returns how many rows were compared."""
    reader, rows = host.capture(job), 0
    assert reader.manifest().requests == len(reader.requests()) == len(job.prompts)
    for output in outputs:
        prompt = job.prompts[output.index].token_ids
        tokens = prompt + output.token_ids
        streams = reference.post_block(tokens[:-1])
        positions = reader.positions(output.index)
        assert reader.token_ids(output.index) == [tokens[position] for position in positions]
        for layer in job.captures[output.index][0].sites["post_block"]:
            got = reader.array(layer, request=output.index)
            assert relative_error(got, streams[layer][positions]) <= FP32_ROWS, (
                job.id,
                output.index,
                layer,
            )
            rows += len(got)
    return rows


@pytest.mark.parametrize(
    "positions", ["last_prompt", "all_prompt", "all_generated", "all", [0, 3, -1]]
)
def test_each_position_selector_names_the_rows_that_it_says(
    v1: Host, reference: Reference, positions
) -> None:
    prompt = prompt_of(20)
    job = v1.job(prompt, max_tokens=6, capture=capture_of(ALL, positions))
    outputs = v1.run(job)[job.id]
    wanted = {
        "last_prompt": [19],
        "all_prompt": list(range(20)),
        "all_generated": list(range(20, 25)),
        "all": list(range(25)),
    }.get(positions if isinstance(positions, str) else "", [0, 3, 19])
    assert v1.capture(job).positions(0) == wanted
    assert check_against_reference(v1, reference, job, outputs) == len(wanted) * LAYERS


def test_layer_12_is_the_output_of_block_12(v1: Host, reference: Reference) -> None:
    """`post_block` L is HF `hidden_states[L + 1]`."""  # field case 8, field case 4
    prompt = prompt_of(10)
    job = v1.job(prompt, max_tokens=1, capture=capture_of(ALL, "all_prompt"))
    v1.run(job)
    reader = v1.capture(job)
    import torch

    with torch.no_grad():
        hidden = reference._model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    for layer in ALL[:-1]:  # the last one of HF's list is after the final norm
        assert relative_error(reader.array(layer), hidden[layer + 1][0].numpy()) <= FP32_ROWS
    for layer in ALL[1:]:
        assert relative_error(reader.array(layer), reader.array(layer - 1)) > 0.01
    np.testing.assert_array_equal(reader.array(-1), reader.array(ALL[-1]))


def test_prompts_longer_than_a_step_are_captured_whole(v1: Host, reference: Reference) -> None:
    """Chunked prefill: 200 tokens in steps of at most 64."""
    job = v1.job(prompt_of(200), max_tokens=4, capture=capture_of(ALL, "all"))
    outputs = v1.run(job)[job.id]
    assert check_against_reference(v1, reference, job, outputs) == 203 * LAYERS


def test_sixty_four_mixed_requests_get_their_own_rows(v1: Host, reference: Reference) -> None:
    # field case 1
    """Random lengths, layers and positions, captured, steered and plain requests in one batch."""
    rng = random.Random(7)
    name = v1.vector(np.random.default_rng(1).normal(size=64))
    jobs = []
    for number in range(64):
        prompt = prompt_of(rng.randint(1, 90), seed=100 + number)
        layers = sorted(rng.sample(ALL, rng.randint(1, LAYERS)))
        positions = rng.choice(["last_prompt", "all_prompt", "all_generated", "all", [0], [-1, 0]])
        steering = [steer(name, [1], 0.5)] if number % 5 == 0 else None
        capture = capture_of(layers, positions) if number % 3 else None
        jobs.append(
            v1.job(prompt, max_tokens=rng.randint(1, 12), capture=capture, steering=steering)
        )
    answers = v1.run(*jobs)
    compared = sum(
        check_against_reference(v1, reference, job, answers[job.id])
        for job in jobs
        if job.captures and not job.steering
    )
    assert compared > 1000


def test_every_prompt_of_a_job_is_captured(v1: Host, reference: Reference) -> None:
    # field case 18
    """One file and one receipt for each prompt; the wait is not over with the first."""
    job = v1.job(
        *(prompt_of(5 + n, seed=n) for n in range(6)),
        max_tokens=3,
        capture=capture_of([0, 2], "all"),
    )
    outputs = v1.run(job)[job.id]
    assert [receipt.request for receipt in v1.receipts(job)] == list(range(6))
    assert check_against_reference(v1, reference, job, outputs) == sum(
        (5 + n + 2) * 2 for n in range(6)
    )


def test_padded_rows_and_warm_up_runs_are_never_captured(v1: Host) -> None:
    # field case 7
    """A capture of n positions has exactly n rows, and the plane saw no request that nobody
    made.
    """
    job = v1.job(prompt_of(7), max_tokens=1, capture=capture_of(ALL, "all"))
    v1.run(job)
    assert v1.capture(job).positions(0) == list(range(7))
    assert v1.call("midstream_status")[0]["requests"] == 0
    assert {receipt.job[:3] for receipt in v1.all_receipts()} == {"job"}


def test_receipts_do_not_wait_for_another_step(v1: Host) -> None:
    # field case 17
    """The receipt of the last request comes although no further step follows for anybody."""
    job = v1.job(prompt_of(7), max_tokens=2, capture=capture_of(ALL, "last_prompt"))
    v1.run(job)
    assert len(v1.receipts(job)) == 1


def test_a_cancelled_request_leaves_no_file_and_frees_its_rows(v1: Host) -> None:
    name = v1.vector(np.ones(64))
    job = v1.job(
        prompt_of(20), max_tokens=200, capture=capture_of(ALL, "all"), steering=[steer(name, [0])]
    )
    v1.run(job, cancel_after={job.id: 3})
    v1.run(v1.job(prompt_of(3), max_tokens=1))
    status = v1.call("midstream_status")[0]
    assert (status["requests"], status["rows_used"]) == (0, 0)
    assert not (v1.root / "default" / job.id).exists()


@pytest.mark.parametrize("stop_at", [1, 3, 7])
def test_captured_rows_end_at_the_stop_string(v1: Host, reference: Reference, stop_at: int) -> None:
    """vLLM finds stop strings after the fact and aborts the request, which may have computed
    further by then.
    """
    prompt = prompt_of(20, seed=stop_at)
    free = v1.run(job := v1.job(prompt, max_tokens=12))[job.id][0].token_ids
    stop = f"w{free[stop_at]}"
    stopped = v1.job(prompt, max_tokens=12, capture=capture_of(ALL, "all"), stop=[stop])
    answer = v1.run_any(stopped)
    (output,) = answer.outputs[stopped.id]
    assert output.finish_reason == "stop"
    assert len(output.token_ids) <= stop_at + 1
    assert v1.capture(stopped).positions(0) == list(range(20 + len(output.token_ids) - 1))
    check_against_reference(v1, reference, stopped, [output])
    assert v1.call("midstream_status")[0]["requests"] == 0
    assert answer.rank_calls == 0, "the ranks learn it from the engine's next step"


def test_token_ids_stay_in_the_vocabulary(v1: Host) -> None:
    job = v1.job(prompt_of(9), max_tokens=5)
    assert all(0 <= token < VOCABULARY for token in v1.run(job)[job.id][0].token_ids)


def test_a_failing_writer_fails_the_request_with_the_reason_and_the_engine_goes_on(
    v1: Host,
) -> None:
    """`ok` is never said of a capture that is not on disk."""  # field case 19
    v1.call("midstream_fault", "write")
    try:
        job = v1.job(prompt_of(9), max_tokens=2, capture=capture_of(ALL, "all"))
        v1.run(job)
        receipt = v1.receipts(job)[0]
        assert receipt.status == "error"
        assert "write failed" in receipt.message
        assert receipt.files == []
    finally:
        v1.call("midstream_fault", "")
    again = v1.job(prompt_of(9), max_tokens=2, capture=capture_of(ALL, "all"))
    v1.run(again)
    assert v1.receipts(again)[0].status == "ok"


def test_one_bad_file_does_not_hold_up_the_others_of_its_group(v1: Host) -> None:
    """Results wait for their own file only, not for all writers to be idle."""  # field case 20
    blocked = v1.job(prompt_of(9), max_tokens=2, capture=capture_of(ALL, "all", tag="blocked"))
    v1.root.mkdir(parents=True, exist_ok=True)
    (v1.root / "blocked").write_text("a file where a folder is needed")
    others = [
        v1.job(prompt_of(9, seed=n), max_tokens=2, capture=capture_of(ALL, "all")) for n in range(8)
    ]
    v1.run(blocked, *others)
    assert v1.receipts(blocked)[0].status == "error"
    assert [v1.receipts(job)[0].status for job in others] == ["ok"] * 8


def test_a_data_plane_error_fails_the_requests_of_the_step_and_not_the_engine(v1: Host) -> None:
    """Reported before the request ends, so nobody sits out a timeout."""  # field case 21
    v1.call("midstream_fault", "plan")
    try:
        job = v1.job(prompt_of(9), max_tokens=2, capture=capture_of(ALL, "all"))
        v1.run(job)
        receipt = v1.receipts(job)[0]
        assert receipt.status == "error"
        assert "fault injected" in receipt.message
    finally:
        v1.call("midstream_fault", "")


def test_files_carry_the_checksum_that_the_receipt_says(v1: Host) -> None:
    job = v1.job(prompt_of(30), max_tokens=4, capture=capture_of(ALL, "all"))
    v1.run(job)
    reader, receipt = v1.capture(job), v1.receipts(job)[0]
    assert all(check.ok for check in reader.verify())
    assert [check.crc32 for check in reader.verify()] == [file.crc32 for file in receipt.files]


def test_a_seeded_request_samples_the_same_if_its_prompt_is_split(v1: Host) -> None:
    """Beside another one, a step of 64 tokens has no room for it as a whole."""
    first, seeded = (
        v1.job(prompt_of(40, seed=n), max_tokens=8, temperature=1.0, seed=n) for n in (90, 91)
    )
    alone = v1.run(seeded)[seeded.id][0].token_ids
    before = v1.call("midstream_status")[0]["step"]
    assert v1.run_together(first, seeded)[seeded.id][0].token_ids == alone
    assert v1.call("midstream_status")[0]["step"] - before > 8, "the prompt was not split"
