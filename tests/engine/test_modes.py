"""The same rows from every way to run: v2 runner, torch.compile, two tensor-parallel ranks, two
pipeline stages.
"""

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, steer
from reference import Edit, Reference
from rows_kit import check_rows, direction
from tiny import HIDDEN, LAYERS

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.specs import StoredCapture

ALL = list(range(LAYERS))


def one_of_each(seed: int, layer: int = 1, hook: str = "post_block") -> list[Edit]:
    """Every family at one place, in the order in which they are applied."""
    rng = np.random.default_rng(seed)
    a, b, c, d, e = rng.normal(size=(5, HIDDEN)).astype(np.float32)
    rotation, weight = (rng.normal(size=(2, 3, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32)
    bias = rng.normal(size=3).astype(np.float32)
    return [
        Edit(layer, a, [2, 5], hook, "replace", alpha=0.5, scale=2.0),
        Edit(
            layer,
            None,
            None,
            hook,
            "lowrank",
            strength=0.5,
            rotation=rotation,
            weight=weight,
            bias=bias,
        ),
        Edit(layer, b, [3], hook, "add", scale=1.5),
        Edit(layer, c, None, hook, "add", scale=0.2, norm_match=True),
        Edit(layer, d, None, hook, "ablate", strength=0.75),
        Edit(layer, e, [2, 3], hook, "clamp", low=-0.5, high=0.25),
    ]


def mixed_batch(
    host: Host, reference: Reference, longest: int = 100, max_tokens: int = 5
) -> list[Job]:
    """Captured, edited and plain requests together, at all hooks, chunked prefill among them; each
    checked against the reference.
    """
    vector = direction(1)
    families = one_of_each(2)
    everything = capture_of([], "all", sites={hook: ALL for hook in HOOKS})
    wanted: dict[str, list[Edit]] = {}

    def job(length: int, capture: StoredCapture, *edits: Edit) -> Job:
        made = host.job(
            prompt_of(length, seed=length),
            max_tokens=max_tokens,
            capture=capture,
            steering=host.steering(*edits),
        )
        wanted[made.id] = list(edits)
        return made

    jobs = [
        job(longest, everything),
        job(20, everything, Edit(1, vector, hook="pre_attn"), Edit(2, vector, hook="mlp_in")),
        job(
            22,
            everything,
            Edit(0, vector, hook="attn_out"),
            Edit(3, vector, hook="mlp_out"),
            Edit(2, vector, [3, 4]),
        ),
        job(
            24,
            everything,
            Edit(1, vector, [2, 9], "post_attn", "replace"),
            Edit(2, vector, None, "pre_attn", "replace", 0.5),
        ),
        job(30, capture_of([3], "all"), Edit(0, vector, [4])),
        job(28, everything, *(edit._replace(layer=1, hook="post_attn") for edit in families)),
        job(
            18,
            everything,
            *(
                edit._replace(layer=n % 3, hook=HOOKS[n])
                for n, edit in enumerate(families)
                if not edit.norm_match
            ),
        ),
        job(
            26,
            capture_of([], "all_prompt", sites={"post_attn": [1], "post_block": ALL}, at="after"),
            Edit(1, vector, hook="post_attn"),
        ),
    ]
    answers = host.run(*jobs, host.job(prompt_of(10, seed=4), max_tokens=max_tokens))
    for each in jobs:
        check_rows(host, reference, each, answers[each.id], wanted[each.id])
    return jobs


@pytest.mark.parametrize("way", ["v1", "v2"])
def test_a_mixed_batch_has_the_rows_of_the_reference(
    way: str, request: pytest.FixtureRequest, reference: Reference
) -> None:
    host: Host = request.getfixturevalue(way)
    assert host.info["runner"] == way
    mixed_batch(host, reference, *((80, 3) if way == "v2" else ()))


def test_compiled_forward_captures_and_steers_like_the_reference(
    compiled: Host, reference: Reference
) -> None:
    # field case 5
    """The op is not dead code, and idle steps of the same graph leave nothing behind."""
    before = compiled.call("midstream_status")[0]
    compiled.run(compiled.job(prompt_of(20), max_tokens=3))
    after = compiled.call("midstream_status")[0]
    assert after["idle_steps"] - before["idle_steps"] == after["step"] - before["step"] >= 3
    mixed_batch(compiled, reference)
    # the step after the last request
    assert compiled.call("midstream_status")[0]["idle_steps"] - after["idle_steps"] <= 1


def test_prompt_captures_leave_decode_steps_idle(compiled: Host) -> None:
    before = compiled.call("midstream_status")[0]
    job = compiled.job(prompt_of(20), max_tokens=6, capture=capture_of([1], "all_prompt"))
    compiled.run(job)
    assert compiled.capture(job).positions(0) == list(range(20))
    assert compiled.call("midstream_status")[0]["idle_steps"] - before["idle_steps"] >= 5


@pytest.mark.slow("two ranks answer a mixed batch")
def test_two_tensor_parallel_ranks_agree_and_one_of_them_writes(tp2: Host, qwen3) -> None:
    for job in mixed_batch(tp2, Reference(qwen3)):
        first, second = tp2.receipts(job)
        assert first.checksum == second.checksum
        assert first.actions == second.actions
        assert first.step == second.step
        assert len(first.files) > 0
        assert len(second.files) == 0
        assert first.tp == 0
        assert second.tp == 1
        assert first.world == 2


def test_vectors_refused_by_one_rank_are_rolled_back_on_the_other(tp2: Host) -> None:
    before = tp2.call("midstream_status")  # field case 29
    tp2.call("midstream_fault", "put_vectors:rank=1")
    job = tp2.job(prompt_of(9), max_tokens=2, steering=[steer(tp2.vector(direction(30)), [0])])
    assert "rank 1: fault injected" in tp2.run_any(job).errors[job.id]
    tp2.call("midstream_fault", "")
    after = tp2.call("midstream_status")
    assert [rank["vectors"] for rank in after] == [rank["vectors"] for rank in before]
    # a refused vector does not put the ranks out of step
    assert after[0]["checksum"] == after[1]["checksum"]


def test_an_action_that_failed_on_one_of_two_ranks_is_in_the_receipts(tp2: Host) -> None:
    """Nothing that ranks apply waits for other ranks: the forward's collectives go on, for this
    request and the ones beside it.
    """
    tp2.call("midstream_fault", "admit:rank=1")  # field case 28, 29
    job = tp2.job(prompt_of(9), max_tokens=2, steering=[steer(tp2.vector(direction(31)), [0])])
    beside = tp2.job(prompt_of(7), max_tokens=2)
    outputs = tp2.run(job, beside)
    tp2.call("midstream_fault", "")
    assert [len(outputs[each.id][0].token_ids) for each in (job, beside)] == [2, 2]
    assert [receipt.status for receipt in tp2.receipts(job)] == ["ok", "error"]


@pytest.mark.long
def test_each_pipeline_stage_writes_its_own_layers_and_one_reader_sees_all(
    pp2: Host, qwen3
) -> None:
    for job in mixed_batch(pp2, Reference(qwen3)):
        receipts = pp2.receipts(job)
        assert [receipt.pp for receipt in receipts] == [0, 1]
        for hook, layers in job.captures[0][0].sites.items():
            written = [
                file.sites[hook]
                for receipt in receipts
                for file in receipt.files
                if hook in file.sites
            ]
            assert sorted(layer for part in written for layer in part) == layers


@pytest.mark.long
def test_stages_with_three_steps_under_way_capture_and_steer_like_the_reference(
    overlapped: Host, qwen3
) -> None:
    """The scheduler hands out a request's next step before it knows the last one's token; requests
    are preempted meanwhile.
    """
    reference = Reference(qwen3)
    for job in mixed_batch(overlapped, reference, longest=80, max_tokens=5):
        assert [(receipt.pp, receipt.status) for receipt in overlapped.receipts(job)] == [
            (0, "ok"),
            (1, "ok"),
        ]
    assert "Batch queue is enabled with size 3" in overlapped.log()
    assert overlapped.call("midstream_status")[0]["preemptions"] > 0
    cancelled = [
        overlapped.job(prompt_of(12, seed=n), max_tokens=30, capture=capture_of(ALL, "all"))
        for n in (60, 61)
    ]
    overlapped.run(*cancelled, cancel_after={job.id: 2 for job in cancelled})
    mixed_batch(overlapped, reference, longest=40, max_tokens=3)
    status = overlapped.call("midstream_status")
    assert [(rank["requests"], rank["rows_used"], rank["entries_used"]) for rank in status] == [
        (0, 0, 0)
    ] * 2
