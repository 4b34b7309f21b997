"""Captured rows are the reference's rows, whatever the batch looks like.

Real vLLM, v1 runner, tiny Llama in fp32.
"""

import pytest
from host import Host, capture_of, prompt_of
from reference import Reference
from rows_kit import check_rows
from tiny import LAYERS

from midstream.schemas.prompts.selectors import PositionWindow

ALL = list(range(LAYERS))


def test_each_position_selector_names_the_rows_that_it_says(v1: Host, reference: Reference) -> None:
    """Of a prompt in three steps of at most 64 tokens, and of what is generated."""
    wanted = {
        "last_prompt": [149],
        "all_prompt": range(150),
        "all_generated": range(150, 155),
        "all": range(155),
        "some": [0, 3, 149],
        "window": range(148, 153),
    }
    chosen = {"some": [0, 3, -1], "window": PositionWindow(start=148, stop=153)}
    jobs = {
        name: v1.job(prompt_of(150), max_tokens=6, capture=capture_of(ALL, chosen.get(name, name)))
        for name in wanted
    }
    answers = v1.run(*jobs.values())
    for name, job in jobs.items():
        assert v1.capture(job).positions(0) == list(wanted[name])
        assert check_rows(v1, reference, job, answers[job.id]) == len(wanted[name]) * LAYERS


def test_every_prompt_of_a_job_is_captured(v1: Host, reference: Reference) -> None:
    # field case 17, 18
    """One file and one receipt for each prompt, though no further step follows for anybody; files
    have the checksums that the receipts say.
    """
    job = v1.job(
        *(prompt_of(5 + n, seed=n) for n in range(6)),
        max_tokens=3,
        capture=capture_of([0, 2], "all"),
    )
    outputs = v1.run(job)[job.id]
    receipts = v1.receipts(job)
    assert [receipt.request for receipt in receipts] == list(range(6))
    assert check_rows(v1, reference, job, outputs) == sum((5 + n + 2) * 2 for n in range(6))
    reader = v1.capture(job)
    assert reader.manifest().requests == len(reader.requests()) == 6
    checks = reader.verify()
    assert all(check.ok for check in checks)
    files = [file.crc32 for receipt in receipts for file in receipt.files]
    assert sorted(check.crc32 for check in checks) == sorted(files)


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


@pytest.mark.parametrize("stop_at", [1, 7])
def test_captured_rows_end_at_the_stop_string(v1: Host, reference: Reference, stop_at: int) -> None:
    """vLLM finds stop strings after the fact and aborts the request, which may have computed
    further by then.
    """
    prompt = prompt_of(20, seed=stop_at)
    job = v1.job(prompt, max_tokens=12)
    free = v1.run(job)[job.id][0].token_ids
    stop = f"w{free[stop_at]}"
    stopped = v1.job(prompt, max_tokens=12, capture=capture_of(ALL, "all"), stop=[stop])
    answer = v1.run_any(stopped)
    (output,) = answer.outputs[stopped.id]
    assert output.finish_reason == "stop"
    assert len(output.token_ids) <= stop_at + 1
    check_rows(v1, reference, stopped, [output])
    assert v1.call("midstream_status")[0]["requests"] == 0
    assert answer.rank_calls == 0, "the ranks learn it from the engine's next step"


# field case 19, 20, 21
@pytest.mark.parametrize(
    ("fault", "says"), [("write", "write failed"), ("plan", "fault injected: plan")]
)
def test_a_failing_data_plane_fails_its_requests_and_the_engine_goes_on(
    v1: Host, fault: str, says: str
) -> None:
    """`ok` is never said of a capture that is not on disk, and nobody sits out a timeout."""
    v1.call("midstream_fault", fault)
    try:
        job = v1.job(prompt_of(9), max_tokens=2, capture=capture_of(ALL, "all"))
        v1.run(job)
        (receipt,) = v1.receipts(job)
        assert receipt.status == "error"
        assert receipt.files == []
        assert says in receipt.message
    finally:
        v1.call("midstream_fault", "")
    again = v1.job(prompt_of(9), max_tokens=2, capture=capture_of(ALL, "all"))
    v1.run(again)
    assert v1.receipts(again)[0].status == "ok"


def test_a_seeded_request_samples_the_same_if_its_prompt_is_split(v1: Host) -> None:
    """Beside another one, a step of 64 tokens has no room for it as a whole."""
    first, seeded = (
        v1.job(prompt_of(40, seed=n), max_tokens=8, temperature=1.0, seed=n) for n in (90, 91)
    )
    alone = v1.run(seeded)[seeded.id][0].token_ids
    before = v1.call("midstream_status")[0]["step"]
    assert v1.run_together(first, seeded)[seeded.id][0].token_ids == alone
    assert v1.call("midstream_status")[0]["step"] - before > 8, "the prompt was not split"
