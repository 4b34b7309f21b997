"""Cells under strain: shared blocks, runs that are gone, ranks that fail, and preemption. fp32."""

from pathlib import Path

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error
from inside_reference import InsideReference
from patching_kit import ALL, Cell, edits, everything, in_one_step, patch, patches, rows_of
from reference import Edit, Reference
from rows_kit import check_rows
from test_inside import captured
from tiny import HIDDEN
from tolerances import FP32_ROWS

from midstream.schemas.requests.source_runs import RunRow, row_name
from midstream.schemas.requests.specs import Grade, StoredSteering, dims_name, dims_named

BLOCK = 128
GRADE = [Grade(list(range(20, 60)))]


def graded(
    host: Host, prompt: list[int], steering: list[StoredSteering] | None = None
) -> tuple[int, list[float]]:
    """Tokens found in the prefix cache, and log-probabilities of the next token."""
    job = host.job(prompt, max_tokens=1, steering=steering)
    answer = host.run_any(job, grades={job.id: GRADE})
    assert not answer.errors, answer.errors
    (receipt,) = host.receipts(job)
    assert receipt.status == "ok", receipt
    return answer.outputs[job.id][0].cached_tokens, receipt.graded


def source_of(host: Host, prompt: list[int]) -> tuple[str, dict[tuple[str, int], np.ndarray]]:
    """The key of a new run with every row of the prompt, and those rows."""
    job = host.job(prompt, max_tokens=1, capture=everything("all_prompt"))
    host.run(job)
    return host.keep(job), rows_of(host, job)


def test_cells_share_blocks_below_their_patch_and_none_with_unpatched_requests(
    cached: Host,
) -> None:
    # field case 13
    """What a plain request finds after patched ones is, bit for bit, what it finds in a cache that
    never saw one.
    """
    prompt = prompt_of(300, seed=91)
    key, _ = source_of(cached, prompt_of(300, seed=92))

    def cell(position: int) -> list[StoredSteering]:
        return patches(key, [Cell("post_block", 1, position)])

    cached.call("restart_ledgers")
    fresh = [graded(cached, prompt) for _ in range(2)]
    assert [found for found, _ in fresh] == [0, 2 * BLOCK]
    cached.call("restart_ledgers")
    late, middle, early, again, beside = (
        graded(cached, prompt, cell(position)) for position in (290, 140, 5, 290, 291)
    )
    assert [each[0] for each in (late, middle, early, again, beside)] == [
        0,
        BLOCK,
        0,
        2 * BLOCK,
        2 * BLOCK,
    ]
    assert graded(cached, prompt, cell(140))[0] == 2 * BLOCK, "the same patch shares what it made"
    assert graded(cached, prompt) == fresh[1], "bit for bit"
    assert len({tuple(values) for _, values in (fresh[1], late, middle, early, beside)}) == 5, (
        "every patch showed"
    )


def test_a_run_lost_mid_request_fails_only_that_request(cached: Host) -> None:
    """The worker believes that the ranks have it; a cell beside it, of another run, and a plain
    request have their own numbers.
    """
    # field case 31, 32
    (gone, _), (kept, rows) = (
        source_of(cached, prompt_of(20, seed=93 + number)) for number in range(2)
    )
    warm = cached.job(
        prompt_of(12), max_tokens=1, steering=patches(gone, [Cell("post_block", 1, 2)])
    )
    cached.run(warm)
    assert cached.receipts(warm)[0].status == "ok"
    cached.call("midstream_drop_runs", [gone])
    cell = Cell("post_block", 1, 3)
    jobs = [
        cached.job(
            prompt_of(14, seed=1),
            max_tokens=1,
            capture=capture_of([1, 3], "all", at="after"),
            steering=patches(gone, [cell]),
        ),
        cached.job(
            prompt_of(14, seed=2),
            max_tokens=1,
            capture=capture_of([1, 3], "all", at="after"),
            steering=patches(kept, [cell]),
        ),
        cached.job(
            prompt_of(14, seed=3), max_tokens=1, capture=capture_of([1, 3], "all", at="after")
        ),
    ]
    cached.run_together(*jobs)
    in_one_step(cached, jobs[1:])
    receipts = [cached.receipts(job)[0] for job in jobs]
    assert ([receipt.status for receipt in receipts], receipts[0].kind) == (
        ["error", "ok", "ok"],
        "intervention_failed",
    )
    assert f"source run {gone} is not on this rank" in receipts[0].message
    assert receipts[0].applied == 0
    assert np.array_equal(cached.capture(jobs[1]).array(1)[3], rows["post_block", 1][3])


@pytest.mark.parametrize("way", ["v1", "tp2", "pp2"])
def test_every_rank_patches_its_own_part_of_a_head_by_the_mask_of_its_name(
    way: str, request: pytest.FixtureRequest
) -> None:
    """The row comes from the files of all ranks, the mask from its name: head 2 is on the second
    rank of two.
    """
    host: Host = request.getfixturevalue(way)
    source = captured(
        host,
        host.job(prompt_of(12, seed=8), max_tokens=1),
        hooks={"z": [1, 3]},
        positions="all_prompt",
    )
    host.run(source)
    key = host.keep(source)
    masks = {1: "64-95", 3: "0-31,96-127"}
    steering = [
        patch(row_name(RunRow(key, "z", layer, 3)), "z", [layer], [7], mask=dims_name(dims))
        for layer, dims in masks.items()
    ]
    job = captured(
        host,
        host.job(prompt_of(12), max_tokens=1, steering=steering),
        hooks={"post_block": [3]},
        positions="all",
    )
    host.run(job)
    assert {receipt.status for receipt in host.receipts(job)} == {"ok"}
    there = {
        layer: np.isin(
            np.arange(128), [dim for dims in dims_named(dims_name(text)) for dim in dims]
        )
        for layer, text in masks.items()
    }
    rows = {layer: host.capture(source).array(layer, "z")[3] for layer in masks}
    model: Path = request.getfixturevalue("llama" if way == "v1" else "qwen3")
    wanted = InsideReference(model).rows(
        prompt_of(12),
        *(
            Edit(layer, rows[layer], [7], hook="z", op="replace", mask=there[layer])
            for layer in masks
        ),
    )
    assert (
        relative_error(host.capture(job).array(3, "post_block"), wanted["post_block", 3])
        <= FP32_ROWS
    )


@pytest.mark.slow("requests preempt one another")
def test_preempted_requests_are_patched_where_they_were_and_nowhere_else(
    cached: Host, reference: Reference
) -> None:
    """Seven blocks for six requests of up to three: what was patched is computed again, and patched
    again.
    """
    key, rows = source_of(cached, prompt_of(110, seed=98))
    before = cached.call("midstream_status")[0]["preemptions"]
    vector = np.random.default_rng(5).normal(size=HIDDEN).astype(np.float32)
    cells = [Cell("post_attn", 1, 3), Cell("post_attn", 1, 100, 7)]
    jobs = [
        cached.job(
            prompt_of(110, seed=400 + number),
            max_tokens=180,
            capture=capture_of(ALL, "all"),
            steering=[
                *patches(key, cells),
                patch(cached.vector(vector), "mlp_out", [2], "all_generated"),
            ]
            if number % 2
            else None,
        )
        for number in range(6)
    ]
    answers = cached.run_together(*jobs)
    assert cached.call("midstream_status")[0]["preemptions"] > before
    wanted = [*edits(cells, rows), Edit(2, vector, list(range(110, 289)), "mlp_out", "replace")]
    for number, job in enumerate(jobs):
        check_rows(cached, reference, job, answers[job.id], wanted if number % 2 else [])
